"""Processors and criteria of the caller's, asked where plain decoding would have torch's random generators.

Plain decoding asks them between the draws of its tokens; our loop takes noise ahead. One that draws from torch's own
generators as well, or that returns other scores than it was given, is noticed when it does so for the first time. From
there on the text is written as plain decoding writes it: nothing is drafted any more, each token is drawn by torch
itself, and the generators go from hand to hand.

What processors that keep state have made of a prefix is kept until the text has grown past it, what criteria said and
what was drawn, too: nothing is asked or drawn twice where a round is repeated (memory ran out in it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .draw import PositionNoise, random_state, set_random_state

T = TypeVar("T")
States = dict[torch.device, Tensor]
Moment = tuple[int, bool]
"""Tokens of a text, and whether its criteria were asked: its processors, and the next token, come after them."""


class CallersCode:
    """The caller's code of one text.

    Args:
        prompt_length: tokens before the first new one.
        device: of the scores.

    Attributes:
        noise: what tokens are sampled by, once there is any.
        processed: by tokens of a prefix, how many processors were asked behind it, and what they made of the scores.
        why: what noise that was taken ahead cannot follow; empty while it can.
        asked_ahead: processors were shown tokens that may not come, or have drawn, before a criterion drew.
    """

    def __init__(self, prompt_length: int, device: torch.device):
        self._prompt_length = prompt_length
        self._devices = tuple({torch.device("cpu"), device})
        self.noise: PositionNoise | None = None
        self.processed: dict[int, tuple[int, Any]] = {}
        self.why, self.asked_ahead = "", False
        self._since: Moment = (0, False)  # `why` was met
        self._states: States = {}  # of the generators behind that, as plain decoding has them
        self._said: dict[int, bool] = {}  # by criteria, of texts of so many tokens
        self._drawn = (0, torch.empty(0))  # the latest token that was drawn, and the length of the text before

    def is_followed(self, length: int, *, asked: bool) -> bool:
        """Whether all can be followed until a text has `length` tokens, and until its criteria were `asked`."""
        return not self.why or (length, asked) < self._since

    def process(self, place: int, name: str, ids: Tensor, scores: Tensor, ask: Callable[[], Any]) -> Any:
        """What the processor called `name`, at this place, makes of `scores` `(1, V)` behind `ids` `(1, t)`."""
        kept = torch.empty_like(scores)  # first: once it has been asked, nothing may fail
        moment = ids.shape[1], True
        made, drew, states = self._ask(moment, ask)
        why = _draws(name) if drew else _returns_others(name, kept, made)
        if why and not self.why:
            self.why, self._since, self._states = why, moment, states
        # It may be written on, by others or by what gave it.
        self.processed[ids.shape[1]] = place + 1, made if why else kept.copy_(made)
        return made

    def must_end(self, length: int, names: Sequence[str], ask: Callable[[], bool]) -> bool:
        """Whether criteria end a text of `length` tokens."""
        if length in self._said:  # memory ran out behind it
            return self._said[length]
        followed = self.is_followed(length, asked=False)
        self._said[length], drew, states = self._ask((length, False), ask)
        if drew and followed:
            met_here = bool(self.why) and self._since == (length, True)  # by a processor, which may have drawn already
            self.asked_ahead = met_here or any(shown > length for shown in self.processed)
            self.why, self._since, self._states = _draws(", ".join(names)), (length, False), states
            self.processed = {shown: made for shown, made in self.processed.items() if shown <= length}
        return self._said[length]

    def has_cut(self, length: int) -> bool:
        """Whether a text may go on otherwise behind so many tokens than by those that were accepted."""
        return bool(self.why) and self._since == (length, False)

    def draw(self, length: int, scores: Tensor) -> Tensor:
        """A token `(1,)` behind `length` others by scores `(1, V)`, as plain decoding draws it."""
        if self._drawn[0] != length:  # else memory ran out behind it
            here = self._now()
            set_states(self._states)
            self._drawn = length, torch.multinomial(scores.softmax(-1), 1).squeeze(1)
            self._states = self._now()
            set_states(here)
        return self._drawn[1]

    def leave_generators(self) -> None:
        """Leave torch's generators where plain decoding leaves them."""
        set_states(self._states)

    def forget_before(self, length: int) -> None:
        """Let go what was made of prefixes of fewer tokens."""
        self.processed = {shown: made for shown, made in self.processed.items() if shown >= length}

    def _ask(self, moment: Moment, ask: Callable[[], T]) -> tuple[T, bool, States]:
        """What is answered, whether numbers were drawn for it, and the generators' states behind it."""
        here, followed = self._now(), self.is_followed(moment[0], asked=moment[1])
        if not followed:
            set_states(self._states)
        elif self.noise is not None:
            self.noise.rewind(moment[0] - self._prompt_length)
        before = self._now()
        answer = ask()
        after = self._now()
        drew = any(not torch.equal(before[device], after[device]) for device in before)
        if drew or not followed or self.noise is not None:
            set_states(here)
        if not followed:
            self._states = after
        return answer, drew, after

    def _now(self) -> States:
        return {device: random_state(device) for device in self._devices}


def set_states(states: States) -> None:
    """Put torch's generators where they were."""
    for device, state in states.items():
        set_random_state(device, state)


def _draws(name: str) -> str:
    return f"{name} draws from torch's own random generator"


def _returns_others(name: str, given: Tensor, made: Any) -> str:
    """Why what a processor has made of scores is not chosen from as they are; empty if it is."""
    if not isinstance(made, Tensor):
        return f"{name} returns {type(made).__name__} and no scores"
    if (made.shape, made.dtype, made.device) == (given.shape, given.dtype, given.device):
        return ""
    return f"{name} returns scores {_kind(made)} for {_kind(given)}"


def _kind(scores: Tensor) -> str:
    return f"{tuple(scores.shape)} {str(scores.dtype).removeprefix('torch.')} on {scores.device}"
