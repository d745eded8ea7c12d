"""A target of any size with random weights that counts, and a drafter that is right about most of its tokens.

What rounds cost depends on shapes and on how many drafts are accepted, not on what the weights say. So both can be
measured at sizes whose weights are not at hand. After token `t` the target says `t + 1`: its layers add next to nothing
to the embedding, and row `v` of its head is the embedding of `v - 1`. The drafter attends to its last token alone and
has the same head, but for the rows that it is to be wrong about. Every product of a real pair is computed.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from eagle31_hf import Eagle31Drafter

SIZES = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14336, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 512, "vocab_size": 1024},
}  # fmt: skip
SMALL = 1e-3
"""What layers add to the embedding is smaller by this factor than in a model that is to be trained."""

SURENESS = 120.0
"""Attention scores of the drafter's last token with itself; those with others are several times smaller."""


def llama_config(size: str, **more: Any) -> LlamaConfig:
    """Of one of `SIZES`; no token ends a text."""
    return LlamaConfig(
        **SIZES[size], bos_token_id=None, eos_token_id=None, **{"max_position_embeddings": 131072, **more}
    )


def random_target(
    size: str, *, dtype: torch.dtype, device: torch.device | str, four_bit: bool = False
) -> PreTrainedModel:
    """A Llama that counts. With `four_bit` its linear layers but the head are packed to nf4 by bitsandbytes."""
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        torch.manual_seed(0)
        with torch.device(device):
            target = AutoModelForCausalLM.from_config(llama_config(size), dtype=dtype)
            embedding = target.get_input_embeddings().weight
            with torch.no_grad():
                embedding.normal_()
                target.get_output_embeddings().weight.copy_(embedding.roll(1, 0))
                for name, weight in target.named_parameters():
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        weight.mul_(SMALL)
    if four_bit:
        _pack(target, dtype)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target.eval().requires_grad_(False)


def _pack(target: Any, dtype: torch.dtype) -> None:
    """One layer after the other, so that no more than one is there twice."""
    import bitsandbytes as bnb

    linears = {name: each for name, each in target.model.named_modules() if type(each) is nn.Linear}
    for name, linear in linears.items():
        packed = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
        )
        weight: Any = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        packed.weight = weight.to(linear.weight.device)  # this is when it is packed
        target.model.set_submodule(name, packed)
    target.is_loaded_in_4bit = True


def counting_drafter(
    target: PreTrainedModel, *, draft_vocabulary: int, right: float = 0.7, **load: Any
) -> Eagle31Drafter:
    """A drafter for a counting target, loaded from a checkpoint as a user's would be.

    Args:
        target: of `random_target`.
        draft_vocabulary: its first so many tokens.
        right: share of them that it drafts when they are next.
        load: further arguments of `from_pretrained`.
    """
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        fresh = Eagle31Drafter.from_target(target, draft_vocab_size=draft_vocabulary)
        fresh.save_pretrained(where)
        fresh.detach()
        del fresh
        weights = load_file(where / "model.safetensors")
        sizes = json.loads((where / "config.json").read_text(encoding="utf-8"))
        _teach_to_count(weights, sizes, target.get_input_embeddings().weight[:draft_vocabulary].cpu(), right)
        save_file(weights, where / "model.safetensors", metadata={"format": "pt"})
        return Eagle31Drafter.from_pretrained(where, target=target, **load).eval()


def _teach_to_count(weights: dict[str, Tensor], sizes: dict[str, Any], embedding: Tensor, right: float) -> None:
    def named(ending: str) -> str:
        (name,) = (name for name in weights if name.endswith(ending))
        return name

    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width, dim = embedding.shape[1], weights[named("self_attn.k_proj.weight")].shape[0] // kv_heads
    dice = torch.Generator().manual_seed(0)
    spread = math.sqrt(SURENESS / (width * math.sqrt(dim)))
    keys = torch.randn(kv_heads * dim, width, generator=dice) * spread
    queries = keys.view(kv_heads, 1, dim, width).expand(-1, heads // kv_heads, -1, -1).reshape(heads * dim, width)
    values, out = torch.eye(kv_heads * dim, width), torch.zeros(width, heads * dim)
    for head in range(kv_heads):  # one query head of each group hands its values on
        rows = torch.arange(head * dim, min((head + 1) * dim, width))
        out[rows, rows - head * dim + head * (heads // kv_heads) * dim] = 8.0
    for name, matrix in (("q_proj", queries), ("k_proj", keys), ("v_proj", values)):
        weight = weights[named(f"self_attn.{name}.weight")]
        weight.zero_()[:, :width] = matrix  # of the embedding; nothing of the hidden state beside it
    weights[named("self_attn.o_proj.weight")].copy_(out)
    weights[named("mlp.down_proj.weight")].mul_(SMALL)
    weights[named("fc.weight")].mul_(SMALL)
    known = torch.rand(len(embedding), 1, generator=dice) < right
    weights[named("lm_head.weight")].copy_(embedding.roll(1, 0) * known)


def counted_on(ids: Tensor, prompt_tokens: int, vocabulary: int) -> bool:
    """Whether every row of `ids` `(B, T)` goes on counting behind its prompt."""
    last, written = ids[:, prompt_tokens - 1 : -1], ids[:, prompt_tokens:]
    return bool(torch.equal((last + 1) % vocabulary, written))


def random_prompts(rows: int, length: int, below: int, device: torch.device | str) -> dict[str, Tensor]:
    """`(rows, length)` ids with room to count on below the draft vocabulary's end."""
    ids = torch.randint(0, below // 2, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
