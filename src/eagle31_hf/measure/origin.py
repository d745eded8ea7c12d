"""What a figure depends on beside the prompts: command, versions, commit, device, models."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from .. import __version__
from ..targets.binding import TargetBinding


def origin(binding: TargetBinding | None = None) -> dict[str, Any]:
    """What it takes to make a record again.

    Args:
        binding: of the target that was measured; its device and precision are told, too.
    """
    facts = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "eagle31_hf": __version__,
        "commit": commit_of(Path(__file__)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
    }
    if binding is None:
        return facts
    device = binding.head_device
    return facts | {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(binding.model.dtype).removeprefix("torch."),
    }


def commit_of(file: Path) -> str:
    """Short commit of the checkout that tracks a file, with a `+` where the package differs from it; empty without."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(file.parent), *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.rstrip() if done.returncode == 0 else ""

    try:
        if not git("ls-files", "--error-unmatch", file.name):  # installed into some other project's checkout
            return ""
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "--", ".."))
    except (OSError, subprocess.TimeoutExpired):
        return ""


def processor_name() -> str:
    """As the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
