"""Memory runs out, everywhere in turn: the text is what it would have been, and the next call is undisturbed.

Faults are injected: a forward hook or a method raises what CUDA, Metal or a CPU allocator raises, at its n-th call, a
given number of times or for as long as its cause is there.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache import SpeculativeCache
from eagle31_hf.cache.layers import FullLayer, SlotLayer
from eagle31_hf.compiled.round_graphs import RoundGraph
from eagle31_hf.decoding import decoder, eager_round, out_of_memory, pair_caches
from eagle31_hf.decoding.carried_cache import CacheExport, CacheResume, CarriedCache
from eagle31_hf.decoding.compiled_round import CompiledRound
from eagle31_hf.decoding.decoder import SpeculativeDecoder
from eagle31_hf.decoding.eager_round import EagerRound
from eagle31_hf.decoding.memory_ladder import Budget, FallbackStep
from eagle31_hf.decoding.prefill import ChunkedPrefill
from eagle31_hf.decoding.text import Sequences
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.errors import Eagle31Error, OutOfMemoryError
from eagle31_hf.generation import stock_loop
from helpers import (
    CONFIGS,
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    random_drafter,
    random_target,
    target_of,
    use_fixed_shapes_only,
)

SAID = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GB, max allowed: 9.07 GB)."),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1000 bytes."),
    "python": MemoryError(),
}
FREED, SHORTENED, CHUNKED, FORGOT, DROPPED, MOVED = (step.value for step in FallbackStep)
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 3},
    "tree": {"num_assistant_tokens": 3, "draft_top_k": 2, "draft_tree_size": 8},
}
NEW_TOKENS = 10
LENGTHS = {1: (13,), 3: (13, 9, 4)}


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """Raises `error` at call number `first` (1-based) and the `times - 1` after it, as long as `holds(*call)`."""

    first: int = 1
    times: int = 1
    error: BaseException = field(default_factory=lambda: SAID["cuda"])
    holds: Callable[..., bool] = lambda *_: True
    calls: int = 0
    raised: int = 0

    def __call__(self, *call: Any) -> None:
        if not self.holds(*call):
            return
        self.calls += 1
        if self.first <= self.calls < self.first + self.times:
            self.raised += 1
            raise self.error

    @contextmanager
    def in_module(self, module: nn.Module) -> Iterator[Fault]:
        handle = module.register_forward_pre_hook(self)
        try:
            yield self
        finally:
            handle.remove()

    @contextmanager
    def before(self, owner: Any, name: str) -> Iterator[Fault]:
        function = getattr(owner, name)

        @functools.wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            self(*args)
            return function(*args, **kwargs)

        with mock.patch.object(owner, name, failing):
            yield self

    @contextmanager
    def after(self, owner: Any, name: str) -> Iterator[Fault]:
        function = getattr(owner, name)

        @functools.wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self(*args)
            return result

        with mock.patch.object(owner, name, failing):
            yield self


def modules_of(name: str) -> dict[str, nn.Module]:
    """Where a forward pass of target or drafter may run out of memory."""
    target, drafter = target_of(name), drafter_of(name)
    decoder = target.get_decoder()
    places: dict[str, nn.Module] = {"embedding": decoder.embed_tokens, "norm": decoder.norm, "head": target.lm_head}
    places |= {f"layer {index}": layer for index, layer in enumerate(decoder.layers)}
    places |= {"attention": decoder.layers[1].self_attn, "mlp": decoder.layers[2].mlp}
    drafting = {"fc": drafter.fc, "layer": drafter.layers[0], "attention": drafter.layers[0].self_attn,
                "norm": drafter.norm}  # fmt: skip
    return places | {f"drafter {place}": module for place, module in drafting.items()}


METHODS: dict[str, tuple[Any, str]] = {
    "place": (SpeculativeCache, "place"),
    "mask": (SpeculativeCache, "attention_mask"),
    "first write": (SlotLayer, "lazy_initialization"),
    "growth": (SlotLayer, "_grow"),
    "write": (SlotLayer, "update"),
    "commit": (SpeculativeCache, "commit"),
    "keep": (SpeculativeCache, "keep"),
    "copy": (SlotLayer, "copy"),
    "rows of the cache": (SpeculativeCache, "select_rows"),
    "rows of a layer": (SlotLayer, "select_rows"),
    "rows of the drafter": (DraftSession, "select_rows"),
    "draft step": (DraftSession, "step"),
    "absorb": (DraftSession, "absorb"),
    "draft logits": (Eagle31Drafter, "draft_logits"),
    "verify": (EagerRound, "verify"),
    "accept": (EagerRound, "accept"),
    "read back": (decoder, "sync_accepted"),
    "first token": (SpeculativeDecoder, "choose_first"),
    "text": (Sequences, "append"),
    "stop": (Sequences, "_must_stop"),
    "time": (Sequences, "stop_if_out_of_time"),
    "path": (eager_round, "aux_of_path"),
    "roots": (SpeculativeDecoder, "set_roots"),
    "start": (CacheResume, "load"),
}


# --- runs -------------------------------------------------------------------------------------------------------------


@functools.cache
def prompts_of(batch: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(5)
    return left_padded([torch.randint(3, 90, (n,), generator=dice).tolist() for n in LENGTHS[batch]])


@functools.cache
def truth_of(name: str, batch: int, end: bool = False) -> Tensor:
    """What the target writes alone; with `end`, some token of row 0 ends a row."""
    inputs = prompts_of(batch)
    with torch.no_grad():
        return target_of(name).generate(**inputs, **how(name, batch, end))


def how(name: str, batch: int, end: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "prefill_chunk_size": 5}
    if end:
        free = truth_of(name, batch)
        settings |= {"eos_token_id": int(free[0, -5]), "pad_token_id": 0}
    return settings


def speculative(name: str, batch: int, *, end: bool = False, **more: Any) -> Any:
    """The same with drafts that are right by lot."""
    inputs = prompts_of(batch)
    with oracle_drafts(truth_of(name, batch, end), inputs["input_ids"].shape[1], seed=3):
        return target_of(name).generate(**inputs, assistant_model=drafter_of(name), **{**how(name, batch, end), **more})


def steps_of(name: str) -> dict[str, int]:
    stats = drafter_of(name).stats
    assert stats is not None
    assert stats.loop == "own"
    return stats.memory_steps


def assert_survives(name: str, shape: str, batch: int, fault: Any, *, end: bool = False) -> dict[str, int]:
    """With the fault and after it, the text is the undisturbed one. Returns the steps that were taken."""
    truth = truth_of(name, batch, end)
    with configured(drafter_of(name), **SHAPES[shape]):
        with fault as raised:
            assert torch.equal(speculative(name, batch, end=end), truth)
            steps = dict(steps_of(name))
        assert bool(steps) == bool(raised.raised), (steps, raised.raised)
    return steps


def assert_undisturbed(name: str, shape: str, batch: int) -> None:
    with configured(drafter_of(name), **SHAPES[shape]):
        assert torch.equal(speculative(name, batch), truth_of(name, batch))
        assert not steps_of(name)


def live_storages() -> set[int]:
    """Of dense tensors: ours are, and a sparse one that another test left has no storage to count."""
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    tensors = [tensor for tensor in alive if tensor.device.type != "meta" and tensor.layout == torch.strided]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.fixture
def no_leak() -> Iterator[None]:
    """As many storages alive afterwards as before. What is made once is made first."""
    for batch in LENGTHS:
        truth_of("llama", batch, True)
        for shape in SHAPES:
            assert_undisturbed("llama", shape, batch)
    before = len(live_storages())
    yield
    assert len(live_storages()) <= before


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[torch.device]:
    """Without collecting garbage, which takes longer than a generation here. Returns where it would have been."""
    caplog.set_level(logging.WARNING, "eagle31_hf")
    calls: list[torch.device] = []
    for module in (out_of_memory, stock_loop):
        monkeypatch.setattr(module, "give_back_memory", calls.append)
    return calls


# --- every layer, every stage ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "batch"), [("chain", 3), ("tree", 1)])  # the others: the next test
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
def test_a_step_runs_out_of_memory_at_any_call(shape: str, batch: int, no_leak: None) -> None:
    """Before and after each step of the loop, in a text whose rows end at different times."""
    reached, points = set(), 0
    for place, (owner, name) in METHODS.items():
        for fault, first in ((Fault(1), "before"), (Fault(1), "after"), (Fault(3), "before")):
            assert_survives("llama", shape, batch, getattr(fault, first)(owner, name), end=True)
            points += fault.raised
            reached |= {place} if fault.raised else set()
    batches_only = {"rows of the cache", "rows of a layer", "rows of the drafter"}
    assert set(METHODS) - reached <= ({"growth"} if batch > 1 else {"growth", "copy"} | batches_only)
    assert points >= 45
    assert_undisturbed("llama", shape, batch)


@pytest.mark.parametrize("kind", SAID)
def test_every_allocator_is_understood(kind: str) -> None:
    fault = Fault(2, error=SAID[kind])
    assert assert_survives("llama", "tree", 1, fault.in_module(target_of("llama").lm_head)) == {FREED: 1}


def test_memory_is_given_back_before_anything_else_is_given_up(quick: list[torch.device]) -> None:
    fault = Fault(2, times=2)
    steps = assert_survives("llama", "chain", 1, fault.before(*METHODS["verify"]))
    assert steps == {FREED: 1, SHORTENED: 1}
    assert quick == [torch.device("cpu")] * 2


def test_a_cache_that_cannot_grow_grows_by_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_caches, "SLAB", 8)
    for first in (1, 3, 5):
        assert assert_survives("llama", "tree", 3, Fault(first).before(SlotLayer, "_grow"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("mistral", "chain"), ("mistral", "tree"), ("gemma3", "tree")])
def test_windows_that_have_slid_are_read_again(name: str, shape: str) -> None:
    """A ring cannot be rolled back: the caches are made anew from the text."""
    for place in ("absorb", "copy", "keep", "commit", "write", "verify", "rows of the cache"):
        for first in (2, 4):
            assert_survives(name, shape, 3, Fault(first).before(*METHODS[place]), end=True)
    assert_undisturbed(name, shape, 3)


@pytest.mark.parametrize("place", ["absorb", "write", "verify", "rows of a layer", "draft step"])
def test_a_quantised_cache_comes_back_too(place: str) -> None:
    with configured(drafter_of("llama"), cache_type="int8", **SHAPES["tree"]):
        undisturbed = speculative("llama", 3, end=True)
        with Fault(3).before(*METHODS[place]) as fault:
            assert torch.equal(speculative("llama", 3, end=True), undisturbed)
        assert fault.raised


@pytest.mark.parametrize(
    ("shape", "place"),
    itertools.product(SHAPES, ("commit", "keep", "read back", "text", "verify", "round end")),
)
def test_ended_rows_that_stay_for_a_graph_are_in_nobodys_way(
    shape: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was compiled for goes on without graphs, and without those rows."""
    use_fixed_shapes_only(monkeypatch)
    monkeypatch.setattr(drafter_of("llama").require_binding(), "compiled", None)
    running, go = [], SpeculativeDecoder.step
    monkeypatch.setattr(SpeculativeDecoder, "step", lambda self: running.append(self) or go(self))
    raised, where = 0, {**METHODS, "verify": (CompiledRound, "verify"), "round end": (RoundGraph, "__call__")}[place]
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


