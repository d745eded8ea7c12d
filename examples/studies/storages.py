"""What rounds allocate, by the storages that they make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from eagle31_hf.memory.storage_counter import StorageCounter

__all__ = ["Allocation", "StorageCounter", "count_storages"]


@dataclass(frozen=True)
class Allocation:
    """Bytes of storages born in rounds: `round_bytes` at most alive within one, `kept_bytes` at most between two."""

    round_bytes: int
    kept_bytes: int


def count_storages(one_round: Callable[[], None], rounds: int) -> Allocation:
    """Run `rounds` rounds and count every storage they make."""
    with StorageCounter() as counter:
        round_bytes = kept_bytes = 0
        for _ in range(rounds):
            before = counter.live_bytes
            counter.restart_peak()
            one_round()
            round_bytes = max(round_bytes, counter.peak_bytes - before)
            kept_bytes = max(kept_bytes, counter.live_bytes)
    return Allocation(round_bytes, kept_bytes)
