"""Do drafts that adapt pay on every kind of text? Counted: all ways write the same texts by the same noise.

    python examples/studies/adaptive_drafts_counted.py --prompts domain=chats.jsonl other=questions.jsonl \\
        --copy copy=chats.jsonl --json docs/records/adaptive-counted.json

`adaptive_drafts_pay.py` times `generate`. Here the target writes each text once, alone; what drafts behind each of its
tokens come to follows from passes of the drafter, by the noise that the text was sampled by, and each way goes through
the text by the code that `generate` runs. Rounds take the seconds that this machine is calibrated to: let nothing else
run until that is done; the rest is counted. The best fixed setting is the best of all in hindsight. Intervals (95 %) by
drawing texts again.

With --graphs rounds take the seconds of graphs that are kept, made first as `eagle31 warmup` makes them, which takes
minutes; chains have one length then. Plain decoding is a rest's round, so what a rest takes beyond it is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from adaptive_drafts_pay import (
    DEFAULT,
    DOUBT,
    FIXED_LENGTH,
    LOOKUP,
    MOST_SLOWER,
    PLAIN,
    RANDOM,
    Way,
    configured,
    make_graphs,
    parser_of,
    prompts_and_pair,
    untrained_drafter,
    write_record,
)
from policy_replay import DraftTrace, replay

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cli.pairs import LoadedPair, encode
from eagle31_hf.decoding.adaptive.prompt_lookup import TextIndex
from eagle31_hf.decoding.calibration.calibration import Calibration
from eagle31_hf.decoding.calibration.measure import CONTEXTS, InTurn
from eagle31_hf.decoding.calibration.unasked import calibrate
from eagle31_hf.decoding.draft_policy import DraftPlan, DraftPolicy, RoundState, RoundStats
from eagle31_hf.decoding.pair import Pair
from eagle31_hf.decoding.policy_choice import RequestedDraft, choose_policy
from eagle31_hf.drafter.hindsight import MOST_JUDGED
from eagle31_hf.evidence.bare_meter import BareMeter
from eagle31_hf.evidence.gauges import ends_off
from eagle31_hf.evidence.ratios import RESAMPLES, interval_of
from eagle31_hf.generation_config import LONGEST_CHAIN
from eagle31_hf.stats import SpeculationStats
from eagle31_hf.texts.prompts import Prompt
from eagle31_hf.training.distillation.evaluation import EvaluationPrompt
from eagle31_hf.training.distillation.known_texts import KnownTexts, chains_along, write_texts
from eagle31_hf.trees.shape import DraftShape

FIXED = range(1, 9)


class LookupAlone(DraftPolicy):
    """Ten tokens from the text itself wherever its last two came before, as prompt lookup does it."""

    def __init__(self) -> None:
        self._index = TextIndex()

    def next_draft(self, state: RoundState) -> DraftPlan:
        """What followed the last time."""
        self._index.extend(state.sequences.text(0)[len(self._index) :])
        tokens = self._index.lookup(10).tokens
        return DraftPlan(DraftShape(len(tokens)), tokens=(tokens,)) if tokens else DraftPlan.skip()

    def record(self, stats: RoundStats) -> None:
        """Learns nothing."""


def ways_of(pair: LoadedPair, untrained: Eagle31Drafter, *, graphs: bool) -> list[Way]:
    """All of them."""
    constant = {"num_assistant_tokens_schedule": "constant"}
    lengths = [Way(f"fixed {k}", pair.drafter, {**constant, "num_assistant_tokens": k}) for k in FIXED]
    fixed = [*lengths, Way(DOUBT, pair.drafter, constant)]
    return [
        Way(PLAIN),
        *([Way(FIXED_LENGTH, pair.drafter, constant)] if graphs else fixed),
        Way(DEFAULT, pair.drafter),
        Way(LOOKUP),
        Way(RANDOM, untrained),
    ]


def traces_of(drafter: Eagle31Drafter, texts: KnownTexts) -> list[DraftTrace]:
    """One of each text."""
    return [DraftTrace.of(known, chains_along(drafter, known, texts, LONGEST_CHAIN)) for known in texts.texts]


def policy_of(way: Way, context: int, *, sampled: bool, compiled: bool) -> tuple[DraftPolicy, DraftShape]:
    """As `generate` chooses it for a text of its own, and the largest draft."""
    if way.drafter is None:
        policy = LookupAlone() if way.name == LOOKUP else InTurn(DraftPlan.skip())
        return policy, DraftShape(LONGEST_CHAIN)
    with configured(way):
        length = way.drafter.generation_config.draft_length(
            device_type="cpu", batch_size=1, sampled=sampled, compiled=compiled
        )
        requested = RequestedDraft.of(way.drafter, length, rows=1, context=context, sampled=sampled, compiled=compiled)
        return choose_policy(way.drafter, requested, SpeculationStats()), requested.shape


@dataclass(frozen=True)
class Costs:
    """Seconds of rounds, and of the drafter over what it missed; `None`: as over what one round wrote."""

    calibration: Calibration
    compiled: bool
    reading_s: float | None

    @classmethod
    def of(cls, drafter: Eagle31Drafter, *, compiled: bool, sampled: bool) -> Costs:
        """Of this machine; graphs must have been timed."""
        history = Pair.of(drafter).history
        if not compiled:
            return cls(calibrate(drafter, compiled=False), compiled, None)
        calibration = history.calibration(drafter, compiled=True, sampled=sampled)
        assert calibration is not None, "warming up times graphs"
        text = torch.arange(CONTEXTS[0])[None] * 7 % drafter.config.vocab_size
        missed = 2 * MOST_JUDGED  # by graphs, too, what was missed is read eagerly
        meter = BareMeter(drafter, text, DraftShape(missed), absorbed=missed)
        meter.time_rounds({1: 1.0}, count=20)
        return cls(calibration, compiled, meter.costs({1: 1.0}).absorb_s)


def count(way: Way, traces: list[DraftTrace], costs: Costs, *, sampled: bool) -> np.ndarray:
    """Seconds of each trace."""
    seconds = []
    for trace in traces:
        policy, largest = policy_of(way, len(trace.prompt), sampled=sampled, compiled=costs.compiled)
        table = costs.calibration.costs(len(trace.prompt)).rounds(LONGEST_CHAIN)
        told = {"reading_s": costs.reading_s, "reads_at_once": costs.compiled}
        seconds.append(replay(policy, trace, table, largest, **told).seconds)
    return np.array(seconds)


def compared(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Our speed over theirs on the same texts, with its interval; a figure for each text."""
    picks = np.random.default_rng(0).integers(len(ours), size=(RESAMPLES, len(ours)))
    low, high = interval_of(theirs[picks].sum(1) / ours[picks].sum(1))
    return {"ratio": float(theirs.sum() / ours.sum()), "low": low, "high": high}


