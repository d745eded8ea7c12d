"""Attention drift (arXiv 2605.09992): does the drafter look away from the prompt as its draft gets longer?

An EAGLE-3 drafter feeds back a state that was not normed; along a draft its length grows and attention moves from the
prompt's first tokens to the draft's own. EAGLE 3.1 feeds back the normed state. Shown by draft depth, under conditions
a server meets and training may not have met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import repeat_kv

from ..cache.grouped_attention import WatchedCache
from ..demo import Messages
from ..drafter.drafter import Eagle31Drafter
from ..drafter.replay import read_text
from ..texts.chats import encode_chat
from .readings import OnStep, Replay, replay
from .results import Task

SINK_TOKENS = 4
"""First tokens of a prompt counted as its sink (StreamingLLM, arXiv 2309.17453, keeps four)."""
SINK_SHARE = 0.05
"""Of the attention at the first depth; a drafter that looks at the prompt's beginning less than this has no sink."""
DEPTH = 8
"""Longer than served drafts, for drift shows late."""
LONG_CONTEXT_CHARACTERS = 4000


@dataclass(frozen=True)
class DriftCurve:
    """Means over `starts` positions of all texts, one entry per draft depth."""

    condition: str  # what was done to the prompt
    sink: list[float]  # share of attention on the prompt's first tokens
    own: list[float]  # and on the draft itself
    feedback_norm: list[float]  # length of the fed-back state over that after the first depth
    acceptance: list[float]  # share of the drafts that are right, of those behind right ones
    starts: int

    @property
    def drifts(self) -> bool:
        """Whether the fed-back state grows by half and more, or a sink that had a share loses half of it."""
        loses_sink = self.sink[0] >= SINK_SHARE and self.sink[-1] < 0.5 * self.sink[0]
        return self.feedback_norm[-1] > 1.5 or loses_sink


def _without_system(messages: Messages) -> Messages:
    return [message for message in messages if message["role"] != "system"]


def _behind_long_notes(messages: Messages) -> Messages:
    text = " ".join(message["content"] for message in messages) + " "
    notes = (text * (1 + LONG_CONTEXT_CHARACTERS // len(text)))[:LONG_CONTEXT_CHARACTERS]
    opening = {"role": "user", "content": f"Before we begin, here are some notes; you need not answer them. {notes}"}
    return [opening, {"role": "assistant", "content": "I have read them."}, *_without_system(messages)]


def _without_marks(messages: Messages) -> str:
    """As a client sends them that knows another template."""
    turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*turns, "Assistant:"])


CONDITIONS: dict[str, Callable[[Messages], Messages | str]] = {
    "prompts as they are": list,
    "system prompt added": lambda messages: [
        {"role": "system", "content": "You are a helpful assistant. Answer briefly."}, *_without_system(messages),
    ],
    "system prompt removed": _without_system,
    "long context": _behind_long_notes,
    "another template": _without_marks,
}  # fmt: skip


def probe_drift(
    drafter: Eagle31Drafter,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    new_tokens: int,
    on_step: OnStep = lambda what, done, of: None,
) -> list[DriftCurve]:
    """Curves of the drafter under every condition that changes any of the prompts."""
    binding, device, curves = drafter.binding, drafter.fc.weight.device, []
    generate: Any = binding.model.generate
    chats = [list(task.prompt.messages) for task in tasks]
    for condition, change in CONDITIONS.items():
        prompts = [change(chat) for chat in chats]
        if change is not list and prompts == chats:
            continue
        replays, shares = [], []
        for number, prompt in enumerate(prompts):
            on_step(f"drift, {condition}", number, len(prompts))
            read = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else encode_chat(tokenizer, prompt)
            begun = torch.tensor([read], device=binding.input_device)
            batch = {"input_ids": begun, "attention_mask": torch.ones_like(begun)}
            ids = generate(**batch, do_sample=False, num_beams=1, max_new_tokens=new_tokens + DEPTH)[0].cpu()
            text = read_text(binding, ids, len(read), binding.aux_layers)
            if len(starts := text.starts(DEPTH)):
                cache = ObservedCache(starts.to(device))
                replays.append(replay(drafter, text, depth=DEPTH, cache=cache))
                shares.append(cache.shares())
        if replays:
            curves.append(curve_of(replays, shares, condition=condition))
    return curves


def curve_of(replays: Sequence[Replay], shares: Sequence[Tensor], *, condition: str) -> DriftCurve:
    """Means over the starts of all texts; `shares` `(S, K, 2)` of attention."""
    sink, own = torch.cat(list(shares)).double().mean(0).T.tolist()
    norms = torch.cat([one.feedback_norm for one in replays]).double()  # (S, K)
    right = torch.cat([one.right for one in replays])
    kept = [len(right), *right.sum(0).tolist()]
    acceptance = [now / before if before else 0.0 for before, now in pairwise(kept)]
    return DriftCurve(condition, sink, own, (norms / norms[:, :1]).mean(0).tolist(), acceptance, len(right))


class ObservedCache(WatchedCache):
    """Notes where the queries of drafts look that begin at these starts `(S,)` of a text."""

    def __init__(self, starts: Tensor):
        super().__init__()
        self._starts = starts
        self._of_text = 0  # keys of the text, which the first pass reads
        self._by_depth: list[dict[int, Tensor]] = []  # by layer (S, 2)

    def shares(self) -> Tensor:
        """`(S, K, 2)`: of the attention on the sink and on the draft's own tokens; mean over heads and layers."""
        return torch.stack([torch.stack(list(layers.values())).mean(0) for layers in self._by_depth], 1).cpu()

    def see(self, query: Tensor, key: Tensor, attention_mask: Tensor | None, layer_idx: int) -> None:
        assert attention_mask is not None, "drafts along a text have one"
        if layer_idx == 0:
            self._by_depth.append({})
        if len(self._by_depth) == 1:
            self._of_text = key.shape[2]
            query, attention_mask = query[:, :, self._starts], attention_mask[:, :, self._starts]
        keys = repeat_kv(key, query.shape[1] // key.shape[1])
        scores = (query @ keys.transpose(2, 3)).float() * query.shape[-1] ** -0.5 + attention_mask  # (1, n, S, N)
        mean = scores.softmax(-1).mean(1)[0]
        parts = mean[:, :SINK_TOKENS].sum(1), mean[:, self._of_text :].sum(1)
        self._by_depth[-1][layer_idx] = torch.stack(parts, 1)
