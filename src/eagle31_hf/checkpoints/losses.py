"""Facts of a drafter that a layout has no words for, and the drafter that is left without them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigurationError
from .formats import FORMATS, Format, find_format, from_hs_indices, has_reduced_vocabulary

if TYPE_CHECKING:
    from ..configuration_eagle31 import Eagle31Config


@dataclass(frozen=True)
class Loss:
    """One fact that a format may be unable to say."""

    what: str  # the fact in words
    applies: Callable[[Eagle31Config], bool]  # whether it is one of a drafter's
    left: Mapping[str, Any] | None = None  # fields of the drafter without it; `None`: no drafter that runs is left
    # the part of the target that the drafter shares and could hold a copy of: embedding, head or none
    in_target: Literal["embedding", "head", ""] = ""


_LOSSES = {
    "per_slot": Loss(
        "one norm per aux state (aux_norm='per_slot')", lambda c: c.aux_norm == "per_slot", {"aux_norm": "none"}
    ),
    "concatenated": Loss(
        "one norm over all aux states (aux_norm='concatenated')",
        lambda c: c.aux_norm == "concatenated",
        {"aux_norm": "none"},
    ),
    "norm_output": Loss("post-norm feedback (norm_output)", lambda c: c.norm_output, {"norm_output": False}),
    "norm_before_residual": Loss(
        "a normed residual (norm_before_residual)", lambda c: c.norm_before_residual, {"norm_before_residual": False}
    ),
    "qk_norm": Loss("query and key norms (qk_norm)", lambda c: c.qk_norm, {"qk_norm": False}),
    "latent": Loss("latent attention (kv_lora_rank)", lambda c: c.is_latent),
    "grouped": Loss("attention with keys and values of its own (kv_lora_rank=None)", lambda c: not c.is_latent),
    "fc_bias": Loss("a bias on fc (fc_bias)", lambda c: c.fc_bias, {"fc_bias": False}),
    "biases": Loss(
        "attention or MLP biases",
        lambda c: c.attention_bias or c.mlp_bias,
        {"attention_bias": False, "mlp_bias": False},
    ),
    "layers": Loss("more than one layer", lambda c: c.num_hidden_layers > 1, {"num_hidden_layers": 1}),
    "widths": Loss("a target of another width (target_hidden_size)", lambda c: c.target_hidden_size != c.hidden_size),
    "shared_embedding": Loss(
        "the target's embedding (own_embedding=False)", lambda c: not c.own_embedding, in_target="embedding"
    ),
    "shared_head": Loss(
        "the target's whole LM head (own_lm_head=False)",
        lambda c: not c.own_lm_head and not has_reduced_vocabulary(c),
        in_target="head",
    ),
    "shared_head_rows": Loss(
        "draft rows of the target's LM head (own_lm_head=False with a reduced draft vocabulary)",
        lambda c: not c.own_lm_head and has_reduced_vocabulary(c),
        in_target="head",
    ),
    "aux_count": Loss(
        "a number of aux states other than 3 without explicit aux_layers",
        lambda c: c.num_aux_hidden_states != 3 and c.aux_layers is None,
    ),
}
"""By the names in `Format.expresses`."""


def find_losses(table: Format, config: Eagle31Config) -> tuple[Loss, ...]:
    """What `table`'s format cannot say of this drafter; empty if it can say everything."""
    losses = [loss for name, loss in _LOSSES.items() if name not in table.expresses and loss.applies(config)]
    convention = table.layer_ids[0][1]
    if config.aux_layers is not None and from_hs_indices(config.aux_layers, convention) is None:
        what = f"the hidden states {config.aux_layers} (it stores layer ids as: {convention})"
        losses.append(Loss(what, lambda c: True, {"aux_layers": None}))
    return tuple(losses)


def check_expressible(table: Format, config: Eagle31Config) -> None:
    """Raise a `ConfigurationError` if the format cannot say something this drafter needs: what, and what to do."""
    losses = find_losses(table, config)
    if not losses:
        return
    others = [name for name in FORMATS if not find_losses(find_format(name), config)]
    ways = [f"write it as {' or '.join(others)}"] if others else []
    if all(loss.in_target for loss in losses):
        ways.append("name the target (--target), whose weights are then copied into the drafter")
    if all(loss.left is not None for loss in losses):
        ways.append("go on without (--allow-loss): a drafter of another network, to be trained again")
    raise ConfigurationError(
        f"the {table.name} format cannot express {', '.join(loss.what for loss in losses)}; "
        + ("; or ".join(ways) or "no format can; change the drafter")
    )


def reduce_to(table: Format, config: Eagle31Config) -> tuple[Eagle31Config, tuple[str, ...]]:
    """The drafter that remains without what `table`'s format cannot say, and in words what was left out.

    What has no drafter without it stays, for `check_expressible` to name.
    """
    losses = find_losses(table, config)
    if any(loss.left is None for loss in losses):
        return config, ()
    reduced = copy.deepcopy(config)
    for loss in losses:
        for name, value in (loss.left or {}).items():
            setattr(reduced, name, value)
    return reduced, tuple(loss.what for loss in losses)
