"""Tiny stock models, one plain forward of each, and draft trees to try them with."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.targets.binding import CACHE_ARGUMENT

VOCAB = 61
WINDOW = 8
COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWED = dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0, layer_types=MIXED)
MODELS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-windowed": ("qwen2", WINDOWED),
    "qwen3": ("qwen3", {}),
    "mistral-windowed": ("mistral", dict(sliding_window=WINDOW)),
    "mixtral": ("mixtral", dict(sliding_window=None, **MOE)),
    "mixtral-windowed": ("mixtral", dict(sliding_window=WINDOW, **MOE)),
    "gemma3-mixed": ("gemma3_text", dict(sliding_window=WINDOW, layer_types=MIXED)),
    "gpt_neox": ("gpt_neox", {}),
}
CELLS = [(name, attention) for name in MODELS for attention in ("eager", "sdpa")]
CELLS.append(("llama4-chunked", "eager"))
CHUNKED = dict(
    attention_chunk_size=WINDOW, intermediate_size_mlp=48, no_rope_layers=[1, 0, 1], moe_layers=[1],
    layer_types=["chunked_attention", "full_attention", "chunked_attention"], num_local_experts=2,
    num_experts_per_tok=1,
)  # fmt: skip
MODELS["llama4-chunked"] = ("llama4_text", CHUNKED)

_models: dict[tuple[str, str], torch.nn.Module] = {}


def tiny_model(name: str, attention: str = "sdpa") -> torch.nn.Module:
    if (name, attention) not in _models:
        kind, extra = MODELS[name]
        config = AutoConfig.for_model(kind, **{**COMMON, **extra})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        for parameter in model.parameters():
            # Large weights: attention must be sharp enough for a wrong mask cell to show.
            torch.nn.init.normal_(parameter, std=0.3)
        _models[name, attention] = model.eval()
    return _models[name, attention]


@dataclass
class Tree:
    """Node 0 is the root; parents precede children."""

    tokens: list[int]
    parents: list[int]

    def path(self, node: int) -> list[int]:
        return [node] if node == 0 else [*self.path(self.parents[node]), node]

    @property
    def depths(self) -> torch.Tensor:
        return torch.tensor([len(self.path(i)) - 1 for i in range(len(self.tokens))])

    @property
    def ancestors(self) -> torch.Tensor:
        size = len(self.tokens)
        return torch.tensor([[j in self.path(i) for j in range(size)] for i in range(size)])


def random_tree(rng: random.Random, size: int) -> Tree:
    parents = [0] + [rng.randrange(max(0, i - 3), i) for i in range(1, size)]
    return Tree([rng.randrange(3, VOCAB) for _ in range(size)], parents)


def oracle(model, tokens: list[int]) -> torch.Tensor:
    """Logits after the last token, by one plain forward without any cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def make_cache(model, batch_size: int, **sizes) -> SpeculativeCache:
    sizes = {"capacity": 128, "block": 16, **sizes}
    return SpeculativeCache.from_config(model.config, batch_size=batch_size, **sizes)


def forward(model, cache, tokens, ancestors=None, depths=None, after=0):
    """One placed forward, `(B, T, V)` logits."""
    tokens = torch.as_tensor(tokens)
    cache.place(tokens.shape[1], after=after)
    return model(
        tokens,
        attention_mask=cache.attention_mask(ancestors, depths),
        position_ids=cache.position_ids(depths),
        use_cache=True,
        **{CACHE_ARGUMENT: cache},
    ).logits


def prefill(model, cache, rows: list[list[int]], chunk: int = 5) -> None:
    """Right-padded column chunks; a row that has ended commits nothing."""
    for start in range(0, max(map(len, rows)), chunk):
        parts = [row[start : start + chunk] for row in rows]
        width = max(map(len, parts))
        forward(model, cache, [part + [0] * (width - len(part)) for part in parts])
        cache.commit([len(part) for part in parts])


def tree_forward(model, cache, trees: list[Tree]) -> torch.Tensor:
    ancestors, depths = torch.stack([t.ancestors for t in trees]), torch.stack([t.depths for t in trees])
    return forward(model, cache, [t.tokens for t in trees], ancestors, depths)


def random_rows(rng: random.Random, lengths) -> list[list[int]]:
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.abs().max() > 0.5  # logits large enough for the bound to mean something
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
