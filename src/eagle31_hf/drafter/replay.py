"""Drafts of a text that is known already, from many of its positions at once.

A text the target has written says what it would have accepted, so nothing has to be generated to judge a drafter: one
pass over the text and one pass per draft depth serve all positions at once. Position `t` of a text `x_0, x_1, ...`
joins the target's hidden states at `t` with token `x_{t+1}`, as in generation, and its first draft answers for
`x_{t+2}`. Deeper drafts are made behind the text's own tokens, as behind accepted ones, so that every depth is judged
at every position.

`S` starts (positions drafted from), `T` tokens, `n` heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import repeat_kv

from ..checkpoints.eagle_network import AttendingCache
from ..targets.taps import HiddenStateTaps
from .drafter import Eagle31Drafter, MtpDrafter


@dataclass(frozen=True)
class TargetText:
    """A prompt with what the target wrote after it.

    Attributes:
        ids: `(T,)` the whole text.
        prompt_length: tokens of it that were the prompt.
        states: `hs` index to hidden states `(T, Ht)` of the target.
    """

    ids: Tensor
    prompt_length: int
    states: dict[int, Tensor]

    def starts(self, depth: int) -> Tensor:
        """`(S,)` positions a draft of `depth` tokens could have begun at, with all of it known."""
        return torch.arange(self.prompt_length - 1, max(self.prompt_length - 1, len(self.ids) - 1 - depth))


@dataclass(frozen=True)
class KnownDraft:
    """One depth of the drafts from all starts.

    Attributes:
        logits: `(S, Vd)` of the drafter.
        truth: `(S,)` the text's token they answer for; the last one where the text is over.
        feedback: `(S, H)` hidden state that is fed back.
    """

    logits: Tensor
    truth: Tensor
    feedback: Tensor


@torch.no_grad()
def read_text(target: Any, ids: Tensor, prompt_length: int, indices: Sequence[int]) -> TargetText:
    """Run `target` once over a text `(T,)` and keep the hidden states with these `hs` indices.

    Args:
        target: a `TargetBinding`, for its model and decoder layers.
    """
    wanted = sorted(set(indices))
    taps = HiddenStateTaps(target.model, target.decoder, target.layers, wanted)
    try:
        with taps.open():
            target.model(input_ids=ids[None].to(target.input_device), logits_to_keep=1, use_cache=False)
            states = taps.take(target.head_device)[0]
    finally:
        taps.close()
    return TargetText(ids, prompt_length, dict(zip(wanted, states.chunk(len(wanted), dim=-1), strict=True)))


def drafter_states(drafter: Eagle31Drafter, text: TargetText) -> Tensor:
    """`(1, T, A*Ht)` the text's hidden states of the layers that an attached `drafter` reads."""
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    layers = drafter.binding.aux_layers
    return torch.cat([text.states[layer].to(device, dtype) for layer in layers], dim=-1)[None]


def drafts_along(
    drafter: Eagle31Drafter, text: TargetText, starts: Tensor, depth: int, cache: StartsCache | None = None
) -> Iterator[KnownDraft]:
    """`depth` tokens drafted from every start `(S,)` of `text` by an attached `drafter`, one depth after the other.

    Args:
        cache: of those starts; default: a new one. Heads inside targets have none: their layers are the target's.
    """
    if isinstance(drafter, MtpDrafter):
        yield from _drafts_of_head(drafter, text, starts, depth)
        return
    device = drafter.fc.weight.device
    aux = drafter_states(drafter, text)
    ids, starts = text.ids.to(device), starts.to(device)
    cache = StartsCache(starts) if cache is None else cache
    length = len(ids) - 1
    positions = torch.arange(length, device=device)[None]
    out = drafter.decode(
        drafter.embed(ids[None, 1:]), drafter.fuse_aux(aux[:, :length]), drafter.rotary(positions), None, cache
    )
    normed, feedback = out.normed[0, starts, None], out.feedback[0, starts, None]  # (S, 1, H)
    for level in range(depth):
        truth = ids[(starts + 2 + level).clamp(max=length)]  # (S,)
        yield KnownDraft(drafter.draft_logits(normed).squeeze(1), truth, feedback.squeeze(1))
        if level + 1 < depth:
            rotary = drafter.rotary((starts + 1 + level)[:, None])
            out = drafter.decode(drafter.embed(truth[:, None]), feedback, rotary, None, cache)
            normed, feedback = out.normed, out.feedback


