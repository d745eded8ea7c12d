"""How much noise is held at a time: asked by memory plans, too, which need no torch."""

from __future__ import annotations

KEPT_BEHIND = 16
"""Positions behind each row's present one whose noise is kept: a drafter that paused is judged by so many."""


def ring_length(rows: int, count: int) -> int:
    return (KEPT_BEHIND + count) * (2 if rows == 1 else 1)


def noise_bytes(rows: int, vocabulary: int, count: int) -> int:
    """Bytes that `PositionNoise` holds for windows of so many positions."""
    return ring_length(rows, count) * rows * vocabulary * 4
