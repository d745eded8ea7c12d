"""EAGLE-3's formulas in plain tensor code that shares nothing with the package: whole passes, nothing cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention: of the latent, of a head's unrotated and rotated part, of a head's value."""

    rank: int
    plain: int
    rotated: int
    value: int


@dataclass(frozen=True)
class Reference:
    """A one-layer drafter.

    Attributes:
        w: its tensors without prefixes: `fc.weight`, `self_attn.q_proj.weight`, `mlp.up_proj.weight`, ….
        frequencies: angle per position of each pair, `(d/2,)`. rotary_scale: factor on cosines and sines.
        window: positions seen back. latent: its widths, where attention is latent; pairs are then neighbours.
    """

    w: Mapping[str, Tensor]
    heads: int
    kv_heads: int
    frequencies: Tensor
    rotary_scale: float = 1.0
    activation: Callable[[Tensor], Tensor] = torch.nn.functional.silu
    window: int | None = None
    latent: Latent | None = None

    def chain(self, aux: Tensor, embed: Callable[[Tensor], Tensor], tokens: list[int], steps: int) -> list[Tensor]:
        """Draft logits of `steps` greedy steps.

        Args:
            aux: `(T, A*Ht)` of the prompt's positions. embed: ids to rows. tokens: `T` ids, each position's next.
        """
        g, tokens, logits = aux @ self.w["fc.weight"].T, list(tokens), []
        for _ in range(steps):
            hidden = self._layer(embed(torch.tensor(tokens)), g)[-1:]
            logits.append((_rms(hidden, self.w["norm.weight"]) @ self.w["lm_head.weight"].T)[0])
            row = int(logits[-1].argmax())
            tokens.append(row + int(self.w["d2t"][row]) if "d2t" in self.w else row)
            g = torch.cat((g, hidden))
        return logits

    def _layer(self, embeddings: Tensor, g: Tensor) -> Tensor:
        w = self.w
        read = torch.cat((_rms(embeddings, w["input_layernorm.weight"]), _rms(g, w["hidden_norm.weight"])), -1)
        hidden = g + (self._grouped(read) if self.latent is None else self._latent(read, self.latent))
        inner = _rms(hidden, w["post_attention_layernorm.weight"])
        gated = self.activation(inner @ w["mlp.gate_proj.weight"].T) * (inner @ w["mlp.up_proj.weight"].T)
        return hidden + gated @ w["mlp.down_proj.weight"].T

    def _grouped(self, read: Tensor) -> Tensor:
        count = len(read)
        q, k, v = (read @ self.w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = q.view(count, self.heads, -1), k.view(count, self.kv_heads, -1), v.view(count, self.kv_heads, -1)
        if "self_attn.q_norm.weight" in self.w:
            q, k = _rms(q, self.w["self_attn.q_norm.weight"]), _rms(k, self.w["self_attn.k_norm.weight"])
        q, k = self._turn_halves(q), self._turn_halves(k)
        k, v = (states.repeat_interleave(self.heads // self.kv_heads, 1) for states in (k, v))
        return self._attend(q, k, v) @ self.w["self_attn.o_proj.weight"].T

    def _latent(self, read: Tensor, widths: Latent) -> Tensor:
        count, w = len(read), self.w
        if "self_attn.q_proj.weight" in w:
            q = read @ w["self_attn.q_proj.weight"].T
        else:
            q = _rms(read @ w["self_attn.q_a_proj.weight"].T, w["self_attn.q_a_layernorm.weight"])
            q = q @ w["self_attn.q_b_proj.weight"].T
        q = q.view(count, self.heads, -1)
        latent, key = (read @ w["self_attn.kv_a_proj_with_mqa.weight"].T).split((widths.rank, widths.rotated), -1)
        made = _rms(latent, w["self_attn.kv_a_layernorm.weight"]) @ w["self_attn.kv_b_proj.weight"].T
        made = made.view(count, self.heads, -1)
        key = self._turn_neighbours(key[:, None]).expand(-1, self.heads, -1)
        k = torch.cat((made[..., : widths.plain], key), -1)
        q = torch.cat((q[..., : widths.plain], self._turn_neighbours(q[..., widths.plain :])), -1)
        return self._attend(q, k, made[..., widths.plain :]) @ w["self_attn.o_proj.weight"].T

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(len(q))
        back = places[:, None] - places[None]
        seen = (back >= 0) & (back < (self.window or len(q)))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)

    def _angles(self, count: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(count, dtype=self.frequencies.dtype)[:, None, None] * self.frequencies
        return angles.cos() * self.rotary_scale, angles.sin() * self.rotary_scale

    def _turn_halves(self, heads: Tensor) -> Tensor:
        cos, sin = self._angles(len(heads))
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def _turn_neighbours(self, heads: Tensor) -> Tensor:
        cos, sin = self._angles(len(heads))
        even, odd = heads[..., ::2], heads[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def plain_frequencies(theta: float, width: int) -> Tensor:
    """RoPE's, by its paper."""
    return torch.tensor([theta ** (-2 * pair / width) for pair in range(width // 2)], dtype=torch.float64)


def yarn_frequencies(theta: float, width: int, factor: float, original: int) -> Tensor:
    """YaRN's, by its paper (arXiv 2309.00071), from 32 turns to 1: long waves are stretched, short ones kept."""
    plain = plain_frequencies(theta, width)

    def pair_of(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(32)), 0), min(math.ceil(pair_of(1)), width - 1)
    stretched = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * stretched + plain * (1 - stretched)