@dataclass(frozen=True)
class Cause:
    """Always out of memory at `place` while `holds`; `steps` remove it from a tree's generation."""

    place: tuple[Any, str]
    holds: Callable[..., bool]
    steps: dict[str, int]


CAUSES = {
    "wide verification": Cause(
        METHODS["verify"], lambda _, tree: tree.size > 2, {FREED: 1, SHORTENED: 2}
    ),
    "trees": Cause(METHODS["verify"], lambda _, tree: not tree.is_chain, {FREED: 1, SHORTENED: 1}),
    "draft steps": Cause(METHODS["draft step"], lambda *_: True, {FREED: 1, SHORTENED: 2}),
    "the drafter": Cause(METHODS["absorb"], lambda *_: True, {FREED: 1, DROPPED: 1}),
    "the drafter's head": Cause(METHODS["draft logits"], lambda *_: True, {FREED: 1, DROPPED: 1}),
    "more than one node": Cause(METHODS["verify"], lambda _, tree: tree.size > 1, {FREED: 1, SHORTENED: 2, DROPPED: 1}),
}  # fmt: skip


@pytest.mark.parametrize("batch", LENGTHS)
@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_steps_are_taken_until_the_cause_is_gone(cause: Cause, batch: int) -> None:
    fault = Fault(times=10**6, holds=cause.holds)
    assert assert_survives("llama", "tree", batch, fault.before(*cause.place), end=True) == cause.steps
    assert_undisturbed("llama", "tree", batch)


