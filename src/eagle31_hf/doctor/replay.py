"""What a drafter would draft at every position of a text that is known already.

A text the target has written says what it would have accepted, so nothing has to be generated to judge a drafter: one
pass over the text and one pass per draft depth serve all positions at once. Position `t` of a text `x_0, x_1, ...`
joins the target's hidden states at `t` with token `x_{t+1}`, as in generation, and its first draft is right if it is
`x_{t+2}`. Deeper drafts are made behind the text's own tokens, as behind accepted ones, so that every depth is judged
at every position. The attention weights are computed in the open, so they can be looked at.

`S` starts (positions drafted from), `K` draft depths, `T` tokens, `n` heads, `d` head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import repeat_kv

from ..drafter.drafter import Eagle31Drafter
from ..drafter.modeling_eagle31 import AttendingCache

SINK_TOKENS = 4
"""First tokens of a prompt counted as its sink (StreamingLLM, arXiv 2309.17453, keeps four)."""


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
class Replay:
    """Drafts from every start of one text.

    Attributes:
        drafted: `(S, K)` draft-vocabulary rows the drafter thought likeliest.
        right: `(S, K)` bool; the draft is what the target wrote, and so are all drafts before it.
        log_probs: `(S, K)` log-probability the drafter gave to what the target wrote; NaN where that cannot be drafted.
        attention: `(S, K, 3)` share of the attention on the prompt's sink, on the rest of the text, and on the
            drafter's own tokens of this draft; mean over heads and layers.
        feedback_norm: `(S, K)` length of the hidden state that is fed back after each depth.
    """

    drafted: Tensor
    right: Tensor
    log_probs: Tensor
    attention: Tensor
    feedback_norm: Tensor

    @property
    def accepted(self) -> Tensor:
        """`(S,)` drafts accepted from each start."""
        return self.right.sum(1)


@torch.no_grad()
def read_text(target: Any, ids: Tensor, prompt_length: int, indices: Sequence[int]) -> TargetText:
    """Run `target` once over a text `(T,)` and keep the hidden states with these `hs` indices.

    Args:
        target: a `TargetBinding`, for its model and decoder layers.
    """
    states: dict[int, Tensor] = {}

    def entering(index: int) -> Any:
        def keep(_module: Any, args: tuple, kwargs: dict) -> None:
            states[index] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return keep

    def leaving(_module: Any, _args: tuple, output: Any) -> None:
        states[len(target.layers)] = (output[0] if isinstance(output, tuple) else output)[0].clone()

    handles = []
    for index in set(indices):
        if index < len(target.layers):
            handles.append(target.layers[index].register_forward_pre_hook(entering(index), with_kwargs=True))
        else:
            handles.append(target.layers[-1].register_forward_hook(leaving))
    try:
        target.model(input_ids=ids[None].to(target.input_device), logits_to_keep=1, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return TargetText(ids, prompt_length, states)


@torch.no_grad()
def replay(drafter: Eagle31Drafter, text: TargetText, *, depth: int) -> Replay:
    """Draft `depth` tokens from every start of `text` with an attached `drafter`."""
    device = drafter.fc.weight.device
    layers = drafter.require_binding().aux_layers
    aux = torch.cat([text.states[layer].to(device, drafter.fc.weight.dtype) for layer in layers], dim=-1)
    ids, starts = text.ids.to(device), text.starts(depth).to(device)
    cache = _ObservedCache(starts)
    length = len(ids) - 1
    positions = torch.arange(length, device=device)[None]
    out = drafter.decode(
        drafter.embed(ids[None, 1:]), drafter.fuse_aux(aux[None, :length]), drafter.rotary(positions), None, cache
    )
    normed, feedback = out.normed[0, starts, None], out.feedback[0, starts, None]  # (S, 1, H)
    row_of = _rows_of_ids(drafter)
    drafted, right, log_probs, norms = [], [], [], []
    still_right = torch.ones(len(starts), dtype=torch.bool, device=device)
    for level in range(depth):
        truth = ids[starts + 2 + level]  # (S,)
        wanted = truth if row_of is None else row_of[truth]
        scores = drafter.draft_logits(normed).squeeze(1).float().log_softmax(-1)  # (S, Vd)
        drafted.append(scores.argmax(-1))
        still_right = still_right & (drafted[-1] == wanted)
        right.append(still_right)
        given = scores.gather(1, wanted.clamp(min=0)[:, None]).squeeze(1)
        log_probs.append(torch.where(wanted >= 0, given, torch.nan))
        norms.append(feedback.squeeze(1).float().norm(dim=-1))
        if level + 1 < depth:
            rotary = drafter.rotary((starts + 1 + level)[:, None])
            out = drafter.decode(drafter.embed(truth[:, None]), feedback, rotary, None, cache)
            normed, feedback = out.normed, out.feedback
    return Replay(*(torch.stack(parts, 1).cpu() for parts in (drafted, right, log_probs, cache.shares(), norms)))


def _rows_of_ids(drafter: Eagle31Drafter) -> Tensor | None:
    """`(V,)` row of the draft head of each target id, -1 where there is none; `None` if the vocabularies are one."""
    if drafter.draft_ids is None:
        return None
    rows = drafter.draft_ids.new_full((drafter.config.vocab_size,), -1)
    rows[drafter.draft_ids] = torch.arange(len(drafter.draft_ids), device=rows.device)
    return rows


class _ObservedCache(AttendingCache):
    """Keys of one text, and of the drafts begun at many of its positions; notes where their queries look.

    The first pass is over the text. Later ones hold one query per start, which sees the text up to its start and the
    draft's own tokens.
    """

    def __init__(self, starts: Tensor):
        self._starts = starts
        self._keys: dict[int, Tensor] = {}  # per layer, of the text (1, n, T, d)
        self._values: dict[int, Tensor] = {}
        self._own_keys: dict[int, Tensor] = {}  # (S, n, k, d)
        self._own_values: dict[int, Tensor] = {}
        self._shares: list[dict[int, Tensor]] = []  # per depth and layer (S, 3)

    def shares(self) -> list[Tensor]:
        """`(S, 3)` per depth: sink, rest of the text, own tokens."""
        return [torch.stack(list(by_layer.values())).mean(0) for by_layer in self._shares]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, layer_idx: int
    ) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        if layer_idx not in self._keys:
            self._keys[layer_idx], self._values[layer_idx] = key, value
            of_starts = query[:, :, self._starts].transpose(0, 2)  # (S, n, 1, d)
            self._note(layer_idx, self._weights(layer_idx, of_starts))
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if layer_idx in self._own_keys:
            key = torch.cat((self._own_keys[layer_idx], key), dim=2)
            value = torch.cat((self._own_values[layer_idx], value), dim=2)
        self._own_keys[layer_idx], self._own_values[layer_idx] = key, value
        weights = self._weights(layer_idx, query)
        self._note(layer_idx, weights)
        length = self._keys[layer_idx].shape[2]
        of_text = torch.einsum("snqt,ntd->snqd", weights[..., :length], self._values[layer_idx][0])
        return of_text + weights[..., length:] @ value

    def _weights(self, layer_idx: int, query: Tensor) -> Tensor:
        """Attention `(S, n, 1, T + k)` of one query per start over the text up to it and its own tokens."""
        keys = self._keys[layer_idx]
        scores = torch.einsum("snqd,ntd->snqt", query, keys[0])
        later = torch.arange(keys.shape[2], device=keys.device) > self._starts[:, None]  # (S, T)
        scores = scores.masked_fill(later[:, None, None], -torch.inf)
        if layer_idx in self._own_keys:
            scores = torch.cat((scores, query @ self._own_keys[layer_idx].transpose(2, 3)), dim=-1)
        return (scores.float() * query.shape[-1] ** -0.5).softmax(-1).to(query.dtype)

    def _note(self, layer_idx: int, weights: Tensor) -> None:
        depth = 0 if layer_idx not in self._own_keys else self._own_keys[layer_idx].shape[2]
        if depth == len(self._shares):
            self._shares.append({})
        mean = weights.float().mean((1, 2))  # (S, T + k)
        length = self._keys[layer_idx].shape[2]
        parts = (mean[:, :SINK_TOKENS], mean[:, SINK_TOKENS:length], mean[:, length:])
        self._shares[depth][layer_idx] = torch.stack([part.sum(1) for part in parts], dim=1)
