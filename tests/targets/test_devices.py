"""Which precision is quick: by what processors announce, not by what this one is."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle31_hf.cli.pairs import PairSource, load_pair
from eagle31_hf.drafter import loading
from eagle31_hf.targets import devices
from eagle31_hf.targets.devices import precision_caution, quick_dtype, warn_once
from helpers import DEMO_DRAFTER, MODELS

PROCESSORS = {  # what they announce; what bfloat16 and float16 are computed in
    "Zen 3": ("flags\t\t: fpu fma avx avx2 sha_ni", torch.float32, torch.float32),
    "Cooper Lake": ("flags\t\t: avx2 avx512f avx512_bf16", torch.bfloat16, torch.float32),
    "Sapphire Rapids": ("flags\t\t: avx512_bf16 avx512_fp16 amx_bf16", torch.bfloat16, torch.float16),
    "Graviton 3": ("Features\t: fp asimd asimdhp svebf16 bf16", torch.bfloat16, torch.float16),
    "Cortex-A72": ("Features\t: fp asimd evtstrm crc32", torch.float32, torch.float32),
}


@pytest.fixture(params=PROCESSORS)
def processor(request, tmp_path: Path, monkeypatch) -> tuple[torch.dtype, torch.dtype]:
    text, *answers = PROCESSORS[request.param]
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor\t: 0\n{text}\n", encoding="ascii")
    monkeypatch.setattr(devices, "PROCESSOR_FACTS", facts)
    return tuple(answers)


def test_a_processor_computes_in_what_it_announces(processor) -> None:
    dtype, half = processor
    assert quick_dtype(torch.bfloat16, "cpu") is dtype
    assert quick_dtype(torch.float16, "cpu") is half
    assert quick_dtype(torch.float32, "cpu") is torch.float32


def test_where_the_system_does_not_say_weights_stay_as_they_are(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(devices, "PROCESSOR_FACTS", tmp_path / "nothing")
    assert quick_dtype(torch.bfloat16, "cpu") is torch.bfloat16


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float16), ((8, 9), torch.bfloat16)])
def test_a_gpu_before_ampere_computes_in_float16(monkeypatch, capability, dtype) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert quick_dtype(torch.bfloat16, "cuda") is dtype


def test_the_owner_of_a_slow_model_is_told_once(processor, caplog) -> None:
    dtype, _ = processor
    warn_once.cache_clear()
    model = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cpu"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            warn_once(precision_caution(model))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (dtype is torch.float32)
    assert all("Load it with dtype=torch.float32 (twice the memory)" in line for line in said)
    model.hf_quantizer = object()
    assert not precision_caution(model), "packed weights are computed in what their format says"


@pytest.mark.parametrize(
    ("settings", "loaded"), [("auto", torch.float32), ("stored", torch.bfloat16), ("bfloat16", torch.bfloat16)]
)
def test_commands_load_what_is_quick_unless_told_otherwise(monkeypatch, settings, loaded) -> None:
    monkeypatch.setattr(loading, "quick_dtype", lambda stored, device: torch.float32)
    pair = load_pair(PairSource([str(MODELS / "demo-target"), str(DEMO_DRAFTER)], dtype=settings, device="cpu"))
    assert pair.target.dtype is loaded
    assert pair.drafter.dtype is loaded
