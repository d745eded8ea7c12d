"""What a figure depends on beside the prompts: versions, commit, machine, models, template."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..demo import drafter_path, target_path
from ..drafter.drafter import Eagle31Drafter
from ..target.binding import TargetBinding

SAMPLED_BYTES = 2**20


def run_facts(
    drafter: Eagle31Drafter, tokenizer: PreTrainedTokenizerBase, names: tuple[str | None, str | None]
) -> dict[str, Any]:
    """What the first line of a run's records begins with: when, how, on what, of whom. `names` as in `pair_facts`."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        **software(),
        "machine": machine(drafter.binding),
        "pair": pair_facts(drafter, tokenizer, names),
    }


def software() -> dict[str, Any]:
    """Versions, and the commit of the package's source where that is a checkout, with what has changed since."""
    commit, changes = checkout_of(Path(__file__).parent)
    return {
        "eagle31_hf": __version__,
        "commit": commit,
        **({"changes": changes} if changes else {}),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def origin() -> dict[str, Any]:
    """What it takes to make a record again: command, time, versions, commit, processor."""
    return {
        "command": command_line(),
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **software(),
        "processor": processor_name(),
    }


def checkout_of(folder: Path) -> tuple[str, list[str]]:
    """Short commit of the checkout `folder` is in, and which files of the package differ from it; empty without one.

    Where files differ, a `+` stands behind the commit.

    Only a checkout that tracks the folder counts: a package installed into some project's tree is not that project.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.rstrip() if done.returncode == 0 else ""

    try:
        if not git("ls-files", "--error-unmatch", "provenance.py"):
            return "", []
        changes = [line[3:] for line in git("status", "--porcelain", "--", "..").splitlines()]
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changes), changes
    except (OSError, subprocess.TimeoutExpired):
        return "", []


def machine(binding: TargetBinding) -> dict[str, Any]:
    """Device, processor and how many threads of it."""
    told = describe_device(binding.head_device, binding.model.dtype)
    place = {"device": told["device"], "processor": processor_name(), "threads": told["threads"]}
    return {**place, "system": platform.system()}


def describe_device(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What a figure depends on beside models, versions and processor."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }


def processor_name() -> str:
    """As the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def pair_facts(
    drafter: Eagle31Drafter, tokenizer: PreTrainedTokenizerBase, names: tuple[str | None, str | None]
) -> dict[str, Any]:
    """Who was measured.

    Args:
        names: Hub id or folder of target and drafter; `None` for the embedded ones.
    """
    model: Any = drafter.binding.model
    template = tokenizer.chat_template or ""
    return {
        "target": _checkpoint(names[0], model.config, target_path()),
        "drafter": _checkpoint(names[1], drafter.config, drafter_path()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": _quantisation(model),
        "attention": model.config._attn_implementation,
        "template": hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "none",
    }


def _checkpoint(name: str | None, config: Any, embedded: Path) -> dict[str, str]:
    """A name without the folders above it, and what tells its weights from others."""
    if name is None:
        return {"name": f"embedded {embedded.name}", "revision": fingerprint(embedded)}
    folder = Path(name)
    if folder.is_dir():
        return {"name": folder.resolve().name, "revision": fingerprint(folder)}
    return {"name": name, "revision": str(getattr(config, "_commit_hash", None) or "not known")}


def fingerprint(folder: Path) -> str:
    """Digest of a folder's configuration and of its weights: sizes, and the first and last MiB of each file."""
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("config.json"))):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            if size > SAMPLED_BYTES:
                file.seek(-SAMPLED_BYTES, os.SEEK_END)
                digest.update(file.read())
    return f"sha256:{digest.hexdigest()[:16]}"


def _quantisation(model: PreTrainedModel) -> str:
    config: Any = getattr(model.config, "quantization_config", None)
    if config is None:
        return "none"
    facts = config if isinstance(config, dict) else config.to_dict()
    return ", ".join(
        f"{name}={facts[name]}"
        for name in ("quant_method", "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bits")
        if facts.get(name)
    )


def command_line() -> str:
    """The command as it was typed, without the folder the script lies in."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
