"""Settings of the CUDA allocator and of the driver that decide whether memory that is free can be had."""

from __future__ import annotations

import logging
import os

import torch

from .cards import driver_spills

logger = logging.getLogger(__name__)

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name first: torch 2.9.1 reads only that one on CUDA (pytorch#183387), later ones read both."""


def allocator_advice(settings: str, *, spills: bool) -> list[str]:
    """What should be set differently and why; empty if all is well.

    Args:
        settings: content of the variables in `VARIABLES`.
        spills: see `cards.driver_spills`.
    """
    said, advice = settings.lower().replace(" ", ""), []
    # cudaMallocAsync has no segments to expand, and neither has Windows; some WSL installations fail their first
    # allocation with them (pytorch#192330).
    if not ("expandable_segments:true" in said or "backend:cudamallocasync" in said or spills):
        assignments = " ".join(f"{name}=expandable_segments:True" for name in VARIABLES)
        advice.append(
            f"set {assignments} before torch is imported: a cache that grows otherwise leaves its old blocks behind "
            "in sizes nothing else fits, and memory runs out although enough is free"
        )
    if spills:
        advice.append(
            "this driver moves to main memory without an error when the card is full, and everything gets about ten "
            "times slower: leave 1.5 GiB free (memory plans do), or choose 'Prefer No Sysmem Fallback' for Python in "
            "the NVIDIA control panel"
        )
    return advice


_advised: set[str] = set()


def advise_once(device: torch.device) -> None:
    """Log the advice for this process, at the first use of CUDA and never again."""
    if device.type != "cuda" or device.type in _advised:
        return
    _advised.add(device.type)
    settings = ",".join(os.environ.get(name, "") for name in VARIABLES)
    for advice in allocator_advice(settings, spills=driver_spills()):
        logger.warning("eagle31: %s", advice)
