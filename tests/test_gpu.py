"""What must hold on a CUDA card. Each test also runs on the CPU, so that nothing but the device is new on a card."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.graphs.captured import CapturedStep
from eagle31_hf.loop import kept_graphs
from eagle31_hf.loop.pair import Pair
from eagle31_hf.memory.cards import measure_card
from eagle31_hf.memory.dry_run import StorageCounter
from families import RECURRENT_FAMILIES, recurrent_target
from helpers import (
    CONFIGS,
    GROUPED,
    PACKINGS,
    assert_same_or_tie,
    assert_same_text,
    configured,
    left_padded,
    oracle_drafts,
    random_drafter,
    random_prompts,
    random_target,
    use_fixed_shapes_only,
    write,
)
from peak_runs import RUNS, AllocatorMeter, PeakRun, StorageMeter, measure_peak

on_a_card = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_card)])

CHAIN: dict[str, Any] = {"speculation_loop": "own", "num_assistant_tokens": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "tree": {**CHAIN, "draft_top_k": 2, "draft_tree_size": 15},
}
LENGTH: dict[str, Any] = {"max_new_tokens": 24}


def _pair(family: str, device: str, dtype: torch.dtype = torch.float32) -> Eagle31Drafter:
    made = recurrent_target(family) if family in RECURRENT_FAMILIES else random_target(CONFIGS[family]())
    return random_drafter(made.to(device=device, dtype=dtype), aux_layers=[1, 2, 4])


def _inputs(rows: int, device: str, seed: int = 0) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in left_padded(random_prompts(rows, seed=seed)).items()}


def _with_drafts(drafter: Eagle31Drafter, inputs: dict[str, Tensor], plain: Tensor, **fields: Any) -> Tensor:
    """The text by our own loop, with drafts that are right for a while."""
    with configured(drafter, **fields), oracle_drafts(plain, inputs["input_ids"].shape[1]):
        ours = write(drafter.binding.model, inputs, assistant_model=drafter, **LENGTH)
    assert drafter.stats.loop == "own"
    return ours


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "how"),
    [("llama", {}), ("mistral", {}), ("llama", {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3})],
    ids=["full layers", "windows", "trees judged going down, with a wait per level"],
)
def test_our_loop_writes_the_plain_text(family: str, how: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    if how and dtype == torch.bfloat16:
        pytest.skip("a tie is found by scores that no processor has changed")
    drafter = _pair(family, device, dtype)
    for rows, fields in itertools.product((1, 3), SHAPES.values()):
        inputs = _inputs(rows, device, seed=rows)
        if dtype == torch.float32:
            assert_same_text(drafter.binding.model, drafter, inputs, oracle=0, settings=fields, **LENGTH, **how)
        else:
            plain = write(drafter.binding.model, inputs, **LENGTH)
            assert_same_or_tie(drafter.binding.model, inputs, plain, _with_drafts(drafter, inputs, plain, **fields))


@devices
def test_a_cache_in_eight_bits_reads_the_same_with_drafts(device: str) -> None:
    drafter = _pair("llama", device)
    model, inputs = drafter.binding.model, _inputs(2, device)
    with configured(drafter, cache_type="int8", **CHAIN):
        with oracle_drafts(write(model, inputs, **LENGTH), inputs["input_ids"].shape[1], right=0):
            truth = write(model, inputs, assistant_model=drafter, **LENGTH)
        assert drafter.stats.cache_type == "int8"
    for fields in SHAPES.values():
        assert torch.equal(_with_drafts(drafter, inputs, truth, cache_type="int8", **fields), truth)


@devices
@pytest.mark.parametrize("packing", ["nf4-dq", "int8"])
def test_packed_targets_and_drafters_write_the_plain_text(packing: str, device: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    bits = hf.BitsAndBytesConfig(**PACKINGS[packing])
    made = random_target(hf.LlamaConfig(**GROUPED | {"intermediate_size": 128}))
    random_drafter(made, aux_layers=[1, 2, 4]).save_pretrained(tmp_path / "drafter")
    made.save_pretrained(tmp_path / "target")
    target = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", dtype=torch.float32, quantization_config=bits, device_map={"": device}
    ).eval()
    for quantization_config in (None, bits):
        drafter = Eagle31Drafter.from_pretrained(
            tmp_path / "drafter", target=target, quantization_config=quantization_config
        )
        inputs = _inputs(1, device)
        plain = write(target, inputs, **LENGTH)
        for fields in SHAPES.values():
            ours = _with_drafts(drafter, inputs, plain, **fields)
            assert_same_or_tie(target, inputs, plain, ours)
        drafter.detach()


@devices
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_steps_write_the_plain_text(shape: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA every step is a captured graph, and so is all of a round but its verification, unless trees are static;
    on the CPU the same steps run uncompiled."""
    if device == "cpu":
        use_fixed_shapes_only(monkeypatch)
    drafter = _pair("llama", device)
    how: dict[str, Any] = {"oracle": 0, "settings": {"acceleration": "compile", **SHAPES[shape]}, **LENGTH}
    for rows in (1, 3):
        for _ in range(2):  # made, then replayed
            assert_same_text(drafter.binding.model, drafter, _inputs(rows, device, seed=rows), **how)
            assert drafter.stats.fallbacks == []
    compiled: Any = Pair.of(drafter).graphs
    kinds = {kind for kind, *_ in compiled.keys}
    whole = {"chain": {"chain", "advance"}, "tree": {"tree", "advance"}}
    assert kinds & {"chain", "tree", "advance"} == whole.get(shape, set())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "nemotron_h", "lfm2"])
