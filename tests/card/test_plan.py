"""What plans say of captured steps, beside counted storages on fake CUDA tensors."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import transformers as hf

if torch.version.cuda is None:
    pytest.skip("needs torch's build for CUDA: make card", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a card is here: small tensors that the package keeps would be fake", allow_module_level=True)

from fake_card import Counting
from fake_rounds import CHAIN, Text, fake_pair, write
from test_counts import TARGETS, config_of_states

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.graphs.verify import CompiledVerification
from eagle31_hf.memory.cards import find_card
from eagle31_hf.memory.drafter_facts import read_drafter
from eagle31_hf.memory.dry_run import StorageCounter
from eagle31_hf.memory.ledger import (
    BETWEEN,
    LedgerTerm,
    MemorySettings,
    build_ledger,
    recorded_lengths,
    workspace_bytes,
)
from eagle31_hf.memory.target_facts import read_target
from eagle31_hf.memory.weights import storage_bytes

pytestmark = pytest.mark.card

CARD = find_card("RTX 4090")
PROCESSORS = (
    hf.RepetitionPenaltyLogitsProcessor(1.05),
    hf.TemperatureLogitsWarper(0.7),
    hf.TopPLogitsWarper(0.9),
)
"""Of the texts that take most: drawn, from a top-p of many tokens, under a penalty."""


@dataclass(frozen=True)
class Kept:
    """Bytes that stay after texts of two lengths: weights, keys with values, all else that one length brings, what
    comes once, and what steps need between their kernels."""

    weights: int
    per_length: int
    once: int
    pool: int

    def total(self, lengths: int) -> int:
        return self.weights + lengths * self.per_length + self.once + self.pool


def kept_by(pair: tuple[Counting, Eagle31Drafter], prompts: tuple[int, int], longest: int, chunk: int) -> Kept:
    """Write two texts, the longer first, so that the other lies in its memory; and single tokens of both."""
    counting, drafter = pair
    made: list[int] = []
    weights = storage_bytes(drafter.binding.model) + storage_bytes(drafter)
    verify = CompiledVerification.__call__
    resting = mock.patch.object(CompiledVerification, "__call__", lambda *told, rests: verify(*told, rests=True))
    with StorageCounter() as counter, resting:  # a graph for single tokens pays at once
        for prompt in prompts:
            for shape in (CHAIN, DraftShape(0)):
                text = Text(prompt, longest, shape, captured=True, do_sample=True, processors=PROCESSORS, chunk=chunk)
                assert not write(counting, drafter, text, 2).fallbacks
            gc.collect()
            made.append(counter.live_bytes)
    first, both = made
    return Kept(weights, per_length=both - first, once=first - (both - first), pool=counting.pool_bytes)


@pytest.mark.parametrize("nf4", [False, True], ids=["bf16", "nf4"])
def test_a_plan_knows_what_stays_between_texts(nf4: bool) -> None:
    config = TARGETS["Llama 3.1 8B"]
    settings = MemorySettings(context=Text.longest, draft_tokens=CHAIN.depth, prefill_chunk=2048)
    facts = read_target(config, "bnb-nf4-dq" if nf4 else "bf16")
    with fake_pair(config, nf4=nf4) as pair:
        drafter_config = pair[1].config
        kept = kept_by(pair, (32_000, 16_000), Text.longest, 2048)
    drafter = read_drafter(drafter_config, facts)
    ledger = build_ledger(facts, drafter, CARD, settings)  # its dry run needs no card, nor one that is not there
    beside = 0 if nf4 else kept.weights  # which would hide the rest; but what is unpacked lies in the pool on a card
    assert staying(ledger) - beside == pytest.approx(kept.total(recorded_lengths(Text.longest)) - beside, rel=0.02)


@pytest.mark.parametrize(("target", "times"), [("Qwen3.5 9B", 1), ("Nemotron 3 Nano", 1), ("Nemotron 3 Nano", 3)])
def test_a_plan_knows_what_stays_of_states(target: str, times: int) -> None:
    """The rows' own, what chains and single tokens leave of them, for each length and where they are moved on, a set
    that is moved on, and one that mixers are handed. Weights aside, which would hide it."""
    config, longest = config_of_states(target, times), 1000
    settings = MemorySettings(context=longest, draft_tokens=CHAIN.depth, prefill_chunk=256)
    facts = read_target(config, "bf16")
    with fake_pair(config) as pair:
        drafter_config = pair[1].config
        kept = kept_by(pair, (900, 450), longest, 256)
    drafter = read_drafter(drafter_config, facts)
    ledger = build_ledger(facts, drafter, CARD, settings)
    found = kept.total(recorded_lengths(longest)) - kept.weights
    assert staying(ledger) - kept.weights == pytest.approx(found, rel=0.02)


def staying(ledger: Sequence[LedgerTerm]) -> int:
    """What is planned to stay, without what storages do not show: the runtime's, cuBLAS's, and what is unpacked within
    bitsandbytes' operation."""
    planned = sum(term.num_bytes for term in ledger if BETWEEN in term.moments)
    unpacked = sum(term.num_bytes for term in ledger if term.name == "unpacking workspace, verify")
    return planned - CARD.context_bytes - workspace_bytes(CARD) - unpacked
