"""What bare figures are asked about: drafts by a loop's settings, and how deep they were."""

from __future__ import annotations

from ..decoding.default_length import default_length
from ..drafter.drafter import Eagle31Drafter
from ..stats import Acceptance, SpeculationStats
from ..trees.shape import DraftShape


def requested_shape(
    drafter: Eagle31Drafter, *, batch_size: int, sampled: bool = False, compiled: bool | None = None
) -> DraftShape:
    """What a round drafts at most by the settings; `compiled`: by graphs, of themselves if these ask for them."""
    asked = drafter.generation_config
    compiled = asked.acceleration == "compile" if compiled is None else compiled
    return asked.draft_shape(default_length(drafter, batch_size=batch_size, sampled=sampled, compiled=compiled))


def drafted_depths(stats: SpeculationStats | Acceptance | None) -> dict[int, float] | None:
    """Share of the rounds that drafted so many tokens one after another; doubt and the end of a text shorten drafts.

    `None` if there was no round.
    """
    if stats is None or not stats.rounds:
        return None
    reached = [stats.rounds, *stats.drafted_at, 0]
    ended = {depth: reached[depth] - reached[depth + 1] for depth in range(len(reached) - 1)}
    return {depth: count / stats.rounds for depth, count in ended.items() if count}
