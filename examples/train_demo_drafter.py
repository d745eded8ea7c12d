"""Prompts in, a drafter for the embedded target out: stage 1 from scratch, sized for two CPU cores and an hour.

    python examples/train_demo_drafter.py sgd_train.jsonl gsm8k_train.jsonl taskmaster_train.jsonl --out drafter

The embedded drafter's own recipe (its card has the command, which shares the steps between two processes): what is not
said here suits a target of this size.
"""

import argparse
from pathlib import Path

from eagle31_hf.demo import target_path
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.train import train_drafter

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompts", nargs="+", help="JSONL files with conversations, one file per kind of text")
parser.add_argument("--out", type=Path, default=Path("demo-drafter"), help="folder for drafter, data and checkpoints")
parser.add_argument("--max-steps", type=int, help="fewer steps, for a try")
parser.add_argument("--resume", action="store_true", help="go on where an earlier run was stopped")
told = parser.parse_args()

report = train_drafter(
    TrainingSettings(
        target=str(target_path()),
        prompts=tuple(told.prompts),
        out=told.out,
        max_rows=4000,  # of each source: so many texts can be written in a quarter of an hour
        epochs=3.1,
        max_steps=told.max_steps,
        resume=told.resume,
    )
)
for category, counts in report.record["stages"][0]["acceptance"].items():
    print(f"{category}: acceptance length {counts['acceptance_length']:.3f}")
print(f"drafter and card are in {report.folder}")
