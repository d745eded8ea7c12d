"""Predicted peaks against traces of stock models with fake tensors: nothing is computed, every storage is counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from eagle31_hf.cache.spans import LayerKinds
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.config import Eagle31Config
from eagle31_hf.drafter.modeling_eagle31 import Eagle31Network
from eagle31_hf.loop.prefill import ChunkedPrefill
from eagle31_hf.memory.cards import Card
from eagle31_hf.memory.drafter_facts import drafter_facts
from eagle31_hf.memory.dry_run import StorageCounter
from eagle31_hf.memory.ledger import DRAFTER_PREFILL, PREFILL, VERIFY, MemorySettings, build_ledger
from eagle31_hf.memory.target_facts import dry_run_of, read_target
from eagle31_hf.memory.weights import SCHEMES
from eagle31_hf.targets.binding import CACHE_ARGUMENT
from eagle31_hf.targets.grouped_attention import attending_grouped
from helpers import configured, drafter_of, target_of

BF16 = torch.bfloat16
COMMON = {"num_hidden_layers": 4, "max_position_embeddings": 131072}
TARGETS: dict[str, PreTrainedConfig] = {
    "llama 8B": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                            vocab_size=128256, **COMMON),
    "llama 70B": LlamaConfig(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
                             vocab_size=128256, **COMMON),
    "plain heads": LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
                               num_key_value_heads=32, vocab_size=32000, **COMMON),
    "qwen2 7B": Qwen2Config(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
                            vocab_size=152064, **COMMON),
    "qwen3 8B": Qwen3Config(hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
                            head_dim=128, vocab_size=151936, **COMMON),
    "mistral, window": MistralConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                                     num_key_value_heads=8, vocab_size=32768, sliding_window=1024, **COMMON),
    "gemma3 27B": Gemma3TextConfig(hidden_size=5376, intermediate_size=21504, num_hidden_layers=7,
                                   num_attention_heads=32, num_key_value_heads=16, head_dim=128, vocab_size=262208,
                                   sliding_window=1024),
    "mixtral": MixtralConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_attention_heads=32,
                             num_key_value_heads=8, num_local_experts=8, vocab_size=32000),
    # Gate and up in one matrix; narrow experts beside one that all tokens pass.
    "phi3": Phi3Config(hidden_size=3072, intermediate_size=8192, num_attention_heads=32, vocab_size=32064, **COMMON),
    "qwen3 moe": Qwen3MoeConfig(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, num_experts=16,
                                moe_intermediate_size=768, vocab_size=151936, head_dim=128, **COMMON),
    "glm4 moe": Glm4MoeConfig(hidden_size=4096, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
                              n_routed_experts=16, first_k_dense_replace=1, vocab_size=151552, **COMMON),
    # Latent attention: keys and values are made of all that is cached, for every head.
    "glm4 flash": Glm4MoeLiteConfig(hidden_size=2048, num_attention_heads=20, num_key_value_heads=20,
                                    n_routed_experts=16, moe_intermediate_size=1536, kv_lora_rank=512, q_lora_rank=768,
                                    qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, vocab_size=151552,
                                    **COMMON),
}  # fmt: skip
DRAFTER = Eagle31Config(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
    draft_vocab_size=32000, max_position_embeddings=131072, aux_norm="per_slot", norm_output=True,
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One traced generation: prompt length, prefill chunk, nodes verified, rows, how the cache is stored and grows."""

    prompt: int
    chunk: int
    nodes: int
    batch: int = 1
    cache_type: str = "full"
    slab: int | None = None

    @property
    def capacity(self) -> int:
        return self.prompt + self.nodes


RUNS = (Run(2048, 2048, 7), Run(8192, 1024, 8), Run(16384, 512, 60), Run(4096, 256, 24), Run(2048, 512, 8, batch=2))
LONG_RUNS = {"gemma3 27B": RUNS[:3], "mixtral": (RUNS[0], RUNS[3]), "mistral, window": (RUNS[1], RUNS[3]),
             "phi3": RUNS[:2], "qwen3 moe": RUNS[:2], "glm4 moe": RUNS[:2], "glm4 flash": RUNS[:2]}  # fmt: skip
