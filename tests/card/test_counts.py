"""What a round asks of a card, and what plans say of captured steps, counted on fake CUDA tensors; see `fake_card`.

Layers are alike, so a few of them show what all do.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf

if torch.version.cuda is None:
    pytest.skip("needs torch's build for CUDA: make card", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("a card is here: small tensors that the package keeps would be fake", allow_module_level=True)

import fake_rounds
from fake_card import Counting, Work
from fake_rounds import ACCEPTED, CHAIN, Text, Written, fake_pair, serve, write

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache import grouped_attention
from eagle31_hf.drafting.shape import DraftShape
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
from eagle31_hf.serving.text import Sampling

pytestmark = pytest.mark.card

LAYERS = 4
COMMON: dict[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": 131072}
TARGETS: dict[str, hf.PreTrainedConfig] = {
    "Llama 3.1 8B": hf.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                                   num_key_value_heads=8, vocab_size=128256, **COMMON),
    "Qwen3 8B": hf.Qwen3Config(hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
                               num_key_value_heads=8, head_dim=128, vocab_size=151936, **COMMON),
    "Qwen3 30B-A3B": hf.Qwen3MoeConfig(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                                       num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                                       vocab_size=151936, **COMMON),
    "Mistral 7B": hf.MistralConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                                   num_key_value_heads=8, vocab_size=32768, sliding_window=None, **COMMON),
    "Gemma 3 27B": hf.Gemma3TextConfig(hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
                                       num_key_value_heads=16, head_dim=128, vocab_size=262208, sliding_window=1024,
                                       max_position_embeddings=131072, num_hidden_layers=6),
}  # fmt: skip
TARGETS["Llama 3.1 8B, all layers"] = hf.LlamaConfig(**{**TARGETS["Llama 3.1 8B"].to_dict(), "num_hidden_layers": 32})
OF_STATES: dict[str, dict[str, Any]] = {
    "Qwen3.5 9B": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "Nemotron 3 Nano": {
        "model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "vocab_size": 131072, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 8, "n_routed_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "topk_group": 1,
        "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"],
    },
}  # fmt: skip
"""Four of their layers."""
PLAIN = [name for name in TARGETS if not name.startswith("Gemma")]
SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"shape": DraftShape(4, top_k=4, size=16)},
    "sampled chain": {"do_sample": True},
    "penalty": {"processors": (hf.RepetitionPenaltyLogitsProcessor(1.05),)},
    "four rows": {"rows": 4, "prompt": 8000},
}
OUTSIDE = {"chain": 6, "tree": 6, "sampled chain": 6 + ACCEPTED, "penalty": 8, "four rows": 7}
"""What the host starts in a round beside its two graphs: of each, slots go to the device, inputs in, outputs out. A
sampled text takes the noise of each token that was written; a penalty is told of these tokens."""
ROUNDS = 3


@cache
def written(target: str, text: Text) -> Written:
    with fake_pair(TARGETS[target]) as (counting, drafter):
        return write(counting, drafter, text, ROUNDS)


def last(target: str, text: Text) -> tuple[Work, Written]:
    """A round when all that is recorded has been."""
    found = written(target, text)
    assert not found.fallbacks
    return found.rounds[-1], found


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(
    ("target", "setting"),
    [*(("Llama 3.1 8B", setting) for setting in SETTINGS), *((name, "chain") for name in PLAIN[1:])],
)
def test_a_round_reads_keys_and_values_once_and_writes_none_but_new_ones(
    target: str, setting: str, captured: bool
) -> None:
    text = Text(captured=captured, **SETTINGS[setting])
    work, found = last(target, text)
    assert 0.99 <= work.read / found.visible_bytes[-1] <= 1.1
    assert (work.waits, work.blocking_copies, work.copied) == (1, 0, 0), work.where
    if target == "Llama 3.1 8B":
        row = text.rows * 2 * 8 * 128 * 2 * LAYERS  # bytes of a token: keys and values of 8 heads
        assert found.visible_bytes[-1] >= text.prompt * row
        stored = work.stored / (text.shape.nodes * row)
        assert stored >= 1 if setting == "tree" else stored == 1


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_windows_read_no_more_than_they_keep(captured: bool) -> None:
    """Accepted tokens are moved from the block into the window, and nothing else is."""
    text = Text(captured=captured, prompt=4000, chunk=1000)
    work, found = last("Gemma 3 27B", text)
    assert work.read <= 1.1 * found.kept_bytes[-1]
    assert work.copied <= 5 * 2 * text.shape.nodes * 16 * 128 * 2


@pytest.mark.parametrize("setting", SETTINGS)
def test_captured_rounds_are_two_graphs_and_record_nothing_more(setting: str) -> None:
    text = Text(captured=True, **SETTINGS[setting])
    found = written("Llama 3.1 8B", text)
    assert [len(each.recorded) for each in found.rounds] == [3, 0, 0]  # drafting once, and the two
    assert all(len(each.replayed) == 2 for each in found.rounds[1:])
    assert found.rounds[-1].launches == OUTSIDE[setting], found.rounds[-1].names


OUTSIDE_WITH_STATES = OUTSIDE["chain"] + 3
"""What the host starts where states are moved on by a graph of their own: how much each row keeps goes to the device,
what a block left goes in, and what becomes of the states goes over them."""


def config_of_states(target: str, times: int = 1) -> hf.PreTrainedConfig:
    """Of `times` as many layers."""
    kinds = {name: value * times for name, value in OF_STATES[target].items() if isinstance(value, list)}
    sizes = {"num_hidden_layers": LAYERS * times} if "layer_types" in kinds else {}
    fields = {**OF_STATES[target], **kinds, **sizes, "max_position_embeddings": 131072}
    return hf.AutoConfig.for_model(**fields)


@pytest.mark.parametrize(("target", "times"), [("Llama 3.1 8B", 1), *product(OF_STATES, (1, 2))])
def test_the_next_text_records_nothing(target: str, times: int) -> None:
    """The host starts no more for eight layers with states than for four, of whatever kernels."""
    config, graphs, outside = TARGETS.get(target), 2, OUTSIDE["chain"]
    if config is None:
        config, graphs, outside = config_of_states(target, times), 3, OUTSIDE_WITH_STATES
    with fake_pair(config) as (counting, drafter):
        made = [write(counting, drafter, Text(300, 700, captured=True), ROUNDS) for _ in range(2)]
    assert not any(found.fallbacks for found in made)
    assert [[len(each.recorded) for each in found.rounds] for found in made] == [[graphs + 1, 0, 0], [0, 0, 0]]
    for work in (made[0].rounds[1], *made[1].rounds[1:]):  # a text's last work has the next prompt in it
        assert len(work.replayed) == graphs
        assert (work.waits, work.blocking_copies) == (1, 0), work.where
        assert work.launches == outside, work.names


def test_the_most_that_a_sampled_round_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts are accepted. Now and then the noise ahead lies at both ends of its ring."""
    monkeypatch.setattr(fake_rounds, "ACCEPTED", 6)
    with fake_pair(TARGETS["Llama 3.1 8B"]) as (counting, drafter):
        found = write(counting, drafter, Text(captured=True, do_sample=True), 10)
    assert Counter(each.launches for each in found.rounds[1:]) == {12: 7, 14: 2}