def test_accepted_nodes_that_cannot_be_moved_are_no_longer_trees() -> None:
    fault = Fault(times=10**6)
    steps = assert_survives("llama", "tree", 3, fault.before(*METHODS["copy"]))
    assert steps == {FREED: 1, SHORTENED: 1}


def test_a_long_prompt_is_read_in_smaller_chunks() -> None:
    target, drafter = target_of("llama"), drafter_of("llama")
    ids = torch.randint(3, 90, (1, 150), generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "prefill_chunk_size": 100}
    truth = target.generate(ids, **arguments)
    widths: list[int] = []

    def too_wide(_reader: Any, columns: Tensor, _keep: Any) -> bool:
        widths.append(columns.shape[1])
        return columns.shape[1] > 40

    with Fault(times=10**6, holds=too_wide).before(ChunkedPrefill, "_forward"):
        assert torch.equal(target.generate(ids, assistant_model=drafter, **arguments), truth)
    assert steps_of("llama") == {FREED: 1, CHUNKED: 1}
    assert widths[:3] == [100, 100, 32]


def test_what_was_read_before_a_failure_is_not_read_again() -> None:
    reads: list[int] = []
    fault = Fault(3, holds=lambda _reader, columns, _keep: reads.append(columns.shape[1]) or True)  # type: ignore[func-returns-value]
    assert_survives("llama", "chain", 1, fault.before(ChunkedPrefill, "_forward"))
    assert reads[:4] == [5, 5, 3, 3]


