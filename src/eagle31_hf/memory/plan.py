"""A memory plan as data: what a run takes and when, the settings decided on, and whether it fits the card."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ..errors import MemoryPlanError
from .cards import GIB, MIB, Card
from .drafter_facts import DrafterFacts
from .dry_run import dry_run_of
from .ledger import MOMENTS, RUNNING, LedgerTerm, MemorySettings, build_ledger, captures_steps
from .target_facts import TargetFacts

LARGEST_CONTEXT = 2**22
NAMED_TERMS = 5
"""Of a ledger in one sentence."""


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory: what it takes, when, and the settings decided on.

    Attributes:
        target, drafter, card: what was planned for. `drafter` is `None` where none was asked for.
        settings: what a generation keeps to. Of a refusal: the smallest settings tried.
        margin_bytes: of the card, left free.
        longest_by_cache: `longest_context` with the smallest settings that still draft, by how keys and values are
            stored. Up to the first of them a plan keeps graphs, where there are any; 8-bit caches are read by eager
            steps.
        given_up: what was given up so that it fits, in words.
        alternatives: of a refusal, nearby plans that fit: what to change, and to what.
        warnings: what the user should know before loading.
    """

    target: TargetFacts
    drafter: DrafterFacts | None
    card: Card
    settings: MemorySettings
    margin_bytes: int
    longest_by_cache: tuple[tuple[str, int], ...] = ()
    given_up: tuple[str, ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    # --- figures -----------------------------------------------------------------------------------------------------

    @cached_property
    def ledger(self) -> tuple[LedgerTerm, ...]:
        return build_ledger(self.target, self.drafter, self.card, self.settings)

    @cached_property
    def bytes_by_moment(self) -> dict[str, int]:
        """Sum of what is alive, for every moment that has a term of its own."""
        return {moment: sum(term.num_bytes for term in self.ledger if moment in term.moments) for moment in MOMENTS}

    @property
    def peak_moment(self) -> str:
        """The moment of a run at which most is alive, by its name in `bytes_by_moment`."""
        return max(self.bytes_by_moment, key=self.bytes_by_moment.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """Bytes alive at that moment."""
        return self.bytes_by_moment[self.peak_moment]

    @property
    def budget_bytes(self) -> int:
        """What the plan may use: the card's usable bytes less the margin."""
        return self.card.usable_bytes - self.margin_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak keeps within `budget_bytes`."""
        return self.peak_bytes <= self.budget_bytes

    @cached_property
    def longest_context(self) -> int:
        """Tokens per row that fit with these settings (a limit of memory, not of training); 0 if none."""

        def is_too_long(context: int) -> bool:
            try:
                return not replace(self, settings=replace(self.settings, context=context)).fits
            except MemoryPlanError:  # a mask as a table, beyond whose end nothing can be read
                return True

        if not self.fits and is_too_long(1):
            return 0
        known = self.settings.context if self.fits else 1  # bytes only grow with it
        return known + bisect_left(range(known + 1, LARGEST_CONTEXT + 1), True, key=is_too_long)

    @property
    def has_graphs(self) -> bool:
        """Whether rounds are captured as CUDA graphs."""
        return captures_steps(self.target, self.card, self.settings)

    @property
    def drafter_bytes(self) -> int:
        """What adding the drafter costs at the peak: this plan's peak less that of the target alone."""
        alone = replace(self.settings, draft_tokens=0, tree_size=None, draft_is_usual=False)
        return self.peak_bytes - replace(self, settings=alone).peak_bytes

    # --- keeping the plan --------------------------------------------------------------------------------------------

    def require_fit(self) -> MemoryPlan:
        """This plan, if it fits.

        Raises:
            MemoryPlanError: it does not; the message names the largest terms and what would fit.
        """
        if self.fits:
            return self
        otherwise = "a shorter context, or the same beside less" if self.card.measured else "a larger card"
        nearest = "; ".join(map(" ".join, self.alternatives)) or otherwise
        raise MemoryPlanError(
            f"{self.target.name} ({self.target.quantization.name}) needs {self.peak_bytes / GIB:.1f} GiB at "
            f"{self.peak_moment!r}, {self.card.name} has {self.budget_bytes / GIB:.1f} GiB free for it. "
            f"{self.largest_terms}What would fit: {nearest}"
        )

    @property
    def peak_terms(self) -> list[LedgerTerm]:
        """Terms alive at the peak, the largest first."""
        return sorted((t for t in self.ledger if self.peak_moment in t.moments), key=lambda term: -term.num_bytes)

    @property
    def largest_terms(self) -> str:
        """One sentence with the largest terms alive at the peak."""
        alive = self.peak_terms
        named = ", ".join(f"{term.name} {size_text(term.num_bytes)}" for term in alive[:NAMED_TERMS])
        rest = sum(term.num_bytes for term in alive[NAMED_TERMS:])
        return f"Planned at the peak ({self.peak_moment}): {named}, the rest {size_text(rest)}. "

    def check_target(self, model: nn.Module) -> None:
        """Refuse a model other than the planned one.

        Raises:
            MemoryPlanError: its shape is not the planned one's.
        """
        found = dry_run_of(model.config, self.target.quantization).fingerprint  # type: ignore[arg-type]
        if found != self.target.fingerprint:
            raise MemoryPlanError(
                f"this plan was made for {self.target.name} (shape {self.target.fingerprint}), got a model of shape "
                f"{found}; plan again with plan_memory(model)"
            )

    # --- JSON --------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what the plan was made from, and the figures that follow from it."""
        figures = ("fits", "peak_bytes", "peak_moment", "budget_bytes", "bytes_by_moment")
        target, drafter = self.target, self.drafter
        named = ("name", "fingerprint", "num_parameters", "max_position_embeddings", "loaded")
        return {
            "target": {name: getattr(target, name) for name in named}
            | {"quantization": asdict(target.quantization), "weights": asdict(target.weights)},
            "drafter": None if drafter is None else {"name": drafter.name, "draft_vocab": drafter.draft_vocab},
            "card": asdict(self.card),
            "settings": asdict(self.settings),
            "margin_bytes": self.margin_bytes,
            "longest_context": self.longest_context,
            "longest_by_cache": dict(self.longest_by_cache),
            "given_up": list(self.given_up),
            "alternatives": [{"what": what, "value": value} for what, value in self.alternatives],
            "warnings": list(self.warnings),
            "figures": {name: getattr(self, name) for name in figures} | {"ledger": list(map(asdict, self.ledger))},
        }


# --- in words ---------------------------------------------------------------------------------------------------------

LEDGER_COLUMNS = ("term", "size", "alive during", "formula")


def size_text(num_bytes: int) -> str:
    """`"5.31 GiB"`, `"112 MiB"`, `"64 B"`."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if abs(num_bytes) >= MIB else f"{num_bytes:,} B"


def ledger_rows(plan: MemoryPlan) -> list[tuple[str, ...]]:
    """One row per term under `LEDGER_COLUMNS`, largest first."""
    rows: list[tuple[str, ...]] = []
    for term in sorted(plan.ledger, key=lambda term: -term.num_bytes):
        when = "always" if set(RUNNING) <= set(term.moments) else ", ".join(term.moments)
        rows.append((term.name, size_text(term.num_bytes), when, term.formula))
    return rows


PARTS = {
    "target": ("target weights", "target experts"),
    "drafter": ("drafter weights", "draft head"),
    "caches": ("target cache", "drafter cache", "target states"),
    "graphs": ("recordings",),
    "working memory": (),  # all else
    "runtime": ("runtime",),
    "left free": (),
}
"""Of a card at the fullest moment, by how terms begin."""


def part_bytes(plan: MemoryPlan) -> dict[str, int]:
    """What fills the card at the fullest moment, by `PARTS`; together all of it, or more where that does not fit."""
    sizes = {part: sum(term.num_bytes for term in plan.peak_terms if term.name.startswith(names or part))
             for part, names in PARTS.items()}  # fmt: skip
    sizes["working memory"] = plan.peak_bytes - sum(sizes.values())
    return sizes | {"left free": max(0, plan.card.total_bytes - plan.peak_bytes)}


def part_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """`part_bytes` in words, empty parts left out."""
    return [(part, size_text(num_bytes)) for part, num_bytes in part_bytes(plan).items() if num_bytes]


def decision_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """What was decided, as (name, value)."""
    settings, target = plan.settings, plan.target
    too_much, largest = plan.peak_bytes - plan.budget_bytes, plan.peak_terms[0]
    rows = [
        ("target", f"{target.name}, {target.num_parameters / 1e9:.2f}B parameters, {target.quantization.name}"),
        ("card", f"{plan.card.name}, {size_text(plan.budget_bytes)} of {size_text(plan.card.total_bytes)} to use"),
        ("fits", "yes" if plan.fits else f"no, {size_text(too_much)} too much"),
        ("peak", f"{size_text(plan.peak_bytes)}, at {plan.peak_moment}"),
        *([] if plan.fits else [("largest term", f"{largest.name}: {size_text(largest.num_bytes)}")]),
        ("context", f"{settings.context:,} tokens" + (f", {settings.batch} rows" if settings.batch > 1 else "")),
        *_longest_rows(plan),
        ("prompt", f"read {settings.prefill_chunk:,} tokens at a time"),
        ("keys, values", "in 8 bits" if settings.cache_type == "int8" else "in the target's precision"),
        ("graphs", "yes" if plan.has_graphs else "no, steps are eager"),
        ("draft", _draft_text(plan)),
    ]
    if settings.speculates and plan.drafter is not None:
        weights = f"{size_text(part_bytes(plan)['drafter'])} of it weights of {plan.drafter.name}"
        rows.append(("drafting adds", f"{size_text(plan.drafter_bytes)} at the peak, {weights}"))
    rows += [("given up", what) for what in plan.given_up]
    return rows + [("would fit", " ".join(other)) for other in plan.alternatives]


def _longest_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Up to which context plans look like this one, and up to which they give up graphs."""
    if not plan.longest_by_cache:
        return [("longest", _tokens_text(plan, plan.longest_context))]
    rows = []
    for kind, tokens in plan.longest_by_cache:
        settings = replace(plan.settings, cache_type=kind, draft_tokens=plan.settings.draft_tokens or 1)
        graphs = " with graphs" if captures_steps(plan.target, plan.card, settings) else " without graphs"
        graphs = graphs if plan.card.kind == "cuda" else ""  # nothing is captured elsewhere
        stored = " with keys and values in 8 bits" if kind == "int8" else ""
        rows.append((f"longest{graphs}", _tokens_text(plan, tokens) + stored))
        if tokens >= (plan.target.max_position_embeddings or tokens + 1):  # nothing is longer
            break
    return rows


def _tokens_text(plan: MemoryPlan, tokens: int) -> str:
    trained = plan.target.max_position_embeddings
    if trained and tokens >= trained:
        return f"{trained:,} tokens, all that the target was trained for"
    return f"{tokens:,} tokens" if tokens else "not one token"


def _draft_text(plan: MemoryPlan) -> str:
    settings = plan.settings
    if not settings.speculates:
        return "none: no drafter" + ("" if plan.drafter is None else " fits beside the target")
    depth, nodes = settings.draft_tokens, settings.tree_size and settings.shape.nodes
    if settings.draft_is_usual:
        shape = f"chains of up to {depth} tokens" + (f", trees of {nodes} nodes for sampled texts" if nodes else "")
    else:
        shape = f"tree of {nodes} nodes, depth {depth}" if nodes else f"chain of {depth} tokens"
    return f"{shape}, drafter in {settings.drafter_precision} precision"
