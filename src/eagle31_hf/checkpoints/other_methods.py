"""Checkpoints of other methods, called by name. What a file is, its tensors say first; its config where they cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointFormatError
from .files import FLOAT_DTYPES, TensorInfo, get_path

Tensors = Mapping[str, TensorInfo]
_WANTED = "wanted an EAGLE-3 or EAGLE 3.1 drafter"
_SHOWN = 4  # tensor names in one message
# What packers store beside a matrix: compressed-tensors, FP8, GPTQ, AWQ, bitsandbytes.
_PACKED_PARTS = r"\.(weight_(scale|packed|shape|zero_point)\w*|input_scale|q?scales|qweight|qzeros|g_idx|absmax)$"


def _any_name(names: Collection[str], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in names)


def _fc_shape(tensors: Tensors) -> tuple[int, ...]:
    """Of the matrix that fuses hidden states; `(0, 0)` where there is none."""
    shapes = (info.shape for name, info in tensors.items() if name.removeprefix("model.") == "fc.weight")
    return next((shape for shape in shapes if len(shape) == 2), (0, 0))


def _widths_read(tensors: Tensors) -> set[int]:
    """Columns of the first layer's query matrix, however it is called."""
    query = re.compile(r"^(model\.)?(midlayer|layers\.0)\.self_attn\.(q_proj|q_a_proj)\.weight$")
    return {info.shape[1] for name, info in tensors.items() if query.match(name) and len(info.shape) == 2}


def _is_block_diffusion(config: Mapping[str, Any], tensors: Tensors) -> bool:
    """States of the target are its context, so its layers read rows as wide as `fc` writes."""
    return "hidden_norm.weight" in tensors and _widths_read(tensors) == {_fc_shape(tensors)[0]}


def _is_parallel(config: Mapping[str, Any], tensors: Tensors) -> bool:
    """vLLM reads these with its EAGLE-3 class, so architecture and tensors may be EAGLE-3's."""
    marks = ("parallel_drafting", "pard_token", "ptd_token_id")
    return any(config.get(mark) not in (None, False) for mark in marks)


def _is_eagle_1_or_2(config: Mapping[str, Any], tensors: Tensors) -> bool:
    fused, read = _fc_shape(tensors)
    two_wide = read == 2 * fused > 0 and not _any_name(tensors, r"hidden_norm\.")  # [embedding ; hidden] -> H
    return two_wide or get_path(config, "eagle_config.use_aux_hidden_state") is False


def _is_language_model(config: Mapping[str, Any], tensors: Tensors) -> bool:
    layers = r"layers\.\d+\.(self_attn|linear_attn|mixer|mamba|conv)\.|transformer\.h\."
    return _any_name(tensors, layers) and not _any_name(tensors, r"(^|\.)fc\.weight$|hidden_norm\.")


class _Method(NamedTuple):
    """What a checkpoint is, what to do, and by which of these it is recognised; patterns are searched for.

    Attributes:
        kind: in its architectures, `model_type` and `speculators_model_type`, lower-cased.
        keys: of the config, where its tensors do not say that it is EAGLE-3's.
        tensors: in the names of its tensors.
        holds: a test of config and tensors.
    """

    what: str
    advice: str = _WANTED
    kind: str = ""
    keys: tuple[str, ...] = ()
    tensors: str = ""
    holds: Callable[[Mapping[str, Any], Tensors], bool] = lambda config, tensors: False


