"""Which floating-point type a device computes in quickly, and when it has done what it was sent.

A CPU without 16-bit arithmetic converts every weight to float32 each time it is multiplied. One token at a time that
may go unnoticed, since reading half the bytes makes up for it; verifying several at once is two to three times slower.
"""

from __future__ import annotations

import logging
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

PROCESSOR_FACTS = Path("/proc/cpuinfo")
ARITHMETIC = {  # by type: flags (x86) and features (Arm) of processors that multiply it themselves
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "svebf16", "bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16", "asimdhp"),
}
FIRST_BFLOAT16_CUDA = (8, 0)

SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Of torch's types, as people write them."""

PRECISIONS = ("auto", "stored", *SHORT_NAMES.values(), *SHORT_NAMES)
"""What can be chosen by name."""


def is_emulated(dtype: torch.dtype) -> bool:
    """Whether this CPU has no arithmetic of its own for `dtype`; false where the system does not say."""
    try:
        announced = PROCESSOR_FACTS.read_text(encoding="ascii", errors="replace").lower().split()
    except OSError:  # not Linux
        return False
    return dtype in ARITHMETIC and set(announced).isdisjoint(ARITHMETIC[dtype])


def quick_dtype(stored: torch.dtype, device: torch.device | str) -> torch.dtype:
    """What weights stored as `stored` are computed in quickest: their own type, unless the device has to emulate it."""
    device = torch.device(device)
    if device.type == "cpu" and is_emulated(stored):
        return torch.float32
    is_bfloat16 = stored is torch.bfloat16
    if device.type == "cuda" and is_bfloat16 and torch.cuda.get_device_capability(device) < FIRST_BFLOAT16_CUDA:
        return torch.float16
    return stored


def precision_caution(model: Any) -> str:
    """What the owner of a model should know of its precision on its device; empty if that is the quick one."""
    dtype, device = model.dtype, model.device
    quick = quick_dtype(dtype, device)
    if quick == dtype or getattr(model, "hf_quantizer", None) is not None:
        return ""
    kind, better = (str(each).removeprefix("torch.") for each in (dtype, quick))
    place = "this processor" if device.type == "cpu" else "this GPU"
    return (
        f"the target is in {kind}, which {place} has no arithmetic of its own for: verifying several tokens at once is "
        f"slow, and drafts bring less. Load it with dtype=torch.{better}"
        + (" (twice the memory)" if quick.itemsize > dtype.itemsize else "")
    )


@lru_cache
def warn_once(caution: str) -> None:
    """Log a caution, if there is one."""
    if caution:
        logger.warning("eagle31: %s", caution)


def now(device: torch.device) -> float:
    """Seconds, after everything sent to `device` has been computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
