"""Tiny random targets of many families: decoders with attention of every kind, decoders that see, recurrent hybrids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from helpers import GROUPED, SIZES, random_target, seeded

GEMMA_4: dict[str, Any] = {
    **GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 96,
}  # fmt: skip
GPT_2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "initializer_range": 0.15}
IDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}  # fmt: skip
LOW_RANK: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
SPARSE_AND_LATENT: dict[str, Any] = {**SIZES, **ROUTED, **LOW_RANK, "first_k_dense_replace": 1}
"""As DeepSeek's are."""
WITHOUT_HEAD_DIM = {name: value for name, value in GROUPED.items() if name != "head_dim"}

TEXT_FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma4_text": lambda: hf.Gemma4TextConfig(**GEMMA_4),
    "gpt2": lambda: hf.GPT2Config(**GPT_2, **IDS),
    "gptj": lambda: hf.GPTJConfig(**GPT_2, **IDS, rotary_dim=8),
    "opt": lambda: hf.OPTConfig(
        vocab_size=96, hidden_size=64, ffn_dim=80, num_hidden_layers=4, num_attention_heads=4, word_embed_proj_dim=64,
        max_position_embeddings=128, init_std=0.15, **IDS,
    ),
    "falcon": lambda: hf.FalconConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, initializer_range=0.15, **IDS
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=96, hidden_size=64, n_layer=4, n_head=4, initializer_range=0.15, **IDS),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=96, hidden_size=64, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]],
        max_position_embeddings=128, window_size=8, initializer_range=0.15, **IDS,
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**SPARSE_AND_LATENT),
    "gpt_oss": lambda: hf.GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "qwen2_windowed": lambda: hf.Qwen2Config(
        **WITHOUT_HEAD_DIM, use_sliding_window=True, sliding_window=8, max_window_layers=2,
    ),
    "llama4_text": lambda: hf.Llama4TextConfig(
        **GROUPED, attention_chunk_size=8, intermediate_size_mlp=48, no_rope_layers=[1, 0] * 2, moe_layers=[1],
        layer_types=["chunked_attention", "full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1,
    ),
}  # fmt: skip

# --- decoders that see ------------------------------------------------------------------------------------------------

IMAGE, VIDEO, AUDIO, START, END = 90, 87, 86, 88, 89  # token ids
TOWER = {"hidden_size": 32, "intermediate_size": 48}
SIGLIP = {**TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
QWEN_TOWER = {
    **TOWER, "depth": 2, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8, "spatial_merge_size": 2,
    "temporal_patch_size": 1,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": IMAGE,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "video_token_id": VIDEO,
}


def llava() -> Any:
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            text_config=hf.LlamaConfig(**GROUPED), vision_config=hf.CLIPVisionConfig(**SIGLIP),
            image_token_index=IMAGE, vision_feature_layer=-1,
        )
    )  # fmt: skip


def gemma_3() -> Any:
    text = {
        **GROUPED, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
    }  # fmt: skip
    model = hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            text_config=text, vision_config={**SIGLIP, "model_type": "siglip_vision_model"}, mm_tokens_per_image=4,
            image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
        )
    )  # fmt: skip
    with torch.no_grad():
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(0, 0.2)  # zeros in a fresh model
    return model


def mistral_3() -> Any:
    tower = {**SIGLIP, "model_type": "pixtral", "head_dim": 16, "patch_size": 4}
    return hf.Mistral3ForConditionalGeneration(
        hf.Mistral3Config(
            text_config={**GROUPED, "model_type": "mistral", "sliding_window": None}, vision_config=tower,
            image_token_index=IMAGE, spatial_merge_size=2, vision_feature_layer=-1,
        )
    )  # fmt: skip


def qwen_2_5_vl() -> Any:
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"}
    return hf.Qwen2_5_VLForConditionalGeneration(
        hf.Qwen2_5_VLConfig(
            text_config={**WITHOUT_HEAD_DIM, "rope_scaling": scaling},
            vision_config={**QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [1]}, **QWEN_IDS,
        )
    )  # fmt: skip


