"""What measured calls say: exactness first, then speeds, acceptance, waiting, memory and price.

Speeds are tokens over seconds, all prompts of a repeat together; ratios are formed within a repeat, and their median
counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median, quantiles
from typing import Any

from ..stats import Acceptance
from .bench import PLAIN, Call, Measured, Method
from .exactness import Kind, Verdict


@dataclass(frozen=True)
class Spread:
    """A figure's median over repeats, its smallest and its largest."""

    median: float
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class MethodResult:
    """One method with so many rows, beside plain `generate`'s calls on the same prompts."""

    method: Method
    rows: int
    calls: tuple[Call, ...]
    plain: tuple[Call, ...]

    @cached_property
    def verdicts(self) -> Counter[Kind]:
        return Counter(verdict.kind for call in self.calls for verdict in call.verdicts)

    @property
    def refusal(self) -> str:
        """Why there is no speedup to tell; empty if there is one."""
        wrong = self.verdicts[Kind.DIFFERENT]
        return f"{wrong} of {self.verdicts.total()} answers are not the target's own, beyond ties" if wrong else ""

    @property
    def differences(self) -> dict[str, Verdict]:
        """By prompt, answers whose tokens are not plain `generate`'s: ties, and errors before them."""
        verdicts = [pair for call in self.calls for pair in zip(call.prompts, call.verdicts, strict=True)]
        ties, errors = ({prompt: verdict for prompt, verdict in verdicts if verdict.kind is kind}
                        for kind in (Kind.TIE, Kind.DIFFERENT))  # fmt: skip
        return ties | errors

    @cached_property
    def tokens_per_s(self) -> Spread:
        return Spread.over(list(_speeds(self.calls).values()))

    @cached_property
    def speedup(self) -> Spread | None:
        """Over plain `generate`; `None` where answers are wrong."""
        if self.refusal:
            return None
        plain = _speeds(self.plain)
        return Spread.over([speed / plain[repeat] for repeat, speed in _speeds(self.calls).items()])

    @cached_property
    def acceptance(self) -> Acceptance:
        return Acceptance.of(call.stats for call in self.calls)

    @property
    def tokens_per_pass(self) -> float | None:
        """Acceptance length; `None` of plain `generate`, and of texts that it wrote after all."""
        return self.acceptance.acceptance_length or None

    @property
    def first_token_s(self) -> dict[str, float]:
        return _percentiles([call.first_token_s for call in self.calls])

    @property
    def gap_s(self) -> dict[str, float]:
        """Between two times that tokens are handed out."""
        return _percentiles([gap for call in self.calls for gap in call.gaps_s])

    @property
    def peak_bytes(self) -> int | None:
        """Most memory of any call."""
        return _most(self.calls)

    @property
    def bytes_over_plain(self) -> int | None:
        """Most memory beside plain `generate`'s."""
        plain = _most(self.plain)
        return None if self.peak_bytes is None or plain is None else self.peak_bytes - plain

    def price_per_million(self, price_per_hour: float) -> float:
        """Of a million tokens."""
        return price_per_hour / 3600 / self.tokens_per_s.median * 1e6

    @property
    def served_by(self) -> list[str]:
        """Loops other than our own that wrote texts, with the reason, and steps down that our own took."""
        seen = [call.stats for call in self.calls if call.stats is not None]
        loops = {f"{stats.loop}: {stats.reason}" if stats.reason else stats.loop for stats in seen}
        return sorted((loops - {"own"}) | {step for stats in seen for step in stats.fallbacks})

    @cached_property
    def by_kind(self) -> dict[str, MethodResult]:
        """The same for each kind of prompt."""
        kinds = dict.fromkeys(call.kind for call in self.calls)
        return {kind: replace(self, calls=_of(self.calls, kind), plain=_of(self.plain, kind)) for kind in kinds}

    def to_dict(self, price_per_hour: float | None = None) -> dict[str, Any]:
        """Every figure, JSON-ready."""
        return {
            "method": self.method.name,
            "rows": self.rows,
            "answers": {kind.value: count for kind, count in self.verdicts.items()},
            "refusal": self.refusal,
            "calls": len(self.calls),
            "new_tokens": sum(call.new_tokens for call in self.calls),
            "tokens_per_s": asdict(self.tokens_per_s),
            "speedup": self.speedup and asdict(self.speedup),
            "tokens_per_pass": self.tokens_per_pass,
            "accepted_at": self.acceptance.cumulative_acceptance,
            "first_token_s": self.first_token_s,
            "gap_s": self.gap_s,
            "peak_bytes": self.peak_bytes,
            "bytes_over_plain": self.bytes_over_plain,
            "price_per_million": None if price_per_hour is None else self.price_per_million(price_per_hour),
            "served_by": self.served_by,
            "by_kind": {
                kind: {
                    "tokens_per_s": part.tokens_per_s.median,
                    "speedup": part.speedup and part.speedup.median,
                    "tokens_per_pass": part.tokens_per_pass,
                }
                for kind, part in self.by_kind.items()
            },
        }


@dataclass(frozen=True)
class BenchResult:
    """All methods with each number of rows, in the order they were measured."""

    measured: Measured
    methods: tuple[MethodResult, ...]

    def with_rows(self, rows: int) -> list[MethodResult]:
        return [result for result in self.methods if result.rows == rows]

    @property
    def is_exact(self) -> bool:
        return not any(result.refusal for result in self.methods)

    def to_dict(self, price_per_hour: float | None = None) -> dict[str, Any]:
        """JSON-ready."""
        settings, measured = self.measured.settings, self.measured
        return {
            "settings": {**vars(settings), "methods": [method.name for method in settings.methods]},
            "prompts": len({prompt for call in measured.calls for prompt in call.prompts}),
            "same_text": self.is_exact,
            "methods": [result.to_dict(price_per_hour) for result in self.methods],
            "left_out": measured.left_out,
            "compiled": {"graphs": measured.graphs, "seconds": measured.graphs_s},
        }


def summarise(measured: Measured) -> BenchResult:
    """Figures of all calls."""
    grouped: dict[tuple[int, Method], list[Call]] = {}
    for call in measured.calls:
        grouped.setdefault((call.rows, call.method), []).append(call)
    results = [
        MethodResult(method, rows, tuple(calls), tuple(grouped[rows, PLAIN]))
        for (rows, method), calls in grouped.items()
    ]
    return BenchResult(measured, tuple(results))


def _of(calls: Iterable[Call], kind: str) -> tuple[Call, ...]:
    return tuple(call for call in calls if call.kind == kind)


def _speeds(calls: Iterable[Call]) -> dict[int, float]:
    """Tokens per second of each repeat, all its prompts together."""
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for call in calls:
        tokens[call.repeat] = tokens.get(call.repeat, 0) + call.new_tokens
        seconds[call.repeat] = seconds.get(call.repeat, 0.0) + call.seconds
    return {repeat: tokens[repeat] / seconds[repeat] for repeat in tokens}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    hundred = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {f"p{percent}": hundred[percent - 1] for percent in (50, 95, 99)}


def _most(calls: Iterable[Call]) -> int | None:
    return max((call.peak_bytes for call in calls if call.peak_bytes is not None), default=None)
