"""The host's clock, once a device has done what it was sent."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Seconds, after everything sent to `device` has been computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