def test_the_cache_moves_to_main_memory_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other memory to move to on a CPU, but the way there is the same."""
    monkeypatch.setattr(out_of_memory, "Budget", lambda *values: Budget(*values[:4], on_device=True))
    fault = Fault(times=10**6, holds=lambda layer, *_: layer.kept_on is None)
    steps = assert_survives("llama", "tree", 3, fault.before(FullLayer, "write"), end=True)
    assert list(steps) == [FREED, DROPPED, MOVED]


def test_a_layer_is_kept_where_it_was_moved() -> None:
    cache = SpeculativeCache([None], batch_size=1, capacity=8, block=4)
    states = torch.randn(1, 2, 3, 4)
    cache.place(3)
    cache.update(states, states, 0)
    cache.commit(3)
    cache.move_to(torch.device("meta"))
    assert cache.layers[0].keys.is_meta
    assert cache.layers[0].values.is_meta
    cache.place(1)
    with pytest.raises(NotImplementedError, match="meta"):  # it is written there; nothing can be read from there
        cache.update(states[:, :, :1], states[:, :, :1], 0)


# --- when nothing is left ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "written"), [(1, 0), (5, 1)])
def test_at_last_it_says_what_took_the_memory(first: int, written: int) -> None:
    head = target_of("llama").lm_head
    truth_of("llama", 3)  # before memory is short
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
    for part in ("target weights", "cache", FREED, DROPPED, "max_new_tokens", "Tried to allocate 20.00 MiB"):
        assert part in said
    if not written:
        assert "after 0 new tokens" in said
    assert_undisturbed("llama", "tree", 3)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("shapes cannot be multiplied"), ValueError("no")])
@pytest.mark.parametrize("place", ["write", "draft step", "verify", "absorb", "keep", "text", "commit"])
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
    fault = Fault(times=10**6, holds=CAUSES["wide verification"].holds)
    assert_survives("llama", "tree", 1, fault.before(*METHODS["verify"]))
    said = [record.getMessage() for record in caplog.records if "memory ran out" in record.getMessage()]
    assert len(said) == 3
    assert "at verify (CUDA out of memory" in said[0]
    assert "draft shortened to a chain of 3" in said[1]
    assert "draft shortened to a chain of 1" in said[2]


def test_stats_tell_the_steps() -> None:
    fault = Fault(2)
    assert_survives("llama", "tree", 1, fault.in_module(target_of("llama").lm_head))
    with configured(drafter_of("llama"), **SHAPES["tree"]), Fault(2).in_module(target_of("llama").lm_head):
        speculative("llama", 1)
    stats = drafter_of("llama").stats
    assert f"memory ran out: {FREED} 1x" in str(stats)
    assert stats.to_dict()["memory_steps"] == {FREED: 1}


# --- what else a call brings along -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["text", "keep", "absorb", "verify", "first token", "read back"])
def test_scores_are_those_of_the_text(place: str) -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with configured(drafter_of("llama"), **SHAPES["tree"]):
        truth = speculative("llama", 3, **asked)
        with Fault(1).after(*METHODS[place]) as fault:
            output = speculative("llama", 3, **asked)
    assert fault.raised
    assert torch.equal(output.sequences, truth.sequences)
    for found, wanted in ((output.scores, truth.scores), (output.logits, truth.logits)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


class Listener:
    """A streamer that notes what it is shown."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    def put(self, ids: Tensor) -> None:
        self.shown += ids.flatten().tolist()

    def end(self) -> None: ...


