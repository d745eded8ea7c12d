"""Sampling as arg-max: the exponential noise that plain `generate` would use, position by position.

`torch.multinomial` of one sample is `argmax(p / E)`, where `E` is exponential noise of p's shape taken from torch's
generator. Plain `generate` takes one such tensor `(B, V)` for each new position. `PositionNoise` takes the same tensors
in the same order and keeps those that a round looks ahead to. So the target chooses the very token it would have
chosen alone, whatever was drafted, and a drafter that is shown the same noise agrees with it nearly as often as any
rule allows (Gumbel coupling, arXiv 2408.07978).

`B` rows of a batch, `V` vocabulary, `p` / `q` target / draft distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..drafting.host_numbers import on_device
from ..drafting.shape import KEPT_BEHIND, ring_length

KEPT_STATES = 256
"""Positions behind the slowest row whose generator state is kept (5 kB each on a CPU, 16 bytes on CUDA)."""

NOT_PLAIN = "something else took random numbers while the text was sampled: it is not the text of plain generate"
"""Said where `PositionNoise.settle` finds that out."""


def argmax(scores: Tensor) -> Tensor:
    """Index of the largest of each row, `(..., V)` -> `(...)`; of equal ones the first, as `argmax`."""
    return scores.max(-1).indices  # `argmax` takes two to three times as long on a CPU in bf16


def likeliest(scores: Tensor) -> Tensor:
    """`argmax`, and `V`, as `choose` has it, where no score is a number."""
    best = scores.max(-1)
    return best.indices.masked_fill(~(best.values > float("-inf")), scores.shape[-1])


def choose(scores: Tensor, noise: Tensor) -> Tensor:
    """The token that sampling draws, `(..., V)` -> `(...)`: `torch.multinomial` of one sample by this noise.

    Args:
        scores: processed scores, float32.
        noise: exponential, of the same shape.

    A row whose scores are no numbers gives `V`, which is no token: reading it is an error.
    """
    best = (scores.softmax(-1) / noise.to(scores.device)).max(-1)
    return torch.where(best.values.isnan(), scores.shape[-1], best.indices)


def perturbed(scores: Tensor, noise: Tensor) -> Tensor:
    """Draft scores `(..., S)` whose arg-max is what sampling by this noise would draw: `log q - log E`, and a constant.

    Their softmax says how likely each token is the one that the target draws, so whatever is done with the scores of
    greedy drafts (arg-max, top-k, trees, confidence) can be done with these.
    """
    return scores.float() - noise.log()


class PositionNoise:
    """Exponential noise for the new positions of a batch, taken from a generator as plain `generate` takes it.

    Rows may be at different positions. Each keeps the noise of its own next positions; what a slow row needs again is
    made again from the generator's state before that position.

    Args:
        rows: of the batch, `B`; rows that have ended count, since `generate` draws for them, too.
        vocabulary: scores per row, `V`.
        device: of the scores.
        generator: to take from; `None`: torch's own one of the device.
    """

    def __init__(self, rows: int, vocabulary: int, device: torch.device, generator: torch.Generator | None = None):
        self.rows, self.vocabulary, self.device = rows, vocabulary, device
        self._generator = generator
        self._ring: Tensor = torch.empty(0, rows, vocabulary, device=device)  # position t lies at t modulo its length
        self._held: list[list[int]] = []  # by place in the ring and row, whose position's noise lies there
        self._states: dict[int, Any] = {}  # before a position's noise was taken
        self._taken = 0  # positions whose noise was taken
        self._left: Any = None  # the generator's state after that

    def window(self, rows: Sequence[int], starts: Sequence[int], count: int) -> Tensor:
        """Noise `(R, count, V)` of these rows, each from its own position on. Valid until the next call.

        Args:
            rows: of the batch.
            starts: of each of them, the first position: how many new tokens come before it.
            count: positions.
        """
        self._make_room(count)
        self._fill(rows, starts, count)
        if len(rows) == 1 == self.rows:
            first = starts[0] % len(self._ring)
            if first + count <= len(self._ring):
                return self._ring[first : first + count].transpose(0, 1)
        places = [
            [(start + offset) % len(self._ring) * self.rows + row for offset in range(count)]
            for row, start in zip(rows, starts, strict=True)
        ]
        return self._ring.view(-1, self.vocabulary)[on_device(places, self.device)]

    def settle(self, position: int) -> bool:
        """Leave the generator where `generate` leaves it after so many positions.

        Returns:
            Whether nothing else has taken random numbers from it meanwhile. If something has, it is left as it is.
        """
        if self._left is None:
            return True
        if not torch.equal(self._state(), self._left):
            return False
        if position in self._states:
            self._set_state(self._states[position])
        while self._taken < position:  # a text that was written without looking at all of its noise
            self._take(torch.empty(self.rows, self.vocabulary, device=self.device))
        return True

    def rewind(self, position: int) -> None:
        """Put the generator where plain decoding has it once the noise of so many positions is taken."""
        if position < self._taken:
            self._set_state(self._states[position])

    # --- taking it -------------------------------------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        """A ring that holds a window and what lies behind it; of a single row twice that, so that few windows wrap."""
        if len(self._ring) < KEPT_BEHIND + count:
            length = ring_length(self.rows, count)
            self._ring = torch.empty(length, self.rows, self.vocabulary, device=self.device)
            self._held = [[-1] * self.rows for _ in range(length)]

    def _fill(self, rows: Sequence[int], starts: Sequence[int], count: int) -> None:
        missing: dict[int, list[int]] = {}
        for row, start in zip(rows, starts, strict=True):
            for position in range(start, start + count):
                if self._held[position % len(self._ring)][row] != position:
                    missing.setdefault(position, []).append(row)
        for position in sorted(missing):
            self._fill_position(position, missing[position])
        for position in [known for known in self._states if known < min(starts) - KEPT_STATES]:
            del self._states[position]

    def _fill_position(self, position: int, rows: Sequence[int]) -> None:
        place = position % len(self._ring)
        slot = self._ring[place]  # (B, V)
        noise = slot if len(rows) == self.rows else torch.empty_like(slot)
        self._take_position(position, noise)
        if noise is not slot:
            index = on_device(rows, self.device)
            slot[index] = noise[index]
        for row in rows:
            self._held[place][row] = position

    def _take_position(self, position: int, out: Tensor) -> None:
        """Noise of a position, for all rows."""
        if position < self._taken:
            assert position in self._states, f"the noise of position {position} is asked for again too late"
            here = self._state()
            self.rewind(position)
            out.exponential_(generator=self._generator)
            self._set_state(here)
            return
        while self._taken <= position:
            self._take(out)

    def _take(self, out: Tensor) -> None:
        self._states[self._taken] = self._state()
        out.exponential_(generator=self._generator)
        self._taken += 1
        self._left = self._state()

    def _state(self) -> Tensor:
        return random_state(self.device) if self._generator is None else self._generator.get_state()

    def _set_state(self, state: Tensor) -> None:
        if self._generator is None:
            set_random_state(self.device, state)
        else:
            self._generator.set_state(state)


class FreshNoise:
    """Noise of one text whose tokens need not be those of any seed: many positions are drawn at once, which starts one
    kernel where `PositionNoise` starts one for each.

    Args:
        vocabulary: scores, `V`.
        device: of the scores.
        generator: to take from; `None`: torch's own one of the device.
    """

    def __init__(self, vocabulary: int, device: torch.device, generator: torch.Generator | None = None):
        self._generator = generator
        self._held = torch.empty(0, vocabulary, device=device)  # of positions from `_begin` on
        self._begin = 0

    def window(self, rows: Sequence[int], starts: Sequence[int], count: int) -> Tensor:
        """Noise `(1, count, V)` of the one row, from its own position on; that of a position stays until it is left
        behind, since a draft made ahead is chosen by what verifies it. See `PositionNoise.window`."""
        (start,) = starts
        held = self._held[start - self._begin :] if start >= self._begin else self._held[:0]
        if len(held) < count:
            self._held = held.new_empty(count + KEPT_BEHIND, held.shape[-1])
            self._held[: len(held)] = held
            self._held[len(held) :].exponential_(generator=self._generator)
            self._begin, held = start, self._held
        return held[:count][None]


def random_state(device: torch.device) -> Tensor:
    """The state of torch's own generator of a device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    module: Any = torch.get_device_module(device)
    return module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put torch's own generator of a device into a state."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)


@cache
def why_noise_is_unknown(device: torch.device) -> str | None:
    """Why `torch.multinomial` on this device does not draw as this module says; `None` where it does. Tried once."""
    state = random_state(device)
    try:
        weights = torch.arange(1.0, 65.0, device=device).repeat(8, 1)  # (8, 64)
        drawn = torch.multinomial(weights, 1).squeeze(1)
        after = random_state(device)
        set_random_state(device, state)
        expected = argmax(weights / torch.empty_like(weights).exponential_())
        is_same = torch.equal(drawn, expected) and torch.equal(after, random_state(device))
    except (RuntimeError, NotImplementedError) as error:
        return f"random numbers of {device} cannot be followed: {str(error).splitlines()[0]}"
    finally:
        set_random_state(device, state)
    return None if is_same else f"torch.multinomial draws in another way than known on {device}"
