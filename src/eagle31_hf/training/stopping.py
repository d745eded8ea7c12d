"""A run that is stopped from outside: what it has kept is told, and how to go on. A resumed one says what it found."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from .distillation.trainer import last_checkpoint
from .progress import say

RESULT_FILE = "result.json"
"""In a stage's folder once it is finished."""


def describe_kept(out: Path) -> str:
    """What lies in a run's folder that `--resume` goes on with; empty if nothing does."""
    lines = {
        "self-written prompts": _lines(out / "data", "prompts*.jsonl"),
        "answers": _lines(out / "data", "conversations*.jsonl"),
        "files of hidden states": len(list((out / "features").glob("*.safetensors"))),
    }
    told = [f"{count:,} {what}" for what, count in lines.items() if count]
    for stage in sorted(out.glob("stage*")):
        checkpoint = last_checkpoint(stage)
        if (stage / RESULT_FILE).exists():
            told.append(f"{stage.name} as a whole")
        elif checkpoint is not None:
            told.append(f"{stage.name} up to step {int(checkpoint.name.rpartition('-')[2]):,}")
    return ", ".join(told)


def _lines(folder: Path, names: str) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob(names))


@contextmanager
def telling_what_is_kept(out: Path, console: Console) -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C end the run with a line that says what it has kept.

    Raises:
        SystemExit: SIGTERM came; its code is 128 and the signal's number, as shells count.
    """
    before = signal.getsignal(signal.SIGTERM)
    listens = threading.current_thread() is threading.main_thread()
    if listens:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        kept = describe_kept(out)
        told = f"kept in {out}: {kept}; go on with the same options and --resume" if kept else "nothing was kept yet"
        say(console, f"stopped; {told}")
        raise
    finally:
        if listens:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)