@pytest.mark.parametrize("place", ["text", "stop", "keep", "absorb", "roots", "first token"])
def test_nothing_is_streamed_twice_or_left_out(place: str) -> None:
    for fault, when in ((Fault(1), "after"), (Fault(3), "after"), (Fault(2), "before")):
        listener = Listener()
        with configured(drafter_of("llama"), **SHAPES["chain"]), getattr(fault, when)(*METHODS[place]):
            text = speculative("llama", 1, end=True, streamer=listener)
        assert listener.shown == text[0].tolist()


def test_what_a_streamer_raises_is_its_own() -> None:
    listener = Listener()
    with Fault(3, error=MemoryError("mine")).before(listener, "put"), pytest.raises(MemoryError, match="mine"):
        speculative("llama", 1, streamer=listener)
    assert_undisturbed("llama", "chain", 1)


@pytest.mark.parametrize("place", ["verify", "accept", "draft step", "first token", "read back"])
def test_sampling_goes_on(place: str) -> None:
    """With one token to choose from, whatever is drawn is the greedy text."""
    with configured(drafter_of("llama"), **SHAPES["chain"]), Fault(2).before(*METHODS[place]) as fault:
        text = speculative("llama", 1, do_sample=True, top_k=1)
    assert fault.raised or place == "first token"
    assert torch.equal(text, truth_of("llama", 1))


TURN = {"return_dict_in_generate": True, "max_new_tokens": 6, "do_sample": False}


def two_turns(disturbance: Any) -> list[list[int]]:
    """Text of two turns over one cache, the first one disturbed, and of one more that starts from what is left."""
    target, drafter = target_of("llama"), drafter_of("llama")
    ids, cache, texts = prompts_of(1)["input_ids"], hf.DynamicCache(config=target.config), []
    for turn in range(3):
        with disturbance if turn == 1 else nullcontext():
            output = target.generate(ids, past_key_values=cache, assistant_model=drafter, **TURN)
        texts.append(output.sequences[0].tolist())
        ids = torch.cat((output.sequences, torch.tensor([[7, 8, 9]])), dim=1)
    return texts


