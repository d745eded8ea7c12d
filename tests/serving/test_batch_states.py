"""Texts on a target whose layers keep states: what they are resumed from, what they take, what they leave."""

from __future__ import annotations

import pytest
import torch
from batches import PIECE, assert_plain, batch_of, read_in_pieces, text_of

from eagle31_hf.cache.states import StateLayer
from eagle31_hf.memory.dry_run import Forward
from eagle31_hf.memory.ledger import UPDATE, MemorySettings
from eagle31_hf.memory.target_facts import read_target
from families import clamped_target, recurrent_target
from helpers import configured, ledger_of, random_drafter, random_prompts

ROWS = 3


@pytest.mark.parametrize("family", ["zamba2", "nemotron_h"])
def test_a_bound_that_the_time_steps_of_prompts_alone_have(family: str) -> None:
    """Prompts are read by the code for prompts to the last token, whatever pieces are left; answers in them, too."""
    batch = batch_of(random_drafter(clamped_target(family), aux_layers=[1, 2, 3]), context=128)
    first = assert_plain(batch, [(prompt, 16) for prompt in ([7], *random_prompts(9, seed=2, longest=35))])
    assert {len(text.request.prompt) % PIECE for text in first} >= {1, 2}
    assert_plain(batch, [([*text.tokens, 7, 8], 12) for text in first])


def test_a_turn_is_resumed_where_the_last_one_ended_and_nowhere_else() -> None:
    target = recurrent_target("qwen3_5_text")
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    prompt = list(range(5, 25))
    with torch.inference_mode():
        batch = batch_of(drafter, ROWS, context=128)
        (first,) = assert_plain(batch, [(prompt, 12)])
        asked = [*prompt, *first.writer.tokens, 7, 8, 9]
        (second,) = assert_plain(batch, [(asked, 12)])
        assert second.usage.cached_tokens == len(prompt) + 12 - 1
        (third,) = assert_plain(batch, [([*asked[:22], 40, 41, 42], 12)])
        assert third.usage.cached_tokens == 0, "a state cannot go back"


@pytest.mark.parametrize("rows", [1, 3])
def test_what_serve_holds_is_planned(rows: int) -> None:
    """Its rows, written and parked, and the states of the prompt that is read beside them."""
    target = recurrent_target("qwen3_5_text")
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    with torch.inference_mode(), configured(drafter, num_assistant_tokens=4, num_assistant_tokens_schedule="constant"):
        batch = batch_of(drafter, rows, context=64, chunk=16)
        for number in range(rows):
            read_in_pieces(batch, text_of([5 + number, *range(6, 20)], 12), writing=False)
        batch.round()
        layers: list[StateLayer] = [*batch.cache.with_states, *batch.prompt_caches.target.with_states]
        found = sum(layer.state_bytes for layer in layers)
    ledger = ledger_of(drafter, MemorySettings(64, rows, 4))
    planned = sum(term.num_bytes for term in ledger if "states" in term.name and UPDATE in term.moments)
    one_set = rows * read_target(target).forward.count(Forward(5, 64, block=16)).states
    assert found * 0.98 <= planned <= found + one_set, "no more than a set of each row too many"


def test_a_prompt_that_is_given_up_leaves_nothing() -> None:
    """A request that was cancelled while it was read, and all that a failure takes along."""
    target = recurrent_target("qwen3_5_text")
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    prompt = list(range(5, 25))
    with torch.inference_mode():
        batch = batch_of(drafter, ROWS, context=64, chunk=16)
        batch.begin(text_of(prompt, 8))
        batch.read(8)
        batch.drop_reading()
        read_in_pieces(batch, text_of(prompt, 8), writing=False)
        batch.round()
        batch.reset()
        held = [state for layer in batch.cache.with_states for state in layer.held_states(0).values()]
        assert held
        assert not any(state.any() for state in held)
        assert_plain(batch, [(prompt, 8)])
