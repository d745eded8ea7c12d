"""Tiny targets with a random MTP head in their files, of each family whose heads can be read.

The head's tensors are those of one of the target's own layers under the family's published names, so nothing here asks
the package how a head is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import LOW_RANK, RECURRENT_FAMILIES, ROUTED, SPARSE_AND_LATENT
from helpers import GROUPED, WINDOW, random_target, seeded

NEMOTRON_LAYERS = ["linear_attention", "full_attention", "linear_attention", "moe"]
FULL, SLIDING = "full_attention", "sliding_attention"

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(
        **_hybrid("qwen3_5_text"), rope_parameters=_partial(0.5), mtp_num_hidden_layers=1
    ),
    "qwen3_5_moe_text": lambda: hf.Qwen3_5MoeTextConfig(
        **_hybrid("qwen3_5_moe_text"), rope_parameters=_partial(0.5), mtp_num_hidden_layers=1
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_hybrid("qwen3_next")),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **GROUPED, **ROUTED, first_k_dense_replace=1, rope_parameters=_partial(0.5), num_nextn_predict_layers=1
    ),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(
        **{**GROUPED, **ROUTED, **LOW_RANK}, mlp_layer_types=["dense", *["sparse"] * 3], num_nextn_predict_layers=1
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**SPARSE_AND_LATENT, num_nextn_predict_layers=1),
    "mellum": lambda: hf.MellumConfig(
        **GROUPED, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
        layer_types=[FULL, SLIDING] * 2, mlp_layer_types=["sparse"] * 4, mtp_layer_types=[SLIDING],
        mtp_mlp_layer_types=["sparse"], num_nextn_predict_layers=1,
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **{**RECURRENT_FAMILIES["nemotron_h"], "layers_block_type": NEMOTRON_LAYERS}, num_nextn_predict_layers=1
    ),
    "exaone_moe": lambda: hf.ExaoneMoeConfig(
        **GROUPED, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, num_shared_experts=1, n_group=1,
        topk_group=1, sliding_window=WINDOW, layer_types=[SLIDING, FULL] * 2, mtp_layer_types=[FULL],
        mlp_layer_types=["sparse", "sparse", "sparse", "dense"], num_nextn_predict_layers=1,
    ),
    "exaone4": lambda: hf.Exaone4Config(
        **GROUPED, sliding_window=WINDOW, sliding_window_pattern=2, layer_types=[SLIDING, FULL] * 2,
        num_nextn_predict_layers=1,
    ),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **GROUPED, moe_intermediate_size=32, moe_k=2, moe_num_experts=4, moe_num_shared_experts=1,
        num_nextn_predict_layers=1,
    ),
    "mimo_v2_flash": lambda: hf.MiMoV2FlashConfig(
        **GROUPED, v_head_dim=8, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        sliding_window=WINDOW, layer_types=[FULL, SLIDING] * 2, num_nextn_predict_layers=3,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"],
    ),
}  # fmt: skip

LIKE_LAYERS = {"nemotron_h": [1, 3], "ernie4_5_moe": [0]}
"""Layers of the target that are shaped like the head's; of the others the last one."""

LAYER_TYPES = {"mellum": SLIDING, "exaone4": SLIDING, "mimo_v2_flash": SLIDING}
"""What the head's layer sees; of the others everything."""

TWO_LAYERS = ("nemotron_h",)
"""Their head has a layer that attends and one of experts."""

FAMILIES = [name for name in CONFIGS if name in hf.CONFIG_MAPPING]
"""Those that the installed transformers has."""

