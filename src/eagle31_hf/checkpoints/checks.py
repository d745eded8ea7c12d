"""Is this an EAGLE-3 / 3.1 drafter, whole and sound? What does not fit is listed, other methods are called by name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config import Eagle31Config
from ..errors import CheckpointFormatError, shown
from .files import FLOATS, dtype_name, get_path

Tensors = Mapping[str, Tensor]
"""By name; without content, as far as headers show it, or as they were loaded."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_LISTED = 12  # names in one message


def check_tensors(tensors: Tensors, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise a `CheckpointFormatError` that lists tensors missing, spare, of another shape or dtype than wanted."""
    problems = []
    if missing := sorted(wanted.keys() - tensors.keys()):
        problems.append(f"missing: {_shortened(missing)}")
    if spare := sorted(tensors.keys() - wanted.keys()):
        problems.append(f"spare: {_shortened(spare)}{_hint(spare)}")
    shapes, kinds = [], []
    for name in sorted(wanted.keys() & tensors.keys()):
        got, dtypes = tensors[name], INTEGERS if name in ("d2t", "t2d") else FLOATS
        if got.shape != wanted[name]:
            shapes.append(f"{name} is {list(got.shape)}, wanted {list(wanted[name])}")
        if got.dtype not in dtypes:
            kinds.append(f"{name} has dtype {dtype_name(got)}, wanted {'integers' if dtypes == INTEGERS else 'floats'}")
    problems += shapes[:_LISTED] + kinds[:_LISTED]
    if problems:
        raise CheckpointFormatError(
            "the weights do not fit config.json, nothing was loaded: " + "; ".join(problems) + ". Correct config.json "
            "or fetch the checkpoint again"
        )


def check_rope(config: Eagle31Config) -> None:
    """Raise a `CheckpointFormatError` if no sound rotary tables can be made for the first and the last position."""
    rope: Mapping[str, Any] = config.rope_parameters or {}
    turned = rope.get("partial_rotary_factor")
    if turned not in (None, 1.0) and rope["rope_type"] != "proportional":
        raise CheckpointFormatError(
            f"config.json: partial_rotary_factor is {shown(turned)}; only drafters whose heads are turned whole can be "
            "read"
        )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # which takes a second to import

    try:
        ends = torch.tensor([[0, config.max_position_embeddings]])
        cos, sin = LlamaRotaryEmbedding(config)(torch.ones(1), ends)
        sound = bool((cos.isfinite() & sin.isfinite()).all()) and cos.shape[-1] == config.head_dim
    except Exception as error:  # formulas for settings that were not looked at may raise anything
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" …")
        raise CheckpointFormatError(
            f"config.json: no rotary tables can be made of its rope settings ({reason})"
        ) from error
    if not sound:
        raise CheckpointFormatError(
            f"config.json: its rope settings {shown(rope)} make tables that are not finite or not "
            f"{config.head_dim} wide"
        )


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(textwrap.shorten(name, 120, placeholder="…") for name in names[:_LISTED]) + more


def _hint(spare: list[str]) -> str:
    if any(name.startswith("fc_norm.") for name in spare):
        return " (does config.json lack fc_norm: true?)"
    if "input_norm.weight" in spare:
        return " (does config.json lack norm_before_fc: true?)"
    return ""


def check_values(tensors: Tensors) -> None:
    """Raise a `CheckpointFormatError` if a weight holds NaN or infinity."""
    broken = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise CheckpointFormatError(
            f"NaN or infinite values in {_shortened(broken)}; the training run diverged or the file is damaged"
        )


def check_vocabulary_map(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> None:
    """Raise a `CheckpointFormatError` unless `i + d2t[i]` names `Vd` different tokens, the ones set in `t2d`.

    Args:
        d2t: `[Vd]` integer offsets. t2d: `[V]` membership mask, if there is one. vocab_size: `V`.
    """
    stored = d2t.to(torch.int64)
    ids = stored + torch.arange(len(stored))  # [Vd] target ids
    members = None if t2d is None else t2d.nonzero().flatten()  # [Vd] target ids, ascending
    if _names_tokens(ids, members, vocab_size):
        return
    # Offsets of sorted ids never fall, so a rising list of valid ids that fails as offsets is the absolute form.
    if _names_tokens(stored, members, vocab_size) and bool((stored.diff() > 0).all()):
        raise CheckpointFormatError(
            "d2t holds absolute target ids, not offsets (target_id = i + d2t[i]); every engine would draft wrong "
            "tokens. Convert it: d2t = d2t - torch.arange(len(d2t))"
        )
    if _names_tokens(ids, None, vocab_size):
        raise CheckpointFormatError(
            f"t2d disagrees with d2t: t2d marks {len(members if members is not None else ())} tokens, d2t names "
            f"{len(ids)}, and the two sets differ; rebuild t2d from i + d2t[i] or fetch the checkpoint again"
        )
    raise CheckpointFormatError(
        f"d2t is no vocabulary map: i + d2t[i] runs from {int(ids.min())} to {int(ids.max())} with "
        f"{len(ids) - len(ids.unique())} repeated; wanted {len(ids)} different ids from 0 to {vocab_size - 1}"
    )


def _names_tokens(ids: Tensor, members: Tensor | None, vocab_size: int) -> bool:
    distinct = ids.unique()  # sorted
    in_range = bool(distinct[0] >= 0) and bool(distinct[-1] < vocab_size)
    return len(distinct) == len(ids) and in_range and (members is None or distinct.equal(members))


# --- other methods, called by name ---------------------------------------------------------------------------------
# What a file is, its tensors say first; its config where they cannot.

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


def _facts(config: Mapping[str, Any], tensors: Tensors) -> Iterator[str]:
    """What `_METHODS` are recognised by: `kind K` (architectures, `model_type` and `speculators_model_type`), `set K`
    (what the config says, and not that it is false), `tensor NAME`, and `reads ...` by the tensors' shapes."""
    architectures = ", ".join(map(str, config.get("architectures") or ()))
    yield f"kind {architectures} {config.get('model_type')} {config.get('speculators_model_type')}".lower()
    yield from (f"set {key}" for key, value in config.items() if value not in (None, False))
    yield from (f"tensor {name}" for name in tensors)
    fused, columns = _fc_shape(tensors)
    two_wide = columns == 2 * fused > 0 and not _any_name(tensors, r"hidden_norm\.")  # [embedding ; hidden] -> H
    if two_wide or get_path(config, "eagle_config.use_aux_hidden_state") is False:
        yield "reads one state"
    elif _widths_read(tensors) == {fused}:  # EAGLE-3's first layer reads twice as much: [embedding ; hidden]
        yield "reads states as context"
    layers = r"layers\.\d+\.(self_attn|linear_attn|mixer|mamba|conv)\.|transformer\.h\."
    if _any_name(tensors, layers) and not _any_name(tensors, r"(^|\.)fc\.weight$|hidden_norm\."):
        yield "reads tokens"


class _Method(NamedTuple):
    """What a checkpoint is, what to do, and a pattern of its `_facts`."""

    what: str
    pattern: str
    advice: str = _WANTED


_METHODS = (  # the first that fits
    _Method(
        "an assistant that transformers runs itself (Gemma 4's multi-token prediction and its like)",
        r"^kind .*assistant|^tensor pre_projection\.weight$",
        "load it with AutoModelForCausalLM.from_pretrained and pass it as assistant_model= to generate; this package "
        "has no part in that",
    ),
    _Method(
        "a DFlash / DSpark block-diffusion drafter",
        "^kind .*(dflash|dspark|domino|jetspec)|^reads states as context$",
    ),
    _Method(
        "a P-EAGLE parallel drafter",
        # vLLM reads these with its EAGLE-3 class, so architecture and tensors may be EAGLE-3's.
        r"^kind .*peagle|^set (parallel_drafting|pard_token|ptd_token_id)$|^tensor (.*\.)?mask_hidden$",
        "it was trained to draft all tokens in one pass from mask tokens, which no loop here does: serve it with vLLM "
        "(parallel_drafting), or take an EAGLE-3 or EAGLE 3.1 drafter",
    ),
    _Method(
        "a multi-token-prediction (MTP) head",
        r"^kind .*mtp|^tensor (.*\.)?(mtp|enorm|hnorm)\.|^tensor .*eh_proj",
        "heads of some families are read from their target's folder (docs/choosing.md names them); for others take an "
        "EAGLE-3 or EAGLE 3.1 drafter",
    ),
    _Method(
        "an EAGLE-1/2 drafter (it reads only the last hidden state)", "^reads one state$", f"{_WANTED} for this target"
    ),
    _Method(
        "a whole language model, not a drafter",
        "^reads tokens$",
        "name it as the target, and its drafter here (were the two swapped?)",
    ),
    _Method(
        "an EAGLE-3 drafter with another decoder layer (Gemma's norms behind attention and MLP, Kimi K3's output gate, "
        "or a mixture of experts)",
        r"^tensor .*(\.(pre|post)_feedforward_layernorm\.|\.layer_scalar$|\.self_attn\.g_proj\."
        r"|\.mlp\.((shared_)?experts?\.|gate\.weight$|router\.)|\.block_sparse_moe\.)",
        "only layers like Llama's, Qwen3's and DeepSeek's with one MLP can be read: take a drafter with one of those, "
        "such as SpecForge and NeMo make",
    ),
)


def refuse_other_methods(config: Mapping[str, Any], tensors: Tensors) -> None:
    """Names a checkpoint of another method instead of listing its tensors as wrong.

    Raises:
        CheckpointFormatError: this is not an EAGLE-3 / 3.1 drafter, or its weights are quantised.
    """
    facts = "\n".join(_facts(config, tensors))
    for method in _METHODS:
        if re.search(method.pattern, facts, re.MULTILINE):
            raise CheckpointFormatError(f"this checkpoint is {method.what}; {method.advice}")
    if not _any_name(tensors, r"(^|\.)fc\.weight$|hidden_norm\.|self_attn\."):
        architectures = ", ".join(map(str, config.get("architectures") or ()))
        raise CheckpointFormatError(
            f"this checkpoint holds no drafter that is known here (its tensors: "
            f"{', '.join(sorted(tensors)[:_SHOWN]) or 'none'}; its architecture: {architectures or 'not stated'}); "
            f"{_WANTED}"
        )
    # A `quantization_config` beside float weights was copied from the target.
    maps = ("d2t", "t2d", "draft_id_to_target_id")
    are_floats = all(info.dtype in FLOATS for name, info in tensors.items() if name not in maps)
    if config.get("quantization_config") and (not are_floats or _any_name(tensors, _PACKED_PARTS)):
        raise CheckpointFormatError(
            "this drafter's weights are quantised (config.json has quantization_config); wanted float weights. Take "
            "the unquantised release and pass quantization_config= to pack it while it is loaded"
        )
