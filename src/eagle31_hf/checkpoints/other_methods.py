"""Checkpoints of other methods, called by name. What a file is, its tensors say first; its config where they cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..errors import CheckpointFormatError
from .files import TensorInfo, get_path

Tensors = Mapping[str, TensorInfo]
_WANTED = "wanted an EAGLE-3 or EAGLE 3.1 drafter"
_SHOWN = 4  # tensor names in one message
_VOCABULARY_MAPS = ("d2t", "t2d", "draft_id_to_target_id")
# What packers store beside a matrix: compressed-tensors, FP8, GPTQ, AWQ, bitsandbytes.
_PACKED_PARTS = r"\.(weight_(scale|packed|shape|zero_point)\w*|input_scale|q?scales|qweight|qzeros|g_idx|absmax)$"


def refuse_other_methods(config: Mapping[str, Any], tensors: Tensors) -> None:
    """Names a checkpoint of another method instead of listing its tensors as wrong.

    Raises:
        CheckpointFormatError: this is not an EAGLE-3 / 3.1 drafter, or its weights are quantised in a foreign layout.
    """
    for what, applies, advice in _OTHER_METHODS:
        if applies(config, tensors):
            raise CheckpointFormatError(f"this checkpoint is {what}; {advice}")
    if not _any_name(tensors, r"(^|\.)fc\.weight$|hidden_norm\.|layers?\."):
        names = sorted(tensors)[:_SHOWN]
        raise CheckpointFormatError(
            f"this checkpoint holds no drafter that is known here (its tensors: {', '.join(names) or 'none'}; its "
            f"architecture: {_architectures(config) or 'not stated'}); {_WANTED}"
        )
    if config.get("quantization_config") and _are_packed(tensors):
        raise CheckpointFormatError(
            "this drafter's weights are quantised (config.json has quantization_config); wanted float weights. Take "
            "the unquantised release and pass quantization_config= to pack it while it is loaded"
        )


def _are_packed(tensors: Tensors) -> bool:
    """Whether some matrix is stored packed. A `quantization_config` beside float weights was copied from the target."""
    kinds = {info.dtype for name, info in tensors.items() if name not in _VOCABULARY_MAPS}
    return not kinds <= {"float64", "float32", "float16", "bfloat16"} or _any_name(tensors, _PACKED_PARTS)


def _fc_shape(tensors: Tensors) -> tuple[int, ...]:
    """Of the matrix that fuses hidden states; `(0, 0)` where there is none."""
    found = (info.shape for name, info in tensors.items() if name.removeprefix("model.") == "fc.weight")
    return next((shape for shape in found if len(shape) == 2), (0, 0))


def _widths_read(tensors: Tensors) -> set[int]:
    """Columns of the first layer's query matrix, however it is called."""
    query = re.compile(r"^(model\.)?(midlayer|layers\.0)\.self_attn\.(q_proj|q_a_proj)\.weight$")
    return {info.shape[1] for name, info in tensors.items() if query.match(name) and len(info.shape) == 2}


def _architectures(config: Mapping[str, Any]) -> str:
    return " ".join(str(name) for name in config.get("architectures") or ())


def _any_name(names: Collection[str], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in names)


def _states(config: Mapping[str, Any], tensors: Tensors, *keys: str) -> bool:
    """Whether the config has one of these keys and the tensors do not say that it is EAGLE-3's all the same:
    its first layer reads rows twice as wide as `fc` writes, `[embedding ; hidden]`."""
    is_eagle_3 = 2 * _fc_shape(tensors)[0] in _widths_read(tensors)
    return not is_eagle_3 and any(config.get(key) is not None for key in keys)


def _is_assistant(config: Mapping[str, Any], tensors: Tensors) -> bool:
    named = "Assistant" in _architectures(config) or str(config.get("model_type", "")).endswith("_assistant")
    return named or {"pre_projection.weight", "post_projection.weight"} <= tensors.keys()


def _is_block_diffusion(config: Mapping[str, Any], tensors: Tensors) -> bool:
    if re.search(r"DFlash|DSpark|Domino|JetSpec", _architectures(config)):
        return True
    if str(config.get("speculators_model_type", "")).lower() in ("dflash", "dspark"):
        return True
    if _states(config, tensors, "dflash_config", "dspark_config", "target_layer_ids"):
        return True
    # States of the target are its context, so its layers read rows as wide as `fc` writes: noise of a block to come.
    return "hidden_norm.weight" in tensors and _widths_read(tensors) == {_fc_shape(tensors)[0]}


