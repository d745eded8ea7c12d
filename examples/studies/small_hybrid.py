"""A small hybrid of our own: does drafting pay on a target of which most layers keep a recurrent state?

    python examples/studies/small_hybrid.py gsm8k_train.jsonl taskmaster_train.jsonl --held-out gsm8k_heldout.jsonl \\
        --out hybrid --json docs/records/small-hybrid.json

Trains a target shaped like Qwen3.5 (gated delta net, every fourth layer attention) on conversations, a drafter for it
as `eagle31 train` does, and measures the pair: chains of one length at temperature 0 over plain decoding, beside the
speedup that bare forwards would allow; and the default, which adapts its drafts, with this drafter and with one that
was never trained. The target begins with the embedded one's table of tokens. What is in the folder already is not
trained again. All is eager and in float32, so every text must be plain decoding's. Half an hour on two cores; run the
measurement (again, with --json) on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from adaptive_drafts_pay import (
    DEFAULT,
    MOST_SLOWER,
    PLAIN,
    RANDOM,
    Way,
    configured,
    measure,
    ratio,
    summary,
    untrained_drafter,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

from eagle31_hf.cli.pairs import LoadedPair, PairSource, encode, load_pair
from eagle31_hf.decoding.calibration.unasked import calibrate
from eagle31_hf.demo import target_path
from eagle31_hf.measure.calls import PLAIN as PLAIN_GENERATE
from eagle31_hf.measure.gauges import ends_off
from eagle31_hf.measure.pair import measure_loops
from eagle31_hf.measure.provenance import machine, origin, pair_facts
from eagle31_hf.measure.run_settings import RunSettings
from eagle31_hf.texts.conversations import read_conversations
from eagle31_hf.texts.prompts import Prompt, read_prompts
from eagle31_hf.training.data.rendering import render_documents
from eagle31_hf.training.settings import TrainingSettings
from eagle31_hf.training.train import train_drafter

LEAST_OF_CEILING = 0.85
"""What a chain's speedup is to reach of that by bare forwards."""

ROWS, WIDTH, RATE = 8, 128, 2e-3
MOST_CONVERSATIONS = 2000
"""Of each file; a few minutes do not read more."""

CONSTANT = {"num_assistant_tokens_schedule": "constant"}


def shape_of(target: Any, layers: int) -> Qwen3_5TextConfig:
    """As wide as the embedded target."""
    like = target.config
    return Qwen3_5TextConfig(
        vocab_size=like.vocab_size, hidden_size=like.hidden_size, intermediate_size=2 * like.hidden_size,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32,
        max_position_embeddings=like.max_position_embeddings, tie_word_embeddings=True,
        bos_token_id=like.bos_token_id, eos_token_id=like.eos_token_id, pad_token_id=like.pad_token_id,
    )  # fmt: skip


