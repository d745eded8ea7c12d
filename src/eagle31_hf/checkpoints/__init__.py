"""Drafter checkpoints of every published layout: find, recognise, inspect, read and write them."""

from .checkpoint import Checkpoint, CheckpointSummary, inspect_checkpoint, read_checkpoint, write_checkpoint
from .config_json import TARGET_MODEL
from .files import require_no_checkpoint
from .hub import holds_drafter, require_head, resolve_checkpoint, target_holds_head
from .layouts import FORMATS, WRITTEN_FORMATS, default_format

__all__ = [
    "FORMATS",
    "TARGET_MODEL",
    "WRITTEN_FORMATS",
    "Checkpoint",
    "CheckpointSummary",
    "default_format",
    "holds_drafter",
    "inspect_checkpoint",
    "read_checkpoint",
    "require_head",
    "require_no_checkpoint",
    "resolve_checkpoint",
    "target_holds_head",
    "write_checkpoint",
]
