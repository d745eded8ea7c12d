"""Memory runs out, everywhere in turn: the text is what it would have been, and the next call is undisturbed.

Also beneath what a call brings along: scores, streamers, sampling, carried caches, layers that keep states.
"""

from __future__ import annotations

import itertools
import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf.cache import states
from eagle31_hf.cache.layers import SlotLayer
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.errors import Eagle31Error, OutOfMemoryError
from eagle31_hf.graphs.round_graphs import RoundStep
from eagle31_hf.loop import pair_caches, survive
from eagle31_hf.loop.carried_cache import CarriedCache
from eagle31_hf.loop.decoder import SpeculativeDecoder
from eagle31_hf.loop.pair import Pair
from eagle31_hf.loop.prefill import ChunkedPrefill
from eagle31_hf.loop.survive import NOT_HANDED_OVER, is_out_of_memory
from eagle31_hf.memory.cards import driver_spills
from families import clamped_target, recurrent_target
from helpers import (
    Shown,
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    random_drafter,
    random_prompts,
    target_of,
    use_fixed_shapes_only,
    write,
)
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
    how,
    inputs_of,
    live_storages,
    modules_of,
    speculative,
    steps_of,
    truth_of,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> mock.Mock:
    """Memory is given back without collecting garbage, which takes longer than a generation here: what is called."""
    caplog.set_level(logging.WARNING, "eagle31_hf")
    monkeypatch.setattr(survive, "give_back_memory", given_back := mock.Mock())
    return given_back


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
def test_steps_are_taken_until_the_cause_is_gone(
    cause: str, batch: int, quick: mock.Mock, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory is given back before anything else is given up, and each step is logged once."""
    place, holds = CAUSES[cause]
    fault = Fault(times=10**6, holds=holds)
    steps = assert_survives("llama", "tree", batch, fault.before(*METHODS[place]), end=True)
    assert steps == {FREED: 1, DROPPED: 1}
    assert quick.call_count == 2
    freed, dropped = (line for line in caplog.messages if "memory ran out" in line)
    assert ("at verify " if cause == "wide verification" else "") + "(CUDA out of memory" in freed
    assert "drafting stopped" in dropped
    assert_undisturbed("llama", "tree", batch)


def test_accepted_nodes_that_cannot_be_moved_are_no_longer_drafted() -> None:
    fault = Fault(times=10**6)
    assert assert_survives("llama", "tree", 3, fault.before(*METHODS["copy"])) == {FREED: 1, DROPPED: 1}


def test_a_long_prompt_is_read_in_smaller_chunks() -> None:
    ids = torch.randint(3, 90, (1, 150), generator=torch.Generator().manual_seed(0))
    widths: list[int] = []

    def too_wide(_reader: Any, columns: Tensor, *_: Any) -> bool:
        widths.append(columns.shape[1])
        return columns.shape[1] > 40

    with Fault(times=10**6, holds=too_wide).before(ChunkedPrefill, "_forward"):
        assert_same_text(target_of("llama"), drafter_of("llama"), ids, prefill_chunk_size=100, max_new_tokens=5)
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


# --- what else a call brings along -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["text", "keep", "absorb", "verify", "first token"])
def test_scores_are_those_of_the_text(place: str) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with Fault(1).after(*METHODS[place]) as fault:
        assert_same_text(
            target_of("llama"), drafter_of("llama"), inputs_of(3), oracle=3, settings=SHAPES["tree"],
            **how("llama", 3, False), **asked,
        )  # fmt: skip
    assert fault.raised


@pytest.mark.parametrize("place", ["text", "stop", "keep", "absorb", "first token"])
def test_nothing_is_streamed_twice_or_left_out(place: str) -> None:
    for fault, when in ((Fault(1), "after"), (Fault(3), "after"), (Fault(2), "before")):
        listener = Shown()
        with configured(drafter_of("llama"), **SHAPES["chain"]), getattr(fault, when)(*METHODS[place]):
            text = speculative("llama", 1, end=True, streamer=listener)
        assert listener.tokens == text[0].tolist()


def test_what_a_streamer_raises_is_its_own() -> None:
    listener = Shown()
    with Fault(3, error=MemoryError("mine")).before(listener, "put"), pytest.raises(MemoryError, match="mine"):
        speculative("llama", 1, streamer=listener)
    assert_undisturbed("llama", "chain", 1)


DRAFTED = {
    "verify": ("before", lambda _, tree, *rest: drafted_oddly(tree)),
    "accept": ("before", lambda _, tree, *rest: drafted_oddly(tree)),
    "accepted": ("after", lambda _, tree, *rest: drafted_oddly(tree)),
    "keep": ("before", lambda _, paths: 1 < max(map(len, paths)) <= 4),  # a prompt has more
    "absorb": ("before", lambda _, tokens, *rest: tokens.shape[1] > 1),
    "draft step": ("before", lambda *_: True),
    "first token": ("after", lambda *_: True),
}
"""Where memory runs out by what was drafted, or by what of it was accepted."""


def drafted_oddly(tree: DraftTree) -> bool:
    return tree.size > 1 and bool((tree.tokens[:, 1] % 2 == 1).any())


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", DRAFTED)
@pytest.mark.thorough(every=2)
def test_what_was_drafted_when_memory_ran_out_decides_about_no_draw(place: str, shape: str, times: int) -> None:
    """A repeated round that drew anew would have fewer of the tokens that had been drafted before it."""
    when, holds = DRAFTED[place]
    method = METHODS["accept" if place == "accepted" else place]
    sampled: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 1.0, "settings": SHAPES[shape]}
    raised = 0
    for batch, seed in ((1, 1), (1, 2), (3, 3)):
        fault = Fault(times=1 if place == "first token" else times, holds=holds)
        with getattr(fault, when)(*method):
            assert_same_text(
                target_of("llama"), drafter_of("llama"), inputs_of(batch), seed=seed, oracle=seed, **sampled
            )
        raised += fault.raised
    assert raised >= 2


def two_turns(disturbance: Any) -> list[list[int]]:
    """Text of two turns over one cache, the first one disturbed, and of one more that starts from what is left."""
    ids, texts, call = inputs_of(1)["input_ids"], [], {"max_new_tokens": 6, "assistant_model": drafter_of("llama")}
    call["past_key_values"] = hf.DynamicCache(config=target_of("llama").config)
    for turn in range(3):
        with disturbance if turn == 1 else nullcontext():
            text = write("llama", {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **call)
        texts.append(text[0].tolist())
        ids = torch.cat((text, torch.tensor([[7, 8, 9]])), dim=1)
    return texts


@pytest.mark.parametrize(
    ("owner", "name", "times", "step"),
    [
        (CarriedCache, "load", 1, FREED),
        (CarriedCache, "close", 1, NOT_HANDED_OVER),
        (DraftSession, "_absorb", 10**6, DROPPED),
        (SpeculativeCache, "keep", 1, FREED),
    ],
)
def test_a_conversation_goes_on(owner: Any, name: str, times: int, step: str) -> None:
    taken: list[dict[str, int]] = []
    finish = SpeculativeDecoder.finish

    def finishing(self: SpeculativeDecoder) -> Tensor:
        taken.append(self.request.stats.memory_steps)
        return finish(self)

    with mock.patch.object(SpeculativeDecoder, "finish", finishing):
        assert two_turns(Fault(times=times).before(owner, name)) == two_turns(nullcontext())
    assert not taken[0]
    assert step in taken[1]


# --- layers that keep states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "batch"), [("qwen3_5_text", 1), ("qwen3_5_text", 3), ("nemotron_h", 1), ("lfm2", 3)]
)
@pytest.mark.thorough(every=4)
def test_states_that_cannot_go_back_are_read_again_as_they_were_decoded(family: str, batch: int) -> None:
    model = clamped_target(family) if family == "nemotron_h" else recurrent_target(family)
    drafter, layer = random_drafter(model, aux_layers=[1, 2, 3]), model.get_decoder().layers[-1]
    faults = {
        "none": nullcontext(Fault()),
        "a layer, in the prompt": Fault(1).in_module(layer),
        "a layer, in a round": Fault(3).in_module(layer),
        "states are kept": Fault(3).before(states, "state_moves"),
        "some states are kept": Fault(2).before(states, "make_moves"),
        "all states are kept": Fault(3).after(states, "make_moves"),
        "the drafter reads on": Fault(2).before(DraftSession, "put_off"),
    }
    call: dict[str, Any] = {"max_new_tokens": 14, "oracle": batch, "written": {}}
    call["settings"] = {"num_assistant_tokens": 3, "prefill_chunk_size": 8}
    for where, failing in faults.items():
        with failing as fault:
            assert_same_text(model, drafter, left_padded(random_prompts(batch, seed=batch, longest=20)), **call)
        assert bool(drafter.stats.memory_steps) == bool(fault.raised), where
        assert fault.raised or where in ("none", "the drafter reads on"), where


# --- what counts as running out of memory -----------------------------------------------------------------------------

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
