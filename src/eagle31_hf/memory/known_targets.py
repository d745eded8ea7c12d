"""Shapes of targets people run at home, so that plans and tables can be made without a network.

Sizes are those of each model's published `config.json`; parameter totals those of its safetensors index.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers import (
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)


@dataclass(frozen=True)
class KnownTarget:
    """A model's configuration and its published number of parameters."""

    config: PreTrainedConfig
    num_parameters: int


def _target(
    kind: type[PreTrainedConfig], sizes: tuple[int, int, int, int, int, int], positions: int, total: int, **more: object
) -> KnownTarget:
    """`sizes`: hidden, intermediate, layers, query heads, key-value heads, vocabulary."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = sizes
    fields = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }
    return KnownTarget(kind(**fields), total)  # type: ignore[arg-type]


def known_targets() -> dict[str, KnownTarget]:
    """By the name people call them. Gemma 3 without its vision tower."""
    return {
        "Llama 3.1 8B": _target(LlamaConfig, (4096, 14336, 32, 32, 8, 128256), 131072, 8_030_261_248),
        "Llama 3.1 70B": _target(LlamaConfig, (8192, 28672, 80, 64, 8, 128256), 131072, 70_553_706_496),
        "Qwen2.5 7B": _target(Qwen2Config, (3584, 18944, 28, 28, 4, 152064), 32768, 7_615_616_512),
        "Qwen2.5 14B": _target(Qwen2Config, (5120, 13824, 48, 40, 8, 152064), 32768, 14_770_033_664),
        "Qwen2.5 32B": _target(Qwen2Config, (5120, 27648, 64, 40, 8, 152064), 32768, 32_763_876_352),
        "Qwen2.5 72B": _target(Qwen2Config, (8192, 29568, 80, 64, 8, 152064), 32768, 72_706_203_648),
        "Qwen3 8B": _target(Qwen3Config, (4096, 12288, 36, 32, 8, 151936), 40960, 8_190_735_360, head_dim=128),
        "Qwen3 32B": _target(Qwen3Config, (5120, 25600, 64, 64, 8, 151936), 40960, 32_762_123_264, head_dim=128),
        "Mistral 7B v0.3": _target(
            MistralConfig, (4096, 14336, 32, 32, 8, 32768), 32768, 7_248_023_552, sliding_window=None
        ),
        "Mixtral 8x7B": _target(MixtralConfig, (4096, 14336, 32, 32, 8, 32000), 32768, 46_702_792_704),
        "gpt-oss 20B": _target(
            GptOssConfig, (2880, 2880, 24, 64, 8, 201088), 131072, 20_914_757_184, head_dim=64, num_local_experts=32
        ),
        "Gemma 3 27B": _target(
            Gemma3TextConfig,
            (5376, 21504, 62, 32, 16, 262208),
            131072,
            27_009_346_304,
            head_dim=128,
            sliding_window=1024,
            tie_word_embeddings=True,
        ),
    }


def find_known_target(name: str) -> KnownTarget | None:
    """The target people call so (`"Llama 3.1 8B"`, `"llama-3.1-8b"`), or `None`. Hub ids have an owner and are none."""
    by_key = {_key(known): target for known, target in known_targets().items()}
    return None if "/" in name else by_key.get(_key(name))


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
