"""The way down as data, what counts as running out of memory, and advice on the allocator."""

from __future__ import annotations

import logging
import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.decoding.memory_ladder import (
    FALLBACKS,
    SMALLEST_CHUNK,
    Budget,
    FallbackPolicy,
    FallbackStep,
    Stage,
    is_out_of_memory,
)
from eagle31_hf.memory import allocator
from eagle31_hf.memory.allocator import allocator_advice
from eagle31_hf.memory.cards import driver_spills
from eagle31_hf.trees.shape import DraftShape

BUDGETS = st.builds(
    Budget,
    draft_tokens=st.integers(0, 64),
    is_tree=st.booleans(),
    chunk=st.integers(1, 8192),
    on_device=st.booleans(),
)


def way_down(budget: Budget, stage: Stage) -> list[FallbackStep]:
    policy, taken = FallbackPolicy(budget), []
    while (step := policy.step_down(stage)) is not None:
        taken.append(step)
        assert len(taken) < 100
    return taken


@given(BUDGETS, st.sampled_from(Stage))
def test_every_way_ends_and_keeps_its_order(budget: Budget, stage: Stage) -> None:
    taken = way_down(budget, stage)
    assert [step for step in FALLBACKS[stage] if step in taken] == list(dict.fromkeys(taken))
    assert taken == sorted(taken, key=FALLBACKS[stage].index)
    assert taken[0] is FallbackStep.FREE
    assert taken.count(FallbackStep.FREE) == taken.count(FallbackStep.DROP) + (budget.draft_tokens == 0)
    assert (FallbackStep.HOST in taken) == budget.on_device


@given(BUDGETS, st.lists(st.sampled_from(Stage), max_size=200))
def test_nothing_is_given_up_twice_or_given_back(budget: Budget, stages: list[Stage]) -> None:
    policy = FallbackPolicy(budget)
    for stage in stages:
        before = policy.budget
        step = policy.step_down(stage)
        after = policy.budget
        assert after.draft_tokens <= before.draft_tokens
        assert after.chunk <= before.chunk
        assert after.is_tree <= before.is_tree
        assert after.on_device <= before.on_device
        assert (after == before) == (step in (None, FallbackStep.FREE))


def test_a_tree_becomes_a_chain_and_chains_are_halved() -> None:
    policy = FallbackPolicy(Budget(draft_tokens=6, is_tree=True, chunk=2048))
    seen = []
    while policy.step_down(Stage.VERIFY) is not None:
        seen.append((policy.budget.draft_tokens, policy.budget.is_tree))
    assert seen == [(6, True), (6, False), (3, False), (1, False), (0, False)]


def test_chunks_are_cut_down_to_the_smallest_and_no_further() -> None:
    policy, chunks = FallbackPolicy(Budget(draft_tokens=2, is_tree=False, chunk=2048)), []
    while policy.step_down(Stage.PREFILL) is FallbackStep.FREE or policy.budget.draft_tokens:
        chunks.append(policy.budget.chunk)
    assert chunks == [2048, 512, 128, SMALLEST_CHUNK]


def test_what_does_not_help_is_not_tried() -> None:
    budget = Budget(draft_tokens=4, is_tree=True, chunk=512, on_device=True)
    assert FallbackStep.SHORTEN not in way_down(budget, Stage.PREFILL)
    assert FallbackStep.CHUNK not in way_down(budget, Stage.VERIFY)


def test_workspaces_are_freed_once_per_stage() -> None:
    policy = FallbackPolicy(Budget(draft_tokens=4, is_tree=False, chunk=512))
    assert [policy.step_down(stage) for stage in (Stage.PREFILL, Stage.VERIFY, Stage.PREFILL, Stage.VERIFY)] == [
        FallbackStep.FREE, FallbackStep.FREE, FallbackStep.CHUNK, FallbackStep.SHORTEN,
    ]  # fmt: skip


@given(st.integers(1, 8), st.integers(0, 8), st.booleans())
def test_a_reduced_shape_is_never_larger(depth: int, left: int, is_tree: bool) -> None:
    shape = DraftShape(depth, top_k=2, size=4 * depth)
    reduced = shape.reduced_to(left, is_tree=is_tree)
    assert reduced.depth == min(depth, left)
    assert reduced.nodes <= shape.nodes
    assert reduced.draft_block <= shape.draft_block
    assert reduced.is_tree <= is_tree


@given(st.integers(2, 12), st.integers(2, 30))
def test_a_chain_has_fewer_nodes_than_the_tree_it_was_made_of(depth: int, size: int) -> None:
    """Which may be deep and have few."""
    shape = DraftShape(depth, top_k=3, size=size)
    reduced = shape.reduced_to(depth, is_tree=False)
    assert reduced.nodes < shape.nodes or reduced.nodes == 2


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

EXPANDABLE = "max_split_size_mb:128, expandable_segments:True"


@pytest.mark.parametrize(
    ("settings", "spills", "said"),
    [
        ("", False, ["expandable_segments:True"]),
        ("expandable_segments:False", False, ["expandable_segments:True"]),
        (EXPANDABLE, False, []),
        ("backend:cudaMallocAsync", False, []),
        ("", True, ["Sysmem Fallback"]),
        (EXPANDABLE, True, ["Sysmem Fallback"]),
    ],
)
def test_advice_fits_the_machine(settings: str, spills: bool, said: list[str]) -> None:
    advice = allocator_advice(settings, spills=spills)
    assert len(advice) == len(said)
    assert all(words in line for words, line in zip(said, advice, strict=True))


@pytest.mark.parametrize(
    ("system", "release", "spills"),
    [("Windows", "11", True), ("Linux", "6.6.87-microsoft-standard-WSL2", True), ("Linux", "6.8.0-generic", False)],
)
def test_drivers_of_windows_spill(monkeypatch: pytest.MonkeyPatch, system: str, release: str, spills: bool) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    assert driver_spills() == spills


@pytest.mark.parametrize("variable", allocator.VARIABLES)
def test_the_environment_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    monkeypatch.setattr(allocator, "_advised", set())
    monkeypatch.setattr(allocator, "driver_spills", lambda: False)
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, EXPANDABLE)
    allocator.advise_once(torch.device("cuda"))
    assert not caplog.records


def test_advice_is_given_once_and_for_cuda_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "eagle31_hf")
    monkeypatch.setattr(allocator, "_advised", set())
    monkeypatch.setattr(allocator, "driver_spills", lambda: False)
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for device in ("cpu", "mps", "cuda", "cuda:0"):
        allocator.advise_once(torch.device(device))
    assert len(caplog.records) == 1
