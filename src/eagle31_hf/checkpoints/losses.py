"""Facts of a drafter that a layout has no words for, and the drafter that is left without them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigurationError
from .checks import expected_shapes
from .formats import FORMATS, VARIANTS, Format, find_format, from_hs_indices

if TYPE_CHECKING:
    from torch import Tensor

    from ..configuration_eagle31 import Eagle31Config

# Config fields of the drafter that is left; what is not listed cannot be left out of a network that still runs.
_LEFT: Mapping[str, Mapping[str, Any]] = {
    "per_slot": {"aux_norm": "none"},
    "concatenated": {"aux_norm": "none"},
    "norm_output": {"norm_output": False},
    "norm_before_residual": {"norm_before_residual": False},
    "qk_norm": {"qk_norm": False},
    "fc_bias": {"fc_bias": False},
    "biases": {"attention_bias": False, "mlp_bias": False},
    "layers": {"num_hidden_layers": 1},
}
_IN_TARGET: Mapping[str, Literal["embedding", "head"]] = {
    "shared_embedding": "embedding",
    "shared_head": "head",
    "shared_head_rows": "head",
}


@dataclass(frozen=True)
class Loss:
    """One fact that cannot be written.

    Attributes:
        what: the fact in words.
        left: fields of the drafter without it; `None`: no drafter is left.
        in_target: the part of the target that the drafter shares and could hold a copy of: embedding, head or none.
    """

    what: str
    left: Mapping[str, Any] | None = None
    in_target: Literal["embedding", "head", ""] = ""


@dataclass(frozen=True)
class Reduction:
    """A drafter without what a layout cannot say: its config, its tensors, and in words what was left out."""

    config: Eagle31Config
    tensors: dict[str, Tensor] = field(repr=False)
    left_out: tuple[str, ...]


def find_losses(table: Format, config: Eagle31Config) -> tuple[Loss, ...]:
    """What `table`'s format cannot say of this drafter; empty if it can say everything."""
    lacking = [key for key, (_, applies) in VARIANTS.items() if applies(config) and key not in table.expresses]
    losses = [Loss(VARIANTS[key][0], _LEFT.get(key), _IN_TARGET.get(key, "")) for key in lacking]
    if config.aux_layers is not None and from_hs_indices(config.aux_layers, table.layer_ids[0][1]) is None:
        where = f"it stores layer ids as: {table.layer_ids[0][1]}"
        losses.append(Loss(f"the hidden states {config.aux_layers} ({where})", {"aux_layers": None}))
    return tuple(losses)


def check_expressible(table: Format, config: Eagle31Config) -> None:
    """Raises:
    ConfigurationError: the format has no way to say something this drafter needs; what, and what to do.
    """
    losses = find_losses(table, config)
    if losses:
        told = ", ".join(loss.what for loss in losses)
        raise ConfigurationError(f"the {table.name} format cannot express {told}; {_advice(losses, config)}")


def _advice(losses: tuple[Loss, ...], config: Eagle31Config) -> str:
    others = [name for name in FORMATS if not find_losses(find_format(name), config)]
    ways = [f"write it as {' or '.join(others)}"] if others else []
    if all(loss.in_target for loss in losses):
        ways.append("name the target (--target), whose weights are then copied into the drafter")
    if all(loss.left is not None for loss in losses):
        ways.append("go on without (--allow-loss): a drafter of another network, to be trained again")
    return "; or ".join(ways) or "no format can; change the drafter"


def reduce_to(table: Format, config: Eagle31Config, tensors: Mapping[str, Tensor]) -> Reduction:
    """The drafter that is left where everything `table`'s format cannot say is left out.

    Raises:
        ConfigurationError: nothing would be left that runs.
    """
    losses = find_losses(table, config)
    if any(loss.left is None for loss in losses):
        check_expressible(table, config)
    left = copy.deepcopy(config)
    for loss in losses:
        for name, value in (loss.left or {}).items():
            setattr(left, name, value)
    check_expressible(table, left)  # layer ids left out may leave a number of them that cannot be said
    wanted = expected_shapes(left)
    kept = {name: tensor for name, tensor in tensors.items() if name in wanted}
    return Reduction(left, kept, tuple(loss.what for loss in losses))
