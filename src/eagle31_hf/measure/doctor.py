"""Is a pair sound: does it fit, is its text the target's own, how much is accepted, is its configuration right?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ..config import Eagle31Config, MtpConfig
from ..drafter.drafter import Eagle31Drafter
from ..drafter.replay import TargetText, read_text
from ..errors import count
from ..stats import USELESS_LENGTH
from ..targets.binding import TargetBinding
from ..targets.devices import precision_caution
from ..targets.fresh_drafter import trained_context
from ..targets.quantized import holds_packed_weights
from .bench import Bench, has_graphs
from .drift import DriftCurve, probe_drift
from .exactness import Kind
from .readings import OnStep, ReadingScore, Replay, layers_to_keep, other_readings, replay, score_readings
from .results import PLAIN, BenchResult, BenchSettings, Method, MethodResult, Spread, Task, Writer
from .tables import difference_lines

DEPTH = 5
SHARE_OF_CARD = 0.8
"""Of the least acceptance length that a training report has for a kind of prompt; kinds differ by twice (SmolLM2: 1.5
for general questions, 3.0 for sums), so less than any is a sign that the target is another than it was trained for."""

FEWEST_RIGHT = 0.05
"""Share of first drafts that any drafter gets right that has learned something, and drafts the tokens it means."""

FEWEST_JUDGED = 3
"""Texts from which acceptance is judged: one alone may be of a kind that is hard to foresee."""

PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""What a pair is examined with where nothing else is given: of many kinds."""

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """Outcome of one check, and what to do about it, if anything.

    A `"problem"` makes the pair work worse than it could, or not at all; a `"note"` is worth knowing.
    """

    check: str
    level: Level
    text: str
    advice: str = ""


@dataclass
class Examination:
    """Everything that was seen: `greedy` and `sampled` texts as of `write_both`, `readings` best first."""

    greedy: BenchResult
    sampled: BenchResult
    findings: list[Finding] = field(default_factory=list)
    readings: list[ReadingScore] = field(default_factory=list)
    drift: list[DriftCurve] = field(default_factory=list)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "problem"]

    @property
    def verdict(self) -> str:
        """Use it, train one, or do without; a head inside a target is not trained here."""
        result, by_drafts = _drafted(self.greedy), _over_no_drafts(self.greedy)
        length, speedup = result.tokens_per_pass or 0.0, result.speedup
        if speedup is None or _drafted(self.sampled).refusal:
            return f"do without until this is understood: the text is not the target's own ({length:.2f} tokens a pass)"
        figures = f"{length:.2f} tokens a pass, {speedup.median:.2f} times plain generate on this machine"
        if by_drafts is not None:
            figures += f", {by_drafts.median:.2f} times our loop without drafts"
        if any(finding.check == "layers and norms" for finding in self.problems):
            return f"mend its configuration first, see above ({figures})"
        if (texts := self.greedy.turns) < FEWEST_JUDGED:
            lacks_time = any(finding.check == "time" for finding in self.findings)
            more = "more time (--thorough)" if lacks_time else "more prompts"
            return f"too few texts to tell ({texts}): at least {FEWEST_JUDGED} are needed, give {more}"
        if length < USELESS_LENGTH:
            return f"do without, or train a drafter for this target and these prompts ({length:.2f} tokens a pass)"
        if (by_drafts or speedup).median >= 1.0:
            return f"use it ({figures})"
        return f"it drafts, but not faster than without: try graphs (eagle31 warmup), or train a drafter ({figures})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        by_drafts = _over_no_drafts(self.greedy)
        return {
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "greedy": _drafted(self.greedy).to_dict(),
            "sampled": _drafted(self.sampled).to_dict(),
            "over_no_drafts": by_drafts and asdict(by_drafts),
            "readings": [asdict(score) for score in self.readings],
            "drift": [asdict(curve) | {"drifts": curve.drifts} for curve in self.drift],
        }


def examine(
    drafter: Eagle31Drafter,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    new_tokens: int = 48,
    drift: bool = False,
    minutes: float | None = None,
    on_step: OnStep = lambda what, done, of: None,
) -> Examination:
    """Look at everything that there is time for.

    Args:
        drafter: attached.
        tokenizer: its target's.
        tasks: what to write.
        new_tokens: written after each prompt.
        drift: also probe for attention drift, however long it takes.
        minutes: about how long it may take; at least one text is written each way. `None`: all are written.
        on_step: shows what is done.
    """
    findings = preflight(drafter, tokenizer)

    def write(what: str, share: float, temperature: float = 0.0) -> BenchResult:
        on_step(what, 0, len(tasks))
        time = None if minutes is None else minutes * share
        settings = BenchSettings(new_tokens=new_tokens, temperature=temperature, repeats=1, minutes=time)
        return write_both(drafter, tasks, settings, on_turn=partial(on_step, what))

    greedy = write("greedy texts", 0.5)
    sampled = write("sampled texts", 0.25, temperature=1.0)
    findings += [_text_finding("same text, greedy", greedy), _text_finding("same text, sampled", sampled)]
    findings.append(_acceptance_finding(greedy, promised_acceptance(drafter)))
    if min(greedy.turns, sampled.turns) < len(tasks):
        written = f"{greedy.turns} greedy and {sampled.turns} sampled texts of {len(tasks)} each"
        findings.append(Finding("time", "note", f"{written} in {minutes:g} minutes", "--thorough writes all"))
    seen = Examination(greedy, sampled, findings)
    if texts := _read_texts(drafter, [greedy, sampled]):
        seen.readings, found = reading_findings(drafter, texts, on_step)
        findings += found
    if drift:
        seen.drift = probe_drift(drafter, tokenizer, tasks, new_tokens=new_tokens, on_step=on_step)
        findings.append(drift_finding(seen.drift))
    return seen


