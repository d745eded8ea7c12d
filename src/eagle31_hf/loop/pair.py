"""What this process keeps of a target and its assistant: what rounds of the two take, and their graphs."""

from __future__ import annotations

from collections.abc import Hashable

from ..drafter.assistant import Assistant
from ..drafting.costs import RoundCosts
from ..graphs.graphs import Graphs
from ..graphs.seen import ModelState
from ..graphs.steps import GraphMaker


class Pair:
    """What is kept of an assistant and the target it is attached to. It goes when the two part.

    Attributes:
        costs: of rounds, as this process has timed them: by graphs or not, by shape, by rows.
        graphs: those that were last asked for; `None` before, and once memory ran out.
        ahead: compiles graphs ahead while `kept_graphs.compiling_ahead` is open.
    """

    def __init__(self) -> None:
        self.costs: dict[Hashable, RoundCosts] = {}
        self.graphs: Graphs | None = None
        self.ahead: GraphMaker | None = None

    @classmethod
    def of(cls, drafter: Assistant) -> Pair:
        """The assistant's, with the target it is attached to.

        Raises:
            NotAttachedError: there is none.
        """
        binding = drafter.binding
        if not isinstance(binding.pair, Pair):
            binding.pair = cls()
        return binding.pair

    def __deepcopy__(self, memo: dict) -> None:
        """A copied binding has a target of its own, of which nothing is known."""

    def __reduce__(self) -> tuple:
        return type(None), ()


def current_graphs(drafter: Assistant, state: ModelState | None = None) -> Graphs:
    """The pair's graphs for its weights, and the target's state, as they are now.

    Args:
        state: the target's, if it was just looked at.
    """
    pair = Pair.of(drafter)
    pair.graphs = Graphs.current(drafter, pair.graphs, state)
    return pair.graphs


def last_graphs(drafter: Assistant) -> Graphs:
    """The pair's graphs that were last asked for, without another look at the weights."""
    return Pair.of(drafter).graphs or current_graphs(drafter)
