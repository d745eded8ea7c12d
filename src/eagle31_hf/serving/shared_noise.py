"""Noise of a server's texts that were given no seed: of all of them at once.

A seed's noise comes from its own generator, as plain `generate` takes it (`sampling.draw.PositionNoise`), one call for
each position of each text. Without a seed nobody can ask for the same noise again, so what is missing of all texts is
one call, however many there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling.noise_size import KEPT_BEHIND
from ..trees.host_numbers import on_device


def fresh_generator(device: torch.device) -> torch.Generator:
    """One that gives other numbers in every process."""
    generator = torch.Generator(device)
    generator.seed()
    return generator


class Held(NamedTuple):
    """A text's row of the noise, and from which position up to which it is held."""

    row: int
    begin: int
    end: int


class SharedNoise:
    """Exponential noise by text and position. While it is held a position's stays the same, so a draft and the target's
    choice see the same.

    Args:
        vocabulary: scores per position, `V`.
        device: of the scores.
    """

    def __init__(self, vocabulary: int, device: torch.device):
        self.vocabulary, self.device = vocabulary, device
        self._generator = fresh_generator(device)
        self._rings = torch.empty(0, 0, vocabulary, device=device)  # position t lies at t modulo the length
        self._held: dict[Hashable, Held] = {}

    def window(self, texts: Sequence[Hashable], starts: Sequence[int], count: int) -> Tensor:
        """Noise `(R, count, V)` of these texts, each from its own position on; of others none is held any longer.

        Args:
            texts: each as its own key.
            starts: of each of them, how many new tokens come before the first position.
            count: positions.
        """
        if not texts:
            return torch.empty(0, count, self.vocabulary, device=self.device)
        self._make_room(texts, count)
        length, missing, wanted = self._rings.shape[1], [], []
        for text, start in zip(texts, starts, strict=True):
            row, begin, end = self._held[text]
            if not max(begin, end - length) <= start <= end:  # behind what is held, or ahead of it
                begin = end = start
            stop = start + count
            missing += [row * length + position % length for position in range(end, stop)]
            wanted += [row * length + position % length for position in range(start, stop)]
            self._held[text] = Held(row, begin, max(end, stop))
        places, noise = on_device(missing + wanted, self.device), self._rings.view(-1, self.vocabulary)
        if missing:
            new = torch.empty(len(missing), self.vocabulary, device=self.device)
            noise[places[: len(missing)]] = new.exponential_(generator=self._generator)
        return noise[places[len(missing) :]].view(len(texts), count, self.vocabulary)

    def _make_room(self, texts: Sequence[Hashable], count: int) -> None:
        """A row for each of the texts. Longer ones are other rows: what was held is taken anew."""
        rows, length = self._rings.shape[:2]
        self._held = {text: self._held[text] for text in texts if text in self._held}
        if length < KEPT_BEHIND + count or rows < len(texts):
            rows, length = max(rows, len(texts)), max(length, KEPT_BEHIND + count)
            self._rings, self._held = torch.empty(rows, length, self.vocabulary, device=self.device), {}
        free = iter({*range(rows)} - {held.row for held in self._held.values()})
        for text in texts:
            if text not in self._held:
                self._held[text] = Held(next(free), 0, 0)