COMBINATIONS = [(name, run) for name in TARGETS for run in LONG_RUNS.get(name, RUNS)]


def within(predicted: int, traced_bytes: int, share: float) -> bool:
    return abs(predicted - traced_bytes) <= share * traced_bytes


class TracedTarget:
    """A stock model on fake tensors, driven as the decoding loop drives it."""

    def __init__(self, config: PreTrainedConfig, run: Run, counter: StorageCounter, model: nn.Module, taps: int = 0):
        self.run, self.model, self.counter = run, model, counter
        block = max(run.chunk, run.nodes)
        self.cache = SpeculativeCache.from_config(
            config, batch_size=run.batch, capacity=run.capacity, block=block, cache_type=run.cache_type,
            slab=run.slab,
        )  # fmt: skip
        self.states: dict[int, Tensor] = {}
        for index in range(1, taps + 1):
            model.model.layers[index].register_forward_pre_hook(  # type: ignore[union-attr, operator]
                lambda _module, args, index=index: self.states.__setitem__(index, args[0])
            )

    def forward(self, tokens: int, *, logits_to_keep: int, ancestors: Tensor | None = None) -> Tensor:
        ids = torch.zeros(self.run.batch, tokens, dtype=torch.long)
        self.cache.place(tokens)
        return self.model(
            ids,
            attention_mask=self.cache.attention_mask(ancestors, dtype=BF16),
            position_ids=self.cache.position_ids(None if ancestors is None else torch.arange(tokens)),
            logits_to_keep=logits_to_keep,
            **{CACHE_ARGUMENT: self.cache},
        ).logits

    def skip_to(self, length: int) -> None:
        """As if `length` tokens had been read: one forward allocates every layer's cache, the rest is bookkeeping."""
        if length:
            self.forward(1, logits_to_keep=1)
        while self.cache.lengths[0] < length:
            tokens = min(self.run.chunk, length - self.cache.lengths[0])
            self.cache.place(tokens)
            self.commit(tokens)

    def take_aux(self) -> Tensor:
        aux = torch.cat(list(self.states.values()), dim=-1)
        self.states.clear()
        return aux

    def commit(self, tokens: int) -> None:
        # One token less in every row but the first: rows of unlike length have a mask each.
        self.cache.commit([tokens - (row > 0 and self.cache.lengths[row] == 0) for row in range(self.run.batch)])


def trace_target(config: PreTrainedConfig, run: Run) -> dict[str, int]:
    """Peaks of prefill and verification above the weights."""
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=BF16)
        with torch.no_grad(), StorageCounter() as counter, attending_grouped(model.config):
            target = TracedTarget(config, run, counter, model)
            target.skip_to(run.prompt - run.chunk)
            counter.restart_peak()
            target.forward(run.chunk, logits_to_keep=1)
            target.commit(run.chunk)
            peaks = {PREFILL: counter.peak_bytes}
            counter.restart_peak()
            target.forward(run.nodes, logits_to_keep=0, ancestors=torch.ones(run.nodes, run.nodes).tril().bool())
            return peaks | {VERIFY: counter.peak_bytes}


def predicted_target(config: PreTrainedConfig, run: Run) -> dict[str, int]:
    sizes = {"capacity": run.capacity, "block": max(run.chunk, run.nodes), "batch": run.batch,
             "cache_type": run.cache_type, "grows": run.slab is not None}  # fmt: skip
    forwards = dry_run_of(config, SCHEMES["bf16"])
    prefill = forwards.count(run.chunk, run.prompt, **sizes)
    verify = forwards.count(run.nodes, run.capacity, verifies=True, **sizes)
    return {
        PREFILL: verify.cache + verify.beside + prefill.activations,
        VERIFY: verify.cache + verify.beside + verify.activations,
    }


@pytest.mark.parametrize(("name", "run"), COMBINATIONS, ids=str)
@pytest.mark.thorough(every=9)
def test_target_peaks_match_a_trace(name: str, run: Run) -> None:
    config = TARGETS[name]
    traced_peaks, predicted = trace_target(config, run), predicted_target(config, run)
    for moment, peak in traced_peaks.items():
        assert within(predicted[moment], peak, 0.02), (moment, predicted[moment] / peak)


