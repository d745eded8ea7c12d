"""Memory runs out, everywhere in turn: the text is what it would have been, and the next call is undisturbed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from eagle31_hf.cache.layers import SlotLayer
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.errors import Eagle31Error, OutOfMemoryError
from eagle31_hf.graphs.round_graphs import RoundStep
from eagle31_hf.loop import pair_caches
from eagle31_hf.loop.decoder import SpeculativeDecoder
from eagle31_hf.loop.pair import Pair
from eagle31_hf.loop.prefill import ChunkedPrefill
from helpers import configured, drafter_of, target_of, use_fixed_shapes_only
from memory_faults import (
    CHUNKED,
    DROPPED,
    FREED,
    LENGTHS,
    METHODS,
    SHAPES,
    Fault,
    assert_survives,
    assert_undisturbed,
    live_storages,
    modules_of,
    speculative,
    steps_of,
    truth_of,
)

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def no_leak() -> Iterator[None]:
    """As many storages alive afterwards as before. What is made once is made first."""
    for batch in LENGTHS:
        truth_of("llama", batch, True)
        for shape in SHAPES:
            assert_undisturbed("llama", shape, batch)
    for rows, size in itertools.product((1, 2, 3), range(1, 5)):  # what chains are made of is kept
        DraftTree.chain(torch.zeros(rows, size, dtype=torch.long))
    before = len(live_storages())
    yield
    assert len(live_storages()) <= before


# --- every layer, every stage ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "batch"), [("chain", 3), ("tree", 1)])  # the others: the next test
@pytest.mark.thorough(every=2)
def test_a_module_runs_out_of_memory_at_any_call(shape: str, batch: int, no_leak: None) -> None:
    """In the first chunk, in a later one, in the first drafts and verifications, in later rounds."""
    points = 0
    for number, module in enumerate(modules_of("llama").values()):
        for first in (1 + number % 2, 3 + number % 3, 7):
            fault = Fault(first)
            assert_survives("llama", shape, batch, fault.in_module(module))
            points += fault.raised
    assert points >= 36
    assert_undisturbed("llama", shape, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "batch"), [("chain", 1), ("tree", 3)])
@pytest.mark.thorough(every=2)
def test_a_step_runs_out_of_memory_at_any_call(shape: str, batch: int, no_leak: None) -> None:
    """Before and after each step of the loop, in a text whose rows end at different times."""
    reached, points = set(), 0
    for place, (owner, name) in METHODS.items():
        for fault, first in ((Fault(1), "before"), (Fault(1), "after"), (Fault(3), "before")):
            assert_survives("llama", shape, batch, getattr(fault, first)(owner, name), end=True)
            points += fault.raised
            reached |= {place} if fault.raised else set()
    batches_only = {"rows of the cache", "rows of the drafter"}
    assert set(METHODS) - reached <= ({"growth"} if batch > 1 else {"growth", "copy"} | batches_only)
    assert points >= 45
    assert_undisturbed("llama", shape, batch)


def test_a_cache_that_cannot_grow_grows_by_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_caches, "SLAB", 8)
    for first in (1, 3, 5):
        assert assert_survives("llama", "tree", 3, Fault(first).before(SlotLayer, "_grow"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("mistral", "chain"), ("mistral", "tree"), ("gemma3", "tree")])
@pytest.mark.thorough(every=3)
def test_windows_that_have_slid_are_read_again(name: str, shape: str) -> None:
    """The caches are made anew from the text."""
    for place in ("absorb", "copy", "keep", "commit", "write", "verify", "rows of the cache"):
        for first in (2, 4):
            assert_survives(name, shape, 3, Fault(first).before(*METHODS[place]), end=True)
    assert_undisturbed(name, shape, 3)


@pytest.mark.parametrize("place", ["absorb", "write", "verify", "rows of the cache", "draft step"])
def test_a_quantised_cache_comes_back_too(place: str) -> None:
    with configured(drafter_of("llama"), cache_type="int8", **SHAPES["tree"]):
        undisturbed = speculative("llama", 3, end=True)
        with Fault(3).before(*METHODS[place]) as fault:
            assert torch.equal(speculative("llama", 3, end=True), undisturbed)
        assert fault.raised


@pytest.mark.parametrize(
    ("shape", "place"),
    itertools.product(SHAPES, ("commit", "keep", "text", "verify", "round end")),
)
@pytest.mark.thorough(every=2)
def test_ended_rows_that_stay_for_a_graph_are_in_nobodys_way(
    shape: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was compiled for goes on without graphs, and without those rows."""
    use_fixed_shapes_only(monkeypatch)
    monkeypatch.setattr(Pair.of(drafter_of("llama")), "graphs", None)
    running, go = [], SpeculativeDecoder.step
    monkeypatch.setattr(SpeculativeDecoder, "step", lambda self: running.append(self) or go(self))
    raised, where = 0, {**METHODS, "round end": (RoundStep, "advance")}[place]
    with configured(drafter_of("llama"), acceleration="compile"):
        for first in range(1, 5):
            fault = Fault(first, holds=lambda *_: bool(running) and bool(standing_still(running[-1])))
            assert_survives("llama", shape, 3, fault.before(*where), end=True)
            raised += fault.raised
    assert raised >= 2


