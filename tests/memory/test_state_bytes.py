"""Recurrent and convolution states in a plan, against the bytes that caches hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Barrier, BrokenBarrierError
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.stock import CACHE_ARGUMENT, LayerStates
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.errors import MemoryPlanError
from eagle31_hf.memory.cards import Card
from eagle31_hf.memory.drafter_facts import read_drafter
from eagle31_hf.memory.dry_run import Forward, StorageCounter
from eagle31_hf.memory.ledger import BETWEEN, PREFILL, VERIFY, LedgerTerm, MemorySettings, build_ledger
from eagle31_hf.memory.planner import plan_memory
from eagle31_hf.memory.target_facts import read_target
from families import RECURRENT_FAMILIES, SEEING_HYBRIDS, recurrent_config, recurrent_target
from helpers import GREEDY, configured, ledger_of, oracle_drafts, prompts_of, random_drafter

FAMILIES = ("qwen3_5_text", "nemotron_h", "lfm2", "falcon_h1", "kimi_linear", "bamba")


def states_of(ledger: tuple[LedgerTerm, ...], moment: str) -> int:
    """What caches hold: without copies, and what comes and goes while states are rebuilt."""
    held = {"target states", "target states, of a block", "target states, recorded"}
    return sum(term.num_bytes for term in ledger if term.name in held and moment in term.moments)


@contextmanager
def watched_caches() -> Iterator[dict[str, int]]:
    """Most state bytes a cache has had, where a prompt's chunk was committed and where drafts were."""
    held: dict[str, int] = {}
    own = SpeculativeCache.keep

    def keep(cache: SpeculativeCache, *args: Any, **kwargs: Any) -> None:
        moment = VERIFY if cache.placement.is_draft else PREFILL
        now = sum(layer.state_bytes for layer in cache.with_states)
        held[moment] = max(held.get(moment, 0), now)
        own(cache, *args, **kwargs)

    with mock.patch.object(SpeculativeCache, "keep", keep):
        yield held


@pytest.mark.parametrize("drafts", [4, 1])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.thorough(every=9)
def test_states_are_what_caches_hold(family: str, rows: int, drafts: int) -> None:
    target = recurrent_target(family)
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    ledger = ledger_of(drafter, MemorySettings(40, rows, drafts, prefill_chunk=12))
    with configured(drafter, num_assistant_tokens=drafts), watched_caches() as held:
        target.generate(**prompts_of([12] * rows), **{**GREEDY, "max_new_tokens": 12}, assistant_model=drafter)
    for moment, found in held.items():
        assert states_of(ledger, moment) == pytest.approx(found, rel=0.02), moment
    assert held.keys() == {PREFILL, VERIFY}


PLAIN = ("jamba", "zaya")  # their recurrences cannot be recorded


@pytest.mark.parametrize("family", sorted(set(RECURRENT_FAMILIES) - {*PLAIN, "mamba2"}))  # in which nothing attends
@pytest.mark.thorough(every=3)
def test_keys_and_values_are_those_of_layers_that_attend(family: str) -> None:
    model = recurrent_target(family)
    config = model.config
    planned = read_target(config, "fp32").forward.count(Forward(3, 32, block=8)).cache
    cache = SpeculativeCache.from_config(config, batch_size=1, capacity=32, block=8)
    stock = DynamicCache(config=config.get_text_config())
    model(torch.tensor([[5, 6, 7]]), **{CACHE_ARGUMENT: stock})
    cache.load_dynamic(stock)
    held = sum(layer.num_bytes for layer in cache.layers)
    assert planned == held


def test_states_that_are_handed_over_are_within_their_term() -> None:
    target = recurrent_target("qwen3_5_text")
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    ids = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=target.config)
    taken: list[LayerStates] = []
    own = SpeculativeCache.held_row

    def held_row(cache: SpeculativeCache, row: int) -> LayerStates:
        taken.append(own(cache, row))
        return taken[-1]

    with configured(drafter, num_assistant_tokens=4), mock.patch.object(SpeculativeCache, "held_row", held_row):
        target.generate(ids, max_new_tokens=4, pad_token_id=0, assistant_model=drafter, **{CACHE_ARGUMENT: cache})
    found = sum(state.nbytes for layers in taken for layer in layers.values() for state in layer.states.values())
    (term,) = [t for t in ledger_of(drafter, MemorySettings(40)) if t.name == "target states, copies"]
    assert found == term.num_bytes / 2, "and as much in the cache that is handed over"


