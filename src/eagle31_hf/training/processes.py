"""The processes of `accelerate launch`: which one speaks, and how each leaves."""

from __future__ import annotations

import gc
import os

from accelerate import PartialState


def is_first_process() -> bool:
    """The one that writes and speaks; `accelerate launch` numbers them here before anything is loaded."""
    return os.environ.get("RANK", "0") == "0"


def leave_process_group() -> None:
    """Close the group and end its threads; without a group, do nothing.

    Call it when no name holds a trainer any more: a trainer's wrapped model keeps the group's threads alive, and a
    gloo thread that still holds a tensor when the interpreter ends aborts a process that has done all its work.
    """
    gc.collect()  # a trainer is part of cycles
    PartialState().destroy_process_group()
