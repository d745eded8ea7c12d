"""What plans say of captured steps, beside counted storages on fake CUDA tensors."""

from __future__ import annotations

import gc

import pytest
import torch

if torch.version.cuda is None:
    pytest.skip("needs torch's build for CUDA: make card", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a card is here: small tensors that the package keeps would be fake", allow_module_level=True)

from fake_rounds import Text, fake_pair, write
from storages import StorageCounter
from test_counts import OF_STATES, TARGETS, config_of_states

from eagle31_hf.memory.captured_steps import recorded_lengths, workspace_bytes
from eagle31_hf.memory.cards import find_card
from eagle31_hf.memory.drafter_facts import read_drafter
from eagle31_hf.memory.ledger import BETWEEN, MemorySettings, build_ledger
from eagle31_hf.memory.target_facts import read_target
from eagle31_hf.memory.weight_bytes import storage_bytes

pytestmark = pytest.mark.card

CARD = find_card("RTX 4090")
PROMPTS = (32_000, 16_000)
"""Of two of the lengths in which rows are looked at; the longer first, so that the other lies in its memory."""


@pytest.mark.parametrize("nf4", [False, True], ids=["bf16", "nf4"])
def test_a_plan_knows_what_stays_between_texts(nf4: bool) -> None:
    config = TARGETS["Llama 3.1 8B"]
    settings = MemorySettings(context=Text.longest, draft_tokens=5, prefill_chunk=2048)
    facts = read_target(config, "bnb-nf4-dq" if nf4 else "bf16")
    made: list[int] = []
    with fake_pair(config, nf4=nf4) as (counting, drafter):
        weights = storage_bytes(drafter.binding.model) + storage_bytes(drafter)
        ledger = build_ledger(facts, read_drafter(drafter, facts), CARD, settings)
        with StorageCounter() as counter:
            for prompt in PROMPTS:
                found = write(counting, drafter, Text(prompt, captured=True, do_sample=True, chunk=2048), 2)
                assert not found.fallbacks
                gc.collect()
                made.append(counter.live_bytes)
    lengths, (first, both) = recorded_lengths(Text.longest), made
    kept = first + (lengths - 1) * (both - first) + counting.pool_bytes  # each length is as the other
    planned = {term.name: term.num_bytes for term in ledger if BETWEEN in term.moments}
    # The runtime's and cuBLAS's; and what is unpacked is unpacked within bitsandbytes' operation.
    inside = workspace_bytes(CARD) + sum(t.num_bytes for t in ledger if t.name == "unpacking workspace, verify")
    assert sum(planned.values()) - CARD.context_bytes - inside == pytest.approx(weights + kept, rel=0.02)
    buffers = planned["target cache, full"] + planned["drafter cache, full"]
    assert planned["recordings"] >= kept - buffers
    if not nf4:  # else most of what is planned is unpacked weights
        assert planned["recordings"] - inside <= 1.25 * (kept - buffers)


@pytest.mark.parametrize("target", OF_STATES)
def test_a_plan_knows_what_stays_of_states(target: str) -> None:
    """The rows' own, what chains leave of them, for each length and where they are moved on, and a set that is."""
    config, prompts, longest = config_of_states(target), (900, 450), 1200
    settings = MemorySettings(context=longest, draft_tokens=5, prefill_chunk=256)
    facts = read_target(config, "bf16")
    made: list[int] = []
    with fake_pair(config) as (counting, drafter):
        weights = storage_bytes(drafter.binding.model) + storage_bytes(drafter)
        ledger = build_ledger(facts, read_drafter(drafter, facts), CARD, settings)
        with StorageCounter() as counter:
            for prompt in prompts:
                found = write(counting, drafter, Text(prompt, longest, captured=True, do_sample=True, chunk=256), 2)
                assert not found.fallbacks
                gc.collect()
                made.append(counter.live_bytes)
    lengths, (first, both) = recorded_lengths(longest), made
    kept = first + (lengths - 1) * (both - first) + counting.pool_bytes
    planned = {term.name: term.num_bytes for term in ledger if BETWEEN in term.moments}
    rest = sum(planned.values()) - CARD.context_bytes - workspace_bytes(CARD) - weights
    assert facts.shape.states is not None
    kept += lengths * facts.shape.states.num_bytes  # what single tokens give, which were not written here
    assert rest == pytest.approx(kept, rel=0.12)
