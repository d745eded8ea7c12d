"""One examination of a pair, from the shapes to a verdict in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...drafter.drafter import Eagle31Drafter
from ...drafter.replay import TargetText, read_text
from ...target.precision import precision_advice, precision_caution
from ...target.quantized import holds_packed_weights
from .drift import DriftCurve, drift_finding, form_of, probe_both_forms
from .findings import Finding, Patient
from .losslessness import TextComparison, compare_texts
from .replay import replay
from .variants import ReadingScore, layers_to_keep, other_readings, score_readings, score_vocabulary

DEPTH = 5
GOOD_LENGTH, USELESS_LENGTH = 2.0, 1.3
"""Acceptance lengths from which a drafter is worth its time on most machines, and below which on none."""

SHARE_OF_CARD = 0.8
"""Of the acceptance length a card promises; less is a sign that the target is another one than it was trained for."""


@dataclass
class Examination:
    """Everything that was seen: `greedy` and `sampling` texts with and without the drafter, `readings` best first.

    `greedy` is `None` if the pair cannot write.
    """

    findings: list[Finding] = field(default_factory=list)
    greedy: TextComparison | None = None
    sampling: TextComparison | None = None
    readings: list[ReadingScore] = field(default_factory=list)
    drift: list[DriftCurve] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "problem"]

    @property
    def verdict(self) -> str:
        """Use it, retrain it, or do without."""
        if self.greedy is None:
            return "do without: the pair cannot write"
        length, speedup = self.greedy.acceptance_length, self.greedy.speedup
        figures = f"acceptance length {length:.2f}, {speedup:.2f} times plain decoding on this machine"
        if not self.greedy.is_exact or (self.sampling is not None and not self.sampling.is_exact):
            return f"do without until this is understood: the text is not the target's own ({figures})"
        if any(finding.check in ("layers and norms", "draft vocabulary") for finding in self.problems):
            return f"mend its configuration first, see above ({figures})"
        if length < USELESS_LENGTH:
            return f"do without, or retrain it for this target and these prompts ({figures})"
        if length < GOOD_LENGTH:
            return f"retrain it: it works, but accepts little ({figures})"
        if speedup < 1.0:
            return f"it drafts well, but not faster than this target decodes: try shorter drafts or graphs ({figures})"
        return f"use it ({figures})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "greedy": None if self.greedy is None else self.greedy.to_dict(),
            "sampling": None if self.sampling is None else self.sampling.to_dict(),
            "readings": [asdict(score) for score in self.readings],
            "drift": [curve.to_dict() for curve in self.drift],
        }


def examine(
    patient: Patient, *, new_tokens: int = 48, drift: bool = False, beside: Eagle31Drafter | None = None
) -> Examination:
    """Look at everything. Takes a minute on a small pair, a few on a large one.

    Args:
        new_tokens: written after each prompt.
        drift: also probe for attention drift.
        beside: an attached drafter of the other form to show drift beside; without one, the same weights read so.
    """
    seen = Examination()
    seen.findings += preflight(patient)
    prompts = [patient.encode(conversation) for conversation in patient.conversations]
    seen.greedy = compare_texts(patient.drafter, prompts, new_tokens=new_tokens)
    seen.findings.append(_text_finding("same text, greedy", seen.greedy))
    seen.sampling = compare_texts(patient.drafter, prompts, new_tokens=new_tokens, temperature=1.0)
    seen.findings.append(_text_finding("same text, sampled", seen.sampling))
    seen.findings.append(_acceptance_finding(seen.greedy, promised_acceptance(patient.folder)))
    # Greedy ones alone tell small differences too late.
    written = [*seen.greedy.texts, *seen.sampling.texts]
    binding = patient.drafter.binding
    readings = other_readings(patient.drafter.config, len(binding.layers))
    keep = sorted(layers_to_keep(readings, binding.aux_layers))
    lengths = [prompt["input_ids"].shape[1] for prompt in prompts * 2]
    read = [read_text(binding, ids, length, keep) for ids, length in zip(written, lengths, strict=True)]
    texts = [text for text in read if len(text.starts(DEPTH)) > 0]  # long enough
    if texts:
        seen.readings, findings = reading_findings(patient.drafter, texts)
        seen.findings += findings
    if drift:
        seen.drift = probe_both_forms(patient, new_tokens, beside)
        own = [curve for curve in seen.drift if curve.form == seen.drift[0].form]
        seen.findings.append(drift_finding(own))
    return seen


# --- before anything runs ---------------------------------------------------------------------------------------------


def preflight(patient: Patient) -> list[Finding]:
    """What can be told from configurations alone."""
    return [
        check(patient)
        for check in (_shapes, _vocabulary_size, _trained_length, _chat_template, _head, _quantisation, _trees)
    ]


def _shapes(patient: Patient) -> Finding:
    config, binding = patient.drafter.config, patient.drafter.binding
    layers = ", ".join(str(layer) for layer in binding.aux_layers)
    return Finding(
        "shapes",
        "ok",
        f"{form_of(patient.drafter)}, {config.num_hidden_layers} layer of width {config.hidden_size}, reads hidden "
        f"states {layers} of {len(binding.layers)} layers of width {config.target_hidden_size}",
    )


def _vocabulary_size(patient: Patient) -> Finding:
    config, tokens = patient.drafter.config, len(patient.tokenizer)
    text = f"{config.draft_vocab_size} of {config.vocab_size} tokens can be drafted"
    if tokens > config.vocab_size:
        return Finding(
            "vocabulary",
            "note",
            f"{text}, but the tokenizer has {tokens}",
            "tokens beyond the drafter's vocabulary are never drafted; if they are common, train a drafter for them",
        )
    return Finding("vocabulary", "ok", text)


def _trained_length(patient: Patient) -> Finding:
    drafter, target = patient.drafter.config, patient.drafter.binding.text_config
    trained, wanted = drafter.max_position_embeddings, target.max_position_embeddings
    ours, theirs = _rope_theta(drafter), _rope_theta(target)
    text = f"drafter up to {trained} tokens, target up to {wanted}; RoPE theta {ours:g} and {theirs:g}"
    if trained < wanted:
        return Finding(
            "length", "note", text, f"beyond {trained} tokens the drafter may accept less; the text stays right"
        )
    return Finding("length", "ok", text)


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        parameters = next(iter(parameters.values()))
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _chat_template(patient: Patient) -> Finding:
    if getattr(patient.tokenizer, "chat_template", None):
        return Finding("chat template", "ok", "the tokenizer has one; it is what the drafter should be trained with")
    return Finding(
        "chat template",
        "note",
        "the tokenizer has none: prompts are used as plain text",
        "a drafter trained on chats accepts less of plain text",
    )


def _head(patient: Patient) -> Finding:
    config = patient.drafter.config
    embedding = "its own" if config.own_embedding else "the target's"
    head = "its own" if config.own_lm_head else "rows of the target's"
    return Finding("embedding and head", "ok", f"embedding: {embedding}; LM head: {head}")


def _quantisation(patient: Patient) -> Finding:
    binding = patient.drafter.binding
    if holds_packed_weights(binding.model):
        return Finding(
            "precision",
            "note",
            f"the target is quantised, computing in {str(binding.compute_dtype).removeprefix('torch.')}",
            "a drafter trained on the unquantised target accepts a little less; "
            "`eagle31 train --quantization` trains on this one",
        )
    kind = f"target in {str(binding.compute_dtype).removeprefix('torch.')}"
    is_slow = bool(precision_caution(binding.model))
    return Finding("precision", "note" if is_slow else "ok", kind, precision_advice(binding.model))


def _trees(patient: Patient) -> Finding:
    binding = patient.drafter.binding
    if binding.chain_unsupported_reason:
        whys = f"{binding.tree_unsupported_reason}; {binding.chain_unsupported_reason}"
        return Finding("verification", "problem", f"no drafts, plain decoding only: {whys}")
    if binding.tree_unsupported_reason:
        why = binding.tree_unsupported_reason
        return Finding("verification", "note", f"chains by transformers' assisted loop only: {why}")
    return Finding("verification", "ok", "the self-test verified a tree like plain forwards along its paths")


# --- from what was written --------------------------------------------------------------------------------------------


def _text_finding(check: str, compared: TextComparison) -> Finding:
    wrong = [one for one in compared.differences if not one.is_tie]
    if wrong:
        where = "; ".join(
            f"prompt {one.prompt} after {one.at} tokens, logits {one.gap:.3g} apart where a tie is {one.rounding:.3g}"
            for one in wrong[:3]
        )
        return Finding(
            check,
            "problem",
            f"{len(wrong)} of {len(compared.texts)} texts differ: {where}",
            "please report it with the JSON of this run; until then set speculation_loop='plain'",
        )
    ties = len(compared.differences)
    text = f"{len(compared.texts) - ties} of {len(compared.texts)} texts equal"
    return Finding(check, "ok", text + (f", {ties} part at ties within rounding" if ties else ""))


def promised_acceptance(folder: Path | None) -> float | None:
    """Acceptance length that the drafter's own `training_report.json` holds, mean over its kinds of prompt."""
    path = None if folder is None else folder / "training_report.json"
    if path is None or not path.is_file():
        return None
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        lengths = [float(counts["acceptance_length"]) for counts in stages[-1]["acceptance"].values()]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
    return sum(lengths) / len(lengths) if lengths else None