def write_both(
    drafter: Eagle31Drafter,
    tasks: Sequence[Task],
    settings: BenchSettings,
    *,
    on_turn: Callable[[int, int], None] = lambda done, of: None,
) -> BenchResult:
    """Let plain `generate`, our loop without drafts and the drafter write in turns: the result's three methods.

    Args:
        settings: how, methods aside.
        on_turn: called with how many tasks are done, and of how many.
    """
    # Graphs of the loop without drafts may be kept where the drafter has none: that would compare graphs, not drafts.
    by_graphs = None if has_graphs(drafter, settings) else False
    methods = PLAIN, Method(Writer.NO_DRAFTS, by_graphs), Method(Writer.DRAFTER, by_graphs=None)
    return Bench(drafter, tasks, replace(settings, methods=methods), on_turn=on_turn).run()


def _drafted(written: BenchResult) -> MethodResult:
    """The drafter's texts."""
    return written.methods[-1]


def _over_no_drafts(written: BenchResult) -> Spread | None:
    """The drafter's speed over that of the same loop without drafts; `None` where texts differ."""
    _, no_drafts, drafted = written.methods
    return None if no_drafts.refusal else replace(drafted, plain=no_drafts.calls).speedup


def _read_texts(drafter: Eagle31Drafter, written: Sequence[BenchResult]) -> list[TargetText]:
    """Plain `generate`'s texts that are long enough, with the hidden states that any reading wants."""
    config, depth = drafter.config, len(drafter.binding.layers)
    keep = sorted(layers_to_keep(config, other_readings(config, depth), depth))
    calls = [call for each in written for call in each.methods[0].calls]
    read = [read_text(drafter.binding, call.texts[0], len(call.turn.tasks[0].ids), keep) for call in calls]
    return [text for text in read if len(text.starts(DEPTH))]


# --- before anything runs ---------------------------------------------------------------------------------------------


def preflight(drafter: Eagle31Drafter, tokenizer: Any) -> list[Finding]:
    """What can be told from configurations alone."""
    config, binding = drafter.config, drafter.binding
    layers = ", ".join(map(str, binding.aux_layers))
    tokens, trained = len(tokenizer), config.max_position_embeddings
    wanted = trained_context(binding.text_config) or trained
    embedding = "its own" if config.own_embedding else "the target's"
    head = "its own" if config.own_lm_head else "rows of the target's"
    form = "MTP head" if isinstance(config, MtpConfig) else "EAGLE 3.1" if config.is_eagle31 else "EAGLE-3"
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return [
        Finding(
            "shapes",
            "ok",
            f"{form}, {count(config.num_hidden_layers, 'layer')} of width {config.hidden_size}, "
            f"reads hidden states {layers} of {len(binding.layers)} layers of width {config.target_hidden_size}",
        ),
        _noted(
            tokens > config.vocab_size,
            "vocabulary",
            f"{config.draft_vocab_size} of {config.vocab_size} tokens can be drafted, the tokenizer has {tokens}",
            "tokens beyond the drafter's vocabulary are never drafted; if they are common, train a drafter for them",
        ),
        _noted(
            trained < wanted,
            "length",
            f"drafter up to {trained} tokens, target up to {wanted}",
            f"beyond {trained} tokens the drafter may accept less; the text stays right",
        ),
        _noted(
            not has_template,
            "chat template",
            "the tokenizer has one" if has_template else "the tokenizer has none: prompts are used as plain text",
            "a drafter trained on chats accepts less of plain text",
        ),
        Finding("embedding and head", "ok", f"embedding: {embedding}; LM head: {head}"),
        _precision(binding),
        _verification(binding),
    ]


def _noted(is_remarkable: bool, check: str, text: str, advice: str) -> Finding:
    return Finding(check, "note", text, advice) if is_remarkable else Finding(check, "ok", text)


def _precision(binding: TargetBinding) -> Finding:
    dtype = str(binding.compute_dtype).removeprefix("torch.")
    if holds_packed_weights(binding.model):
        advice = "a drafter trained on the unquantised target accepts a little less; `eagle31 train --quantization` "
        return Finding("precision", "note", f"the target is quantised, computing in {dtype}", f"{advice}mends that")
    caution = precision_caution(binding.model)
    return Finding("precision", "note" if caution else "ok", f"target in {dtype}", caution)


def _verification(binding: TargetBinding) -> Finding:
    if why := binding.tree_unsupported_reason:
        return Finding("verification", "problem", f"no drafts, plain decoding only: {why}")
    return Finding("verification", "ok", "checking several drafts at once gives what single passes give (self-test)")


