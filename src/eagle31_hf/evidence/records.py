"""What a loop benchmark measured: samples of one repeat, records over all of them. Plain numbers, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..decoding.calibration.bare_meter import BareCosts
from ..stats import SpeculationStats


@dataclass(frozen=True)
class RoundSplit:
    """Mean host seconds of a round."""

    draft_s: float
    verify_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True)
class Sample:
    """One repeat of one method: all prompts once.

    `target_passes` are whole forwards of the target, one per call for the prompts included. `split` and `bare` belong
    to our own loop.
    """

    seconds: float
    new_tokens: int
    target_passes: int
    acceptance_length: float
    split: RoundSplit | None = None
    bare: BareCosts | None = None

    @property
    def tok_per_s(self) -> float:
        return self.new_tokens / self.seconds


@dataclass(frozen=True)
class LoopRecord:
    """One method at one batch size.

    Attributes:
        samples, plain: one per repeat, of this method and of plain `generate` at the same batch size.
        compiled_plain: the same of compiled plain decoding, for compiled methods; empty where it was not measured.
        served_by: the loop that ran, and why if it was not the one asked for; empty for transformers' own.
        equal_texts: of `texts`, how many are plain decoding's; `None` when sampling or synthetic.
    """

    name: str
    batch_size: int
    samples: tuple[Sample, ...]
    plain: tuple[Sample, ...]
    served_by: str
    equal_texts: int | None
    texts: int
    compiled_plain: tuple[Sample, ...] = ()

    @property
    def tok_per_s(self) -> list[float]:
        return [sample.tok_per_s for sample in self.samples]

    @property
    def speedups(self) -> list[float]:
        """Against plain `generate`, each within one repeat."""
        return [ours.tok_per_s / plain.tok_per_s for ours, plain in zip(self.samples, self.plain, strict=True)]

    @property
    def speedup(self) -> float:
        return median(self.speedups)

    @property
    def by_compiler(self) -> float | None:
        """What compiling alone gives: compiled plain decoding over plain `generate`. Of compiled methods."""
        pairs = zip(self.compiled_plain, self.plain, strict=False)
        return median(ours.tok_per_s / plain.tok_per_s for ours, plain in pairs) if self.compiled_plain else None

    @property
    def by_drafter(self) -> float | None:
        """What drafts give beside the compiler: over compiled plain decoding. Of compiled methods."""
        pairs = zip(self.samples, self.compiled_plain, strict=False)
        return median(ours.tok_per_s / plain.tok_per_s for ours, plain in pairs) if self.compiled_plain else None

    @property
    def acceptance_length(self) -> float:
        return median(sample.acceptance_length for sample in self.samples)

    @property
    def split(self) -> RoundSplit | None:
        """Medians over the repeats."""
        splits = [sample.split for sample in self.samples if sample.split is not None]
        if not splits:
            return None
        return RoundSplit(**{name: median(getattr(s, name) for s in splits) for name in asdict(splits[0])})

    @property
    def bare(self) -> BareCosts | None:
        """Medians over the repeats."""
        costs = [sample.bare for sample in self.samples if sample.bare is not None]
        if not costs:
            return None
        return BareCosts(**{name: median(getattr(c, name) for c in costs) for name in asdict(costs[0])})

    @property
    def round_over_bare(self) -> float | None:
        """A round's time over that of its bare forwards: what the loop itself costs. Each within one repeat."""
        ratios = [s.split.total_s / s.bare.round_s for s in self.samples if s.split is not None and s.bare is not None]
        return median(ratios) if ratios else None

    @property
    def plain_step_s(self) -> float:
        """Seconds of a step of plain `generate`, which writes one token to each row."""
        return self.batch_size / median(sample.tok_per_s for sample in self.plain)

    @property
    def ceiling(self) -> float | None:
        """Speedup over plain `generate` if our loop cost nothing beside its bare forwards."""
        return None if self.bare is None else self.bare.ceiling(self.acceptance_length, self.plain_step_s)

    def to_dict(self) -> dict[str, Any]:
        """Everything, derived figures included, as JSON-ready values."""
        derived = (
            "tok_per_s",
            "speedups",
            "speedup",
            "by_compiler",
            "by_drafter",
            "acceptance_length",
            "round_over_bare",
            "ceiling",
        )
        return {
            "name": self.name,
            "batch_size": self.batch_size,
            **{key: getattr(self, key) for key in derived},
            "median_tok_per_s": median(self.tok_per_s),
            "target_passes": [sample.target_passes for sample in self.samples],
            "new_tokens": [sample.new_tokens for sample in self.samples],
            "round": None if self.split is None else {**asdict(self.split), "total_s": self.split.total_s},
            "bare": None if self.bare is None else {**asdict(self.bare), "round_s": self.bare.round_s},
            "served_by": self.served_by,
            "equal_texts": self.equal_texts,
            "texts": self.texts,
        }


@dataclass(frozen=True)
class LoopReport:
    """All methods, and those that could not run, with the reason."""

    records: tuple[LoopRecord, ...]
    left_out: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        return {"records": [record.to_dict() for record in self.records], "left_out": dict(self.left_out)}


ADDED_UP = ("rounds", "passes", "drafted", "accepted", "new_tokens", "prefill_s", "draft_s", "verify_s", "other_s")


def add_up(several: Sequence[SpeculationStats]) -> SpeculationStats:
    """The sum of several calls' figures; loop and reason are the first call's that was not served by our own loop."""
    total = SpeculationStats()
    for stats in several:
        for name in ADDED_UP:
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        for name in ("drafted_at", "reached_at", "accepted_at"):
            longer, shorter = sorted((getattr(total, name), getattr(stats, name)), key=len, reverse=True)
            setattr(total, name, [n + (shorter[i] if i < len(shorter) else 0) for i, n in enumerate(longer)])
        if total.loop == "own":
            total.loop, total.reason = stats.loop, stats.reason
    return total
