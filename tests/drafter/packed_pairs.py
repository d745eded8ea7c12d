"""Targets and drafters to pack, how they are packed, and whether every loop agrees on their text."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import BitsAndBytesConfig

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafter.packed_linear import PackedLinear
from eagle31_hf.memory.weights import SCHEMES
from families import LOW_RANK
from helpers import (
    GROUPED,
    PACKINGS,
    SIZES,
    assert_same_or_tie,
    configured,
    left_padded,
    oracle_drafts,
    random_drafter,
    random_prompts,
    target_of,
    write,
)

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # LLM.int8 tells of every cast, at every call

INNER = {"intermediate_size": 128}  # bitsandbytes' kernel for AVX512-BF16 wants rows of whole blocks
FAMILIES: dict[str, Any] = {
    "llama": hf.LlamaConfig(**GROUPED | INNER),
    "mixtral": hf.MixtralConfig(**GROUPED | INNER, num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": hf.GPTNeoXConfig(**SIZES | INNER, rotary_pct=0.5),
}
LOOPS: dict[str, dict[str, Any]] = {
    "chain": {"speculation_loop": "own"},
    "tree": {"speculation_loop": "own", "draft_top_k": 2, "draft_tree_size": 15},
}


def load(folder: Path, packing: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=bits(packing, **fields)
    ).eval()


def assert_every_loop_agrees(target: Any, drafter: Eagle31Drafter, seed: int) -> None:
    """Up to ties, on one prompt."""
    assert not drafter.binding.tree_unsupported_reason
    (prompt,) = random_prompts(1, seed=seed)
    inputs = left_padded([prompt])
    plain = write(target, inputs)
    for loop in LOOPS.values():
        with configured(drafter, num_assistant_tokens=4, **loop), oracle_drafts(plain, len(prompt)):
            ours = write(target, inputs, assistant_model=drafter)
        assert drafter.stats.loop == "own"
        assert_same_or_tie(target, inputs, plain, ours)


SCHEMES_OF_DRAFTERS = {name: SCHEMES[f"bnb-{name}"] for name in ("int8", "nf4", "nf4-dq", "fp4")}


# Of a row's, of a block's largest weight; bitsandbytes' int8 product comes out in fp16.
LARGEST_ERROR = {"int8": 0.5 / 127 + 2**-11, "nf4": 0.17, "nf4-dq": 0.18, "fp4": 0.18}


def matrix_of(packed: PackedLinear) -> Tensor:
    """What a packed layer multiplies with: its answers to the unit vectors, in fp32."""
    return packed(torch.eye(packed.in_features)).T


DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle 3.1": {"aux_norm": "per_slot", "norm_output": True, "draft_vocab_size": 40},
    "biases": {"aux_norm": "concatenated", "fc_bias": True, "attention_bias": True, "mlp_bias": True},
    "own embedding": {"own_embedding": True},
    "shared rows": {"own_lm_head": False, "draft_vocab_size": 40},
    "shared head": {"own_lm_head": False},
    "two layers": {"num_hidden_layers": 2},
    "latent": LOW_RANK,
}


@cache
def drafter_folder(name: str, parent: Path) -> Path:
    """A random drafter for `target_of("llama")`, written unpacked."""
    folder = parent / name.replace(" ", "-")
    random_drafter(target_of("llama"), aux_layers=[1, 2, 4], **DRAFTERS[name]).save_pretrained(folder)
    return folder


def bits(scheme: str, **fields: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(**PACKINGS[scheme] | fields)


def packed(name: str, parent: Path, packing: str, target: Any, **fields: Any) -> Eagle31Drafter:
    """The drafter of that name, packed while it is loaded."""
    folder = drafter_folder(name, parent)
    return Eagle31Drafter.from_pretrained(folder, target=target, quantization_config=bits(packing, **fields))
