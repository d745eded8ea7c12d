"""EAGLE-3's formulas in plain tensor code that shares nothing with the package: whole passes, nothing cached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention: of the latent, of a head's unrotated and rotated part, of a head's value."""

    rank: int
    plain: int
    rotated: int
    value: int


@dataclass(frozen=True)
class Reference:
    """A drafter, of one layer or more.

    Attributes:
        w: its tensors, those of the first layer without a prefix: `fc.weight`, `self_attn.q_proj.weight`,
            `mlp.up_proj.weight`, …, `layers.1.mlp.up_proj.weight`. Norms of aux states are there if it has them.
        frequencies: angle per position of each pair, `(d/2,)`. rotary_scale: factor on cosines and sines.
        score_scale: factor on scores of attention, besides `1 / sqrt(d)`.
        window: positions seen back. latent: its widths, where attention is latent; pairs are then neighbours.
        norm_output: what it feeds back is normed. norm_before_residual: so is the residual of the first layer.
    """

    w: Mapping[str, Tensor]
    heads: int
    kv_heads: int
    frequencies: Tensor
    rotary_scale: float = 1.0
    score_scale: float = 1.0
    activation: Callable[[Tensor], Tensor] = torch.nn.functional.silu
    window: int | None = None
    latent: Latent | None = None
    norm_output: bool = False
    norm_before_residual: bool = False
    eps: float = 1e-5

    def chain(self, aux: Tensor, embed: Callable[[Tensor], Tensor], tokens: list[int], steps: int) -> list[Tensor]:
        """Draft logits of `steps` greedy steps.

        Args:
            aux: `(T, A*Ht)` of the prompt's positions. embed: ids to rows. tokens: `T` ids, each position's next.
        """
        g, tokens, logits = self.fuse(aux), list(tokens), []
        for _ in range(steps):
            normed, feedback = self.step(embed(torch.tensor(tokens)), g)
            logits.append(normed[-1] @ self.w["lm_head.weight"].T)
            row = int(logits[-1].argmax())
            tokens.append(row + int(self.w["d2t"][row]) if "d2t" in self.w else row)
            g = torch.cat((g, feedback[-1:]))
        return logits

    def step(self, embeddings: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """One causal pass over `(T, H)` and `(T, H)`: normed states and what is fed back, both `(T, H)`."""
        hidden = self._layers(embeddings, g)
        normed = self._rms(hidden, self.w["norm.weight"])
        return normed, normed if self.norm_output else hidden

    def fuse(self, aux: Tensor) -> Tensor:
        """`(T, A*Ht)` to `(T, H)`."""
        if "input_norm.weight" in self.w:
            aux = self._rms(aux, self.w["input_norm.weight"])
        slots = [weight for name, weight in sorted(self.w.items()) if name.startswith("fc_norm.")]
        if slots:
            parts = aux.chunk(len(slots), -1)
            aux = torch.cat([self._rms(part, weight) for part, weight in zip(parts, slots, strict=True)], -1)
        return aux @ self.w["fc.weight"].T + self.w.get("fc.bias", 0)

    def _layers(self, embeddings: Tensor, g: Tensor) -> Tensor:
        normed = self._rms(g, self.w["hidden_norm.weight"])
        read = torch.cat((self._rms(embeddings, self.w["input_layernorm.weight"]), normed), -1)
        hidden = self._layer(self.w, normed if self.norm_before_residual else g, read)
        number = 1
        while further := self._weights_of(number):
            hidden = self._layer(further, hidden, self._rms(hidden, further["input_layernorm.weight"]))
            number += 1
        return hidden

    def _weights_of(self, number: int) -> dict[str, Tensor]:
        prefix = f"layers.{number}."
        return {name.removeprefix(prefix): weight for name, weight in self.w.items() if name.startswith(prefix)}

    def _layer(self, w: Mapping[str, Tensor], residual: Tensor, read: Tensor) -> Tensor:
        attended = self._grouped(w, read) if self.latent is None else self._latent(w, read, self.latent)
        hidden = residual + attended
        inner = self._rms(hidden, w["post_attention_layernorm.weight"])
        gated = self.activation(inner @ w["mlp.gate_proj.weight"].T) * (inner @ w["mlp.up_proj.weight"].T)
        return hidden + gated @ w["mlp.down_proj.weight"].T

    def _grouped(self, w: Mapping[str, Tensor], read: Tensor) -> Tensor:
        count = len(read)
        q, k, v = (read @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = q.view(count, self.heads, -1), k.view(count, self.kv_heads, -1), v.view(count, self.kv_heads, -1)
        if "self_attn.q_norm.weight" in w:
            q, k = self._rms(q, w["self_attn.q_norm.weight"]), self._rms(k, w["self_attn.k_norm.weight"])
        q, k = self._turn_halves(q), self._turn_halves(k)
        k, v = (states.repeat_interleave(self.heads // self.kv_heads, 1) for states in (k, v))
        return self._attend(q, k, v) @ w["self_attn.o_proj.weight"].T

    def _latent(self, w: Mapping[str, Tensor], read: Tensor, widths: Latent) -> Tensor:
        count = len(read)
        if "self_attn.q_proj.weight" in w:
            q = read @ w["self_attn.q_proj.weight"].T
        else:
            q = self._rms(read @ w["self_attn.q_a_proj.weight"].T, w["self_attn.q_a_layernorm.weight"])
            q = q @ w["self_attn.q_b_proj.weight"].T
        q = q.view(count, self.heads, -1)
        latent, key = (read @ w["self_attn.kv_a_proj_with_mqa.weight"].T).split((widths.rank, widths.rotated), -1)
        made = self._rms(latent, w["self_attn.kv_a_layernorm.weight"]) @ w["self_attn.kv_b_proj.weight"].T
        made = made.view(count, self.heads, -1)
        key = self._turn_neighbours(key[:, None]).expand(-1, self.heads, -1)
        k = torch.cat((made[..., : widths.plain], key), -1)
        q = torch.cat((q[..., : widths.plain], self._turn_neighbours(q[..., widths.plain :])), -1)
        return self._attend(q, k, made[..., widths.plain :]) @ w["self_attn.o_proj.weight"].T

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(len(q))
        back = places[:, None] - places[None]
        seen = (back >= 0) & (back < (self.window or len(q)))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (self.score_scale / math.sqrt(q.shape[-1]))
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

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight


def plain_frequencies(theta: float, width: int) -> Tensor:
    """RoPE's, by its paper."""
    return torch.tensor([theta ** (-2 * pair / width) for pair in range(width // 2)], dtype=torch.float64)


@dataclass(frozen=True)
class Yarn:
    """YaRN's settings: what turns more than `fast` times in `original` positions is kept, what turns less than `slow`
    times is stretched by `factor`."""

    factor: float
    original: int
    fast: float = 32
    slow: float = 1

    def frequencies(self, theta: float, width: int) -> Tensor:
        """By its paper (arXiv 2309.00071)."""
        plain = plain_frequencies(theta, width)
        low, high = (self._pair_of(turns, theta, width) for turns in (self.fast, self.slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        stretched = ((torch.arange(width // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        return plain / self.factor * stretched + plain * (1 - stretched)

    def _pair_of(self, turns: float, theta: float, width: int) -> float:
        return width * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
