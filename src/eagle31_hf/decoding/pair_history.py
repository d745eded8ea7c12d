"""What this process has learnt of a pair: its calibration, how much it has written, how often drafts were right."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from ..drafter.drafter import Eagle31Drafter
from ..stats import SpeculationStats
from .adaptive.acceptance_rates import Prior
from .calibration.calibration import Calibration
from .calibration.measure import measure
from .calibration.store import calibration_key, load, save

logger = logging.getLogger(__name__)

PASSES_BEFORE_CALIBRATION = 8192
"""Rounds after which a pair is measured unasked. Measuring takes about as long as 230 plain rounds: under 3 % of these,
and a short script never waits for it."""

PRIOR_TOKENS = 4.0
"""Draft tokens that the experience of earlier texts is worth at most: a new text may be of another kind."""


@dataclass
class PairHistory:
    """One pair's, kept with its binding.

    Attributes:
        passes: rounds of all its generations.
        prior: how often greedy drafts were right; `None` before the first.
    """

    passes: int = 0
    prior: Prior | None = None
    _calibrations: dict[Hashable, Calibration | None] = field(default_factory=dict)
    _attempted: bool = False

    @classmethod
    def of(cls, drafter: Eagle31Drafter) -> PairHistory:
        """Of the drafter and the target it is attached to."""
        binding = drafter.require_binding()
        if binding.history is None:
            binding.history = cls()
        return binding.history

    def calibration(self, drafter: Eagle31Drafter, *, compiled: bool) -> Calibration | None:
        """What was measured of the pair as it is now, by this process or an earlier one; `None` if nothing was."""
        setting = _setting(drafter, compiled)
        if setting not in self._calibrations:
            self._calibrations[setting] = load(calibration_key(drafter, compiled=compiled))
        return self._calibrations[setting]

    def calibrate(self, drafter: Eagle31Drafter, *, compiled: bool) -> Calibration:
        """Measure now, and keep it for later processes, too."""
        measured = measure(drafter, compiled=compiled)
        save(calibration_key(drafter, compiled=compiled), measured)
        self._calibrations[_setting(drafter, compiled)] = measured
        return measured

    def calibrate_if_due(self, drafter: Eagle31Drafter, *, compiled: bool) -> None:
        """Measure once enough was written for that to cost little. Failing is logged, and not tried again."""
        if self._attempted or self.passes < PASSES_BEFORE_CALIBRATION:
            return
        if self.calibration(drafter, compiled=compiled) is not None:
            return
        self._attempted = True
        try:
            self.calibrate(drafter, compiled=compiled)
        except Exception as error:  # whatever measuring stumbles over, the text must go on
            logger.warning("eagle31: could not be calibrated, drafts stay as they are: %s", error)

    def record(self, stats: SpeculationStats, *, sampled: bool) -> None:
        """Learn from a generation. Drawn texts teach nothing: the next of the same seed is to be the same."""
        self.passes += stats.passes
        tried, right = sum(stats.reached_at), sum(stats.accepted_at)
        if not sampled and tried:
            self.prior = Prior((right + 0.5) / (tried + 1.0), min(float(tried), PRIOR_TOKENS))


def _setting(drafter: Eagle31Drafter, compiled: bool) -> Hashable:
    """What of a `calibration_key` may change while a process runs."""
    binding = drafter.require_binding()
    attention = binding.model.config._attn_implementation
    settings = drafter.generation_config.stored_cache_type, compiled
    return binding.model.dtype, binding.head_device, drafter.dtype, torch.get_num_threads(), attention, settings