def _drafts_of_head(drafter: MtpDrafter, text: TargetText, starts: Tensor, depth: int) -> Iterator[KnownDraft]:
    """As `drafts_along`. Each depth reads the text and all drafts before it anew, told apart by the mask."""
    device = drafter.fc.weight.device
    ids, starts = text.ids.to(device), starts.to(device)
    length, count = len(ids) - 1, len(starts)
    tokens, states = ids[None, 1:], drafter_states(drafter, text)[:, :length]
    positions = torch.arange(length, device=device)
    start_of = torch.full((length,), -1, device=device)  # of a draft's tokens; -1: of the text itself
    rows = starts
    for level in range(depth):
        mask = _head_mask(positions, start_of, starts, drafter.config.sliding_window, drafter.fc.weight.dtype)
        out = drafter.decode(drafter.embed(tokens), states, drafter.rotary(positions[None]), mask)
        feedback = out.feedback[:, rows]
        truth = ids[(starts + 2 + level).clamp(max=length)]
        yield KnownDraft(drafter.draft_logits(out.normed[0, rows]), truth, feedback[0])
        tokens, states = torch.cat((tokens, truth[None]), dim=1), torch.cat((states, feedback), dim=1)
        positions = torch.cat((positions, starts + 1 + level))
        start_of = torch.cat((start_of, torch.arange(count, device=device)))
        rows = torch.arange(len(positions) - count, len(positions), device=device)


def _head_mask(positions: Tensor, start_of: Tensor, starts: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive `(1, 1, N, N)`: a draft's token sees the text up to its start, and its own draft."""
    of_text = start_of == -1
    last_seen = torch.where(of_text, positions, starts[start_of.clamp(min=0)])  # of the text
    seen = of_text & (positions <= last_seen[:, None])
    seen |= ~of_text & (start_of == start_of[:, None]) & (positions <= positions[:, None])
    if window is not None:
        seen &= positions[:, None] - positions < window
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[
        None, None
    ]


def rows_of_ids(drafter: Eagle31Drafter) -> Tensor | None:
    """`(V,)` row of the draft head of each target id, -1 where there is none; `None` if the vocabularies are one."""
    if drafter.draft_ids is None:
        return None
    rows = drafter.draft_ids.new_full((drafter.vocabulary,), -1)
    rows[drafter.draft_ids] = torch.arange(len(drafter.draft_ids), device=rows.device)
    return rows


class StartsCache(AttendingCache):
    """Keys of one text, and of the drafts begun at many of its positions.

    The first pass is over the text. Later ones hold one query per start, which sees the text up to its start and the
    draft's own tokens.
    """

    def __init__(self, starts: Tensor):
        self._starts = starts
        self._of_text: dict[int, tuple[Tensor, Tensor]] = {}  # per layer keys and values (1, n, T, d)
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # of the drafts, (S, n, k, d)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, layer_idx: int
    ) -> Tensor:
        """See `AttendingCache`."""
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if layer_idx not in self._of_text:
            self._of_text[layer_idx] = key, value
            self.see_text(layer_idx, query)
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if layer_idx in self._own:
            own_key, own_value = self._own[layer_idx]
            key, value = torch.cat((own_key, key), dim=2), torch.cat((own_value, value), dim=2)
        self._own[layer_idx] = key, value
        weights = self.weights(layer_idx, query)
        self.see_drafts(layer_idx, weights)
        read = self._of_text[layer_idx][1][0]  # (n, T, d)
        length = read.shape[1]
        return torch.einsum("snqt,ntd->snqd", weights[..., :length], read) + weights[..., length:] @ value

    def see_text(self, layer_idx: int, query: Tensor) -> None:
        """Called with the queries `(1, n, T, d)` of the pass over the text."""

    def see_drafts(self, layer_idx: int, weights: Tensor) -> None:
        """Called with the attention `(S, n, 1, T + k)` of a pass over drafts."""

    def weights(self, layer_idx: int, query: Tensor) -> Tensor:
        """Attention `(S, n, 1, T + k)` of one query per start over the text up to it and its own tokens."""
        keys = self._of_text[layer_idx][0][0]
        scores = torch.einsum("snqd,ntd->snqt", query, keys)
        later = torch.arange(keys.shape[1], device=keys.device) > self._starts[:, None]  # (S, T)
        scores = scores.masked_fill(later[:, None, None], -torch.inf)
        if layer_idx in self._own:
            scores = torch.cat((scores, query @ self._own[layer_idx][0].transpose(2, 3)), dim=-1)
        return (scores.float() * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)
