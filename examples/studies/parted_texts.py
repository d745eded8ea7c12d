"""How many texts in half precision part from plain decoding's: targets that keep states beside a dense one.

    python examples/studies/parted_texts.py --texts 40 --json docs/records/parted-texts.json

In bf16 several tokens at once and one after the other round differently, so now and then another of two nearly equal
tokens is written. That happens to dense targets, too; what must not be is that it happens more often where states are
rebuilt or kept after every token. Targets are random, of one size, and remember long; drafts follow plain decoding's
text for a while that is drawn anew each round, so that rounds keep anything from one token to all. In float32, where
nothing may part, the same texts are counted as well.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList

from eagle31_hf import Eagle31Drafter
from eagle31_hf.decoding.decoder import SpeculativeDecoder
from eagle31_hf.decoding.draft_policy import DraftPlan, DraftPolicy, RoundState, RoundStats
from eagle31_hf.decoding.request import DecodingRequest
from eagle31_hf.decoding.text import Sequences, StopRules
from eagle31_hf.measure.provenance import machine, origin
from eagle31_hf.sampling.logits_processing import ScoreProcessing
from eagle31_hf.trees.shape import DraftShape

VOCABULARY, DEPTH, PROMPT = 96, 4, 12
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15,
    "tie_word_embeddings": False, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DENSE = "qwen3"
TARGETS: dict[str, dict[str, Any]] = {
    DENSE: {"head_dim": 16},
    "qwen3_5_text": {
        "head_dim": 16, "layer_types": MIXED, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "bamba": {
        "attn_layer_indices": [2], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "lfm2": {
        "layer_types": [kind.replace("linear_attention", "conv") for kind in MIXED], "block_auto_adjust_ff_dim": False
    },
}  # fmt: skip


def random_target(family: str, dtype: torch.dtype) -> Any:
    """Of this family, the same weights in every precision."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **TARGETS[family])).eval()
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # fresh ones forget within two tokens
                weight.copy_((torch.rand(weight.shape, generator=dice) * 0.3 + 0.02).log())
    model.generation_config.eos_token_id = None
    return model.to(dtype)


class Along(DraftPolicy):
    """Drafts that are `truth`, from its first new token on, for as long as is drawn, and then are not."""

    def __init__(self, truth: Sequence[int], seed: int):
        self._truth, self._dice = truth, random.Random(seed)

    def next_draft(self, state: RoundState) -> DraftPlan:
        """Of full depth."""
        assert state.sequences is not None
        written, depth = len(state.sequences.new[0]), state.largest.depth
        coming = list(self._truth[written : written + self._dice.randint(0, depth)])
        wrong = [self._dice.randrange(3, VOCABULARY) for _ in range(depth - len(coming))]
        return DraftPlan(DraftShape(depth=depth), tokens=((*coming, *wrong),))

    def record(self, stats: RoundStats) -> None:
        """Learns nothing."""


def parted(family: str, dtype: torch.dtype, texts: int, new_tokens: int) -> int:
    """How many of so many texts are not plain decoding's."""
    target = random_target(family, dtype)
    torch.manual_seed(2)
    drafter = Eagle31Drafter.from_target(target, aux_layers=[1, 2, 3]).eval()
    dice, count = torch.Generator().manual_seed(3), 0
    for number in range(texts):
        ids = torch.randint(3, VOCABULARY, (1, PROMPT), generator=dice)
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens)
        count += not torch.equal(drafted(drafter, ids, plain[0, PROMPT:].tolist(), number), plain)
    return count


def drafted(drafter: Eagle31Drafter, ids: Tensor, truth: Sequence[int], seed: int) -> Tensor:
    request = DecodingRequest(
        sequences=Sequences(ids, [0], StopRules(max_length=PROMPT + len(truth)), None),
        processing=ScoreProcessing(LogitsProcessorList()),
        shape=DraftShape(DEPTH),
        policy=Along(truth, seed),
        do_sample=False,
    )
    with torch.no_grad(), drafter.binding.masked_attention():
        return SpeculativeDecoder(drafter, request, compiled=False).run()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    rows = []
    for family in TARGETS:
        counts = {
            name: parted(family, dtype, given.texts, given.new_tokens)
            for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
        }
        rows.append({"target": family, "texts": given.texts, "parted": counts})
        print(f"{family:14} {counts['bf16']} of {given.texts} texts part in bf16, {counts['fp32']} in fp32")
    if given.json is not None:
        binding = Eagle31Drafter.from_target(random_target(DENSE, torch.bfloat16)).binding
        record = {**origin(), "machine": machine(binding), "new_tokens": given.new_tokens, "targets": rows}
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
