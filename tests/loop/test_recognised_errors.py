"""What counts as running out of memory."""

from __future__ import annotations

import platform

import pytest
import torch

from eagle31_hf.loop.survive import is_out_of_memory
from eagle31_hf.memory.cards import driver_spills

RAN_OUT: list[BaseException] = [
    torch.OutOfMemoryError("CUDA out of memory."),
    torch.cuda.OutOfMemoryError("HIP out of memory."),
    RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB)"),
    RuntimeError("Invalid buffer size: 24.00 GiB"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]
OTHERS: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: device-side assert triggered"),
    ValueError("CUDA out of memory"),
    OSError("Cannot allocate memory"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", [*RAN_OUT, *OTHERS])
def test_running_out_of_memory_is_recognised_and_nothing_else(error: BaseException) -> None:
    assert is_out_of_memory(error) == (error in RAN_OUT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the allocator of a CPU is asked")
def test_what_this_machine_says_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("system", "release", "spills"),
    [("Windows", "11", True), ("Linux", "6.6.87-microsoft-standard-WSL2", True), ("Linux", "6.8.0-generic", False)],
)
def test_drivers_of_windows_spill(monkeypatch: pytest.MonkeyPatch, system: str, release: str, spills: bool) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    assert driver_spills() == spills
