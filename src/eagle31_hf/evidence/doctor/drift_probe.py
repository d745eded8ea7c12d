"""The drift probe: what to write under which condition, and the curves of both forms of drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...drafter.drafter import Eagle31Drafter
from ...drafter.replay import TargetText, read_text
from .drift import CONDITIONS, OTHER_TEMPLATE, DriftCurve, drift_curve, form_of, in_plain_words
from .findings import Finding, Patient
from .variants import read_as


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
    patient: Patient,
    *,
    new_tokens: int = 48,
    depth: int = 8,
    other: Eagle31Drafter | None = None,
    remark: str = "",
) -> list[DriftCurve]:
    """Curves of the drafter, and of another form beside it, under every condition.

    Args:
        depth: draft tokens; longer than served drafts, for drift shows late.
        other: a drafter of the other form for the same target, attached.
        remark: behind the other form's name, where more is to be said of it.
    """
    curves = []
    forms = {form_of(patient.drafter): patient.drafter}
    if other is not None:
        twin = form_of(other) + remark
        forms[twin if twin not in forms else f"{twin}, the other drafter"] = other
    for condition, prompts in _prompts_by_condition(patient).items():
        texts = [_written(patient, prompt, list(forms.values()), new_tokens, depth) for prompt in prompts]
        usable = [text for text in texts if len(text.starts(depth)) > 0]
        for form, drafter in forms.items() if usable else ():
            curves.append(drift_curve(drafter, usable, depth=depth, form=form, condition=condition))
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
        texts = [in_plain_words(conversation) for conversation in before]
        found[OTHER_TEMPLATE] = [_encode_text(patient, text) for text in texts]
    return found


def _encode_text(patient: Patient, text: str) -> dict[str, Tensor]:
    ids = torch.tensor([patient.tokenizer(text).input_ids], device=patient.drafter.binding.input_device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _written(
    patient: Patient, prompt: dict[str, Tensor], drafters: Sequence[Eagle31Drafter], new_tokens: int, depth: int
) -> TargetText:
    binding = patient.drafter.binding
    model: Any = binding.model
    out = model.generate(**prompt, do_sample=False, num_beams=1, max_new_tokens=new_tokens + depth)[0].cpu()
    keep = {layer for drafter in drafters for layer in drafter.binding.aux_layers}
    return read_text(binding, out, prompt["input_ids"].shape[1], sorted(keep))


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
