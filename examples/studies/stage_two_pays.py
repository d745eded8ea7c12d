"""Does stage 2 pay? Branches of equal processor time from one drafter, judged on the same held-out texts.

    python stage_two_pays.py TARGET --drafter DIR --prompts chats.jsonl --held-out other.jsonl --seconds 600 --out study

Every branch begins with the same weights, sees the same rows in the same order and gets the same processor seconds,
over which its learning rate falls to nothing in a line. What differs is the objective:

    token       cross-entropy on all tokens: more of stage 1
    written     cross-entropy on the tokens the target wrote: tells the objective from the choice of tokens
    hybrid      LK-hybrid on the same tokens (`--loss lk_hybrid`)
    text        expected acceptance along written texts, in closed form (`eagle31 train --stage 2`)
    reach       the same, but how likely a draft is reached weighs it and is not learned

Measured without a draw (`bench acceptance`): acceptance length of a chain at temperature 0 and 1, its ratio to that of
the drafter all began with, and the same of each branch's weights averaged over the second half of its steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.measure.known_texts import DrafterAcceptance, acceptance_of
from eagle31_hf.measure.provenance import origin
from eagle31_hf.texts.conversations import read_conversations
from eagle31_hf.training import text_model
from eagle31_hf.training.data.packing import PackedBatch, collate
from eagle31_hf.training.distillation.evaluation import evaluation_prompts
from eagle31_hf.training.distillation.known_texts import KnownTexts, rounds_of, write_texts
from eagle31_hf.training.distillation.optimizers import make_optimizer
from eagle31_hf.training.distillation.training_model import DistillationModel, LossOutput
from eagle31_hf.training.preparation import Preparation
from eagle31_hf.training.settings import ResolvedSettings, TrainingSettings
from eagle31_hf.training.setup import load_target, multiplies_bfloat16, resolve
from eagle31_hf.training.text_model import TextModel
from eagle31_hf.trees.shape import DraftShape

BRANCHES = ("token", "written", "hybrid", "text", "reach")


def model_of(branch: str, drafter: Eagle31Drafter, told: ResolvedSettings) -> DistillationModel:
    token_loss = told.to_distillation()
    if branch == "token":
        return DistillationModel(drafter, token_loss)
    if branch == "written":
        return DistillationModel(drafter, replace(token_loss, given_weight=0.0))
    if branch == "hybrid":
        return DistillationModel(drafter, replace(token_loss, given_weight=0.0, loss="lk_hybrid"))
    return {"text": TextModel, "reach": ReachModel}[branch](drafter, token_loss)


class ReachModel(TextModel):
    """`TextModel` with `sum_s stopgrad(prod_{r<s} chance_r) chance_s` for its expectation: a product's factors each
    pull at all others, which is most of its noise.
    """

    def forward(self, **batch: Tensor) -> LossOutput:
        """As `TextModel.forward`."""
        with mock.patch.object(text_model, "expected_accepted", _reached_and_accepted):
            return super().forward(**batch)


def _reached_and_accepted(chances: Tensor) -> Tensor:
    """`(N,)` of chances `(N, S)`."""
    reach = torch.cat((torch.ones_like(chances[:, :1]), chances[:, :-1]), 1).cumprod(1).detach()
    return (reach * chances).sum(1)


def batches(dataset: Any, rows: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Without end, each pass over the rows in another order."""
    order = torch.Generator().manual_seed(seed)
    while True:
        yield from DataLoader(dataset, rows, shuffle=True, generator=order, collate_fn=collate, drop_last=True)


