"""What this process has learnt of a pair: its calibration, how much it has written, how often drafts were right."""

from __future__ import annotations

import logging
from collections.abc import Generator, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..stats import SpeculationStats
from .adaptive.acceptance_rates import Prior
from .calibration.calibration import Calibration
from .calibration.measure import PIECES, can_measure_unasked, measure, measure_by_pieces, measure_graphs
from .calibration.store import calibration_key, load, save

logger = logging.getLogger(__name__)

PASSES_BEFORE_PIECE = 8192 // PIECES
"""Rounds after which one piece of a calibration is measured unasked, at the end of a call. All pieces together take
about as long as 230 plain rounds: under 3 % of the rounds before them, and a short script never waits for one."""

PRIOR_TOKENS = 4.0
"""Draft tokens that the experience of earlier texts is worth at most: a new text may be of another kind."""


@dataclass
class PairHistory:
    """One pair's, kept with its binding.

    Attributes:
        passes: rounds of all its generations since something was last measured.
        prior: how often drafts of the last text were right; `None` before the first.
        folder_names: of its kept graphs, by the pair's state (`kept_graphs.pair_folder`).
    """

    passes: int = 0
    prior: Prior | None = None
    folder_names: dict[Hashable, str] = field(default_factory=dict)
    _calibrations: dict[Hashable, Calibration | None] = field(default_factory=dict)
    _measuring: tuple[Hashable, Generator[None, None, Calibration]] | None = None
    _failed: bool = False

    @classmethod
    def of(cls, drafter: Assistant) -> PairHistory:
        """Of the drafter and the target it is attached to."""
        binding = drafter.require_binding()
        if binding.history is None:
            binding.history = cls()
        return binding.history

    def calibration(self, drafter: Assistant, *, compiled: bool) -> Calibration | None:
        """What was measured of the pair as it is now, by this process or an earlier one; `None` if nothing was."""
        setting = setting_of(drafter, compiled=compiled)
        if setting not in self._calibrations:
            self._calibrations[setting] = load(calibration_key(drafter, compiled=compiled))
        return self._calibrations[setting]

    def calibrate(self, drafter: Eagle31Drafter, *, compiled: bool) -> Calibration:
        """Measure now, for all texts to come, and keep it for later processes, too.

        Args:
            compiled: rounds by graphs, which are captured; those for a CPU are timed where they are compiled.
        """
        measured = measure_graphs(drafter) if compiled else measure(drafter)
        self.keep(drafter, measured, compiled=compiled)
        return measured

    def keep(self, drafter: Assistant, measured: Calibration, *, compiled: bool) -> None:
        """Go by this from now on, and in later processes."""
        save(calibration_key(drafter, compiled=compiled), measured)
        self._calibrations[setting_of(drafter, compiled=compiled)] = measured

    def calibrate_if_due(self, drafter: Eagle31Drafter, *, compiled: bool) -> None:
        """Measure one more piece of a calibration once enough was written for that to cost little.

        Failing is logged, and not tried again.

        Args:
            compiled: of rounds by graphs, where nothing is compiled for it (`can_measure_unasked`).
        """
        setting = setting_of(drafter, compiled=compiled)
        if self._failed or self.passes < PASSES_BEFORE_PIECE or not can_measure_unasked(drafter, compiled=compiled):
            return
        if self.calibration(drafter, compiled=compiled) is not None:
            return
        self.passes = 0
        if self._measuring is None or self._measuring[0] != setting:
            self._measuring = setting, measure_by_pieces(drafter, compiled=compiled)
        try:
            next(self._measuring[1])
        except StopIteration as end:
            self._measuring = None
            self.keep(drafter, end.value, compiled=compiled)
            logger.info("eagle31: calibrated")
        except Exception as error:  # whatever measuring stumbles over, the text must go on
            self._failed = True
            logger.warning("eagle31: could not be calibrated, drafts stay as they are: %s", error)

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
    binding = drafter.require_binding()
    attention = binding.attention
    settings = drafter.generation_config.stored_cache_type, compiled
    return binding.model.dtype, binding.head_device, drafter.dtype, torch.get_num_threads(), attention, settings