SERVED = {
    "greedy": (Sampling(temperature=0), 7),
    "sampled": (Sampling(temperature=0.7, top_k=0), 8),
    "penalty": (Sampling(temperature=0, repetition_penalty=1.05), 10),
}
"""What four texts of one kind ask for, and what the host starts beside the two graphs: the noise of texts that
are drawn without a seed (drawn now and then for many tokens); of penalised ones their tokens."""


@pytest.mark.parametrize(
    ("target", "kind"), [*(("Llama 3.1 8B", kind) for kind in SERVED), *((target, "greedy") for target in OF_STATES)]
)
def test_a_servers_round_is_two_graphs_and_one_wait(target: str, kind: str) -> None:
    """Where layers keep states one graph more moves them on: each row keeps its own number of drafts, a tensor."""
    sampling, outside = SERVED[kind]
    has_states = target in OF_STATES
    with fake_pair(config_of_states(target) if has_states else TARGETS[target]) as (counting, drafter):
        works, fallbacks = serve(counting, drafter, 4, ROUNDS + 1, sampling)
    work, graphs = works[-1], 2 + has_states
    assert not fallbacks
    assert [len(work.recorded) for work in works] == [graphs + 1, 0, 0, 0]  # drafting once, and those of each round
    assert len(work.replayed) == graphs
    assert (work.waits, work.blocking_copies) == (1, 0), work.where
    assert has_states or not work.copied
    assert work.launches == outside + 3 * has_states, work.names