_METHODS = (  # the first that fits
    _Method(
        "an assistant that transformers runs itself (Gemma 4's multi-token prediction and its like)",
        "load it with AutoModelForCausalLM.from_pretrained and pass it as assistant_model= to generate; this package "
        "has no part in that",
        kind="assistant",
        tensors=r"^pre_projection\.weight$",
    ),
    _Method(
        "a DFlash / DSpark block-diffusion drafter",
        kind="dflash|dspark|domino|jetspec",
        keys=("dflash_config", "dspark_config", "target_layer_ids"),
        holds=_is_block_diffusion,
    ),
    _Method(
        "a P-EAGLE parallel drafter",
        "it was trained to draft all tokens in one pass from mask tokens, which no loop here does: serve it with vLLM "
        "(parallel_drafting), or take an EAGLE-3 or EAGLE 3.1 drafter",
        kind="peagle",
        tensors=r"(^|\.)mask_hidden$",
        holds=_is_parallel,
    ),
    _Method(
        "a set of Medusa heads",
        kind="medusa",
        keys=("medusa_num_heads",),
        tensors=r"medusa|parallel_draft_heads|^\d+\.\d+\.|^blocks\.\d+\.layers\.|^lm_heads\.\d+\.",
    ),
    _Method(
        "an MLP speculator",
        "it drafts from the last hidden state by layers of its own: serve it with vLLM, or take an EAGLE-3 or EAGLE "
        "3.1 drafter",
        kind="mlp_?speculator",
        tensors=r"^speculator\.(emb|head|proj|ln)\.\d+\.",
    ),
    _Method("a set of Hydra heads", keys=("hydra_num_heads",), tensors="hydra"),
    _Method(
        "a multi-token-prediction (MTP) head",
        "heads of some families are read from their target's folder (docs/choosing.md names them); for others take an "
        "EAGLE-3 or EAGLE 3.1 drafter",
        kind="mtp",
        tensors=r"(^|\.)mtp\.|eh_proj|(^|\.)(enorm|hnorm)\.",
    ),
    _Method(
        "an EAGLE-1/2 drafter (it reads only the last hidden state)",
        f"{_WANTED} for this target",
        holds=_is_eagle_1_or_2,
    ),
    _Method(
        "a whole language model, not a drafter",
        "pass this model as the target (--target, target=…) and its drafter here (were the two swapped?)",
        holds=_is_language_model,
    ),
    _Method(
        "an EAGLE-3 drafter with Gemma's decoder layer (norms behind attention and MLP)",
        "only layers like Llama's, Qwen3's and DeepSeek's can be read: take a drafter with one of those, such as "
        "SpecForge and NeMo make for Gemma targets",
        tensors=r"\.(pre|post)_feedforward_layernorm\.|\.layer_scalar$",
    ),
    _Method(
        "an EAGLE-3 drafter whose attention has an output gate (Kimi K3's)",
        "only layers like Llama's, Qwen3's and DeepSeek's can be read",
        tensors=r"\.self_attn\.g_proj\.",
    ),
    _Method(
        "an EAGLE-3 drafter whose MLP is a mixture of experts (Qwen3-MoE's, gpt-oss's)",
        "only drafters with one MLP per layer can be read",
        tensors=r"\.mlp\.((shared_)?experts?\.|gate\.weight$|router\.)|\.block_sparse_moe\.",
    ),
)


def refuse_other_methods(config: Mapping[str, Any], tensors: Tensors) -> None:
    """Names a checkpoint of another method instead of listing its tensors as wrong.

    Raises:
        CheckpointFormatError: this is not an EAGLE-3 / 3.1 drafter, or its weights are quantised.
    """
    architectures = " ".join(map(str, config.get("architectures") or ()))
    kinds = f"{architectures} {config.get('model_type')} {config.get('speculators_model_type')}".lower()
    # EAGLE-3's first layer reads rows twice as wide as `fc` writes, `[embedding ; hidden]`.
    is_eagle_3 = 2 * _fc_shape(tensors)[0] in _widths_read(tensors)
    for method in _METHODS:
        if (
            (method.kind and re.search(method.kind, kinds))
            or (not is_eagle_3 and any(config.get(key) is not None for key in method.keys))
            or (method.tensors and _any_name(tensors, method.tensors))
            or method.holds(config, tensors)
        ):
            raise CheckpointFormatError(f"this checkpoint is {method.what}; {method.advice}")
    if not _any_name(tensors, r"(^|\.)fc\.weight$|hidden_norm\.|layers?\."):
        raise CheckpointFormatError(
            f"this checkpoint holds no drafter that is known here (its tensors: "
            f"{', '.join(sorted(tensors)[:_SHOWN]) or 'none'}; its architecture: {architectures or 'not stated'}); "
            f"{_WANTED}"
        )
    # A `quantization_config` beside float weights was copied from the target.
    maps = ("d2t", "t2d", "draft_id_to_target_id")
    are_floats = all(info.dtype in FLOAT_DTYPES for name, info in tensors.items() if name not in maps)
    if config.get("quantization_config") and (not are_floats or _any_name(tensors, _PACKED_PARTS)):
        raise CheckpointFormatError(
            "this drafter's weights are quantised (config.json has quantization_config); wanted float weights. Take "
            "the unquantised release and pass quantization_config= to pack it while it is loaded"
        )
