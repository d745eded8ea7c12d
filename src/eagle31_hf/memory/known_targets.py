"""Shapes of targets people run at home, so that plans and tables can be made without a network.

Sizes are those of each model's published `config.json`.
"""

from __future__ import annotations

import difflib
import re

from transformers import AutoConfig, PreTrainedConfig

NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_BLOCKS = {"M": "linear_attention", "*": "full_attention", "E": "moe"}

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip


def _target(kind: str, sizes: tuple[int, ...], positions: int, **more: object) -> PreTrainedConfig:
    """A configuration of the `model_type` `kind`; `sizes` are those of `_SIZES`."""
    fields = dict(zip(_SIZES, sizes, strict=True)) | {
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
    }
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**fields, **more})
    return config


def known_targets() -> dict[str, PreTrainedConfig]:
    """By the name people call them; decoders alone, without vision towers. Where `mtp_num_hidden_layers` is set, their
    checkpoints hold a head for further tokens (MTP)."""
    return {
        "Llama 3.1 8B": _target("llama", (4096, 14336, 32, 32, 8, 128256), 131072),
        "Llama 3.1 70B": _target("llama", (8192, 28672, 80, 64, 8, 128256), 131072),
        "Qwen2.5 7B": _target("qwen2", (3584, 18944, 28, 28, 4, 152064), 32768),
        "Qwen2.5 14B": _target("qwen2", (5120, 13824, 48, 40, 8, 152064), 32768),
        "Qwen2.5 32B": _target("qwen2", (5120, 27648, 64, 40, 8, 152064), 32768),
        "Qwen2.5 72B": _target("qwen2", (8192, 29568, 80, 64, 8, 152064), 32768),
        "Qwen3 8B": _target("qwen3", (4096, 12288, 36, 32, 8, 151936), 40960, head_dim=128),
        "Qwen3 32B": _target("qwen3", (5120, 25600, 64, 64, 8, 151936), 40960, head_dim=128),
        "Mistral 7B v0.3": _target("mistral", (4096, 14336, 32, 32, 8, 32768), 32768, sliding_window=None),
        "Mixtral 8x7B": _target("mixtral", (4096, 14336, 32, 32, 8, 32000), 32768),
        "gpt-oss 20B": _target(
            "gpt_oss", (2880, 2880, 24, 64, 8, 201088), 131072, head_dim=64, num_local_experts=32
        ),
        "Gemma 3 27B": _target(
            "gemma3_text", (5376, 21504, 62, 32, 16, 262208), 131072, head_dim=128, sliding_window=1024,
            tie_word_embeddings=True,
        ),
        # Most layers of these keep a recurrent state instead of keys and values.
        "Qwen3.5 9B": _target(
            "qwen3_5_text", (4096, 12288, 32, 16, 4, 248320), 262144, head_dim=256, linear_num_value_heads=32,
            mtp_num_hidden_layers=1,
        ),
        "Qwen3.6 27B": _target(
            "qwen3_5_text", (5120, 17408, 64, 24, 4, 248320), 262144, head_dim=256, linear_num_value_heads=48,
            mtp_num_hidden_layers=1,
        ),
        "Qwen3.6 35B-A3B": _target(
            "qwen3_5_moe_text", (2048, 512, 40, 16, 2, 248320), 262144, head_dim=256, linear_num_value_heads=32,
            num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
            mtp_num_hidden_layers=1,
        ),
        "Nemotron 3 Nano 30B-A3B": _target(
            "nemotron_h", (2688, 1856, 52, 32, 2, 131072), 262144, head_dim=128, mamba_num_heads=64,
            mamba_head_dim=64, ssm_state_size=128, n_groups=8, n_routed_experts=128, num_experts_per_tok=6,
            moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
            layers_block_type=[_BLOCKS[block] for block in NEMOTRON_3_NANO],
        ),
    }  # fmt: skip


def find_known_target(name: str) -> PreTrainedConfig | None:
    """The target people call so (`"Llama 3.1 8B"`, `"llama-3.1-8b"`), or `None`. Hub ids have an owner and are none."""
    by_key = {_key(known): target for known, target in known_targets().items()}
    return None if "/" in name else by_key.get(_key(name))


def close_names(name: str) -> list[str]:
    """Names of known targets that `name` may be a misspelling of, the closest first."""
    by_key = {_key(known): known for known in known_targets()}
    return [by_key[key] for key in difflib.get_close_matches(_key(name), by_key, n=2, cutoff=0.8)]


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
