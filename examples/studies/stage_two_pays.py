"""Does stage 2 pay? Stage 1 and then stage 2 against stage 1 alone for the same total time, by served acceptance.

    python stage_two_pays.py TARGET --prompts chats.jsonl --held-out other.jsonl --steps 1200 --out study

Stage 1 takes a share of the steps and stage 2 the rest; the seconds both took are then given to a fresh stage 1, with
its own cosine schedule to the end. Measured at temperature 0 and 1. Run it on a machine that does nothing else: what
is compared is time.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from eagle31_hf import Eagle31Drafter
from eagle31_hf.training.data.conversations import read_conversations
from eagle31_hf.training.distillation.evaluation import (
    EvaluationSettings,
    evaluation_prompts,
    measure_acceptance,
    total,
)
from eagle31_hf.training.preparation import Preparation
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.setup import load_target, resolve
from eagle31_hf.training.train import train_drafter


def timed(told: TrainingSettings) -> float:
    """Seconds a run took; its folder holds the drafter."""
    started = time.perf_counter()
    train_drafter(told)
    return time.perf_counter() - started


def acceptance(folder: Path, target: Any, prompts: Any, depth: int, seed: int) -> dict[str, Any]:
    drafter = Eagle31Drafter.from_pretrained(folder, target=target)
    record: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        torch.manual_seed(seed)
        found = measure_acceptance(drafter, prompts, EvaluationSettings(depth=depth, temperature=temperature))
        lengths = {category: counts.acceptance_length for category, counts in found.items()}
        summed = total(found, depth)
        record[f"temperature {temperature:g}"] = {
            **lengths, "all": summed.acceptance_length, "by_position": summed.cumulative_acceptance
        }  # fmt: skip
    return record


def study(told: TrainingSettings, steps: int, share: float) -> dict[str, Any]:
    target, tokenizer = load_target(told)
    told = resolve(told, target)
    preparation = Preparation(told, target, tokenizer, Console(stderr=True))
    preparation.read_texts()
    told = preparation.settings_of_further_runs()  # every run reads what was written once
    first, second, alone = (told.out / name for name in ("stage1", "stage2", "stage1-as-long"))
    first_steps = round(steps * (1 - share))
    prompts = evaluation_prompts(read_conversations(told.held_out), tokenizer)
    # Stopping early would spoil the comparison: every run takes the steps it is given. The best checkpoint is chosen
    # on rows of the prompts: those that are held out only judge.
    told = replace(told, patience=steps, held_out=())
    first_s = timed(replace(told, out=first, stage="1", max_steps=first_steps))
    second_s = timed(replace(told, out=second, stage="2", drafter=str(first), max_steps=steps - first_steps))
    as_many = round(first_steps * (first_s + second_s) / first_s)
    alone_s = timed(replace(told, out=alone, stage="1", max_steps=as_many))
    measured = {
        folder.name: acceptance(folder, target, prompts, told.draft_tokens, told.seed)
        for folder in (first, second, alone)
    }
    seconds = {"stage1": first_s, "stage2": second_s, "stage1-as-long": alone_s}
    return {"seconds": seconds, "steps": {"stage1": first_steps, "stage1-as-long": as_many}, "acceptance": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--held-out", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of stage 1 and stage 2 together")
    parser.add_argument("--stage2-share", type=float, default=0.25)
    parser.add_argument("--reward", default="chain", help="chain or tree")
    parser.add_argument("--max-rows", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    told = TrainingSettings(
        target=given.target,
        prompts=tuple(given.prompts),
        held_out=tuple(given.held_out),
        out=given.out,
        max_rows=given.max_rows,
        reward=given.reward,
        seed=given.seed,
    )
    result = study(told, given.steps, given.stage2_share)
    (given.out / "stage_two_pays.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print("| drafter | seconds | temperature | acceptance length |\n|---|---|---|---|")
    for name, by_temperature in result["acceptance"].items():
        for temperature, figures in by_temperature.items():
            print(f"| {name} | {result['seconds'][name]:.0f} | {temperature} | {figures['all']:.3f} |")


if __name__ == "__main__":
    main()
