"""The two ways a drafter attends: grouped-query attention, as most do, and DeepSeek's latent attention (MLA).

Both read `x` `(B, T, width)`, twice as wide in the first layer (`[embedding ; hidden]`), and see the keys of a cache
and their own. Keys are cached rotated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.models.llama.modeling_llama import rotate_half

from ..config import Eagle31Config
from ..targets.grouped_attention import grouped_attention


class AttendingCache:
    """Keys and values that know a shorter way to attend than a mask over all of them (training-time test)."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, layer_idx: int
    ) -> Tensor:
        """Append keys and values `(B, n_kv, T, d)` of a layer and attend to all with `query` `(B, n, T, d)`.

        Returns:
            Tensor: `(B, n, T, d)`, as wide as values.
        """
        raise NotImplementedError


class GroupedQueryAttention(nn.Module):
    """Query heads share key and value heads in groups; query, key and value are one matrix."""

    def __init__(self, config: Eagle31Config, layer_idx: int, input_size: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(input_size, rows, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | AttendingCache | None,
    ) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)  # (B, n_q + 2 n_kv, T, d)
        heads, value = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None:
            query, key = heads.split((self.num_heads, self.num_kv_heads), dim=1)
            heads = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        heads = _rotate(heads, *rotary)
        query, key = heads.split((self.num_heads, self.num_kv_heads), dim=1)
        out = _attend(query, key, value, attention_mask, cache, self.layer_idx)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), up-projections absorbed as its section 2.1.2 says.

    One latent of `kv_lora_rank` elements stands for the keys and values of all heads, beside one rotated key of
    `qk_rope_head_dim`. Instead of making every head's keys of every latent, each query is taken to where latents are
    (`W_key`), and what was read there to the head's values (`W_value`): attention with one key head, which is the
    latent and the rotated key, and one value head, which is the latent. That is all the cache holds of a token.

    Only the matrices that read the input are twice as wide in the first layer. Names are the published ones.
    """

    def __init__(self, config: Eagle31Config, layer_idx: int, input_size: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.rank, self.rotated = config.kv_lora_rank, config.qk_rope_head_dim
        self.plain, self.value_dim = config.qk_nope_head_dim, config.v_head_dim
        eps, query_rows = config.rms_norm_eps, self.num_heads * (self.plain + self.rotated)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(input_size, query_rows, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_rows, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, self.rank + self.rotated, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.rank, eps=eps)
        self.kv_b_proj = nn.Linear(self.rank, self.num_heads * (self.plain + self.value_dim), bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.value_dim, config.hidden_size, bias=False)
        # What attends divides by the root of the width it sees, which is not that of the heads the scores are of.
        seen, meant = self.rank + self.rotated, self.plain + self.rotated
        self.query_scale = math.sqrt(seen / meant) * _yarn_scale(config.rope_parameters or {}) ** 2

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | AttendingCache | None,
    ) -> Tensor:
        batch, length, _ = x.shape
        query = self._query(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
        plain, rotated = query.split((self.plain, self.rotated), dim=-1)  # (B, n, T, plain), (B, n, T, rotated)
        latent, rotated_key = self.kv_a_proj_with_mqa(x)[:, None].split((self.rank, self.rotated), dim=-1)
        latent = self.kv_a_layernorm(latent)  # (B, 1, T, rank)
        rotated, rotated_key = (_rotate(_halves(part), *rotary) for part in (rotated, rotated_key))
        per_head = self.kv_b_proj.weight.view(self.num_heads, -1, self.rank)
        to_key, to_value = per_head.split((self.plain, self.value_dim), dim=1)  # (n, plain, rank), (n, values, rank)
        out = _attend(
            torch.cat((plain @ to_key, rotated), dim=-1) * self.query_scale,
            torch.cat((latent, rotated_key), dim=-1),
            latent,
            attention_mask,
            cache,
            self.layer_idx,
        )  # (B, n, T, rank)
        values = out @ to_value.transpose(1, 2)
        return self.o_proj(values.transpose(1, 2).reshape(batch, length, -1))

    def _query(self, x: Tensor) -> Tensor:
        if hasattr(self, "q_proj"):
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """DeepSeek's factor on scores under YaRN, `0.1 m ln(factor) + 1`; 1 where `mscale_all_dim` `m` is not stated."""
    weight, factor = rope.get("mscale_all_dim") or 0, rope.get("factor") or 1
    return 0.1 * weight * math.log(factor) + 1 if rope.get("rope_type") == "yarn" and factor > 1 else 1.0


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | AttendingCache | None,
    layer_idx: int,
) -> Tensor:
    """Of `query` `(B, n, T, d)` over these keys and values `(B, n_kv, T, d)` and all cached before; `(B, n, T, d)`."""
    if isinstance(cache, AttendingCache):
        return cache.attend(query, key, value, attention_mask, layer_idx)
    if cache is not None:
        key, value = cache.update(key, value, layer_idx)  # (B, n_kv, S, d)
    return grouped_attention(query, key, value, attention_mask)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on `(B, heads, T, d)` with tables `(B, T, d)`, all heads in one go."""
    return heads * cos[:, None] + rotate_half(heads) * sin[:, None]


def _halves(heads: Tensor) -> Tensor:
    """Pairs (0, 1), (2, 3), ... as DeepSeek rotates them, to the two halves that `_rotate` pairs.

    Queries and keys are reordered alike, which changes no score.
    """
    return heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
