"""Texts that come and go in a batch are those of `generate` after `manual_seed` of each one's seed, alone and in a
crowd, drafted by any drafter or none; beside states, where memory runs out, and within what is planned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import PIECE, assert_plain, batch_of, drafter_on, plain, read_in_pieces, text_of, write_all

from eagle31_hf import Eagle31Drafter, NoDrafter
from eagle31_hf.cache import row_pool
from eagle31_hf.cache.row_pool import RowPool
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.states import StateLayer
from eagle31_hf.cli.pairs import DraftOptions, PairSource, load_pair
from eagle31_hf.cli.serve import READING_ROWS
from eagle31_hf.demo import CONVERSATIONS
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.memory.dry_run import Forward, StorageCounter
from eagle31_hf.memory.ledger import UPDATE, MemorySettings
from eagle31_hf.memory.target_facts import read_target
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.engine import Engine
from eagle31_hf.serving.text import Sampling
from eagle31_hf.texts.chats import encode_chat
from families import ENDING, LAST, clamped_target
from helpers import (
    configured,
    demo_tokenizer,
    drafter_of,
    ledger_of,
    random_drafter,
    random_prompts,
    random_target,
    target_of,
)
from matrix import pairwise
from memory_faults import Fault
from mtp_targets import target_with_head
from peak_runs import StorageMeter

NEW_TOKENS = (24, 10, 30, 18, 40, 12, 21)
SAMPLINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, seed=2, top_p=0.9),
    Sampling(temperature=1.3, seed=3, top_k=30, min_p=0.01),
    Sampling(temperature=0.9, seed=4, repetition_penalty=1.2),
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=5),
]
CHAINS = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant", "acceleration": "eager"}
PROMPT = list(range(5, 25))


def headed(family: str, folder: Path) -> Any:
    target = target_with_head(family, folder, max_position_embeddings=512)
    return Eagle31Drafter.from_pretrained(folder, target=target)


DRAFTERS: dict[str, Callable[[Path], Any]] = {
    "trained": lambda folder: drafter_of("demo-target"),
    "none": lambda folder: NoDrafter(target_of("demo-target")),
    "head beside states": lambda folder: headed("qwen3_5_text", folder),
    "head of latent attention": lambda folder: headed("glm4_moe_lite", folder),
    "head that sees a window": lambda folder: headed("mellum", folder),
    "on qwen3_5_text": lambda folder: drafter_on("qwen3_5_text"),
    "on nemotron_h": lambda folder: drafter_on("nemotron_h"),
    "on lfm2": lambda folder: drafter_on("lfm2"),
    "on falcon_h1": lambda folder: drafter_on("falcon_h1"),
}


@cache
def chats() -> list[list[int]]:
    """Each says what it asks for twice, so that answers have something to quote."""
    said = [f"{messages[0]['content']} {messages[0]['content']}" for messages in CONVERSATIONS[:5]]
    return [encode_chat(demo_tokenizer(), [{"role": "user", "content": each}]) for each in said]


def ids(lengths: tuple[int, ...] = (17, 1, 30, 2, 9, 21, 4)) -> list[list[int]]:
    dice = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (length,), generator=dice).tolist() for length in lengths]


@pytest.mark.parametrize(("name", "rows", "schedule"), pairwise([*DRAFTERS], (1, 2, 4), ("constant", "planned", "pid")))
def test_texts_that_come_and_go_are_those_of_generate(name: str, rows: int, schedule: str, tmp_path: Path) -> None:
    drafter = DRAFTERS[name](tmp_path)
    is_demo = name in ("trained", "none")
    prompts = [*chats(), [5], [7]] if is_demo else ids()
    fields = {} if name == "none" else {**CHAINS, "num_assistant_tokens_schedule": schedule}
    with configured(drafter, **fields):
        batch = batch_of(drafter, rows, context=256)
        texts = assert_plain(batch, list(zip(prompts, NEW_TOKENS, SAMPLINGS, strict=True)))
        next_turns = [([*text.tokens, 7, 8], 9, text.request.sampling) for text in reversed(texts)]
        resumed = assert_plain(batch, next_turns)
    assert batch.stats.drafted > 0
    assert any(text.usage.cached_tokens for text in resumed) is (name != "on nemotron_h"), "its prompts are read whole"
    if is_demo:
        assert batch.stats.accepted > 0
        assert sum(text.usage.rounds for text in texts) < sum(NEW_TOKENS)


@pytest.mark.parametrize("name", [*DRAFTERS])
def test_the_same_prompt_again_is_not_read(name: str, tmp_path: Path) -> None:
    """Its end is kept with the row: others begin there while that is written, and once it is parked."""
    drafter, prompt = DRAFTERS[name](tmp_path), ids()[0]
    batch = batch_of(drafter, 3, context=64)
    texts = assert_plain(batch, [(prompt, 12, sampling) for sampling in SAMPLINGS])
    whole = [text.usage.cached_tokens == len(prompt) for text in texts]
    assert not whole[0]
    if name in ("on nemotron_h", "head that sees a window"):  # prompts are read whole; the window has moved on
        assert not any(whole)
    elif batch.cache.has_states:  # a state goes on with its text
        assert whole[1:3] == [True, True]
    else:
        assert all(whole[1:])
        assert_plain(batch, [([*prompt, 7], 9), (prompt[:-1], 9), (prompt, 9)])


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_a_text_at_the_targets_last_position_fails_none_beside_it(family: str) -> None:
    drafter = random_drafter(random_target(ENDING[family]()), aux_layers=[1, 2, 3])
    prompts = ids((9, 23, 6))
    with configured(drafter, num_assistant_tokens=6):
        assert_plain(batch_of(drafter, context=LAST), [(prompt, LAST - len(prompt)) for prompt in prompts])
    engine = Engine(drafter, demo_tokenizer(), EngineSettings(context=512))
    engine.close(0)
    assert engine.settings.context == LAST


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.thorough(every=2)
def test_a_text_takes_as_few_rounds_as_by_generate(temperature: float) -> None:
    """Counted: alone and with three others, by chains of the same length."""
    drafter = drafter_of("demo-target")
    asked = [(chat, 40, Sampling(temperature=temperature, seed=100 + n)) for n, chat in enumerate(chats() * 2)]
    rounds = tokens = 0
    with configured(drafter, **CHAINS, speculation_loop="own"):
        for each in asked:
            plain(drafter.binding.model, *each, assistant_model=drafter)
            rounds, tokens = rounds + drafter.stats.rounds, tokens + drafter.stats.new_tokens - 1
        for rows in (1, 4):
            texts = [text_of(*each) for each in asked]
            write_all(batch_of(drafter, rows, context=512, chunk=32), texts)
            served = sum(text.usage.completion_tokens - 1 for text in texts) / sum(text.usage.rounds for text in texts)
            assert served >= 0.97 * tokens / rounds, rows


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3)])
def test_the_end_of_all_texts_cuts_a_draft(lengths: tuple[int, int]) -> None:
    """A prompt's own scores give the first token, the target's the last one."""
    drafter = drafter_of("demo-target")
    with configured(drafter, num_assistant_tokens=4), torch.inference_mode():
        batch = batch_of(drafter, 2, context=256, chunk=64)
        texts = [text_of(chat, length) for chat, length in zip(chats(), lengths, strict=False)]
        for text in texts:
            read_in_pieces(batch, text, writing=False)
        batch.round()
    assert max(text.usage.drafted for text in texts) == max(lengths) - 2
    assert not batch.stats.skipped_rounds, "where nothing can be drafted, that says nothing of the drafter"


def test_requests_without_a_seed_differ_and_are_drafted_alike() -> None:
    drafter = drafter_of("demo-target")
    with configured(drafter, **CHAINS):
        batch = batch_of(drafter, 4, context=512, chunk=32)
        written = write_all(batch, [text_of(chat, 40, Sampling(temperature=1.0)) for chat in chats() * 2])
    assert batch.stats.acceptance_length > 1.5
    half = len(chats())
    assert all(one != other for one, other in zip(written[:half], written[half:], strict=True))


# --- on targets whose layers keep states ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["zamba2", "nemotron_h"])
def test_a_bound_that_the_time_steps_of_prompts_alone_have(family: str) -> None:
    """Prompts are read by the code for prompts to the last token, whatever pieces are left; answers in them, too."""
    batch = batch_of(random_drafter(clamped_target(family), aux_layers=[1, 2, 3]), context=128)
    first = assert_plain(batch, [(prompt, 16) for prompt in ([7], *random_prompts(9, seed=2, longest=35))])
    assert {len(text.request.prompt) % PIECE for text in first} >= {1, 2}
    assert_plain(batch, [([*text.tokens, 7, 8], 12) for text in first])


def test_a_turn_is_resumed_where_the_last_one_ended_and_nowhere_else() -> None:
    with torch.inference_mode():
        batch = batch_of(drafter_on("qwen3_5_text"), context=128)
        (first,) = assert_plain(batch, [(PROMPT, 12)])
        asked = [*PROMPT, *first.writer.tokens, 7, 8, 9]
        (second,) = assert_plain(batch, [(asked, 12)])
        assert second.usage.cached_tokens == len(PROMPT) + 12 - 1
        (third,) = assert_plain(batch, [([*asked[:22], 40, 41, 42], 12)])
        assert third.usage.cached_tokens == 0, "a state cannot go back"


@pytest.mark.parametrize("rows", [1, 3])
def test_what_serve_holds_is_planned(rows: int) -> None:
    """Its rows, written and parked, and the states of the prompt that is read beside them."""
    drafter = drafter_on("qwen3_5_text")
    with torch.inference_mode(), configured(drafter, num_assistant_tokens=4, num_assistant_tokens_schedule="constant"):
        batch = batch_of(drafter, rows, context=64)
        for number in range(rows):
            read_in_pieces(batch, text_of([5 + number, *range(6, 20)], 12), writing=False)
        batch.round()
        layers: list[StateLayer] = [*batch.cache.with_states, *batch.prompt_caches.target.with_states]
        found = sum(layer.state_bytes for layer in layers)
    ledger = ledger_of(drafter, MemorySettings(64, rows, 4))
    planned = sum(term.num_bytes for term in ledger if "states" in term.name and UPDATE in term.moments)
    one_set = rows * read_target(drafter.binding.model).forward.count(Forward(5, 64, block=16)).states
    assert found * 0.98 <= planned <= found + one_set, "no more than a set of each row too many"


def test_a_prompt_that_is_given_up_leaves_nothing() -> None:
    """A request that was cancelled while it was read, and all that a failure takes along."""
    with torch.inference_mode():
        batch = batch_of(drafter_on("qwen3_5_text"), context=64)
        batch.begin(text_of(PROMPT, 8))
        batch.read(8)
        batch.drop_reading()
        read_in_pieces(batch, text_of(PROMPT, 8), writing=False)
        batch.round()
        batch.reset()
        held = [state for layer in batch.cache.with_states for state in layer.held_states(0).values()]
        assert held
        assert not any(state.any() for state in held)
        assert_plain(batch, [(PROMPT, 8)])


# --- memory that runs out: one text is lost, or those of a round, and nobody else's changes ---------------------------

JOINING: dict[str, Callable[[], AbstractContextManager[Fault]]] = {
    "the target's row is copied": lambda: Fault(1).after(row_pool, "copy_row"),
    "the drafter's row is copied": lambda: Fault(2).after(row_pool, "copy_row"),
    "the drafter reads on": lambda: Fault(1).before(DraftSession, "_absorb"),
}
LEAVING: dict[str, Callable[[], AbstractContextManager[Fault]]] = {
    "the target's row": lambda: Fault(1).before(RowPool, "leave"),
    "the drafter's row": lambda: Fault(2).before(RowPool, "leave"),
}


@pytest.mark.parametrize("where", JOINING)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_text_that_cannot_join_is_the_only_one_lost(family: str, where: str) -> None:
    """What lay parked where it would have been is gone, too, and not resumed from."""
    batch, prompts = batch_of(drafter_on(family), 2), random_prompts(3, seed=2)
    target = batch.binding.model
    stays, parked, lost = text_of(prompts[0], 40), text_of(prompts[1], 4), text_of(prompts[2], 8)
    with torch.inference_mode():
        for text in (stays, parked):
            read_in_pieces(batch, text, writing=False)
        while parked in batch.texts:
            batch.round()
        batch.begin(lost)
        batch.read(batch.to_read)
        batch.round()
        with JOINING[where]() as fault, pytest.raises(torch.OutOfMemoryError):
            batch.join()
        assert fault.raised
        batch.drop_reading()
    after = [[*prompts[1], *parked.writer.tokens, 7, 8, 9], prompts[2]]
    assert_plain(batch, [(prompt, 12) for prompt in after])
    assert stays.writer.tokens == plain(target, prompts[0], 40)


@pytest.mark.parametrize("where", LEAVING)
def test_a_batch_whose_pools_are_out_of_step_begins_anew(where: str) -> None:
    batch, prompts = batch_of(drafter_on("llama")), random_prompts(3, seed=2)
    with torch.inference_mode():
        for number, prompt in enumerate(prompts):
            read_in_pieces(batch, text_of(prompt, 4 + number), writing=False)
        with LEAVING[where]() as fault, pytest.raises(torch.OutOfMemoryError):
            write_all(batch, [])
        assert fault.raised
        batch.reset()
    assert not batch.texts
    assert_plain(batch, [(prompt, 12) for prompt in prompts])


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_prompt_that_is_read_beside_a_failed_round_is_read_on(family: str) -> None:
    batch, prompts = batch_of(drafter_on(family), 2), random_prompts(2, seed=2)
    reading = text_of(prompts[1] * 2, 12)
    with torch.inference_mode():
        read_in_pieces(batch, text_of(prompts[0], 20), writing=False)
        batch.begin(reading)
        batch.read(5)
        with Fault(1).after(SpeculativeCache, "keep"), pytest.raises(torch.OutOfMemoryError):
            batch.round()
        batch.reset()
        batch.read(batch.to_read)
        batch.join()
    write_all(batch, [])
    assert reading.writer.tokens == plain(batch.binding.model, prompts[1] * 2, 12)


# --- what a running batch takes: all rows full, one prompt being read -------------------------------------------------

ROWS, CONTEXT, LENGTH = 2, 1024, 16


@torch.inference_mode()
def fill(pair, chunk):
    """Write texts that fill every row; bytes of all caches then."""
    batch = batch_of(pair.drafter, ROWS, context=CONTEXT, chunk=chunk)
    for row in range(ROWS):
        ids = torch.randint(10, 8000, (CONTEXT - LENGTH,), generator=torch.manual_seed(row))
        read_in_pieces(batch, text_of(ids.tolist(), LENGTH), writing=False)
    while batch.texts:
        batch.round()
    return batch.num_bytes


@torch.inference_mode()
@pytest.mark.thorough
def test_texts_that_come_and_go_leave_nothing_behind():
    """Storages counted: after 69 texts as many bytes are alive as after 39, when the same rows are full."""
    pair = load_pair(PairSource())
    alive = []
    drafts = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}  # else by time, which masks tell
    with configured(pair.drafter, **drafts), StorageCounter() as counter:
        batch = batch_of(pair.drafter, ROWS, context=128, chunk=32)
        for number in range(69):
            while len(batch.texts) == ROWS:
                batch.round()
            text = text_of(range(10, 40 + 7 * (number % 5)), 8 + number % 3)
            read_in_pieces(batch, text, writing=False)
            if number in (38, 68):
                alive.append(counter.live_bytes)
    assert alive[0] == alive[1]


def test_full_rows_and_the_one_that_reads_are_planned_for():
    kept = []
    source = PairSource(memory="auto", context=CONTEXT)
    pair = load_pair(source, DraftOptions(), batch=ROWS + READING_ROWS)
    meter = StorageMeter()
    meter.loaded(pair.target)
    meter.loaded(pair.drafter)
    peak = meter.peak(lambda: kept.append(fill(pair, pair.plan.settings.prefill_chunk)))
    caches = sum(term.num_bytes for term in pair.plan.ledger if "cache" in term.name)
    assert 0.98 * kept[0] < caches, "a row to read in is one of the plan's"
    assert peak <= pair.plan.peak_bytes
