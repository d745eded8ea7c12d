"""What records say: speeds, speedups, acceptance, steadiness, memory, energy, cost, exactness. No torch.

Speeds are tokens over seconds, all prompts of a repeat together; ratios are formed within a repeat and what counts is
their median. The interval beside it is over prompts: what other prompts of the same kind could have given.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np

from ..stats import Acceptance, variation, window_speeds
from .calls import DIFFERENT, PLAIN, PLAIN_COMPILED, SAME, SAMPLED, TIE, CallRecord, TextPart
from .ratios import Spread, ratio, speeds
from .record_file import Records


@dataclass(frozen=True)
class Setting:
    """What all methods of one table share."""

    temperature: float
    batch_size: int

    def __str__(self) -> str:
        return f"{'greedy' if not self.temperature else f'temperature {self.temperature:g}'}, batch {self.batch_size}"


@dataclass(frozen=True)
class MethodSummary:
    """One method in one setting, against plain decoding on the same prompts.

    `compiled` are the calls of compiled plain decoding, empty if there are none.
    """

    method: str
    setting: Setting
    calls: tuple[CallRecord, ...]
    plain: tuple[CallRecord, ...]
    compiled: tuple[CallRecord, ...] = ()
    price_per_hour: float | None = None

    @cached_property
    def tok_per_s(self) -> Spread:
        return Spread.over(list(speeds(self.calls).values()))

    @cached_property
    def verdicts(self) -> Counter[str]:
        return Counter(verdict.kind for call in self.calls for verdict in call.verdicts)

    @property
    def refusal(self) -> str:
        """Why no speedup may be told; empty if one may."""
        wrong = self.verdicts[DIFFERENT]
        if not wrong:
            return ""
        return f"{wrong} of {self.verdicts.total()} answers are not the target's own, beyond proven ties"

    @cached_property
    def speedup(self) -> Spread | None:
        """Over plain `generate`; `None` where answers are wrong."""
        return None if self.refusal else ratio(self.calls, self.plain)

    @cached_property
    def by_compiler(self) -> Spread | None:
        """What compiling alone gives: compiled plain decoding over plain `generate`. Of compiled methods only."""
        return ratio(self.compiled, self.plain) if self.is_compiled and self.compiled else None

    @cached_property
    def by_drafter(self) -> Spread | None:
        """What drafts give: over plain decoding of the same kind, compiled or not."""
        if self.refusal or (self.is_compiled and not self.compiled):
            return None
        return ratio(self.calls, self.compiled if self.is_compiled else self.plain)

    @property
    def is_compiled(self) -> bool:
        return self.method.endswith("compiled")

    @property
    def drafts(self) -> bool:
        """Whether it is more than plain decoding."""
        return self.method not in (PLAIN, PLAIN_COMPILED)

    @property
    def first_token_s(self) -> float:
        return median(call.first_token_s for call in self.calls)

    @property
    def slow_tok_per_s(self) -> float | None:
        """Fifth percentile over stretches of text."""
        speeds = [speed for call in self.calls for speed in window_speeds(call.window_s)]
        return float(np.percentile(speeds, 5)) if speeds else None

    @property
    def variation(self) -> float | None:
        """Of the speeds of a text's stretches, median over texts."""
        found = [v for call in self.calls if (v := variation(window_speeds(call.window_s))) is not None]
        return median(found) if found else None

    @cached_property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(call.drafting for call in self.calls)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per target pass; where no drafter of ours counts, by the passes that were seen (one row only)."""
        if self.acceptance.length is not None:
            return self.acceptance.length
        seen = [call for call in self.calls if call.target_passes and call.batch_size == 1]
        passes = sum((call.target_passes or 0) - 1 for call in seen)  # the prompt's gives the first token
        return sum(call.new_tokens - 1 for call in seen) / passes if passes > 0 else None

    @property
    def ceiling(self) -> float | None:
        """Speedup over plain `generate` if rounds took as long as their bare forwards, where those were timed.

        A prompt takes what it takes there: no draft makes it shorter, and of a short text it is a large part.
        """
        prompt_s = {(call.repeat, tuple(call.prompts)): call.first_token_s for call in self.plain}
        tokens, seconds = 0, 0.0
        for call in self.calls:
            if call.drafting is None or not call.bare_round_s:
                continue
            tokens += call.new_tokens
            seconds += prompt_s[call.repeat, tuple(call.prompts)]
            seconds += call.bare_round_s * call.drafting.rounds / call.batch_size
        return tokens / seconds / Spread.over(list(speeds(self.plain).values())).median if seconds else None

    @property
    def thinking(self) -> TextPart:
        return sum((call.thinking for call in self.calls), TextPart())

    @property
    def answering(self) -> TextPart:
        return sum((call.answering for call in self.calls), TextPart())

    @property
    def round_ms(self) -> dict[str, float] | None:
        """Mean host milliseconds of a round: `draft`, `verify` and `other`."""
        parts = [call.drafting for call in self.calls if call.drafting is not None]
        passes = sum(part.passes for part in parts)
        if not passes:
            return None
        return {n: sum(getattr(p, f"{n}_s") for p in parts) / passes * 1e3 for n in ("draft", "verify", "other")}

    @property
    def peak_bytes(self) -> int | None:
        return max((call.peak_bytes for call in self.calls if call.peak_bytes is not None), default=None)

    @property
    def joules_per_token(self) -> float | None:
        told = [(call.energy_j, call.new_tokens) for call in self.calls if call.energy_j is not None]
        return sum(joules for joules, _ in told) / sum(tokens for _, tokens in told) if told else None

    @property
    def price_per_million(self) -> float | None:
        """Of a million accepted tokens: all that were written, since the target has accepted each of them."""
        return None if self.price_per_hour is None else self.price_per_hour / 3600 / self.tok_per_s.median * 1e6

    @cached_property
    def categories(self) -> dict[str, MethodSummary]:
        """The same for each category of prompts."""
        found = {}
        for name in dict.fromkeys(call.category for call in self.calls):
            every = (self.calls, self.plain, self.compiled)
            calls, plain, compiled = (tuple(call for call in each if call.category == name) for each in every)
            found[name] = replace(self, calls=calls, plain=plain, compiled=compiled)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Every figure, JSON-ready."""
        accepted = self.acceptance
        spreads = {name: getattr(self, name) for name in ("tok_per_s", "speedup", "by_compiler", "by_drafter")}
        return {
            "method": self.method,
            "temperature": self.setting.temperature,
            "batch_size": self.setting.batch_size,
            "calls": len(self.calls),
            "new_tokens": sum(call.new_tokens for call in self.calls),
            **{name: spread and asdict(spread) for name, spread in spreads.items()},
            "refusal": self.refusal,
            "answers": dict(self.verdicts),
            **{name: getattr(self, name) for name in _PLAIN_FIGURES},
            "accepted_at": {"cumulative": accepted.cumulative, "conditional": accepted.conditional},
            "thinking": self.thinking.acceptance_length,
            "answering": self.answering.acceptance_length,
            "round_ms": self.round_ms and {f"{name}_ms": value for name, value in self.round_ms.items()},
            "categories": {
                name: {
                    "tok_per_s": part.tok_per_s.median,
                    "speedup": part.speedup and part.speedup.median,
                    "acceptance_length": part.acceptance_length,
                }
                for name, part in self.categories.items()
            },
        }


