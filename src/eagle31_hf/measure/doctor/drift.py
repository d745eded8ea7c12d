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
from ...drafter.replay import TargetText, read_text
from ..report.plots import new_figure
from .findings import Finding, Patient
from .replay import Replay, replay
from .variants import read_as

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


# --- measuring --------------------------------------------------------------------------------------------------------


def probe_both_forms(patient: Patient, new_tokens: int, beside: Eagle31Drafter | None) -> list[DriftCurve]:
    """Curves of the drafter, and beside it of another one, or of the same weights with the feedback normed or not."""
    if beside is not None:
        return probe_drift(patient, new_tokens=new_tokens, other=beside)
    turned = read_as(patient.drafter, {"norm_output": not patient.drafter.config.norm_output})
    try:
        return probe_drift(patient, new_tokens=new_tokens, other=turned, remark=" by the same weights")
    finally:
        turned.detach()


def probe_drift(
    patient: Patient, *, new_tokens: int, other: Eagle31Drafter, depth: int = 8, remark: str = ""
) -> list[DriftCurve]:
    """Curves of the drafter, and of another form beside it, under every condition.

    Args:
        other: a drafter of the other form for the same target, attached.
        depth: draft tokens; longer than served drafts, for drift shows late.
        remark: behind the other form's name, where more is to be said of it.
    """
    own, twin = form_of(patient.drafter), form_of(other) + remark
    forms = {own: patient.drafter, twin if twin != own else f"{twin}, the other drafter": other}
    keep = sorted({layer for drafter in forms.values() for layer in drafter.binding.aux_layers})
    curves = []
    for condition, prompts in _prompts_by_condition(patient).items():
        texts = [_written(patient, prompt, keep, new_tokens + depth) for prompt in prompts]
        usable = [text for text in texts if len(text.starts(depth)) > 0]
        for form, drafter in forms.items() if usable else ():
            replays = [replay(drafter, text, depth=depth) for text in usable]
            curves.append(summarise(replays, form=form, condition=condition))
    return curves


def _prompts_by_condition(patient: Patient) -> dict[str, list[dict[str, Tensor]]]:
    """The conversations, encoded, under each condition that changes any of them."""
    found = {}
    before = [list(conversation) for conversation in patient.conversations]
    for condition, change in CONDITIONS.items():
        changed = [change(list(conversation)) for conversation in before]
        if condition == "as it is" or changed != before:
            found[condition] = [patient.encode(conversation) for conversation in changed]
    if getattr(patient.tokenizer, "chat_template", None):
        texts = [patient.tokenizer(in_plain_words(conversation), return_tensors="pt") for conversation in before]
        ids = [text["input_ids"].to(patient.drafter.binding.input_device) for text in texts]
        found[OTHER_TEMPLATE] = [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]
    return found


def _written(patient: Patient, prompt: dict[str, Tensor], layers: Sequence[int], new_tokens: int) -> TargetText:
    model: Any = patient.drafter.binding.model
    out = model.generate(**prompt, do_sample=False, num_beams=1, max_new_tokens=new_tokens)[0].cpu()
    return read_text(patient.drafter.binding, out, prompt["input_ids"].shape[1], layers)


def summarise(replays: Sequence[Replay], *, form: str, condition: str) -> DriftCurve:
    """Means over the starts of all texts."""
    attention = torch.cat([one.attention for one in replays]).double().mean(0)  # (K, 3)
    norms = torch.cat([one.feedback_norm for one in replays]).double()  # (S, K)
    right = torch.cat([one.right for one in replays])
    kept = [len(right), *right.sum(0).tolist()]
    sink, context, own = attention.T.tolist()
    return DriftCurve(
        form=form,
        condition=condition,
        sink=sink,
        context=context,
        own=own,
        feedback_norm=(norms / norms[:, :1]).mean(0).tolist(),
        acceptance=[now / before if before else 0.0 for before, now in pairwise(kept)],
        starts=len(right),
    )


def form_of(drafter: Eagle31Drafter) -> str:
    """What people call it."""
    return "EAGLE 3.1" if drafter.config.is_eagle31 else "EAGLE-3" if not drafter.config.norm_output else "post-norm"


def drift_finding(curves: Sequence[DriftCurve]) -> Finding:
    """What to say of one drafter's curves."""
    drifting = [f"{curve.form}, {curve.condition}" for curve in curves if curve.drifts]
    if not curves:
        return Finding("drift", "note", "the texts were too short to look at", "give longer prompts with --prompts")
    if drifting:
        return Finding(
            "drift",
            "note",
            f"attention leaves the prompt, or the fed-back state grows: {'; '.join(drifting)}",
            "keep drafts short, or train an EAGLE 3.1 form from it: `eagle31 train --drafter`",
        )
    return Finding("drift", "ok", f"none under {len(curves)} conditions")


def plot_drift(curves: Sequence[DriftCurve], path: Any) -> None:
    """Write a plot: attention by depth for each curve, the fed-back state's length, acceptance.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    figure = new_figure(10, 7)
    axes = figure.subplots(2, 2)
    panels = {
        "sink": "share of attention on the prompt's first tokens",
        "own": "share of attention on the draft's own tokens",
        "feedback_norm": "length of the fed-back state, 1 after the first depth",
        "acceptance": "acceptance, given that all before were accepted",
    }
    forms = list(dict.fromkeys(curve.form for curve in curves))
    conditions = list(dict.fromkeys(curve.condition for curve in curves))
    for axis, (name, title) in zip(axes.flat, panels.items(), strict=True):
        for curve in curves:
            style = "-o" if forms.index(curve.form) == 0 else "--s"
            colour = f"C{conditions.index(curve.condition)}"
            depths, label = range(1, len(curve.sink) + 1), f"{curve.form}, {curve.condition}"
            axis.plot(depths, getattr(curve, name), style, color=colour, markersize=3, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("draft depth")
        axis.set_ylim(0, 1.08 * max(max(getattr(curve, name)) for curve in curves) or 1.0)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=120)
