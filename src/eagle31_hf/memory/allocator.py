"""Settings of the CUDA allocator and of the driver that decide whether memory that is free can be had."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .cards import driver_spills

logger = logging.getLogger(__name__)

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name first: torch 2.9.1 reads only that one on CUDA (pytorch#183387), later ones read both."""


@dataclass(frozen=True)
class AllocatorSetup:
    """What the advice depends on.

    Attributes:
        settings: content of the variables in `VARIABLES`, empty ones left out.
        spills: see `cards.driver_spills`.
    """

    settings: Mapping[str, str]
    spills: bool = False

    @classmethod
    def of_this_process(cls) -> AllocatorSetup:
        settings = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
        return cls(settings, driver_spills())

    @property
    def expands_segments(self) -> bool:
        """Whether segments grow instead of being left behind in pieces."""
        said = ",".join(self.settings.values()).lower().replace(" ", "")
        return "expandable_segments:true" in said

    @property
    def has_other_backend(self) -> bool:
        """cudaMallocAsync has no segments."""
        return "backend:cudamallocasync" in ",".join(self.settings.values()).lower().replace(" ", "")


def allocator_advice(setup: AllocatorSetup) -> list[str]:
    """What should be set differently and why; empty if all is well."""
    advice = []
    # Windows has no expandable segments; some WSL installations fail their first allocation with them (pytorch#192330).
    if not (setup.expands_segments or setup.has_other_backend or setup.spills):
        assignments = " ".join(f"{name}=expandable_segments:True" for name in VARIABLES)
        advice.append(
            f"set {assignments} before torch is imported: a cache that grows otherwise leaves its old blocks behind "
            "in sizes nothing else fits, and memory runs out although enough is free"
        )
    if setup.spills:
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
    for advice in allocator_advice(AllocatorSetup.of_this_process()):
        logger.warning("eagle31: %s", advice)
