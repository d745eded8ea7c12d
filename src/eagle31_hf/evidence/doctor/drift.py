"""Attention drift (arXiv 2605.09992): does the drafter look away from the prompt as its draft gets longer?

An EAGLE-3 drafter feeds back a state that was not normed; along a draft its length grows and attention moves from the
prompt's first tokens to the draft's own. EAGLE 3.1 feeds back the normed state. Shown per draft depth: where attention
goes, how long the fed-back state is, and how often the draft is still right, under conditions a server meets and
training may not have met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...drafter.drafter import Eagle31Drafter
from ...drafter.replay import TargetText
from .replay import Replay, replay

Messages = list[dict[str, str]]

SYSTEM_PROMPT = "You are a helpful assistant. Answer briefly."
LONG_CONTEXT_TURN = "Before we begin, here are some notes of mine; you need not answer them. "
LONG_CONTEXT_CHARACTERS = 4000
SINK_SHARE = 0.05
"""Of the attention at the first depth; a drafter that looks at the prompt's beginning less than this has no sink."""


@dataclass(frozen=True)
class DriftCurve:
    """Means over all starts, one entry per draft depth.

    Attributes:
        form: `"EAGLE 3.1"` or `"EAGLE-3"`, or what else tells curves apart.
        condition: what was done to the prompt.
        sink, context, own: shares of attention on the prompt's first tokens, on the other text, on the draft itself.
        feedback_norm: length of the fed-back state over that after the first depth.
        acceptance: share of the drafts that are right, of those whose elders were.
        starts: positions drafted from.
    """

    form: str
    condition: str
    sink: list[float]
    context: list[float]
    own: list[float]
    feedback_norm: list[float]
    acceptance: list[float]
    starts: int

    @property
    def drifts(self) -> bool:
        """Whether the fed-back state grows by half and more, or a sink that had a share loses half of it."""
        loses_sink = self.sink[0] >= SINK_SHARE and self.sink[-1] < 0.5 * self.sink[0]
        return self.feedback_norm[-1] > 1.5 or loses_sink

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "drifts": self.drifts}


OTHER_TEMPLATE = "another template"
"""Beside the conditions below, which change the messages: the same messages by `in_plain_words`."""

CONDITIONS: dict[str, Callable[[Messages], Messages]] = {
    "as it is": lambda messages: messages,
    "system prompt added": lambda messages: [
        {"role": "system", "content": SYSTEM_PROMPT},
        *(message for message in messages if message["role"] != "system"),
    ],
    "system prompt removed": lambda messages: [message for message in messages if message["role"] != "system"],
    "long context": lambda messages: [
        {"role": "user", "content": LONG_CONTEXT_TURN + _filler(messages)},
        {"role": "assistant", "content": "I have read them."},
        *(message for message in messages if message["role"] != "system"),
    ],
}


def in_plain_words(messages: Messages) -> str:
    """A chat without its template's marks: what a client sends that knows another template, or none."""
    told = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join([*told, "Assistant:"])


def _filler(messages: Messages) -> str:
    """Text of the conversation itself, over and over: of the same kind, and long."""
    text = " ".join(message["content"] for message in messages) + " "
    return (text * (1 + LONG_CONTEXT_CHARACTERS // len(text)))[:LONG_CONTEXT_CHARACTERS]


def drift_curve(
    drafter: Eagle31Drafter, texts: Sequence[TargetText], *, depth: int, form: str, condition: str
) -> DriftCurve:
    """Measure one drafter on texts of one condition."""
    return summarise([replay(drafter, text, depth=depth) for text in texts], form=form, condition=condition)


def summarise(replays: Sequence[Replay], *, form: str, condition: str) -> DriftCurve:
    """Means over the starts of all texts."""
    attention = torch.cat([one.attention for one in replays]).double().mean(0)  # (K, 3)
    norms = torch.cat([one.feedback_norm for one in replays]).double()  # (S, K)
    right = torch.cat([one.right for one in replays])
    sink, context, own = attention.T.tolist()
    return DriftCurve(
        form=form,
        condition=condition,
        sink=sink,
        context=context,
        own=own,
        feedback_norm=(norms / norms[:, :1]).mean(0).tolist(),
        acceptance=_conditional(right),
        starts=len(right),
    )


def _conditional(right: Tensor) -> list[float]:
    """Of the drafts whose elders were all right, the share that is right: `(S, K)` bool -> `K` shares."""
    kept = [len(right), *right.sum(0).tolist()]
    return [now / before if before else 0.0 for before, now in pairwise(kept)]


def form_of(drafter: Eagle31Drafter) -> str:
    """What people call it."""
    return "EAGLE 3.1" if drafter.config.is_eagle31 else "EAGLE-3" if not drafter.config.norm_output else "post-norm"


def plot_drift(curves: Sequence[DriftCurve], path: Any) -> None:
    """Write a plot: attention by depth for each curve, the fed-back state's length, acceptance.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    panels = (
        ("share of attention on the prompt's first tokens", lambda curve: curve.sink),
        ("share of attention on the draft's own tokens", lambda curve: curve.own),
        ("length of the fed-back state, 1 after the first depth", lambda curve: curve.feedback_norm),
        ("acceptance, given that all before were accepted", lambda curve: curve.acceptance),
    )
    forms = list(dict.fromkeys(curve.form for curve in curves))
    conditions = list(dict.fromkeys(curve.condition for curve in curves))
    for axis, (title, values) in zip(axes.flat, panels, strict=True):
        for curve in curves:
            style = "-o" if forms.index(curve.form) == 0 else "--s"
            colour = f"C{conditions.index(curve.condition)}"
            depths = range(1, len(curve.sink) + 1)
            axis.plot(depths, values(curve), style, color=colour, markersize=3,
                      label=f"{curve.form}, {curve.condition}")  # fmt: skip
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("draft depth")
        highest = max(max(values(curve)) for curve in curves)
        axis.set_ylim(0, 1.08 * highest or 1.0)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120)