def test_captured_steps_write_the_plain_text(family: str, shape: str, rows: int) -> None:
    """What `acceleration="auto"` does on a card. On the CPU: test_captured_steps.py and test_captured_states.py in
    tests/generate."""
    drafter, made = _pair(family, "cuda"), CapturedStep._record
    recorded: list[int] = []

    def record(self: CapturedStep, *given: Any) -> Any:
        recorded.append(len(given))
        return made(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapturedStep, "_record", record)
        patch.setattr(kept_graphs, "FEWEST_CAPTURED_TOKENS", 1)
        for seed in range(4):
            inputs, how = _inputs(rows, "cuda", seed), {"oracle": 0, "settings": SHAPES[shape]}
            assert_same_text(drafter.binding.model, drafter, inputs, **how, **LENGTH)
            assert drafter.stats.fallbacks == []
    assert recorded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_runs_take_what_was_planned(run: PeakRun) -> None:
    """Within 3 % of what the allocator counts, and never below it by more than 1 %.

    On the CPU: `test_small_runs_take_what_was_planned`.
    """
    device = torch.device("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    plan = run.to_plan(torch.bfloat16, measure_card(device))
    if not plan.fits:
        pytest.skip(f"needs {plan.peak_bytes / 2**30:.1f} GiB")
    record = measure_peak(run, plan, dtype=torch.bfloat16, device=device)
    assert abs(record.planned_weights - record.measured_weights) <= 0.01 * record.measured_weights
    assert 0.99 <= record.ratio <= 1.03, record


class _Scarce(StorageCounter):
    """A CPU on which no more than `spare_bytes` can be had."""

    def __init__(self, spare_bytes: int):
        super().__init__()
        self.spare_bytes = spare_bytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        if self.live_bytes + storage.nbytes() > self.spare_bytes:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes.")
        super()._count(storage)


@contextmanager
def _scarce(device: str, spare_bytes: int) -> Iterator[None]:
    if device == "cpu":
        with _Scarce(spare_bytes):
            yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# The CUDA allocator hands out pieces of 2 and 20 MiB: what is to run out there must be much larger than those.
LONG: dict[str, tuple[dict[str, Any], int]] = {
    "cpu": ({}, 400),
    "cuda": ({"hidden_size": 1024, "intermediate_size": 2816, "head_dim": 64, "max_position_embeddings": 8192}, 4096),
}


@devices
def test_too_little_memory_costs_steps_and_not_the_text(device: str) -> None:
    sizes, length = LONG[device]
    target = random_target(hf.LlamaConfig(**GROUPED | {"initializer_range": 0.05} | sizes)).to(device)
    drafter = random_drafter(target, aux_layers=[1, 2, 4])
    ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = write(target, inputs, **LENGTH)
    with configured(drafter, **CHAIN):
        meter = AllocatorMeter(torch.device(device)) if device == "cuda" else StorageMeter()
        peak = meter.peak(lambda: write(target, inputs, assistant_model=drafter, **LENGTH))
        with _scarce(device, int(0.6 * peak)):
            ours = write(target, inputs, assistant_model=drafter, **LENGTH)
        assert drafter.stats.memory_steps
        again = write(target, inputs, assistant_model=drafter, **LENGTH)
        assert not drafter.stats.memory_steps, "the next call starts as configured"
    for text in (ours, again):
        assert assert_same_or_tie(target, inputs, plain, text) == 0