AS_LARGE_AS_REAL_ONES: dict[str, dict[str, int]] = {
    "qwen3_5_text": {
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "nemotron_h": {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128},
}  # fmt: skip


@pytest.mark.parametrize("family", AS_LARGE_AS_REAL_ONES)
def test_rebuilding_takes_what_is_planned(family: str) -> None:
    target = recurrent_target(family, **AS_LARGE_AS_REAL_ONES[family])
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    ids = torch.randint(3, 96, (1, 8), generator=torch.Generator().manual_seed(0))
    peaks: dict[int, int] = {}  # by how many tokens were kept
    own = SpeculativeCache.keep

    def keep(cache: SpeculativeCache, nodes: Sequence[Sequence[int]], **kwargs: Any) -> None:
        is_chain = cache.placement.is_chain
        with StorageCounter() as counter:
            own(cache, nodes, **kwargs)
        if is_chain:
            peaks[len(nodes[0])] = counter.peak_bytes

    with mock.patch.object(SpeculativeCache, "keep", keep):
        plain = target.generate(ids, max_new_tokens=24, pad_token_id=0)
        with configured(drafter, num_assistant_tokens=7), oracle_drafts(plain, 8):
            target.generate(ids, max_new_tokens=24, pad_token_id=0, assistant_model=drafter)
    assert max(peaks) == 8
    (term,) = [t for t in ledger_of(drafter, MemorySettings(40, draft_tokens=7)) if t.name.endswith("rebuilt")]
    assert term.num_bytes == pytest.approx(peaks[8], rel=0.05)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_states_stay_with_keys_and_values_where_rounds_are_captured(kind: str) -> None:
    card, is_captured = Card("a card", kind, 24 * 2**30, 24 * 2**30), kind == "cuda"
    settings, target = MemorySettings(64, draft_tokens=5), read_target(recurrent_config("lfm2"))
    kept = {t.name for t in build_ledger(target, read_drafter(None, target), card, settings) if BETWEEN in t.moments}
    assert ("target states" in kept) == ("recordings" in kept) == is_captured


def test_a_tree_is_planned_as_the_chain_that_is_drafted() -> None:
    plan = plan_memory(recurrent_config("qwen3_5_text"), card="24GiB", draft_tokens=4, tree_width=2)
    assert plan.settings.shape == DraftShape(4)
    assert plan.warnings == ()


@pytest.mark.parametrize("family", PLAIN)
def test_what_is_decoded_plainly_is_not_planned(family: str) -> None:
    with pytest.raises(MemoryPlanError, match=r"cannot be recorded, so it is decoded plainly; .* leave the plan out"):
        plan_memory(recurrent_config(family), card="24GiB")


@pytest.mark.parametrize("family", SEEING_HYBRIDS)
def test_hybrids_that_see_are_planned(family: str) -> None:
    """By their text's states."""
    model = SEEING_HYBRIDS[family].model()
    seeing, text = (
        read_target(each, "bf16").forward.count(Forward(8, 64, block=16, verifies=True))
        for each in (model.config, model.config.get_text_config())
    )
    assert seeing.rebuilding == text.rebuilding > 0
    assert seeing.states == text.states > 0


def test_plans_of_two_threads_take_turns() -> None:
    """All plans of a configuration run one model, which is changed while it runs."""
    forward, meeting, met = read_target(recurrent_config("qwen3_5_text")).forward, Barrier(2), []

    def enters(*_: Any) -> None:
        with suppress(BrokenBarrierError):
            met.append(meeting.wait(timeout=1))

    hook = forward.model.register_forward_pre_hook(enters)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(forward.count, [Forward(tokens, 999, block=16) for tokens in (13, 15)]))
    hook.remove()
    assert not met