def test_a_head_inside_the_target_drafts_by_three_graphs_and_one_wait() -> None:
    config = hf.Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4, head_dim=256,
        vocab_size=248320, linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128,
        linear_value_head_dim=128, mtp_num_hidden_layers=1, layer_types=["linear_attention"] * 3 + ["full_attention"],
        **COMMON,
    )  # fmt: skip
    with fake_pair(config, head=True) as (counting, drafter):
        found = write(counting, drafter, Text(captured=True, prompt=4000, chunk=1000), ROUNDS)
    work = found.rounds[-1]
    assert not found.fallbacks
    assert not work.recorded, "what the first rounds recorded serves the others"
    assert len(work.replayed) == 3, "verification, the next draft, and what moves states on"
    assert (work.waits, work.blocking_copies) == (1, 0), work.where
    assert work.launches <= 14, work.names


def test_a_packed_target_is_captured_as_any() -> None:
    with fake_pair(TARGETS["Llama 3.1 8B"], nf4=True) as (counting, drafter):
        found = write(counting, drafter, Text(captured=True), ROUNDS)
    work = found.rounds[-1]
    assert (work.waits, work.blocking_copies, work.copied) == (1, 0, 0), work.where
    assert (len(work.replayed), work.launches) == (2, OUTSIDE["chain"]), found.fallbacks
    assert work.read <= 1.1 * found.visible_bytes[-1]


def test_what_attends_without_a_fused_kernel_copies_keys_to_every_query_head() -> None:
    """gpt-oss: its sinks are no business of SDPA's, and eager attention repeats keys and values eight times."""
    target = hf.GptOssConfig(num_hidden_layers=4, num_local_experts=8)
    with fake_pair(target) as (counting, drafter):
        found = write(counting, drafter, Text(captured=True, prompt=4000, chunk=1000), ROUNDS)
    work = found.rounds[-1]
    assert not found.fallbacks
    assert (len(work.replayed), work.waits, work.blocking_copies) == (2, 1, 0), work.where
    assert work.read == pytest.approx(9 * found.kept_bytes[-1], rel=0.05)
    assert work.copied == pytest.approx(8 * found.kept_bytes[-1], rel=0.05)


def test_it_is_seen_if_keys_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own attention, by which all keys and values are written and read for every query head."""
    monkeypatch.setitem(
        hf.AttentionInterface._global_mapping, grouped_attention.GROUPED, grouped_attention.sdpa_attention_forward
    )
    with fake_pair(TARGETS["Llama 3.1 8B"]) as (counting, drafter):
        found = write(counting, drafter, Text(), 1)
    work, visible = found.rounds[-1], found.visible_bytes[-1]
    assert work.copied == pytest.approx(4 * visible, rel=0.01)
    assert work.read == pytest.approx(5 * visible, rel=0.01)


def test_a_card_that_is_not_there_counts_what_it_is_asked() -> None:
    with fake_pair(TARGETS["Llama 3.1 8B"]) as (counting, _):
        keys = torch.empty(1, 8, 64, 128, device="cuda")
        counting.follow([keys])
        keys[:, :, :2].copy_(torch.empty(1, 8, 2, 128, device="cuda"))
        torch.tensor([1, 2], device="cuda")
        bool(keys.sum() > 0)
        work = counting.work
    assert (work.stored, work.waits, work.blocking_copies) == (8 * 2 * 128 * 4, 1, 1)
    assert work.read == 8 * 64 * 128 * 4 + 4  # the keys, then their sum


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
    with StorageCounter() as counter:
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
