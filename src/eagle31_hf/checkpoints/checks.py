"""Is this EAGLE-3 / 3.1 drafter whole and sound? Refusals list what does not fit."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import Eagle31Config
from ..errors import CheckpointFormatError
from .files import FLOAT_DTYPES, TensorInfo, shown
from .layouts import expected_shapes

Tensors = Mapping[str, TensorInfo]

_INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")
_LARGEST_THETA = 1e12  # up to which all of Llama's own frequencies are numbers
_LISTED = 12  # names in one message


def check_tensor_infos(
    config: Eagle31Config, tensors: Tensors, wanted: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Raise a `CheckpointFormatError` that lists tensors missing, spare, of another shape or dtype than `config`'s.

    Args:
        wanted: shapes by name; default: those of an EAGLE drafter.
    """
    wanted = expected_shapes(config) if wanted is None else wanted
    problems = []
    if missing := sorted(wanted.keys() - tensors.keys()):
        problems.append(f"missing: {_shortened(missing)}")
    if spare := sorted(tensors.keys() - wanted.keys()):
        problems.append(f"spare: {_shortened(spare)}{_hint(spare)}")
    shapes, kinds = [], []
    for name in sorted(wanted.keys() & tensors.keys()):
        got, dtypes = tensors[name], _INTEGER_DTYPES if name == "d2t" else FLOAT_DTYPES
        if got.shape != wanted[name]:
            shapes.append(f"{name} is {list(got.shape)}, wanted {list(wanted[name])}")
        if got.dtype not in dtypes:
            kinds.append(f"{name} has dtype {got.dtype}, wanted one of {', '.join(dtypes)}")
    problems += shapes[:_LISTED] + kinds[:_LISTED]
    if problems:
        raise CheckpointFormatError(
            "the weights do not fit config.json, nothing was loaded: " + "; ".join(problems) + ". Correct config.json "
            "or fetch the checkpoint again"
        )


def check_vocabulary_infos(maps: Tensors) -> None:
    """Raise a `CheckpointFormatError` if `d2t` or `t2d` is no list of integers."""
    for name, info in maps.items():
        if len(info.shape) != 1 or info.dtype not in _INTEGER_DTYPES:
            raise CheckpointFormatError(
                f"{name} is {list(info.shape)} of dtype {info.dtype}; wanted one row of {', '.join(_INTEGER_DTYPES)}"
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
    is_plain = rope.get("rope_type") == "default" and 1 <= rope.get("rope_theta", 0) <= _LARGEST_THETA
    if is_plain and (config.head_dim or 1) % 2 == 0:
        return  # what makes tables takes a second to import
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ends = torch.tensor([[0, config.max_position_embeddings]])
    try:
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


def check_values(tensors: Mapping[str, Tensor]) -> None:
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
    if t2d is not None and tuple(t2d.shape) != (vocab_size,):
        raise CheckpointFormatError(f"t2d is {list(t2d.shape)}, wanted [{vocab_size}] as vocab_size says")
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
