"""`eagle31 bench loop`: a run of fixed length (`suite`) as one record per method and batch size, each beside what bare
forwards allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from .bare_meter import BareCosts
from .calls import SAMPLED, CallRecord
from .ratios import speeds
from .run_tables import run_notes, setting_tables
from .summary import MethodSummary, RunSummary
from .tables import DataTable


@dataclass(frozen=True)
class LoopRecord:
    """One method at one batch size, and of our own loop the bare forwards of its rounds."""

    summary: MethodSummary
    bare: BareCosts | None = None

    @property
    def batch_size(self) -> int:
        return self.summary.setting.batch_size

    @property
    def speedups(self) -> list[float]:
        """Against plain `generate`, each within one repeat."""
        plain = speeds(self.summary.plain)
        return [speed / plain[repeat] for repeat, speed in speeds(self.summary.calls).items()]

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass of the target behind the prompt's."""
        if self.summary.acceptance.length is not None:
            return self.summary.acceptance.length
        calls = self.summary.calls
        behind_prompts = sum((call.target_passes or 0) - 1 for call in calls)
        return sum(call.new_tokens / call.batch_size - 1 for call in calls) / max(behind_prompts, 1)

    @property
    def target_passes(self) -> list[int]:
        """Whole forwards of the target in each repeat, one per call for the prompts included."""

        def passes(call: CallRecord) -> int:
            return (call.target_passes or 0) if call.drafting is None else call.drafting.passes + 1

        return [sum(map(passes, calls)) for calls in self._by_repeat()]

    @property
    def round_over_bare(self) -> float | None:
        """A round's time over that of its bare forwards: what the loop itself costs. Median over repeats."""
        ratios = []
        for calls in self._by_repeat():
            parts = [(call.drafting, call.bare_round_s) for call in calls if call.drafting and call.bare_round_s]
            taken = sum(drafting.draft_s + drafting.verify_s + drafting.other_s for drafting, _ in parts)
            bare = sum(drafting.passes * bare_s for drafting, bare_s in parts)
            ratios += [taken / bare] if bare else []
        return median(ratios) if ratios else None

    @property
    def plain_step_s(self) -> float:
        """Seconds of a step of plain `generate`, which writes one token to each row."""
        return self.batch_size / median(speeds(self.summary.plain).values())

    @property
    def ceiling(self) -> float | None:
        """Speedup over plain `generate` if our loop cost nothing beside its bare forwards."""
        return None if self.bare is None else self.bare.ceiling(self.acceptance_length, self.plain_step_s)

    def _by_repeat(self) -> Iterator[list[CallRecord]]:
        for repeat in dict.fromkeys(call.repeat for call in self.summary.calls):
            yield [call for call in self.summary.calls if call.repeat == repeat]

    def to_dict(self) -> dict[str, Any]:
        """Everything, derived figures included, as JSON-ready values."""
        method, tok_per_s = self.summary, list(speeds(self.summary.calls).values())
        split = {f"{name}_s": ms / 1e3 for name, ms in _with_total(method).items()} if self.bare is not None else None
        by_drafter = method.by_drafter if method.is_compiled else None
        return {
            "name": method.method,
            "batch_size": self.batch_size,
            "tok_per_s": tok_per_s,
            "speedups": self.speedups,
            "speedup": median(self.speedups),
            "by_compiler": method.by_compiler and method.by_compiler.median,
            "by_drafter": by_drafter and by_drafter.median,
            "acceptance_length": self.acceptance_length,
            "round_over_bare": self.round_over_bare,
            "ceiling": self.ceiling,
            "median_tok_per_s": median(tok_per_s),
            "target_passes": self.target_passes,
            "new_tokens": [sum(call.new_tokens for call in calls) for calls in self._by_repeat()],
            "round": split or None,
            "bare": self.bare and {**asdict(self.bare), "round_s": self.bare.round_s},
            "served_by": method.calls[0].served_by,
            "equal_texts": self._equal_texts(),
            "texts": sum(len(call.texts) for call in next(self._by_repeat())),
        }

    def _equal_texts(self) -> int | None:
        """Of the first repeat; `None` where tokens are drawn or drafts are accepted by lot."""
        if self.summary.setting.temperature or self.summary.verdicts[SAMPLED]:
            return None
        plain = {call.turn: call.texts for call in self.summary.plain}
        first = next(self._by_repeat())
        return sum(ours == theirs for call in first for ours, theirs in zip(call.texts, plain[call.turn], strict=True))


def _with_total(method: MethodSummary) -> dict[str, float]:
    """Milliseconds of a round's parts and of all of it; empty where there was no round."""
    parts = method.round_ms
    return {} if parts is None else {**parts, "total": sum(parts.values())}


def loop_parts(summary: RunSummary, records: Sequence[LoopRecord], *, synthetic: bool) -> Iterator[Text | Table]:
    """What to print: the ceiling first, then speeds, then where a round's time goes."""
    yield _ceiling_table(records)
    for setting in summary.settings:
        yield from setting_tables(setting, summary.of(setting))
    yield _round_table(records)
    notes = run_notes(summary)
    if synthetic:
        notes.append("Random weights, and drafts accepted by lot: the figures are costs, the text means nothing.")
    for note in notes:
        yield Text(note, style="dim")


def _ceiling_table(records: Sequence[LoopRecord]) -> Table:
    """The speedup of loops that cost nothing, and the bare forwards it is made of."""
    rows = tuple(
        (record.summary.method, str(record.batch_size), f"{record.acceptance_length:.2f}", _ms(record.plain_step_s),
         f"{_ms(bare.verify_s)} ({bare.verified_tokens:.3g})",
         f"{_ms(bare.absorb_s)} + {bare.further_steps:.3g} × {_ms(bare.drafter_step_s)}", f"{record.ceiling:.2f}×")
        for record in records
        if (bare := record.bare) is not None
    )  # fmt: skip
    headings = ("method", "batch", "accepts", "plain", "verify (of)", "drafter steps", "ceiling")  # 80 columns are full
    caption = "Theoretical ceiling, from bare forwards in ms (of so many tokens)"
    return DataTable(caption, headings, rows).on_terminal(left=2)


def _round_table(records: Sequence[LoopRecord]) -> Table:
    """Where a round's time goes, and how much of it the bare forwards need."""
    rows = []
    for record in records:
        parts, bare, overhead = _with_total(record.summary), record.bare, record.round_over_bare
        if parts and bare is not None and overhead is not None:
            figures = (f"{value:.3g}" for value in (*parts.values(), bare.round_s * 1e3))
            rows.append((record.summary.method, str(record.batch_size), *figures, f"{overhead:.2f}"))
    headings = ("method", "batch", "draft", "verify", "rest", "round", "bare", "round/bare")
    return DataTable("Where a round's ms go", headings, tuple(rows)).on_terminal(left=2)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
