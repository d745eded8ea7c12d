"""A small hybrid of our own, for a machine without a card: most of its layers keep a recurrent state.

    python examples/studies/small_hybrid.py gsm8k_train.jsonl taskmaster_train.jsonl --out hybrid
    eagle31 train --target hybrid --prompts gsm8k_train.jsonl --out hybrid-drafter
    eagle31 bench --target hybrid --drafter hybrid-drafter

Trains a target shaped like Qwen3.5 (gated delta net, every fourth layer attention) on conversations; it begins with the
embedded target's table of tokens. A drafter is then trained and measured as for any other target.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5TextConfig

from eagle31_hf.demo import target_path

ROWS, WIDTH, RATE = 8, 128, 2e-3
MOST_CONVERSATIONS = 2000
"""Of each file; a few minutes do not read more."""


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


def train_target(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A model that continues such conversations, saved to `folder`. What it took and how well it predicts."""
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    embedded = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_config(shape_of(embedded, options.layers), dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedded.get_input_embeddings().weight)
    batches = batches_of(options.prompts, tokenizer, options.seed)
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
        done = (time.process_time() - started) / (60 * options.target_minutes)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    last = losses[-max(1, len(losses) // 20) :]
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": len(losses),
        "tokens": len(losses) * ROWS * WIDTH,
        "processor_minutes": options.target_minutes,
        "loss": sum(last) / len(last),
    }


def batches_of(files: list[str], tokenizer: Any, seed: int) -> Iterator[Tensor]:
    """Pieces `(ROWS, WIDTH)` of all conversations one after the other, each time other ones."""
    ids: list[int] = []
    for file in files:
        rows = Path(file).read_text(encoding="utf-8").splitlines()[:MOST_CONVERSATIONS]
        for chat in (json.loads(row)["conversations"] for row in rows):
            ids += tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
    text, dice = torch.tensor(ids), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - WIDTH, (ROWS,), generator=dice)
        yield text[starts[:, None] + torch.arange(WIDTH)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", help="JSONL files with conversations to learn from")
    parser.add_argument("--out", type=Path, default=Path("hybrid"), help="folder for the target")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--target-minutes", type=float, default=10.0, help="of processor time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(json.dumps(train_target(options, options.out)))


if __name__ == "__main__":
    main()