# Long prompts and many layers: the cache is what the peak consists of, its two new terms a part that would show.
PACKED_RUNS = [
    (name, Run(prompt, chunk, nodes, batch, kind))
    for kind in ("int8",)
    for name, prompt, chunk, nodes, batch in (
        ("llama 8B", 32768, 512, 8, 1),
        ("llama 8B", 8192, 1024, 60, 3),
        ("plain heads", 16384, 256, 8, 1),
        ("qwen3 8B", 8192, 2048, 24, 1),
        ("mistral, window", 8192, 1024, 8, 1),
        ("gemma3 27B", 16384, 512, 60, 1),
    )
]


@pytest.mark.parametrize(("name", "run"), PACKED_RUNS, ids=str)
@pytest.mark.thorough(every=12)
def test_target_peaks_with_an_eight_bit_cache_match_a_trace(name: str, run: Run) -> None:
    fields = {k: v for k, v in TARGETS[name].to_dict().items() if k != "layer_types"}
    config = type(TARGETS[name])(**{**fields, "num_hidden_layers": 12})
    traced_peaks, predicted = trace_target(config, run), predicted_target(config, run)
    for moment, peak in traced_peaks.items():
        assert within(predicted[moment], peak, 0.02), (moment, predicted[moment] / peak)


def fake_drafter() -> tuple[Eagle31Network, nn.Embedding]:
    torch.set_default_dtype(BF16)
    try:
        return Eagle31Network(DRAFTER), nn.Embedding(DRAFTER.vocab_size, DRAFTER.hidden_size)
    finally:
        torch.set_default_dtype(torch.float32)


def absorb(network: Eagle31Network, embedding: nn.Embedding, cache: SpeculativeCache, aux: Tensor) -> None:
    """As `DraftSession.absorb`: the caller keeps `aux` until it returns."""
    batch, tokens, _ = aux.shape
    cache.place(tokens)
    network.decode(
        embedding(torch.zeros(batch, tokens, dtype=torch.long)),
        network.fuse_aux(aux),
        network.rotary(cache.position_ids()),
        cache.attention_mask(dtype=BF16),
        cache,
    )
    cache.commit(tokens)


@pytest.mark.parametrize("run", [Run(2048, 2048, 7), Run(8192, 1024, 8), Run(8192, 512, 16)], ids=str)
def test_drafter_peaks_match_a_trace(run: Run) -> None:
    facts = drafter_facts(DRAFTER, 2)
    sizes = {"capacity": run.capacity, "block": run.chunk, "grows": False}
    held = facts.count(run.nodes, run.capacity, **sizes)
    with FakeTensorMode():
        network, embedding = fake_drafter()
        with torch.no_grad(), StorageCounter() as counter:
            cache = SpeculativeCache(LayerKinds([None]), batch_size=1, capacity=run.capacity, block=run.chunk)
            for _ in range(0, run.prompt, run.chunk):
                counter.restart_peak()
                absorb(network, embedding, cache, torch.empty(1, run.chunk, facts.aux_width, dtype=BF16))
            planned = held.cache + facts.absorb_bytes(run.chunk, run.prompt, batch=1, **sizes)
            assert within(planned, counter.peak_bytes, 0.02)

            feedback = torch.empty(1, run.nodes, DRAFTER.hidden_size, dtype=BF16)
            cache.place(run.nodes)
            mask = cache.attention_mask(torch.eye(run.nodes, dtype=torch.bool), dtype=BF16)
            counter.restart_peak()
            tokens = embedding(torch.zeros(1, run.nodes, dtype=torch.long))
            network.decode(tokens, feedback, network.rotary(cache.position_ids()), mask, cache)
            unranked = replace(facts, draft_vocab=1)  # the head is not run here
            planned = held.cache + held.beside + unranked.step_bytes(run.nodes, run.capacity, batch=1, **sizes)
            assert within(planned, counter.peak_bytes, 0.02)


