"""Room on the disk, asked for before it is filled."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...errors import TrainingError


def require_disk(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse before writing what will not fit.

    Raises:
        TrainingError: the disk has too little room; both figures are named.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise TrainingError(
            f"{purpose} needs {needed_bytes / 1e9:.2f} GB, but {existing} has {free / 1e9:.2f} GB free; name a folder "
            "on a larger disk, use fewer prompts, or compute features online"
        )