def _is_eagle_1_or_2(config: Mapping[str, Any], tensors: Tensors) -> bool:
    if get_path(config, "eagle_config.use_aux_hidden_state") is False:
        return True
    fused, read = _fc_shape(tensors)
    two_wide = read == 2 * fused > 0  # [embedding ; hidden] -> H
    return two_wide and not _any_name(tensors, r"hidden_norm\.")


def _is_parallel(config: Mapping[str, Any], tensors: Tensors) -> bool:
    # vLLM reads these with its EAGLE-3 class, so architecture and tensors may be EAGLE-3's.
    marks = ("parallel_drafting", "pard_token", "ptd_token_id")
    named = "peagle" in f"{_architectures(config)} {config.get('speculators_model_type', '')}".lower()
    return (
        named
        or any(config.get(mark) not in (None, False) for mark in marks)
        or _any_name(tensors, r"(^|\.)mask_hidden$")
    )


def _is_whole_model(config: Mapping[str, Any], tensors: Tensors) -> bool:
    return not _any_name(tensors, r"(^|\.)fc\.weight$|hidden_norm\.") and _any_name(
        tensors, r"layers\.\d+\.(self_attn|linear_attn|mixer|mamba|conv)\.|transformer\.h\."
    )


# First match wins: what it is, how to tell, what to do.
_OTHER_METHODS: tuple[tuple[str, Callable[[Mapping[str, Any], Tensors], bool], str], ...] = (
    (
        "an assistant that transformers runs itself (Gemma 4's multi-token prediction and its like)",
        _is_assistant,
        "load it with AutoModelForCausalLM.from_pretrained and pass it as assistant_model= to generate; this package "
        "has no part in that",
    ),
    ("a DFlash / DSpark block-diffusion drafter", _is_block_diffusion, _WANTED),
    (
        "a P-EAGLE parallel drafter",
        _is_parallel,
        "it was trained to draft all tokens in one pass from mask tokens, which no loop here does: serve it with vLLM "
        "(parallel_drafting), or take an EAGLE-3 or EAGLE 3.1 drafter",
    ),
    (
        "a set of Medusa heads",
        lambda c, t: (
            "Medusa" in _architectures(c)
            or c.get("model_type") == "medusa"
            or _states(c, t, "medusa_num_heads")
            or _any_name(t, r"medusa|parallel_draft_heads|^\d+\.\d+\.|^blocks\.\d+\.layers\.|^lm_heads\.\d+\.")
        ),
        _WANTED,
    ),
    (
        "an MLP speculator",
        lambda c, t: (
            "MLPSpeculator" in _architectures(c)
            or c.get("model_type") == "mlp_speculator"
            or _any_name(t, r"^speculator\.(emb|head|proj|ln)\.\d+\.")
        ),
        "it drafts from the last hidden state by layers of its own: serve it with vLLM, or take an EAGLE-3 or EAGLE "
        "3.1 drafter",
    ),
    (
        "a set of Hydra heads",
        lambda c, t: _states(c, t, "hydra_num_heads") or _any_name(t, r"hydra"),
        _WANTED,
    ),
    (
        "a multi-token-prediction (MTP) head",
        lambda c, t: "MTP" in _architectures(c) or _any_name(t, r"(^|\.)mtp\.|eh_proj|(^|\.)(enorm|hnorm)\."),
        _WANTED,
    ),
    ("an EAGLE-1/2 drafter (it reads only the last hidden state)", _is_eagle_1_or_2, f"{_WANTED} for this target"),
    (
        "a whole language model, not a drafter",
        _is_whole_model,
        "pass this model as the target (--target, target=…) and its drafter here (were the two swapped?)",
    ),
    (
        "an EAGLE-3 drafter with Gemma's decoder layer (norms behind attention and MLP)",
        lambda c, t: _any_name(t, r"\.(pre|post)_feedforward_layernorm\.|\.layer_scalar$"),
        "only layers like Llama's, Qwen3's and DeepSeek's can be read: take a drafter with one of those, such as "
        "SpecForge and NeMo make for Gemma targets",
    ),
    (
        "an EAGLE-3 drafter whose attention has an output gate (Kimi K3's)",
        lambda c, t: _any_name(t, r"\.self_attn\.g_proj\."),
        "only layers like Llama's, Qwen3's and DeepSeek's can be read",
    ),
    (
        "an EAGLE-3 drafter whose MLP is a mixture of experts (Qwen3-MoE's, gpt-oss's)",
        lambda c, t: _any_name(t, r"\.mlp\.((shared_)?experts?\.|gate\.weight$|router\.)|\.block_sparse_moe\."),
        "only drafters with one MLP per layer can be read",
    ),
)
