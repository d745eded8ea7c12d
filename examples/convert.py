"""Write a drafter in another published layout and look at both. `eagle31 convert` does the same."""

import tempfile
from pathlib import Path

from eagle31_hf.checkpoints import inspect_checkpoint, read_checkpoint, write_checkpoint
from eagle31_hf.demo import drafter_path

with tempfile.TemporaryDirectory() as folder:
    speculators = Path(folder) / "speculators"
    write_checkpoint(read_checkpoint(drafter_path()), speculators, format="speculators")
    for path in (drafter_path(), speculators):
        summary = inspect_checkpoint(path)
        print(f"{summary.format}: {summary.method}, {summary.parameters:,} parameters")