def _acceptance_finding(greedy: TextComparison, promised: float | None) -> Finding:
    text = f"acceptance length {greedy.acceptance_length:.2f} over {len(greedy.texts)} prompts"
    if promised is None:
        return Finding("acceptance", "ok" if greedy.acceptance_length >= GOOD_LENGTH else "note", text)
    text += f", {promised:.2f} by its training report"
    if greedy.acceptance_length < SHARE_OF_CARD * promised:
        return Finding(
            "acceptance",
            "problem",
            text,
            "the target may have been fine-tuned or quantised since, or these prompts are of another kind: "
            "`eagle31 train --drafter` continues training on this target",
        )
    return Finding("acceptance", "ok", text)


def reading_findings(drafter: Eagle31Drafter, texts: Sequence[TargetText]) -> tuple[list[ReadingScore], list[Finding]]:
    """What other readings of the configuration, and of d2t, say of the same texts; layers only where d2t is right."""
    vocabulary = score_vocabulary(drafter, texts, [replay(drafter, text, depth=DEPTH) for text in texts])
    text = f"{vocabulary.as_mapped:.0%} of first drafts right by d2t, {vocabulary.as_seen:.0%} by what followed them"
    if vocabulary.is_wrong:  # every reading is then measured on wrong tokens
        advice = "d2t maps draft ids to the wrong tokens: offsets and ids may be mixed up, or it is of another drafter"
        wrong = Finding("draft vocabulary", "problem", text, advice)
        return [], [wrong, Finding("layers and norms", "note", "not tried while d2t is wrong")]
    scores = score_readings(drafter, texts, other_readings(drafter.config, len(drafter.binding.layers)), depth=DEPTH)
    return scores, [_reading_finding(scores), Finding("draft vocabulary", "ok", text)]


def _reading_finding(scores: Sequence[ReadingScore]) -> Finding:
    best = next((score for score in scores if score.is_better), None)
    if best is None:
        return Finding("layers and norms", "ok", f"none of {len(scores)} other readings fits the text better")
    fields = ", ".join(f"{name}={value}" for name, value in best.reading.fields.items())
    return Finding(
        "layers and norms",
        "problem",
        f"{best.reading.name} fits the same text better: log-probability of a token {best.gain:+.3f} (standard "
        f"error {best.standard_error:.3f}), acceptance length {best.acceptance_length:.2f} instead of "
        f"{best.acceptance_before:.2f}",
        f"its config.json seems wrong: set {fields} and save the drafter again",
    )