def verdicts(kind: str, seconds: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What must hold, each with its figure."""

    def against(what: str, name: str, others: list[str], wanted: float) -> dict[str, Any]:
        best = min(others, key=lambda other: seconds[other].sum())
        return {"what": what, "other": best, **compared(seconds[name], seconds[best]), "wanted": wanted}

    fixed = [name for name in seconds if name.startswith("fixed") or name == DOUBT]
    told = [
        against("the default against plain", DEFAULT, [PLAIN], MOST_SLOWER),
        against("a random drafter against plain", RANDOM, [PLAIN], MOST_SLOWER),
        against("the default against the best fixed setting", DEFAULT, fixed, MOST_SLOWER),
    ]
    if "copy" in kind:
        alone = DOUBT if DOUBT in seconds else FIXED_LENGTH
        told.append(against("the default against the better of lookup and EAGLE alone", DEFAULT, [LOOKUP, alone], 1.0))
    return told


def study(pair: LoadedPair, untrained: Eagle31Drafter, prompts: list[Prompt], given: Any) -> list[dict[str, Any]]:
    """A record for each kind and temperature."""
    ways, record = ways_of(pair, untrained, graphs=given.graphs), []
    costs = {t: Costs.of(pair.drafter, compiled=given.graphs, sampled=t > 0) for t in given.temperatures}
    for kind in dict.fromkeys(prompt.suite for prompt in prompts):
        openings = [
            EvaluationPrompt(encode(pair, prompt.opening)["input_ids"][0].tolist(), kind)
            for prompt in prompts
            if prompt.suite == kind
        ]
        for temperature in given.temperatures:
            binding = pair.drafter.binding
            texts = write_texts(binding, openings, temperature, max_new_tokens=given.new_tokens)
            traces = {id(each): traces_of(each, texts) for each in (pair.drafter, untrained)}
            seconds = {
                way.name: count(
                    way, traces[id(way.drafter or pair.drafter)], costs[temperature], sampled=temperature > 0
                )
                for way in ways
            }
            figures = [{"way": name, "over_plain": compared(each, seconds[PLAIN])} for name, each in seconds.items()]
            told = verdicts(kind, seconds)
            record.append({"kind": kind, "temperature": temperature, "ways": figures, "verdicts": told})
            show(record[-1], len(openings))
    return record


def show(found: dict[str, Any], texts: int) -> None:
    print(f"\n{found['kind']}, temperature {found['temperature']:g}, {texts} texts", flush=True)
    for row in found["ways"]:
        over = row["over_plain"]
        print(f"  {row['way']:15} {over['ratio']:.3f} x plain ({over['low']:.3f} to {over['high']:.3f})")
    for each in found["verdicts"]:
        verdict = "holds" if each["ratio"] >= each["wanted"] else "FALLS SHORT"
        print(
            f"  {verdict}: {each['what']} ({each['other']}) {each['ratio']:.3f} "
            f"({each['low']:.3f} to {each['high']:.3f}, wanted {each['wanted']})",
            flush=True,
        )


def main() -> None:
    parser = parser_of(__doc__, limit=24)
    parser.add_argument("--graphs", action="store_true", help="rounds by graphs that are kept")
    given = parser.parse_args()
    prompts, pair = prompts_and_pair(parser, given)
    pair.drafter.generation_config.acceleration = "auto" if given.graphs else "eager"
    untrained = untrained_drafter(pair, given.drafter)
    if given.graphs:
        make_graphs([Way(DEFAULT, pair.drafter)], given)
    with ends_off(pair.target):
        record = study(pair, untrained, prompts, given)
    write_record(given, pair, prompts, record)


if __name__ == "__main__":
    main()