def standing_still(decoder: SpeculativeDecoder) -> set[int]:
    """Places of rows that have ended and are still in the batch."""
    return set(range(len(decoder.rows))) - set(decoder.unfinished_rows())


# --- causes that stay until they are removed -------------------------------------------------------------------------


CAUSES: dict[str, tuple[str, Callable[..., bool]]] = {  # place, and whether memory is short there
    "wide verification": ("verify", lambda _, tree: tree.size > 2),
    "draft steps": ("draft step", lambda *_: True),
    "the drafter": ("absorb", lambda *_: True),
    "the drafter's head": ("draft logits", lambda *_: True),
}


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("cause", CAUSES)
def test_steps_are_taken_until_the_cause_is_gone(cause: str, batch: int, quick: mock.Mock) -> None:
    """Memory is given back before anything else is given up."""
    place, holds = CAUSES[cause]
    fault = Fault(times=10**6, holds=holds)
    steps = assert_survives("llama", "tree", batch, fault.before(*METHODS[place]), end=True)
    assert steps == {FREED: 1, DROPPED: 1}
    assert quick.call_count == 2
    assert_undisturbed("llama", "tree", batch)


def test_accepted_nodes_that_cannot_be_moved_are_no_longer_drafted() -> None:
    fault = Fault(times=10**6)
    assert assert_survives("llama", "tree", 3, fault.before(*METHODS["copy"])) == {FREED: 1, DROPPED: 1}


def test_a_long_prompt_is_read_in_smaller_chunks() -> None:
    target, drafter = target_of("llama"), drafter_of("llama")
    ids = torch.randint(3, 90, (1, 150), generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "prefill_chunk_size": 100}
    truth = target.generate(ids, **arguments)
    widths: list[int] = []

    def too_wide(_reader: Any, columns: Tensor, *_: Any) -> bool:
        widths.append(columns.shape[1])
        return columns.shape[1] > 40

    with Fault(times=10**6, holds=too_wide).before(ChunkedPrefill, "_forward"):
        assert torch.equal(target.generate(ids, assistant_model=drafter, **arguments), truth)
    assert steps_of("llama") == {FREED: 1, CHUNKED: 1}
    assert widths[:3] == [100, 100, 32], "not below the smallest chunk, though a fourth would be 25"


# --- when nothing is left ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "written"), [(1, 0), (5, 1)])
def test_at_last_it_says_what_was_given_up(first: int, written: int) -> None:
    head = target_of("llama").lm_head
    truth_of("llama", 3, False)  # before memory is short
    with (
        configured(drafter_of("llama"), **SHAPES["tree"]),
        Fault(first, times=10**6).in_module(head),
        pytest.raises(OutOfMemoryError) as caught,
    ):
        speculative("llama", 3)
    said = str(caught.value)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value, Eagle31Error)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    for part in (FREED, DROPPED, "max_new_tokens", "eagle31 plan", "Tried to allocate 20.00 MiB"):
        assert part in said
    if not written:
        assert "after 0 new tokens" in said
    assert_undisturbed("llama", "tree", 3)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("shapes cannot be multiplied"), ValueError("no")])
@pytest.mark.parametrize("place", ["write", "draft step", "verify", "absorb", "keep", "text", "commit"])
@pytest.mark.thorough(every=2)
def test_other_errors_pass_and_leave_everything_usable(error: BaseException, place: str) -> None:
    with (
        configured(drafter_of("llama"), **SHAPES["tree"]),
        Fault(2, error=error).before(*METHODS[place]),
        pytest.raises(type(error)) as caught,
    ):
        speculative("llama", 3)
    assert caught.value is error
    assert drafter_of("llama").stats.memory_steps == {}
    assert_undisturbed("llama", "tree", 3)


def test_each_step_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault(times=10**6, holds=lambda _, tree: tree.size > 2)
    assert_survives("llama", "tree", 1, fault.before(*METHODS["verify"]))
    said = [record.getMessage() for record in caplog.records if "memory ran out" in record.getMessage()]
    assert len(said) == 2
    assert "at verify (CUDA out of memory" in said[0]
    assert "drafting stopped" in said[1]
