"""The way down as data, what counts as running out of memory, and advice on the allocator."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding_request import DraftShape
from eagle31_hf.memory import allocator
from eagle31_hf.memory.allocator import AllocatorSetup, allocator_advice
from eagle31_hf.memory.ladder import SMALLEST_CHUNK, WAYS_DOWN, Ladder, Means, Rung, Stage, is_out_of_memory
from eagle31_hf.topology import StaticTopology

MEANS = st.builds(
    Means,
    draft_tokens=st.integers(0, 64),
    is_tree=st.booleans(),
    chunk=st.integers(1, 8192),
    hands_over=st.booleans(),
    on_device=st.booleans(),
)


def way_down(means: Means, stage: Stage) -> list[Rung]:
    ladder, taken = Ladder(means), []
    while (rung := ladder.step_down(stage)) is not None:
        taken.append(rung)
        assert len(taken) < 100
    return taken


@given(MEANS, st.sampled_from(Stage))
def test_every_way_ends_and_keeps_its_order(means: Means, stage: Stage) -> None:
    taken = way_down(means, stage)
    assert [rung for rung in WAYS_DOWN[stage] if rung in taken] == list(dict.fromkeys(taken))
    assert taken == sorted(taken, key=WAYS_DOWN[stage].index)
    assert taken[0] is Rung.FREE
    assert taken.count(Rung.FREE) == taken.count(Rung.DROP) + (means.draft_tokens == 0)
    assert (Rung.HOST in taken) == means.on_device


@given(MEANS, st.lists(st.sampled_from(Stage), max_size=200))
def test_nothing_is_given_up_twice_or_given_back(means: Means, stages: list[Stage]) -> None:
    ladder = Ladder(means)
    for stage in stages:
        before = ladder.means
        rung = ladder.step_down(stage)
        after = ladder.means
        assert after.draft_tokens <= before.draft_tokens
        assert after.chunk <= before.chunk
        assert after.is_tree <= before.is_tree
        assert after.hands_over <= before.hands_over
        assert after.on_device <= before.on_device
        assert (after == before) == (rung in (None, Rung.FREE))


def test_a_tree_becomes_a_chain_and_chains_are_halved() -> None:
    ladder = Ladder(Means(draft_tokens=6, is_tree=True, chunk=2048))
    seen = []
    while ladder.step_down(Stage.VERIFY) is not None:
        seen.append((ladder.means.draft_tokens, ladder.means.is_tree))
    assert seen == [(6, True), (6, False), (3, False), (1, False), (0, False)]


def test_chunks_are_cut_down_to_the_smallest_and_no_further() -> None:
    ladder, chunks = Ladder(Means(draft_tokens=2, is_tree=False, chunk=2048)), []
    while ladder.step_down(Stage.READ) is Rung.FREE or ladder.means.draft_tokens:
        chunks.append(ladder.means.chunk)
    assert chunks == [2048, 512, 128, SMALLEST_CHUNK]


def test_what_does_not_help_is_not_tried() -> None:
    means = Means(draft_tokens=4, is_tree=True, chunk=512, hands_over=True, on_device=True)
    assert Rung.SHORTEN not in way_down(means, Stage.READ)
    assert Rung.CHUNK not in way_down(means, Stage.VERIFY)
    assert way_down(means, Stage.HAND_OVER) == [Rung.FREE, Rung.FORGET, Rung.DROP, Rung.HOST]


def test_workspaces_are_freed_once_per_stage() -> None:
    ladder = Ladder(Means(draft_tokens=4, is_tree=False, chunk=512))
    assert [ladder.step_down(stage) for stage in (Stage.READ, Stage.VERIFY, Stage.READ, Stage.VERIFY)] == [
        Rung.FREE, Rung.FREE, Rung.CHUNK, Rung.SHORTEN,
    ]  # fmt: skip


@given(st.integers(1, 8), st.integers(0, 8), st.booleans(), st.booleans())
def test_a_reduced_shape_is_never_larger(depth: int, left: int, is_tree: bool, is_static: bool) -> None:
    static = StaticTopology.best_for([0.7, 0.2], depth=depth, size=4 * depth) if is_static else None
    shape = DraftShape(depth, top_k=2, size=4 * depth, static=static)
    reduced = shape.reduced_to(left, is_tree=is_tree)
    assert reduced.depth == min(depth, left)
    assert reduced.nodes <= shape.nodes
    assert reduced.draft_block <= shape.draft_block
    assert reduced.is_tree <= is_tree


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        torch.cuda.OutOfMemoryError("HIP out of memory."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB)"),
        RuntimeError("Invalid buffer size: 24.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("CUDA out of memory"),
        OSError("Cannot allocate memory"),
        KeyboardInterrupt(),
    ],
)
def test_nothing_else_is_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the allocator of a CPU is asked")
def test_what_this_machine_says_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


# --- allocator --------------------------------------------------------------------------------------------------------

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (AllocatorSetup({}), ["expandable_segments:True"]),
        (AllocatorSetup({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}), ["expandable_segments:True"]),
        (AllocatorSetup(EXPANDABLE), []),
        (AllocatorSetup({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}), []),
        (AllocatorSetup({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}), []),
        (AllocatorSetup({}, system="Windows"), ["Sysmem Fallback"]),
        (AllocatorSetup({}, is_wsl=True), ["Sysmem Fallback"]),
        (AllocatorSetup(EXPANDABLE, is_wsl=True), ["Sysmem Fallback"]),
    ],
)
def test_advice_fits_the_machine(setup: AllocatorSetup, said: list[str]) -> None:
    advice = allocator_advice(setup)
    assert len(advice) == len(said)
    assert all(words in line for words, line in zip(said, advice, strict=True))


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert AllocatorSetup.of_this_process().expands_segments
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    assert not AllocatorSetup.of_this_process().expands_segments


def test_advice_is_given_once_and_for_cuda_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "eagle31_hf")
    monkeypatch.setattr(allocator, "_advised", set())
    monkeypatch.setattr(AllocatorSetup, "of_this_process", lambda: AllocatorSetup({}))
    for device in ("cpu", "mps", "cuda", "cuda:0"):
        allocator.advise_once(torch.device(device))
    assert len(caplog.records) == 1
