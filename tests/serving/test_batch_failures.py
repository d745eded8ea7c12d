"""Memory that runs out while rows come and go: one text is lost, or those of a round, and nobody else's changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from batches import assert_plain, batch_of, plain, read_in_pieces, text_of, write_all

from eagle31_hf.cache import row_pool
from eagle31_hf.cache.row_pool import RowPool
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.serving.batch import Batch
from families import recurrent_target
from helpers import CONFIGS, random_drafter, random_prompts, random_target
from memory_faults import Fault

JOINING: dict[str, Callable[[], AbstractContextManager[Fault]]] = {
    "the target's row is copied": lambda: Fault(1).after(row_pool, "copy_row"),
    "the drafter's row is copied": lambda: Fault(2).after(row_pool, "copy_row"),
    "the drafter reads on": lambda: Fault(1).before(DraftSession, "_absorb"),
}
LEAVING: dict[str, Callable[[], AbstractContextManager[Fault]]] = {
    "the target's row": lambda: Fault(1).before(RowPool, "leave"),
    "the drafter's row": lambda: Fault(2).before(RowPool, "leave"),
}


def batch_on(family: str, rows: int = 2) -> Batch:
    target = random_target(CONFIGS[family]()) if family in CONFIGS else recurrent_target(family)
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    return batch_of(drafter, rows)


@pytest.mark.parametrize("where", JOINING)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_text_that_cannot_join_is_the_only_one_lost(family: str, where: str) -> None:
    """What lay parked where it would have been is gone, too, and not resumed from."""
    batch, prompts = batch_on(family), random_prompts(3, seed=2)
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
    batch, prompts = batch_on("llama", rows=3), random_prompts(3, seed=2)
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
    batch, prompts = batch_on(family), random_prompts(2, seed=2)
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