def qwen_3_vl() -> Any:
    scaling = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return hf.Qwen3VLForConditionalGeneration(
        hf.Qwen3VLConfig(
            text_config={**GROUPED, "rope_scaling": scaling},
            vision_config={**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}, **QWEN_IDS,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class SeeingFamily:
    """How to make a model that sees, and what its processor makes of one 16 x 16 picture in a short prompt."""

    make: Callable[[], Any]
    is_marked: bool = False  # tokens around those of a picture
    is_in_patches: bool = False
    extra: Callable[[Tensor], dict[str, Tensor]] = lambda ids: {}

    def model(self) -> Any:
        with seeded(0):
            return self.make().float().eval()

    def inputs(self, picture: int, rows: int = 1, padding: Sequence[int] = ()) -> dict[str, Tensor]:
        """Arguments of `generate`, with so many pads in front of each row, and so many more tokens in the others."""
        marks = ([START], [END]) if self.is_marked else ([], [])
        pads = list(padding) or [0] * rows
        before = [[0] * n + list(range(30, 30 + max(pads) - n)) for n in pads]
        ids = torch.tensor([[*first, 5, *marks[0], *[IMAGE] * 4, *marks[1], 17, 23, 8] for first in before])
        mask = torch.ones_like(ids)
        for row, n in enumerate(pads):
            mask[row, :n] = 0
        shape = (16 * rows, 3 * 8 * 8) if self.is_in_patches else (rows, 3, 16, 16)
        given = {"input_ids": ids, "attention_mask": mask, "pixel_values": picture_of(picture, shape)}
        return {**given, **self.extra(ids)}


def picture_of(seed: int, shape: tuple[int, ...]) -> Tensor:
    with seeded(seed):
        return 3 * torch.randn(shape)


def _grid(ids: Tensor) -> dict[str, Tensor]:
    return {"mm_token_type_ids": (ids == IMAGE).long(), "image_grid_thw": torch.tensor([[1, 4, 4]] * len(ids))}


SEEING_FAMILIES: dict[str, SeeingFamily] = {
    "llava": SeeingFamily(llava),
    "gemma3": SeeingFamily(gemma_3, is_marked=True, extra=lambda ids: {"token_type_ids": (ids == IMAGE).long()}),
    "mistral3": SeeingFamily(mistral_3, extra=lambda ids: {"image_sizes": torch.tensor([[16, 16]] * len(ids))}),
    "qwen2.5_vl": SeeingFamily(qwen_2_5_vl, is_marked=True, is_in_patches=True, extra=_grid),
    "qwen3_vl": SeeingFamily(qwen_3_vl, is_marked=True, is_in_patches=True, extra=_grid),
}

# --- one that hears ---------------------------------------------------------------------------------------------------


def hearing_model() -> Any:
    tower = {
        "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32,
        "max_source_positions": 8,
    }  # fmt: skip
    config = hf.Qwen2AudioConfig(
        audio_config={**tower, "model_type": "qwen2_audio_encoder"},
        text_config={**WITHOUT_HEAD_DIM, "model_type": "qwen2"}, audio_token_index=AUDIO,
    )  # fmt: skip
    with seeded(0):
        return hf.Qwen2AudioForConditionalGeneration(config).float().eval()


def hearing_inputs(sound: int) -> dict[str, Tensor]:
    """Sixteen frames of sound, of which four tokens are left."""
    ids = torch.tensor([[5, *[AUDIO] * 4, 17, 23, 8]])
    heard = {"input_features": picture_of(sound, (1, 8, 16)), "feature_attention_mask": torch.ones(1, 16).long()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **heard}


# --- hybrids ----------------------------------------------------------------------------------------------------------

GATED_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"]
OF_OTHER_LAYERS = {name: value for name, value in GROUPED.items() if name != "num_hidden_layers"}
DENSE_AND_SPARSE = {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
HEADS_OF_ATTENTION = {"attention_hidden_size": 128, "attention_head_dim": 32}

RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **GROUPED, **GATED_DELTA, **EXPERTS, "layer_types": MIXED, "shared_expert_intermediate_size": 32
    },
    "qwen3_5_text": {**GROUPED, **GATED_DELTA, "layer_types": MIXED},
    "qwen3_5_moe_text": {
        **GROUPED, **GATED_DELTA, **EXPERTS, "layer_types": MIXED, "shared_expert_intermediate_size": 32
    },
    "olmo_hybrid": {**WITHOUT_HEAD_DIM, **GATED_DELTA, "layer_types": MIXED},
    "kimi_linear": {
        **WITHOUT_HEAD_DIM, **EXPERTS, **LATENT, **DENSE_AND_SPARSE, "num_key_value_heads": 4, "layer_types": MIXED,
        "linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "q_lora_rank": None,
        "num_local_experts": 4, "n_shared_experts": 1,
    },
    "bailing_hybrid": {
        **GROUPED, **EXPERTS, **LATENT, **DENSE_AND_SPARSE, "num_key_value_heads": 4, "layer_types": MIXED,
        "q_lora_rank": 16, "num_local_experts": 4,
    },
    "nemotron_h": {
        **OF_OTHER_LAYERS, "layers_block_type": ["linear_attention", "moe", *MIXED[2:], "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4,
        "chunk_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    },
    "bamba": {**WITHOUT_HEAD_DIM, **MAMBA_2, "attn_layer_indices": [2]},
    "granitemoehybrid": {
        **WITHOUT_HEAD_DIM, **MAMBA_2, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {**GROUPED, **MAMBA_2, "mamba_d_ssm": 128},
    "zamba2": {
        **WITHOUT_HEAD_DIM, **HEADS_OF_ATTENTION, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8,
        "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 8, "use_shared_attention_adapter": False,
    },
    "mamba2": {
        **SIZES, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "conv_kernel": 4, "expand": 2,
        "chunk_size": 16,
    },
    "jamba": {
        **WITHOUT_HEAD_DIM, "attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_dt_rank": 8, "use_mamba_kernels": False,
    },
    "lfm2": {
        **WITHOUT_HEAD_DIM, "layer_types": CONVOLUTIONS, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False
    },
    "lfm2_moe": {
        **WITHOUT_HEAD_DIM, **EXPERTS, "layer_types": CONVOLUTIONS, "conv_L_cache": 3, "num_dense_layers": 1
    },
    "zaya": {**WITHOUT_HEAD_DIM},
}  # fmt: skip
"""Fields of their configurations, by model type."""

LATE_FAMILIES = ("bailing_hybrid",)
"""The oldest supported transformers does not have them."""


def recurrent_config(family: str, **fields: Any) -> Any:
    return hf.AutoConfig.for_model(family, **{**RECURRENT_FAMILIES[family], **fields})


def recurrent_target(family: str, **fields: Any) -> Any:
    """A target that remembers: fresh ones forget their states within two tokens, and wrong ones would not show."""
    if family in LATE_FAMILIES and family not in hf.CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {family}")
    return remembering(random_target(recurrent_config(family, **fields)))


def remembering(model: Any) -> Any:
    """The same, with recurrent layers that forget slowly."""
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.copy_((torch.rand(weight.shape, generator=dice) * 0.3 + 0.02).log())
            elif weight.dim() <= 1 and weight.is_floating_point():
                weight.add_(torch.randn(weight.shape, generator=dice) * 0.1)
    return model


def clamped_target(family: str) -> Any:
    """A Mamba-2 target whose code for many tokens raises time steps to a bound that its code for one does not know."""
    model = recurrent_target(family, time_step_min=0.5)
    for name, weight in model.named_parameters():
        if name.endswith("dt_bias"):
            weight.data.fill_(-2.0)
    return model


# --- hybrids that see -------------------------------------------------------------------------------------------------


def _hybrid_vl(kind: str, text_family: str) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
    text = {**RECURRENT_FAMILIES[text_family], "rope_parameters": {**rope, "mrope_interleaved": True}}
    tower = {**QWEN_TOWER, "num_position_embeddings": 16}
    config = getattr(hf, f"{kind}Config")(text_config=text, vision_config=tower, **QWEN_IDS)
    return remembering(getattr(hf, f"{kind}ForConditionalGeneration")(config))


SEEING_HYBRIDS: dict[str, SeeingFamily] = {
    kind: SeeingFamily(partial(_hybrid_vl, name, f"{kind}_text"), is_marked=True, is_in_patches=True, extra=_grid)
    for kind, name in (("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"))
}


# --- targets whose positions end --------------------------------------------------------------------------------------

LAST = 40
"""Positions that there are."""
_GPT: dict[str, Any] = {**GPT_2, **IDS, "n_positions": LAST}
_ENDS: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": LAST, **IDS,
}  # fmt: skip
ENDING: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hf.GPT2Config(**_GPT),
    "gptj": lambda: hf.GPTJConfig(**_GPT, rotary_dim=8),
    "codegen": lambda: hf.CodeGenConfig(**_GPT, rotary_dim=8),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**_GPT),
    "opt": lambda: hf.OPTConfig(**_ENDS, ffn_dim=80, word_embed_proj_dim=64, init_std=0.15),
    "biogpt": lambda: hf.BioGptConfig(**_ENDS, intermediate_size=80, initializer_range=0.15),
    "ctrl": lambda: hf.CTRLConfig(vocab_size=96, n_positions=LAST, n_embd=64, dff=80, n_layer=4, n_head=4, **IDS),
}  # fmt: skip
