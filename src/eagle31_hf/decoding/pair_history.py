"""What this process has learnt of a pair: its calibration, how much it has written, how often drafts were right."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..drafter.assistant import Assistant
from ..stats import SpeculationStats
from .adaptive.acceptance_rates import Prior
from .calibration.calibration import Calibration
from .calibration.store import calibration_key, load, save

PRIOR_TOKENS = 4.0
"""Draft tokens that the experience of earlier texts is worth at most: a new text may be of another kind."""


@dataclass
class PairHistory:
    """One pair's.

    Attributes:
        passes: rounds of all its generations since something was last measured.
        prior: how often drafts of the last text were right; `None` before the first.
        folder_names: of its kept graphs, by the pair's state (`kept_graphs.pair_folder`).
        measuring: a calibration that is under way, and the setting it is for (`calibration.unasked`).
        cannot_measure: measuring has failed, and is not tried again.
    """

    passes: int = 0
    prior: Prior | None = None
    folder_names: dict[Hashable, str] = field(default_factory=dict)
    measuring: tuple[Hashable, Generator[None, None, Calibration]] | None = None
    cannot_measure: bool = False
    _calibrations: dict[Hashable, Calibration | None] = field(default_factory=dict)

    def calibration(self, drafter: Assistant, *, compiled: bool) -> Calibration | None:
        """What was measured of the pair as it is now, by this process or an earlier one; `None` if nothing was."""
        setting = setting_of(drafter, compiled=compiled)
        if setting not in self._calibrations:
            self._calibrations[setting] = load(calibration_key(drafter, compiled=compiled))
        return self._calibrations[setting]

    def keep(self, drafter: Assistant, measured: Calibration, *, compiled: bool) -> None:
        """Go by this from now on, and in later processes."""
        save(calibration_key(drafter, compiled=compiled), measured)
        self._calibrations[setting_of(drafter, compiled=compiled)] = measured

    @contextmanager
    def learning_nothing(self) -> Iterator[None]:
        """While open, texts are written that nobody asked for: how often their drafts are right says nothing."""
        passes, prior = self.passes, self.prior
        try:
            yield
        finally:
            self.passes, self.prior = passes, prior

    def record(self, stats: SpeculationStats) -> None:
        """Learn from a generation."""
        self.passes += stats.passes
        tried, right = sum(stats.reached_at), sum(stats.accepted_at)
        if tried:
            self.prior = Prior((right + 0.5) / (tried + 1.0), min(float(tried), PRIOR_TOKENS))


def setting_of(drafter: Assistant, *, compiled: bool) -> Hashable:
    """What of a `calibration_key` may change while a process runs."""
    binding = drafter.binding
    attention = binding.attention
    settings = drafter.generation_config.stored_cache_type, compiled
    return binding.model.dtype, binding.head_device, drafter.dtype, torch.get_num_threads(), attention, settings