def train(model: DistillationModel, dataset: Any, told: ResolvedSettings, seconds: float) -> tuple[int, dict[str, Any]]:
    """Steps done, and the mean of the weights over the second half of the time."""
    torch.manual_seed(told.seed)
    rate = 0.1 * told.learning_rate  # stage 2's
    optimizer = make_optimizer(model, told.optimizer, rate)
    rates = [group["lr"] for group in optimizer.param_groups]
    bf16 = multiplies_bfloat16(model.drafter.device)
    mean: dict[str, Tensor] = {}
    steps = averaged = 0
    started = time.process_time()
    for batch in batches(dataset, told.batch_rows, told.seed):
        done = (time.process_time() - started) / seconds
        if done >= 1:
            break
        for group, highest in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = highest * (1 - done)
        with torch.autocast(model.drafter.device.type, torch.bfloat16, enabled=bf16):
            output = model(**batch)
        (output.loss / model.counted(PackedBatch(**batch)).sum().clamp(min=1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), told.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if done >= 0.5:
            averaged += 1
            for name, tensor in model.drafter.state_dict().items():
                if tensor.is_floating_point():
                    before = mean.get(name, torch.zeros_like(tensor))
                    mean[name] = before + (tensor.detach() - before) / averaged
    return steps, mean


def measure(name: str, drafter: Eagle31Drafter, texts: list[KnownTexts], shape: DraftShape, first: list) -> list[Any]:
    """Figures at each temperature; `first` holds the rounds of the drafter all began with, and is filled by it."""
    found: list[DrafterAcceptance] = []
    begins = not first
    for place, each in enumerate(texts):
        started = time.process_time()
        rounds = rounds_of(drafter, each, shape)
        seconds = time.process_time() - started
        compared = None if begins else first[place]
        found.append(acceptance_of(name, each.temperature, shape, rounds, compared, seconds))
        if begins:
            first.append(rounds)
        last = found[-1]
        print(name, f"T={each.temperature:g} {last.length:.3f}", last.ratio, last.ratio_interval, flush=True)
    return found


def study(
    told: TrainingSettings, branches: list[str], seconds: float, seeds: int, held_out_rows: int | None
) -> dict[str, Any]:
    target, tokenizer = load_target(told)
    resolved = resolve(told, target)
    preparation = Preparation(resolved, target, tokenizer, Console(stderr=True))
    documents = preparation.read_texts().documents.documents
    drafter, _ = preparation.make_drafter(documents)
    dataset = preparation.make_dataset(drafter, documents)
    prompts = evaluation_prompts(read_conversations(told.held_out, limit=held_out_rows), tokenizer)
    texts = [
        write_texts(drafter.binding, prompts, temperature, max_new_tokens=told.eval_new_tokens)
        for temperature in (0.0, 1.0)
    ]
    shape = DraftShape(told.draft_tokens)
    start = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    first: list[Any] = []
    figures = measure("start", drafter, texts, shape, first)
    steps = {}
    for seed in range(seeds):
        for branch in branches:
            drafter.load_state_dict(start)
            name = f"{branch}, seed {seed}"
            steps[name], mean = train(
                model_of(branch, drafter.train(), resolved), dataset, replace(resolved, seed=seed), seconds
            )
            figures += measure(name, drafter, texts, shape, first)
            if mean:
                drafter.load_state_dict(mean, strict=False)
                figures += measure(f"{name}, averaged", drafter, texts, shape, first)
    return {
        **origin(),
        "prompts": len(prompts),
        "seconds": seconds,
        "steps": steps,
        "drafters": [asdict(figure) for figure in figures],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--drafter", required=True, help="what every branch begins with")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--held-out", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of the processor, for each branch")
    parser.add_argument("--branches", nargs="+", default=["token", "written", "text"], choices=BRANCHES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--max-rows", type=int, help="of each source")
    parser.add_argument("--held-out-rows", type=int, help="of each source")
    parser.add_argument("--new-tokens", type=int, default=128, help="most tokens the target writes to a prompt")
    given = parser.parse_args()
    told = TrainingSettings(
        target=given.target,
        drafter=given.drafter,
        prompts=tuple(given.prompts),
        held_out=tuple(given.held_out),
        out=given.out,
        max_rows=given.max_rows,
        max_new_tokens=given.new_tokens,
        eval_new_tokens=given.new_tokens,
    )
    result = study(told, given.branches, given.seconds, given.seeds, given.held_out_rows)
    (given.out / "stage_two_pays.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