@pytest.mark.parametrize(
    ("owner", "name", "times", "step"),
    [
        (CacheExport, "take", 1, FREED),
        (CacheExport, "take", 10**6, FORGOT),
        (CacheResume, "load", 1, FREED),
        (CarriedCache, "close", 1, None),
        (CarriedCache, "close", 10**6, FORGOT),
        (DraftSession, "absorb", 10**6, DROPPED),
        (SpeculativeCache, "keep", 1, FREED),
    ],
)
def test_a_conversation_goes_on(owner: Any, name: str, times: int, step: str | None) -> None:
    taken: list[dict[str, int]] = []
    finish = SpeculativeDecoder.finish

    def finishing(self: SpeculativeDecoder) -> Tensor:
        taken.append(self.request.stats.memory_steps)
        return finish(self)

    with mock.patch.object(SpeculativeDecoder, "finish", finishing):
        assert two_turns(Fault(times=times).before(owner, name)) == two_turns(nullcontext())
    assert not taken[0]
    assert (step in taken[1]) if step else not taken[1]


@pytest.mark.parametrize("place", ["take", "rows"])
def test_a_batch_whose_rows_end_one_by_one_hands_its_caches_over(place: str) -> None:
    owner, name = {"take": (CacheExport, "take"), "rows": METHODS["rows of a layer"]}[place]
    asked = {"return_dict_in_generate": True}
    for first in (1, 2):
        with configured(drafter_of("llama"), **SHAPES["tree"]), Fault(first).before(owner, name):
            output = speculative("llama", 3, end=True, **asked)
        assert torch.equal(output.sequences, truth_of("llama", 3, True))


# --- the stock loop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "times", "step"),
    [
        ("draft step", 1, SHORTENED),
        ("draft step", 10**6, SHORTENED),
        ("absorb", 1, DROPPED),
        ("absorb", 10**6, DROPPED),
    ],
)
def test_the_stock_loop_goes_on_without_drafts(place: str, times: int, step: str) -> None:
    drafter = drafter_of("llama")
    with (
        configured(drafter, speculation_loop="stock", num_assistant_tokens=4),
        Fault(2, times=times).before(*METHODS[place]),
    ):
        text = speculative("llama", 1, prefill_chunk_size=None)
    assert torch.equal(text, truth_of("llama", 1))
    assert list(drafter.stats.memory_steps) == [step]
    with configured(drafter, speculation_loop="stock"):
        assert torch.equal(speculative("llama", 1, prefill_chunk_size=None), truth_of("llama", 1))
    assert not drafter.stats.memory_steps


def test_elsewhere_the_stock_loop_lets_the_error_pass_with_advice(caplog: pytest.LogCaptureFixture) -> None:
    with (
        configured(drafter_of("llama"), speculation_loop="stock"),
        Fault(3).in_module(target_of("llama").lm_head),
        pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"),
    ):
        speculative("llama", 1, prefill_chunk_size=None)
    assert "shorten the prompt" in caplog.text
    assert_undisturbed("llama", "chain", 1)


# --- on a card --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cache_in_main_memory_serves_a_card() -> None:
    target = random_target(CONFIGS["llama"]()).cuda()
    drafter = random_drafter(target, aux_layers=[1, 2, 4])
    inputs = {name: tensor.cuda() for name, tensor in prompts_of(3).items()}
    arguments: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    truth = target.generate(**inputs, **arguments)
    fault = Fault(times=10**6, holds=lambda layer, *_: layer.kept_on is None)
    with fault.before(FullLayer, "write"):
        assert torch.equal(target.generate(**inputs, assistant_model=drafter, **arguments), truth)
    assert MOVED in drafter.stats.memory_steps
