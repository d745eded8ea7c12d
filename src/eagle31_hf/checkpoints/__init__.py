"""Drafter checkpoints of every published layout: find, recognise, inspect, read and write them."""

from .checkpoint import Checkpoint, inspect_checkpoint, read_checkpoint, write_checkpoint
from .files import holds_checkpoint
from .finding import holds_drafter, require_head, resolve_checkpoint, target_holds_head
from .formats import FORMATS
from .packed import PackingScheme
from .shapes import expected_shapes, packable_shapes, published_weights
from .summary import CheckpointSummary, EngineVerdict

__all__ = [
    "FORMATS",
    "Checkpoint",
    "CheckpointSummary",
    "EngineVerdict",
    "PackingScheme",
    "expected_shapes",
    "holds_checkpoint",
    "holds_drafter",
    "inspect_checkpoint",
    "packable_shapes",
    "published_weights",
    "read_checkpoint",
    "require_head",
    "resolve_checkpoint",
    "target_holds_head",
    "write_checkpoint",
]
