"""How graphs come about: what tells them apart, and who makes those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

Step = Callable[..., Any]
"""Tensors in, a NamedTuple of tensors out."""


class OtherInputsError(Exception):
    """A graph was called with inputs that it was not made for; eager code serves them."""


class RecordingFailedError(Exception):
    """A step could not be recorded, for the first time or again; eager code serves what it was to compute."""


class GraphKey(NamedTuple):
    """What tells graphs of one pair of models apart.

    Attributes:
        kind: of step.
        rows: batch size.
        size: tokens or nodes it is about.
        shape: whatever else its inputs' shapes depend on.
        sampling: how tokens are chosen in it; `None` where none are.
    """

    kind: str
    rows: int
    size: int
    shape: tuple = ()
    sampling: Hashable = None


class GraphMaker:
    """Where graphs come from that are not there yet: from nowhere, so that only those are used that are there.

    Attributes:
        exact_sizes: making one takes so little that blocks are not padded to sizes that many rounds share.
        weights_seen: for this generation, the pair's weights were compared with those of its graphs already.
        failure: what is said where it could not make one.
    """

    failure = ""
    exact_sizes = False
    weights_seen = False

    def can_make(self, key: GraphKey) -> bool:
        """Whether it has, or would make, the graph of `key`; the same throughout a generation."""
        return False

    def make(self, key: GraphKey, step: Step, inputs: tuple) -> Step:
        """The graph of `step`. May raise anything."""
        raise NotImplementedError