_PLAIN_FIGURES = (
    "ceiling", "first_token_s", "slow_tok_per_s", "variation", "acceptance_length", "peak_bytes", "joules_per_token",
    "price_per_million",
)  # fmt: skip


@dataclass(frozen=True)
class RunSummary:
    """All methods in all settings.

    Attributes:
        run: the records' first line.
        methods: in the order they were measured.
        left_out: methods that could not run, and why.
        warm_up_s: seconds of the first, uncounted texts, by method and setting: what was compiled in this process alone
            is among them.
        compiled: how many graphs were compiled and kept before that, and their seconds.
        cut: what is missing at the file's end; empty if it is whole.
    """

    run: dict[str, Any]
    methods: tuple[MethodSummary, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    warm_up_s: dict[tuple[str, Setting], float] = field(default_factory=dict)
    compiled: tuple[int, float] = (0, 0.0)
    cut: str = ""

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(method.setting for method in self.methods))

    def of(self, setting: Setting) -> list[MethodSummary]:
        return [method for method in self.methods if method.setting == setting]

    def to_dict(self) -> dict[str, Any]:
        return {
            "bench": "run",
            "run": self.run,
            "methods": [method.to_dict() for method in self.methods],
            "left_out": self.left_out,
            "warm_up_s": {f"{method}, {setting}": seconds for (method, setting), seconds in self.warm_up_s.items()},
            "compiled": {"graphs": self.compiled[0], "seconds": self.compiled[1]},
            "cut": self.cut,
        }


def summarise(records: Records, price_per_hour: float | None = None) -> RunSummary:
    """Figures of all calls.

    Args:
        price_per_hour: instead of the one the run was told.
    """
    price = records.run.get("price_per_hour") if price_per_hour is None else price_per_hour
    grouped: dict[Setting, dict[str, list[CallRecord]]] = {}
    for call in records.calls:
        setting = Setting(call.temperature, call.batch_size)
        grouped.setdefault(setting, {}).setdefault(call.method, []).append(call)
    methods = [
        MethodSummary(name, setting, tuple(calls), tuple(by_name[PLAIN]), tuple(by_name.get(PLAIN_COMPILED, ())), price)
        for setting, by_name in grouped.items()
        for name, calls in by_name.items()
    ]
    warm_up = {
        (note["method"], Setting(note["temperature"], note["batch_size"])): note["seconds"]
        for note in reversed(records.notes_of("warm-up"))  # the first one counts: later ones found things made
    }
    notes = records.notes_of("compiled")
    compiled = sum(note["graphs"] for note in notes), sum(note["seconds"] for note in notes)
    return RunSummary(records.run, tuple(methods), records.left_out, warm_up, compiled, records.cut)


def exact_text(verdicts: Counter[str]) -> str:
    """`"80 of 80 same"`, with ties and errors named."""
    told = verdicts[SAME] + verdicts[TIE] + verdicts[DIFFERENT]
    if not told:
        return "sampled" if verdicts[SAMPLED] else ""
    ties = f", {verdicts[TIE]} by a tie" if verdicts[TIE] else ""
    wrong = f", {verdicts[DIFFERENT]} WRONG" if verdicts[DIFFERENT] else ""
    return f"{verdicts[SAME]} of {told} same{ties}{wrong}"
