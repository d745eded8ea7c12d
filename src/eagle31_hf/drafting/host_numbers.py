"""Numbers that the host knows, where a device needs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(numbers: Any, device: torch.device) -> Tensor:
    """A tensor of `numbers`, nested lists of whole numbers or truth values, for which the host does not wait.

    `torch.tensor(numbers, device=...)` waits until the device has copied them. CUDA stages memory that is not pinned
    before a copy returns, so the source may go at once.
    """
    made = torch.tensor(numbers)
    return made.to(device, non_blocking=device.type == "cuda")
