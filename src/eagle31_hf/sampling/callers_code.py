"""Processors and criteria of the caller's, asked where plain decoding would have torch's random generators.

Plain decoding asks them between the draws of its tokens; our loop takes noise ahead. One that draws from torch's own
generators as well, or that returns other scores than it was given, is noticed when it does so for the first time, in
the state that plain decoding would be in: what it answered is kept, and the text is begun again by plain decoding.

What processors that keep state have made of a prefix is kept until the text has grown past it, so that none is shown a
prefix twice where a round is repeated (memory ran out in it) or left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .draw import PositionNoise, random_state, set_random_state

T = TypeVar("T")
States = dict[torch.device, Tensor]


class NotFollowedError(Exception):
    """What the caller's code does only plain decoding can follow."""


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What was answered, and the generators' states behind it; `None`: nothing was drawn."""

    value: T
    after: States | None


class Processed(NamedTuple):
    """What processors have made of the scores behind a prefix `ids (1, t)`: `scores (1, V)`, of which those before
    `place` have been asked; the generators' states `after` it, if the last one of them drew."""

    ids: Tensor
    place: int
    scores: Any
    after: States | None


class CallersCode:
    """The caller's code of one text or batch.

    Args:
        rows: of the batch. Of several, only what is done before the first token can be followed.
        prompt_length: tokens of each row before the first new one.
        device: of the scores.

    Attributes:
        noise: what tokens are sampled by, once there is any.
        begin: the generators' states before the text.
        processed: by row and tokens of the prefix.
        has_drawn: numbers were drawn that could not be followed any more.
    """

    def __init__(self, rows: int, prompt_length: int, device: torch.device):
        self._rows, self._prompt_length = rows, prompt_length
        self._devices = tuple({torch.device("cpu"), device})
        self.noise: PositionNoise | None = None
        self.processed: dict[tuple[int, int], Processed] = {}
        self.begin = self._states()
        self.has_drawn = False

    def ask(self, length: int, ask: Callable[[], T]) -> Answer[T]:
        """What is answered about a text of `length` tokens."""
        position = length - self._prompt_length
        can_follow = self._rows == 1 or position == 0
        with self.noise.rewound(position) if self.noise is not None and can_follow else nullcontext():
            before = self._states()
            value = ask()
            after = self._states()
        if all(torch.equal(before[device], after[device]) for device in before):
            return Answer(value, None)
        self.has_drawn = True
        return Answer(value, after if can_follow else None)

    def process(self, row: int, place: int, name: str, ids: Tensor, scores: Tensor, ask: Callable[[], Any]) -> Any:
        """What the processor called `name`, at this place among a row's, makes of `scores`.

        Raises:
            NotFollowedError: it does what only plain decoding can follow; its answer is kept.
        """
        kept = torch.empty_like(scores)  # first: once it has been asked, nothing may fail
        answer = self.ask(ids.shape[1], ask)
        why = why_not_followed(name, kept, answer)
        made = answer.value if why else kept.copy_(answer.value)  # it may be written on, by others or by what gave it
        self.processed[row, ids.shape[1]] = Processed(ids, place + 1, made, answer.after)
        if why:
            raise NotFollowedError(why)
        return answer.value

    def forget_before(self, row: int, length: int) -> None:
        """Let go what was made of a row's prefixes of fewer tokens."""
        self.processed = {key: made for key, made in self.processed.items() if key[0] != row or key[1] >= length}

    def _states(self) -> States:
        return {device: random_state(device) for device in self._devices}


def set_states(states: States) -> None:
    """Put torch's generators where they were."""
    for device, state in states.items():
        set_random_state(device, state)


def why_not_followed(name: str, given: Tensor, answer: Answer[Any]) -> str:
    """Why our loop cannot follow what a processor has done with scores; empty if it can."""
    scores = answer.value
    if answer.after is not None:
        return draws(name)
    if not isinstance(scores, Tensor):
        return f"{name} returns {type(scores).__name__} and no scores"
    if (scores.shape, scores.dtype, scores.device) == (given.shape, given.dtype, given.device):
        return ""
    return f"{name} returns scores {_kind(scores)} for {_kind(given)}"


def draws(name: str) -> str:
    """The reason why code that draws is not followed."""
    return f"{name} draws from torch's own random generator"


def _kind(scores: Tensor) -> str:
    return f"{tuple(scores.shape)} {str(scores.dtype).removeprefix('torch.')} on {scores.device}"