@pytest.mark.parametrize("cache_type", ["full", "int8"])
@pytest.mark.thorough(every=3)
def test_ledger_matches_prefill_drafter_and_verification_run_together(cache_type: str) -> None:
    """Target and drafter side by side, hidden states handed over chunk by chunk, as the decoding loop does."""
    run = Run(8192, 1024, 7, cache_type=cache_type, slab=1024)
    # Two more layers than taps need: in the last ones no tap is the layer's own input.
    config = LlamaConfig(**{**TARGETS["llama 8B"].to_dict(), "num_hidden_layers": 6})
    settings = MemorySettings(
        context=run.prompt, draft_tokens=run.nodes - 1, prefill_chunk=run.chunk, cache_type=cache_type
    )
    facts, drafter = read_target(config, "bf16"), drafter_facts(DRAFTER, 2)
    ledger = build_ledger(facts, drafter, Card("main memory", "cpu", 2**36, 2**36), settings)
    left_out = ("runtime", "weights", "draft head", "before packing", "sampling noise")  # nothing is sampled here
    terms = [term for term in ledger if not any(word in term.name for word in left_out)]
    moments = (PREFILL, DRAFTER_PREFILL, VERIFY)
    predicted = {m: sum(t.num_bytes for t in terms if m in t.moments) for m in moments}
    peaks: dict[str, int] = {}
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=BF16)
        network, embedding = fake_drafter()
        with torch.no_grad(), StorageCounter() as counter, attending_grouped(model.config):
            target = TracedTarget(config, run, counter, model, taps=3)
            capacity = settings.drafter_capacity
            cache = SpeculativeCache(LayerKinds([None]), batch_size=1, capacity=capacity, block=run.chunk)
            for _ in range(0, run.prompt, run.chunk):
                counter.restart_peak()
                logits = target.forward(run.chunk, logits_to_keep=1)
                peaks[PREFILL] = counter.peak_bytes
                target.commit(run.chunk)
                aux = target.take_aux()
                counter.restart_peak()
                absorb(network, embedding, cache, aux)
                peaks[DRAFTER_PREFILL] = counter.peak_bytes
                del aux, logits  # as the loop does, `test_nothing_of_a_chunk_outlives_it`
            counter.restart_peak()
            nodes = torch.ones(run.nodes, run.nodes).tril().bool()
            target.forward(run.nodes, logits_to_keep=0, ancestors=nodes)
            peaks[VERIFY] = counter.peak_bytes
    for moment, peak in peaks.items():
        assert within(predicted[moment], peak, 0.02), (moment, predicted[moment] / peak)


def test_nothing_of_a_chunk_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ledger relies on: before each chunk's forward nothing is alive but caches and the text."""
    target, drafter = target_of("llama"), drafter_of("llama")
    ids = torch.randint(3, 90, (1, 300), generator=torch.Generator().manual_seed(0))
    forward, alive = ChunkedPrefill._forward, []
    with configured(drafter, num_assistant_tokens=3), StorageCounter() as counter:

        def measured(self: ChunkedPrefill, *args: object) -> object:
            assert self.session is not None
            alive.append(counter.live_bytes - self.cache.num_bytes - self.session.cache.num_bytes)
            return forward(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(ChunkedPrefill, "_forward", measured)
        target.generate(ids, assistant_model=drafter, max_new_tokens=3, do_sample=False, prefill_chunk_size=50)
    one_chunk = 50 * 3 * target.config.hidden_size * 4
    assert len(alive) == 6
    assert max(alive[1:]) - min(alive[1:]) < one_chunk // 20
    assert max(alive) < one_chunk // 4  # ids, positions, the root: not one hidden state of each of a chunk's tokens


def test_eager_attention_is_budgeted_by_its_scores() -> None:
    run = Run(1024, 256, 8)
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16,
                         num_key_value_heads=4, vocab_size=32000, attn_implementation="eager")  # fmt: skip
    sinks = GptOssConfig(num_hidden_layers=2, num_local_experts=8, hidden_size=1024, intermediate_size=1024)
    for candidate in (config, sinks):
        predicted, peaks = predicted_target(candidate, run), trace_target(candidate, run)
        for moment, peak in peaks.items():
            assert 0.98 <= predicted[moment] / peak <= 1.15, (candidate.model_type, moment, predicted[moment] / peak)