def train_target(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A model that continues such conversations, saved to `folder`. What it took and how well it predicts."""
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    embedded = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32)
    torch.manual_seed(given.seed)
    model = AutoModelForCausalLM.from_config(shape_of(embedded, given.layers), dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedded.get_input_embeddings().weight)
    batches = batches_of(given.prompts, tokenizer, given.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    losses: list[float] = []
    started, done = time.process_time(), 0.0
    while done < 1 or not losses:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, 20 * done + 0.05) * max(0.0, 1 - done)
        ids = next(batches)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        done = (time.process_time() - started) / (60 * given.target_minutes)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    last = losses[-max(1, len(losses) // 20) :]
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": len(losses),
        "tokens": len(losses) * ROWS * WIDTH,
        "processor_minutes": given.target_minutes,
        "loss": sum(last) / len(last),
    }


def batches_of(files: list[str], tokenizer: Any, seed: int) -> Iterator[Tensor]:
    """Pieces `(ROWS, WIDTH)` of all conversations one after the other, each time other ones."""
    conversations = read_conversations(files, limit=MOST_CONVERSATIONS)
    documents = render_documents(conversations, tokenizer, max_length=1024, supervise="all").documents
    ids = torch.tensor([token for document in documents for token in document.input_ids])
    dice = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - WIDTH, (ROWS,), generator=dice)
        yield ids[starts[:, None] + torch.arange(WIDTH)]


def train(given: argparse.Namespace) -> tuple[Path, Path]:
    """Folders of target and drafter, which are made if they are not there; `trained.json` tells how."""
    target, drafter, told = given.out / "target", given.out / "drafter", given.out / "trained.json"
    if not (target / "config.json").exists():
        told.parent.mkdir(parents=True, exist_ok=True)
        told.write_text(json.dumps(train_target(given, target)))
    if not (drafter / "config.json").exists():
        report = train_drafter(
            TrainingSettings(
                target=str(target), prompts=tuple(given.prompts), held_out=tuple(given.held_out), out=drafter,
                max_rows=given.max_rows, max_steps=given.drafter_steps, max_new_tokens=64,
                eval_new_tokens=given.new_tokens,
            )
        )  # fmt: skip
        stage = report.stages[-1]
        lengths = {name: counts.acceptance_length for name, counts in stage.acceptance.items()}
        drafted = {"steps": stage.steps, "acceptance_length": lengths}
        told.write_text(json.dumps({"target": json.loads(told.read_text()), "drafter": drafted}))
    return target, drafter


def chains(pair: LoadedPair, prompts: list[Prompt], given: argparse.Namespace) -> dict[str, Any]:
    """Chains of one length over plain decoding, beside the ceiling by bare forwards."""
    settings = RunSettings(
        new_tokens=given.new_tokens, repeats=given.repeats, methods=(PLAIN_GENERATE, "chain"), ignore_eos=True,
        as_configured=True, ceilings=True,
    )  # fmt: skip
    ids = [encode(pair, prompt.opening)["input_ids"][0] for prompt in prompts]
    with configured(Way("chain", pair.drafter, CONSTANT)):
        _, records = measure_loops(pair.drafter, ids, settings, lambda _: None)
    chain = next(record.to_dict() for record in records if record.summary.method == "chain")
    return {**chain, "of_ceiling": chain["speedup"] / chain["ceiling"], "wanted_of_ceiling": LEAST_OF_CEILING}


def defaults(pair: LoadedPair, folder: Path, prompts: list[Prompt], given: argparse.Namespace) -> list[dict[str, Any]]:
    """The default with the trained drafter and with an untrained one, beside plain decoding."""
    ways = [Way(PLAIN), Way(DEFAULT, pair.drafter), Way(RANDOM, untrained_drafter(pair, str(folder)))]
    calibrate(pair.drafter, compiled=False)
    with ends_off(pair.target):
        found = measure(pair, ways, prompts, 0.0, argparse.Namespace(**vars(given), graphs=False))
    plain = [found[PLAIN]] * len(prompts) * given.repeats
    rows = summary(found)
    for row in rows[1:]:
        row["over_plain"] = {**ratio(found[row["way"]], plain), "wanted": MOST_SLOWER}
    return rows


def parser() -> argparse.ArgumentParser:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("prompts", nargs="+", help="JSONL files with conversations to learn from")
    told.add_argument("--held-out", nargs="+", required=True, help="such files that are measured on")
    told.add_argument("--out", type=Path, default=Path("hybrid"), help="folder for target and drafter")
    told.add_argument("--layers", type=int, default=8)
    told.add_argument("--target-minutes", type=float, default=10.0, help="of processor time")
    told.add_argument("--drafter-steps", type=int, default=300)
    told.add_argument("--max-rows", type=int, default=400, help="conversations of each file the drafter learns from")
    told.add_argument("--limit", type=int, default=4, help="prompts of each held-out file")
    told.add_argument("--new-tokens", type=int, default=96)
    told.add_argument("--repeats", type=int, default=3)
    told.add_argument("--seed", type=int, default=0)
    told.add_argument("--json", type=Path)
    return told


def main(arguments: list[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    target, drafter = train(given)
    prompts = read_prompts(given.held_out, given.limit)
    pair = load_pair(PairSource(target=str(target), drafter=str(drafter), dtype="float32"))
    pair.drafter.generation_config.acceleration = "eager"
    record = {
        **origin(),
        "machine": machine(pair.drafter.binding),
        "pair": pair_facts(pair.drafter, pair.tokenizer, (target.name, drafter.name)),
        "trained": json.loads((given.out / "trained.json").read_text()),
        "prompts": [prompt.id for prompt in prompts],
        "chain": chains(pair, prompts, given),
        "ways": defaults(pair, drafter, prompts, given),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    show(record)


def show(record: dict[str, Any]) -> None:
    chain = record["chain"]
    print(
        f"chain: {chain['speedup']:.2f} x plain, ceiling {chain['ceiling']:.2f}, {chain['of_ceiling']:.0%} of it; "
        f"accepted {chain['acceptance_length']:.2f}; {chain['equal_texts']} of {chain['texts']} texts are plain's"
    )
    for row in record["ways"]:
        over = row["over_plain"]
        print(
            f"{row['way']:15} {row['tokens_per_s']:7.1f} tokens/s  {over['ratio']:.2f} x plain ({over['low']:.2f} to "
            f"{over['high']:.2f})  accepted {row['acceptance_length']:.2f}  equal {row['equal_texts']}/{row['texts']}"
        )


if __name__ == "__main__":
    main()