QWEN_NAMES = {"fc": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
DEEPSEEK_NAMES = {"fc": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}
NEMOTRON_NAMES = {
    "fc": "layers.0.eh_proj", "enorm": "layers.0.enorm", "hnorm": "layers.0.hnorm", "norm": "layers.1.final_layernorm"
}  # fmt: skip
ERNIE_NAMES = {"fc": "linear_proj", "enorm": "emb_norm", "hnorm": "hidden_norm", "layers": "block"}
MIMO_NAMES = {"fc": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "final_layernorm"}
BY_LAYER = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")


def _hybrid(family: str) -> dict[str, Any]:
    """As these targets are published: recurrent layers first, and the last one attends to everything."""
    return {**RECURRENT_FAMILIES[family], "layer_types": ["linear_attention", FULL] * 2}


def _partial(share: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share, "mrope_section": [2, 1, 1]}


def target_with_head(
    family: str, folder: Path, seed: int = 0, *, alias: str = "", single_experts: bool = False, **fields: Any
) -> Any:
    """Write a target of the family with a head into `folder`; the target as transformers reads it from there.

    Args:
        alias: what stands before the head's stored names.
        single_experts: experts are stored one by one.
        fields: of the target's configuration.
    """
    config = CONFIGS[family]()
    config.update(fields)
    model = random_target(config, seed)
    with seeded(seed + 1), torch.no_grad():
        final = final_norm(model)
        final.weight.add_(torch.randn_like(final.weight) * 0.3)  # even norms would hide raw states
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    head = {alias + name: tensor for name, tensor in stored_head(family, model, seed, single_experts).items()}
    save_file({**stored, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def final_norm(model: Any) -> Any:
    decoder = model.get_decoder()
    return decoder.norm_f if hasattr(decoder, "norm_f") else decoder.norm


def layers_like_the_heads(model: Any) -> list[Any]:
    """Layers of the target that are shaped like the head's."""
    return [model.get_decoder().layers[number] for number in LIKE_LAYERS.get(model.config.model_type, [-1])]


def stored_head(family: str, model: Any, seed: int, single_experts: bool = False) -> dict[str, Tensor]:
    """Tensors of a random head under the names that the family's files have."""
    tensors = random_head(model, seed)
    stored = _single(tensors) if single_experts else tensors.items()
    named = {_published(family, model.config.num_hidden_layers, name): tensor.clone() for name, tensor in stored}
    named.pop("", None)
    return named


def _published(family: str, num_layers: int, name: str) -> str:
    part, _, rest = name.partition(".")
    if family == "ernie4_5_moe":  # whose final norm is the target's
        inner = rest.removeprefix("0.") if part == "layers" else rest
        return f"model.mtp_{ERNIE_NAMES[part]}.0.{inner}" if part in ERNIE_NAMES else ""
    if family == "mimo_v2_flash":
        inner = rest.removeprefix("0.").replace("post_attention_", "pre_mlp_").replace("sinks", "attention_sink_bias")
        return f"model.mtp.layers.0.{inner if part == 'layers' else f'{MIMO_NAMES[part]}.{rest}'}"
    if family in TWO_LAYERS:
        return f"mtp.{name}" if part == "layers" else f"mtp.{NEMOTRON_NAMES[part]}.{rest}"
    if family in BY_LAYER:
        inner = rest.removeprefix("0.") if part == "layers" else f"{DEEPSEEK_NAMES[part]}.{rest}"
        return f"model.layers.{num_layers}.{inner}"
    return f"mtp.{name}" if part == "layers" else f"mtp.{QWEN_NAMES[part]}.{rest}"


def random_head(model: Any, seed: int) -> dict[str, Tensor]:
    """`fc`, `enorm`, `hnorm`, `norm` and `layers` of a head beside `model`, shaped as layers of it are."""
    layers = copy.deepcopy(layers_like_the_heads(model))
    width = model.config.hidden_size
    norm = final_norm(model)
    tensors = {}
    with seeded(seed + 2), torch.no_grad():
        for number, layer in enumerate(layers):
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            tensors |= {f"layers.{number}.{name}": tensor for name, tensor in layer.state_dict().items()}
        tensors["fc.weight"] = torch.randn(width, 2 * width) * 0.15
        for part in ("enorm", "hnorm", "norm"):
            tensors[f"{part}.weight"] = norm.weight + torch.randn(width) * 0.3
        if model.config.model_type == "ernie4_5_moe":
            tensors["norm.weight"] = norm.weight.clone()
    return tensors


def _single(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        place, _, kind = name.rpartition(".")
        if not place.endswith(".experts") or tensor.dim() != 3:
            yield name, tensor
            continue
        for number, matrix in enumerate(tensor):
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2)
                yield f"{place}.{number}.gate_proj.weight", gate
                yield f"{place}.{number}.up_proj.weight", up
            else:
                yield f"{place}.{number}.{kind}.weight", matrix
