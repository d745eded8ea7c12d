"""What is measured, and what it says: exactness first, then speeds, acceptance, waiting, memory and price.

Speeds are tokens over seconds, all prompts of a repeat together; ratios are formed within a repeat, and their median
counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import cached_property
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from ..errors import count
from ..sampling.logits_processing import sampling_options
from ..stats import Acceptance, SpeculationStats
from ..texts.prompts import Prompt
from .exactness import Kind, Verdict

FEWEST_NEW_TOKENS = 3
"""Speculation begins with the third token."""


class Writer(Enum):
    """What writes a text."""

    GENERATE = "plain generate"
    NO_DRAFTS = "without drafts"  # our loop, one token a pass
    LOOKUP = "lookups"  # our loop, drafts looked up in the text
    DRAFTER = "drafter"  # our loop as the drafter's settings say


@dataclass(frozen=True)
class Method:
    """A way to write: what writes, and whether its passes are graphs (`None`: as the assistant's settings say)."""

    writer: Writer
    by_graphs: bool | None = False

    @property
    def name(self) -> str:
        return self.writer.value + ", by graphs" * bool(self.by_graphs)

    @property
    def drafts(self) -> bool:
        """Whether it is more than plain decoding."""
        return self.writer in (Writer.LOOKUP, Writer.DRAFTER)

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings of the assistant while it writes."""
        settings: dict[str, Any] = {}
        if self.by_graphs is not None:
            settings["acceleration"] = "compile" if self.by_graphs else "eager"
        if self.writer is Writer.NO_DRAFTS:
            settings["num_assistant_tokens_schedule"] = "constant"
        return settings


PLAIN = Method(Writer.GENERATE)
PLAIN_BY_GRAPHS = Method(Writer.NO_DRAFTS, by_graphs=True)


def all_methods(*, by_graphs: bool, with_drafter: bool = True) -> tuple[Method, ...]:
    """Plain `generate` first, then our loop, and again by graphs."""
    writers = [Writer.NO_DRAFTS, Writer.LOOKUP, *([Writer.DRAFTER] if with_drafter else [])]
    graphs = (False, True) if by_graphs else (False,)
    return PLAIN, *(Method(writer, each) for each in graphs for writer in writers)


def pair_methods(*, by_graphs: bool) -> tuple[Method, ...]:
    """Plain decoding and the drafter, each without and with graphs: what `demo` and `generate` show."""
    drafter = Method(Writer.DRAFTER)
    return (PLAIN, PLAIN_BY_GRAPHS, drafter, Method(Writer.DRAFTER, by_graphs=True)) if by_graphs else (PLAIN, drafter)


@dataclass(frozen=True)
class BenchSettings:
    """What to measure.

    Attributes:
        methods: plain `generate` among them.
        new_tokens: most tokens of an answer.
        temperature: 0 is greedy.
        rows: how many prompts are written together, one setting after the other.
        repeats: passes over all prompts.
        seed: the first turn's; the others' follow from it.
        minutes: no further turn is begun after so long, compiling and warming up aside; `None`: all are measured.
    """

    methods: tuple[Method, ...] = all_methods(by_graphs=False)
    new_tokens: int = 128
    temperature: float = 0.0
    rows: tuple[int, ...] = (1,)
    repeats: int = 3
    seed: int = 0
    minutes: float | None = None

    def to_generate(self) -> dict[str, Any]:
        """Keyword arguments of `generate`, its length aside; the rest is as the target's generation config says."""
        return {**sampling_options(self.temperature), "num_beams": 1}


# --- what is written --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A prompt and its ids `(T,)`, on the target's device."""

    prompt: Prompt
    ids: Tensor


@dataclass(frozen=True)
class Turn:
    """Tasks of one kind that each method writes together, a row each: number `index` of this repeat."""

    repeat: int
    index: int
    kind: str
    tasks: tuple[Task, ...]
    seed: int

    @property
    def rows(self) -> int:
        return len(self.tasks)


@dataclass(frozen=True)
class Call:
    """One `generate` call of one method.

    Attributes:
        answers: new tokens of each row, up to and with its end.
        seconds: of the whole call; `first_token_s` until the first token was handed out.
        gaps_s: seconds between two times that tokens were handed out; of one row alone.
        stats: of our loop; `None` for plain `generate`.
        peak_bytes: most memory of the call, weights included, where the machine tells.
        verdicts: one per row.
    """

    method: Method
    turn: Turn
    answers: list[list[int]]
    seconds: float
    first_token_s: float
    gaps_s: tuple[float, ...] = ()
    stats: SpeculationStats | None = None
    peak_bytes: int | None = None
    verdicts: tuple[Verdict, ...] = ()

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def prompts(self) -> list[str]:
        """Ids of the rows' prompts."""
        return [task.prompt.id for task in self.turn.tasks]

    @property
    def texts(self) -> list[Tensor]:
        """Each row's prompt and answer, `(T,)`."""
        return [
            torch.cat((task.ids.cpu(), torch.tensor(answer)))
            for task, answer in zip(self.turn.tasks, self.answers, strict=True)
        ]


# --- what it says -----------------------------------------------------------------------------------------------------


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
        wrong, answers = self.verdicts[Kind.DIFFERENT], count(self.verdicts.total(), "answer")
        return f"not the target's own, beyond ties: {wrong} of {answers}" if wrong else ""

    def answers_of(self, kind: Kind) -> dict[str, Verdict]:
        """By prompt, what is known of the answers of this kind; of several repeats the last."""
        pairs = [pair for call in self.calls for pair in zip(call.prompts, call.verdicts, strict=True)]
        return {prompt: verdict for prompt, verdict in pairs if verdict.kind is kind}

    @property
    def evidence(self) -> list[dict[str, Any]]:
        """Of each answer that is not plain decoding's what it takes to look at it again."""
        plain = {(call.turn.repeat, call.turn.index, call.turn.kind): call.answers for call in self.plain}
        return [
            {"prompt": prompt, "seed": call.turn.seed, "row": row, "kind": verdict.kind.value,
             "first_different": verdict.position, "rounding": verdict.rounding,
             "logit_gap": verdict.logit_gap if math.isfinite(verdict.logit_gap) else None,  # JSON has no infinity
             "answer": call.answers[row], "plain": plain[call.turn.repeat, call.turn.index, call.turn.kind][row]}
            for call in self.calls
            for row, (prompt, verdict) in enumerate(zip(call.prompts, call.verdicts, strict=True))
            if verdict.kind in (Kind.TIE, Kind.DIFFERENT)
        ]  # fmt: skip

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
        kinds = dict.fromkeys(call.turn.kind for call in self.calls)
        return {kind: replace(self, calls=_of(self.calls, kind), plain=_of(self.plain, kind)) for kind in kinds}

    def to_dict(self, price_per_hour: float | None = None) -> dict[str, Any]:
        """Every figure, JSON-ready."""
        return {
            "method": self.method.name,
            "rows": self.rows,
            "answers": {kind.value: count for kind, count in self.verdicts.items()},
            "refusal": self.refusal,
            "differences": self.evidence,
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


@dataclass
class BenchResult:
    """All calls of a run, and what they say of all methods.

    Attributes:
        turns, of: how many turns were measured before the time was up, and of how many.
        interrupted: whether Ctrl-C ended it before.
        left_out: methods that could not run, and why.
    """

    settings: BenchSettings
    calls: list[Call] = field(default_factory=list)
    turns: int = 0
    of: int = 0
    interrupted: bool = False
    left_out: dict[str, str] = field(default_factory=dict)

    @cached_property
    def methods(self) -> list[MethodResult]:
        """With each number of rows, in the order they were measured."""
        grouped: dict[tuple[int, Method], list[Call]] = {}
        for call in self.calls:
            grouped.setdefault((call.turn.rows, call.method), []).append(call)
        return [
            MethodResult(method, rows, tuple(calls), tuple(grouped[rows, PLAIN]))
            for (rows, method), calls in grouped.items()
        ]

    def with_rows(self, rows: int) -> list[MethodResult]:
        return [result for result in self.methods if result.rows == rows]

    @property
    def is_exact(self) -> bool:
        return not any(result.refusal for result in self.methods)

    @property
    def num_prompts(self) -> int:
        """Of those that were written in time."""
        return len({prompt for call in self.calls for prompt in call.prompts})

    def to_dict(self, price_per_hour: float | None = None) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "settings": {**vars(self.settings), "methods": [method.name for method in self.settings.methods]},
            "prompts": self.num_prompts,
            "turns": [self.turns, self.of],
            "same_text": self.is_exact,
            "methods": [result.to_dict(price_per_hour) for result in self.methods],
            "left_out": self.left_out,
        }


def _of(calls: Iterable[Call], kind: str) -> tuple[Call, ...]:
    return tuple(call for call in calls if call.turn.kind == kind)


def _speeds(calls: Iterable[Call]) -> dict[int, float]:
    """Tokens per second of each repeat, all its prompts together."""
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for call in calls:
        repeat = call.turn.repeat
        tokens[repeat] = tokens.get(repeat, 0) + call.new_tokens
        seconds[repeat] = seconds.get(repeat, 0.0) + call.seconds
    return {repeat: tokens[repeat] / seconds[repeat] for repeat in tokens}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    hundred = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {f"p{percent}": hundred[percent - 1] for percent in (50, 95, 99)}


def _most(calls: Iterable[Call]) -> int | None:
    return max((call.peak_bytes for call in calls if call.peak_bytes is not None), default=None)
