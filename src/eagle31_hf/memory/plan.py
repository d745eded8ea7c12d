"""A memory plan as data: what a run takes and when, the settings decided on, and whether it fits the card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ..errors import MemoryPlanError
from .cards import GIB, Card, find_card
from .drafter_facts import DrafterFacts
from .ledger import LedgerTerm, MemorySettings, build_ledger, bytes_by_moment, captures_steps
from .target_facts import TargetFacts, target_fingerprint


@dataclass(frozen=True)
class Alternative:
    """A nearby plan that fits: change `what` to `value` and leave the rest."""

    what: str
    value: str


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory: what it takes, when, and the settings decided on.

    Attributes:
        target, drafter, card: what was planned for. `drafter` is `None` where none was asked for.
        settings: what a generation keeps to. Of a refusal: the smallest settings tried.
        margin_bytes: of the card, left free.
        longest_context: tokens per row that fit with these settings (a limit of memory, not of training); 0 if none.
        longest_by_cache: the same with the smallest settings that still draft, by how keys and values are stored. Up to
            the first of them a plan keeps graphs, where there are any; 8-bit caches are read by eager steps.
        given_up: what was given up so that it fits, in words.
        alternatives: of a refusal, nearby plans that fit.
        warnings: what the user should know before loading.
    """

    target: TargetFacts
    drafter: DrafterFacts | None
    card: Card
    settings: MemorySettings
    margin_bytes: int
    longest_context: int = 0
    longest_by_cache: tuple[tuple[str, int], ...] = ()
    given_up: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = ()

    # --- figures -----------------------------------------------------------------------------------------------------

    @cached_property
    def ledger(self) -> tuple[LedgerTerm, ...]:
        return build_ledger(self.target, self.drafter, self.card, self.settings)

    @cached_property
    def bytes_by_moment(self) -> dict[str, int]:
        return bytes_by_moment(self.ledger)

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

    @property
    def has_graphs(self) -> bool:
        """Whether rounds are captured as CUDA graphs."""
        return captures_steps(self.target, self.card, self.settings)

    @property
    def largest_term(self) -> LedgerTerm:
        """The largest of the terms alive at the peak."""
        return max((t for t in self.ledger if self.peak_moment in t.moments), key=lambda term: term.num_bytes)

    @property
    def drafter_bytes(self) -> int:
        """What adding the drafter costs at the peak: this plan's peak less that of the target alone."""
        alone = replace(self.settings, draft_tokens=0, tree_size=None, draft_is_usual=False)
        return self.peak_bytes - replace(self, settings=alone).peak_bytes

    # --- keeping the plan --------------------------------------------------------------------------------------------

    def require_fit(self) -> MemoryPlan:
        """This plan, if it fits.

        Raises:
            MemoryPlanError: it does not; the message names the largest term and what would fit.
        """
        if self.fits:
            return self
        nearest = "; ".join(f"{other.what} {other.value}" for other in self.alternatives) or "a larger card"
        raise MemoryPlanError(
            f"{self.target.name} ({self.target.quantization.name}) needs {self.peak_bytes / GIB:.1f} GiB at "
            f"{self.peak_moment!r}, {self.card.name} gives {self.budget_bytes / GIB:.1f}; the largest term is "
            f"{self.largest_term.name!r} with {self.largest_term.num_bytes / GIB:.1f} GiB; what would fit: {nearest}"
        )

    def check_target(self, model: nn.Module) -> None:
        """Refuse a model other than the planned one.

        Raises:
            MemoryPlanError: its shape is not the planned one's.
        """
        found = target_fingerprint(model.config)  # type: ignore[arg-type]
        if found != self.target.fingerprint:
            raise MemoryPlanError(
                f"this plan was made for {self.target.name} (shape {self.target.fingerprint}), got a model of shape "
                f"{found}; plan again with plan_memory(model)"
            )

    def check_card(self, card: str | int | Card | None = None) -> None:
        """Refuse a card other than the planned one; `None` measures this machine's.

        Raises:
            MemoryPlanError: another kind or amount of memory.
        """
        found = find_card(card)
        if not self.card.is_same_as(found):
            raise MemoryPlanError(
                f"this plan was made for {self.card.name} ({self.card.kind}, {self.card.total_bytes / GIB:.1f} GiB), "
                f"got {found.name} ({found.kind}, {found.total_bytes / GIB:.1f} GiB); plan again for this card"
            )

    # --- JSON --------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: what the plan was made from, and the figures that follow from it."""
        figures = {
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "peak_moment": self.peak_moment,
            "budget_bytes": self.budget_bytes,
            "bytes_by_moment": self.bytes_by_moment,
            "ledger": [asdict(term) for term in self.ledger],
        }
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
            "alternatives": [asdict(other) for other in self.alternatives],
            "warnings": list(self.warnings),
            "figures": figures,
        }
