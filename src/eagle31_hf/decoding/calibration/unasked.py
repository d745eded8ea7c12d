"""Calibrating a pair: at once for who asks, and piece by piece, between calls, for who does not."""

from __future__ import annotations

import logging

from ...drafter.drafter import Eagle31Drafter
from ..pair import Pair
from ..pair_history import setting_of
from .calibration import Calibration
from .measure import PIECES, can_measure_unasked, measure, measure_by_pieces, measure_graphs

logger = logging.getLogger(__name__)

PASSES_BEFORE_PIECE = 8192 // PIECES
"""Rounds after which one piece of a calibration is measured unasked, at the end of a call. All pieces together take
about as long as 190 plain rounds: under 3 % of the rounds before them, and a short script never waits for one."""


def calibrate(drafter: Eagle31Drafter, *, compiled: bool) -> Calibration:
    """Measure now, for all texts to come, and keep it for later processes, too.

    Args:
        compiled: rounds by graphs, which are captured; those for a CPU are timed where they are compiled.
    """
    measured = measure_graphs(drafter) if compiled else measure(drafter)
    Pair.of(drafter).history.keep(drafter, measured, compiled=compiled)
    return measured


def calibrate_if_due(drafter: Eagle31Drafter, *, compiled: bool) -> None:
    """Measure one more piece of a calibration once enough was written for that to cost little.

    Failing is logged, and not tried again.

    Args:
        compiled: of rounds by graphs, where nothing is compiled for it (`can_measure_unasked`).
    """
    history, setting = Pair.of(drafter).history, setting_of(drafter, compiled=compiled)
    if history.cannot_measure or history.passes < PASSES_BEFORE_PIECE:
        return
    if not can_measure_unasked(drafter, compiled=compiled):
        return
    if history.calibration(drafter, compiled=compiled) is not None:
        return
    history.passes = 0
    if history.measuring is None or history.measuring[0] != setting:
        history.measuring = setting, measure_by_pieces(drafter, compiled=compiled)
    try:
        next(history.measuring[1])
    except StopIteration as end:
        history.measuring = None
        history.keep(drafter, end.value, compiled=compiled)
        logger.info("eagle31: calibrated")
    except Exception as error:  # whatever measuring stumbles over, the text must go on
        history.cannot_measure = True
        logger.warning("eagle31: could not be calibrated, drafts stay as they are: %s", error)