# --- from what was written --------------------------------------------------------------------------------------------


def _text_finding(check: str, written: BenchResult) -> Finding:
    result, texts = _drafted(written), written.turns
    if result.refusal:
        advice = "please report it with the JSON of this run; until then set speculation_loop='plain'"
        return Finding(check, "problem", "; ".join(difference_lines(result)), advice)
    same = f"{result.verdicts[Kind.SAME]} of {texts} texts are the same"
    return Finding(check, "ok", "; ".join([same, *difference_lines(result)]))


def promised_acceptance(drafter: Eagle31Drafter) -> list[float]:
    """Acceptance lengths that the `training_report.json` in its folder holds, of each kind of prompt."""
    path = Path(drafter.name_or_path or "unsaved") / "training_report.json"
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        return [float(counts["acceptance_length"]) for counts in stages[-1]["acceptance"].values()]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return []


def _acceptance_finding(greedy: BenchResult, promised: Sequence[float]) -> Finding:
    length = _drafted(greedy).tokens_per_pass or 0.0
    text = f"{length:.2f} tokens a pass over {count(greedy.turns, 'prompt')}"
    if promised:
        least, most = (f"{each(promised):.2f}" for each in (min, max))
        text += f"; its training report says {least}" + (f" to {most}, depending on the prompt" if most > least else "")
    if greedy.turns < FEWEST_JUDGED:
        return Finding("acceptance", "note", f"{text}; too few texts to judge by")
    if not promised:
        return Finding("acceptance", "ok" if length >= USELESS_LENGTH else "note", text)
    if length >= SHARE_OF_CARD * min(promised):
        return Finding("acceptance", "ok", text)
    advice = "the target may have been fine-tuned or quantised since, or these prompts are of another kind: "
    return Finding(
        "acceptance", "problem", text, f"{advice}`eagle31 train --drafter` continues training on this target"
    )


def reading_findings(
    drafter: Eagle31Drafter, texts: Sequence[TargetText], on_step: OnStep = lambda what, done, of: None
) -> tuple[list[ReadingScore], list[Finding]]:
    """What other readings of the configuration say of the same texts, where the drafter foresees any of them."""
    config, found = drafter.config, list[Finding]()
    if not isinstance(config, MtpConfig):  # which drafts by the target's own rows
        found.append(_vocabulary_finding([replay(drafter, text, depth=1) for text in texts]))
        if found[0].level == "problem":  # every reading would be measured on wrong tokens
            return [], found
    readings = other_readings(config, len(drafter.binding.layers))
    scores = score_readings(drafter, texts, readings, DEPTH, on_step)
    return scores, [*found, _reading_finding(config, scores)]


def _vocabulary_finding(replays: Sequence[Replay]) -> Finding:
    share = float(torch.cat([one.right for one in replays]).double().mean())
    text = f"{share:.0%} of the first tokens of drafts are what the target wrote"
    if share >= FEWEST_RIGHT:
        return Finding("draft vocabulary", "ok", text)
    advice = "it has hardly learned, or its table d2t is of another drafter, or mixes up offsets and ids"
    return Finding("draft vocabulary", "problem", text, advice)


def _reading_finding(config: Eagle31Config, scores: Sequence[ReadingScore]) -> Finding:
    best = next((score for score in scores if score.is_better), None)
    if best is None:
        return Finding("layers and norms", "ok", f"none of {len(scores)} other ways to read config.json fits better")
    fields = best.reading.fields
    text = (
        f"the same texts fit better by {best.reading.name}: log-probability of a token {best.gain:+.3f} (standard "
        f"error {best.standard_error:.3f}), {best.acceptance_length:.2f} tokens a pass instead of "
        f"{best.acceptance_before:.2f}"
    )
    if isinstance(config, MtpConfig):  # inside a target, which stays as it is
        states = {option: "normed" if fields[name] else "raw" for option, name in HEAD_OPTIONS.items()}
        options = " ".join(f"--{option} {kind}" for option, kind in states.items())
        advice = f"write a head that does so: eagle31 mtp TARGET --out HEAD {options}"
    else:
        changed = ", ".join(f"{name}={value}" for name, value in fields.items())
        advice = f"its config.json seems wrong: set {changed} and save the drafter again"
    return Finding("layers and norms", "problem", text, advice)


HEAD_OPTIONS = {"state": "normed_state", "feedback": "norm_output"}
"""Options of `eagle31 mtp`, and the fields of `MtpConfig` that they set."""


def drift_finding(curves: Sequence[DriftCurve]) -> Finding:
    if not curves:
        return Finding("drift", "note", "the texts were too short to look at", "give longer prompts with --prompts")
    if drifting := [curve.condition for curve in curves if curve.drifts]:
        return Finding(
            "drift",
            "note",
            f"attention leaves the prompt, or the fed-back state grows: {'; '.join(drifting)}",
            "keep drafts short, or train an EAGLE 3.1 form from it: `eagle31 train --drafter`",
        )
    return Finding("drift", "ok", f"none under {len(curves)} conditions")
