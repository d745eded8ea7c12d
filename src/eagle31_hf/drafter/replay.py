"""Drafts of a text that is known already, from many of its positions at once.

A text the target has written says what it would have accepted, so nothing has to be generated to judge a drafter: one
pass over the text and one pass per draft depth serve all positions at once. Position `t` of a text `x_0, x_1, ...`
joins the target's hidden states at `t` with token `x_{t+1}`, as in generation, and its first draft answers for
`x_{t+2}`. Deeper drafts are made behind the text's own tokens, as behind accepted ones, so that every depth is judged
at every position.

`S` starts (positions drafted from), `T` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from ..targets.taps import HiddenStateTaps
from .drafter import Eagle31Drafter


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
    taps = HiddenStateTaps(target.decoder, target.layers, wanted)
    try:
        with taps.open():
            target.model(input_ids=ids[None].to(target.input_device), logits_to_keep=1, use_cache=False)
            states = taps.take(target.head_device)[0]
    finally:
        taps.close()
    return TargetText(ids, prompt_length, dict(zip(wanted, states.chunk(len(wanted), dim=-1), strict=True)))


def drafts_along(
    drafter: Eagle31Drafter, text: TargetText, starts: Tensor, depth: int, cache: Cache | None = None
) -> Iterator[KnownDraft]:
    """`depth` tokens drafted from every start `(S,)` of `text` by an attached `drafter`, one depth after the other.

    The first pass reads the text, each further one a token behind every start; the mask tells the drafts apart.

    Args:
        cache: empty; default: a new one.
    """
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    aux = torch.cat([text.states[layer].to(device, dtype) for layer in drafter.binding.aux_layers], dim=-1)  # (T, A*Ht)
    ids, starts, cache = text.ids.to(device), starts.to(device), DynamicCache() if cache is None else cache
    length = len(ids) - 1
    tokens, hidden = ids[1:], drafter.fuse_aux(aux[None, :length])
    positions = key_positions = torch.arange(length, device=device)
    seen = positions <= positions[:, None]  # (T, T), then (S, T + k * S)
    rows: Tensor | slice = starts  # of a pass: those that drafts come from
    own = torch.eye(len(starts), dtype=torch.bool, device=device)
    for level in range(depth):
        mask = _mask(seen, positions, key_positions, drafter.config.sliding_window, dtype)
        out = drafter.decode(drafter.embed(tokens[None]), hidden, drafter.rotary(positions[None]), mask, cache)
        hidden = out.feedback[:, rows]
        truth = ids[(starts + 2 + level).clamp(max=length)]  # (S,)
        yield KnownDraft(drafter.draft_logits(out.normed[0, rows]), truth, hidden[0])
        seen = torch.cat((seen[rows], own), dim=1)
        tokens, positions, rows = truth, starts + 1 + level, slice(None)
        key_positions = torch.cat((key_positions, positions))


def _mask(seen: Tensor, positions: Tensor, key_positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive `(1, 1, T, N)` of queries and keys at these positions."""
    if window is not None:
        seen = seen & (positions[:, None] - key_positions < window)
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def rows_of_ids(drafter: Eagle31Drafter) -> Tensor:
    """`(V,)` row of the draft head of each target id, -1 where there is none."""
    every = torch.arange(drafter.vocabulary, device=drafter.fc.weight.device)
    if drafter.draft_ids is None:
        return every
    return torch.full_like(every, -1).index_copy(0, drafter.draft_ids, every[: len(drafter.draft_ids)])
