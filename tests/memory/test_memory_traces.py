"""Predicted peaks against traces of stock models with fake tensors: nothing is computed, every storage is counted."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from eagle31_hf.cache.grouped_attention import attending_grouped
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.loop.prefill import ChunkedPrefill
from eagle31_hf.memory.dry_run import Forward, StorageCounter, dry_run_of
from eagle31_hf.memory.known_targets import known_targets
from eagle31_hf.memory.ledger import PREFILL, VERIFY
from eagle31_hf.memory.weights import SCHEMES
from eagle31_hf.targets.mixers import Mixers
from helpers import configured, drafter_of, target_of

BF16 = torch.bfloat16
COMMON = {"max_position_embeddings": 131072}
OTHERS: dict[str, PreTrainedConfig] = {
    "mistral, window": MistralConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                                     num_key_value_heads=8, vocab_size=32768, sliding_window=1024, **COMMON),
    "qwen3 moe": Qwen3MoeConfig(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, num_experts=16,
                                moe_intermediate_size=768, vocab_size=151936, head_dim=128, **COMMON),
    # Latent attention: keys and values are made of all that is cached, for every head.
    "glm4 flash": Glm4MoeLiteConfig(hidden_size=2048, num_attention_heads=20, num_key_value_heads=20,
                                    n_routed_experts=16, moe_intermediate_size=1536, kv_lora_rank=512, q_lora_rank=768,
                                    qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, vocab_size=151552,
                                    **COMMON),
}  # fmt: skip
FEW_LAYERS: dict[str, dict[str, Any]] = {
    "Gemma 3 27B": {"num_hidden_layers": 7},
    "Mixtral 8x7B": {"num_hidden_layers": 2},
    "Qwen3.5 9B": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "vocab_size": 1000,
    },
    "Nemotron 3 Nano 30B-A3B": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "vocab_size": 1000,
    },
}  # fmt: skip
"""Of the others four."""
EAGER = {
    "eager": LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16,
                         num_key_value_heads=4, vocab_size=32000, attn_implementation="eager"),
    "sinks": GptOssConfig(num_hidden_layers=2, num_local_experts=8, hidden_size=1024, intermediate_size=1024),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One traced generation: prompt length, prefill chunk, nodes verified, rows, how the cache is stored, how many
    layers instead of a few, slots by which the cache grows."""

    prompt: int
    chunk: int
    nodes: int
    batch: int = 1
    cache_type: str = "full"
    num_layers: int | None = None
    slab: int | None = None

    @property
    def capacity(self) -> int:
        return self.prompt + self.nodes


RUNS = [
    ("Llama 3.1 8B", Run(8192, 1024, 8)),
    ("Llama 3.1 8B", Run(2048, 512, 8, batch=2)),
    ("Qwen2.5 7B", Run(2048, 2048, 7)),
    ("Qwen3 8B", Run(16384, 512, 60)),
    ("Gemma 3 27B", Run(8192, 1024, 8)),
    ("mistral, window", Run(4096, 256, 24)),
    ("Mixtral 8x7B", Run(2048, 2048, 7)),
    ("qwen3 moe", Run(8192, 1024, 8)),
    ("glm4 flash", Run(8192, 1024, 8)),
    # Long prompts and many layers: the cache is what the peak consists of, its two new terms a part that would show.
    ("Llama 3.1 8B", Run(32768, 512, 8, 1, "int8", 12)),
    ("Llama 3.1 8B", Run(8192, 1024, 60, 3, "int8", 12)),
    ("Gemma 3 27B", Run(16384, 512, 60, 1, "int8", 12)),
    *(("Llama 3.1 8B", Run(8192, 1024, 7, cache_type=kind, slab=1024)) for kind in ("full", "int8")),
    # Most is what the reference kernels of states take for a token.
    ("Qwen3.5 9B", Run(2048, 1024, 1)),
    ("Nemotron 3 Nano 30B-A3B", Run(2048, 1024, 1)),
]


def trace_target(config: PreTrainedConfig, run: Run) -> dict[str, int]:
    """Peaks of prefill and verification above the weights: a stock model, driven as the decoding loop drives it."""
    block = max(run.chunk, run.nodes)
    sizes = {"batch_size": run.batch, "capacity": run.capacity, "block": block, "cache_type": run.cache_type,
             "slab": run.slab}  # fmt: skip

    def forward(tokens: int, logits_to_keep: int, ancestors: Tensor | None = None) -> Tensor:
        depths = None if ancestors is None else torch.arange(tokens)[None]
        cache.place(tokens)
        return model(
            torch.zeros(run.batch, tokens, dtype=torch.long),
            attention_mask=cache.attention_mask(ancestors, depths, BF16),
            position_ids=cache.position_ids(depths),
            logits_to_keep=logits_to_keep,
            **{CACHE_ARGUMENT: cache},
        ).logits

    def commit(tokens: int) -> None:
        # One token less in every row but the first: rows of unlike length have a mask each.
        cache.commit([tokens - (row > 0 and cache.lengths[row] == 0) for row in range(run.batch)])

    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as after:
        model = AutoModelForCausalLM.from_config(config, dtype=BF16).eval()
        after.callback(Mixers(model).let_go)
        with torch.no_grad(), StorageCounter() as counter, attending_grouped(model):
            cache = SpeculativeCache.from_config(config, **sizes)
            before = run.prompt - run.chunk
            if before and not run.slab:
                forward(1, 1)  # allocates every layer's cache; the rest is bookkeeping, unless it grows
            while cache.lengths[0] < before:
                tokens = min(run.chunk, before - cache.lengths[0])
                forward(tokens, 1) if run.slab or cache.has_states else cache.place(tokens)
                commit(tokens)
            counter.restart_peak()
            forward(run.chunk, 1)
            commit(run.chunk)
            peaks = {PREFILL: counter.peak_bytes}
            counter.restart_peak()
            forward(run.nodes, 0, torch.ones(1, run.nodes, run.nodes).tril().bool())
            return peaks | {VERIFY: counter.peak_bytes}


def predicted_target(config: PreTrainedConfig, run: Run) -> dict[str, int]:
    sizes = {"block": max(run.chunk, run.nodes), "batch": run.batch, "cache_type": run.cache_type,
             "grows": run.slab is not None}  # fmt: skip
    forwards = dry_run_of(config, SCHEMES["bf16"])
    prefill = forwards.count(Forward(run.chunk, run.prompt, **sizes))
    verify = forwards.count(Forward(run.nodes, run.capacity, verifies=True, **sizes))
    return {
        PREFILL: verify.cache + 2 * prefill.states + prefill.activations,
        VERIFY: verify.cache + 2 * verify.states + verify.activations,
    }


@pytest.mark.parametrize(("name", "run"), RUNS, ids=str)
@pytest.mark.thorough(every=3)
def test_target_peaks_match_a_trace(name: str, run: Run) -> None:
    known = OTHERS.get(name) or known_targets()[name]
    few = {"num_hidden_layers": run.num_layers} if run.num_layers else FEW_LAYERS.get(name, {"num_hidden_layers": 4})
    fields = {key: value for key, value in known.to_dict().items() if key != "layer_types"}
    config = type(known)(**{**fields, **few})
    predicted = predicted_target(config, run)
    for moment, peak in trace_target(config, run).items():
        assert predicted[moment] == pytest.approx(peak, rel=0.02), moment


@pytest.mark.parametrize("name", EAGER)
def test_eager_attention_is_budgeted_by_its_scores(name: str) -> None:
    run = Run(1024, 256, 8)
    predicted = predicted_target(EAGER[name], run)
    for moment, peak in trace_target(EAGER[name], run).items():
        assert 0.98 <= predicted[moment] / peak <= 1.15, moment


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
        target.generate(ids, assistant_model=drafter, max_new_tokens=3, do_sample=False, prefill_chunk_size=100)
    one_chunk = 100 * 3 * target.config.hidden_size * 4
    assert len(alive) == 3
    assert max(alive[1:]) - min(alive[1:]) < one_chunk // 20
    assert max(alive) < one_chunk // 4  # ids, rotations, the root: not one hidden state of each of a chunk's tokens
