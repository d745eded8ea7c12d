"""Can this target verify drafts? Asked once, when a drafter is attached, by trying it.

One four-node tree is verified in one forward and compared with plain forwards along its two paths. The answer decides
between our loop and plain decoding, so it is measured and not looked up in a list of model families. Where layers keep
states (`state_test`), chains are verified instead, and what rounds and chunks of prompts leave in them is compared,
too.
"""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor

from ..drafting.draft_tree import DraftTree, ancestors_from_parents
from ..errors import Eagle31Error, IncompatibleTargetError, named_line
from .binding import TargetBinding, Verification
from .quantized import holds_packed_weights
from .state_test import logits_error, probe_cache, probe_tokens, read_prompts, state_error

LONGEST_PROBE = 128
"""A sliding window is worth crossing in the probe only if it is shorter than this."""

FAILURES = (
    KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError, AssertionError, Eagle31Error,
)  # fmt: skip
"""What targets raise that cannot do what is tried."""


@torch.no_grad()
def probe_tree_verification(binding: TargetBinding) -> None:
    """Set `binding.masks_by_type` and `binding.tree_unsupported_reason` (empty if trees are verified right)."""
    why = _seen_without_a_forward(binding)
    if not why:
        with binding.masked_attention(), binding.one_token_arithmetic.active():
            for masks_by_type in (None, True, False):
                binding.masks_by_type = masks_by_type
                wrong = _why_wrong(binding)
                if not wrong:
                    return
                why = why or wrong
    binding.tree_unsupported_reason = f"the target failed the tree self-test ({why})"


def _why_wrong(binding: TargetBinding) -> str:
    """What is wrong with drafts by the masks that are tried: they fail, or give other logits; empty if nothing is."""
    try:
        error = state_error(binding) if binding.has_states else _tree_error(binding)
    except KeyError as failure:
        kinds = sorted(set(getattr(binding.text_config, "layer_types", None) or ()))
        return f"its forward looks for {failure}, which we do not hand on; its config names layers of types {kinds}"
    except FAILURES as failure:
        return named_line(failure)
    return "" if error <= tolerance(binding) else f"logits differ by {error:.2g} of their range"


def _seen_without_a_forward(binding: TargetBinding) -> str:
    """What a target lacks, in words; empty if that is not seen.

    Without positions it counts tokens where they lie, pads too. Windows under names that the cache does not know the
    model's own code masks by, counting keys where they lie and not at their positions (GPT-Neo): in a batch,
    or where a tree branches, it sees too little, and only in texts that are longer than any that is tried here.
    """
    takes_positions = "position_ids" in inspect.signature(binding.model.forward).parameters
    if not (takes_positions or binding.has_states):  # states are never shown a pad
        return "its forward takes no position_ids"
    longest = getattr(binding.text_config, "max_position_embeddings", None) or math.inf
    for name, value in vars(binding.text_config).items():
        is_window = "window" in name and name != "sliding_window" and not name.endswith(("pattern", "layers"))
        if is_window and type(value) is int and 0 < value < longest:
            return f"its layers have a window of {value} tokens, {name}, which our cache does not keep"
    return ""


@torch.no_grad()
def require_readable_states(binding: TargetBinding) -> None:
    """A drafter reads one vector a token from between the target's layers.

    Raises:
        IncompatibleTargetError: something else is there, as in Gemma 3n, whose layers pass four streams on.
    """
    tokens = probe_tokens(binding, 2)
    try:
        with binding.capturing():
            _plain_logits(binding, tokens)
            shape = tuple(binding.take_aux().shape)
    except FAILURES:
        return  # the self-test and the first generation say more
    wanted = (1, 2, len(binding.aux_layers) * binding.text_config.hidden_size)
    if shape != wanted:
        raise IncompatibleTargetError(
            f"of two tokens {type(binding.model).__name__} passes hidden states of shape {shape} from layer to layer; "
            f"wanted {wanted}, one vector a token for each layer that is read: there are no drafters for such targets"
        )


def _tree_error(binding: TargetBinding) -> float:
    """Largest difference between tree and path logits, as a share of the logits' range, of two rows that are alike."""
    rows = 2  # some models want a mask for each
    window = getattr(binding.text_config, "sliding_window", None)
    length = min(window + 3, LONGEST_PROBE) if window else 6  # more than a window's if that is short
    tokens = probe_tokens(binding, length + 4)
    prefix, nodes = tokens[:, :length], tokens[:, length:]  # (1, length), (1, 4): root, its children a and b, c below a
    cache = probe_cache(binding, rows=rows, length=length)
    read_prompts(binding, cache, prefix.expand(rows, -1), None)
    found = Verification(binding, cache)(probe_tree(nodes.expand(rows, -1))).logits.float()  # (rows, 4, V)

    long_path = _plain_logits(binding, torch.cat((prefix, nodes[:, [0, 1, 3]]), 1))[-3:]
    short_path = _plain_logits(binding, torch.cat((prefix, nodes[:, [0, 2]]), 1))[-1:]
    wanted = torch.cat((long_path[:2], short_path, long_path[2:]))  # (4, V) in node order
    return logits_error(found, wanted)


def probe_tree(nodes: Tensor) -> DraftTree:
    """A root, its children 1 and 2, and a node below 1. `nodes`: `(B, 4)`."""
    parents = torch.tensor([(0, 0, 0, 1)] * len(nodes), device=nodes.device)
    ancestors = ancestors_from_parents(parents, max_depth=2)
    return DraftTree(nodes, parents, ancestors.sum(2) - 1, ancestors, max_depth=2, max_children=2)


def _plain_logits(binding: TargetBinding, tokens: Tensor) -> Tensor:
    return binding.model(input_ids=tokens, use_cache=False).logits[0].float()


def tolerance(binding: TargetBinding) -> float:
    """A wrong mask changes logits by tenths of their range; rounding by far less, that of packed weights too."""
    exact = binding.compute_dtype in (torch.float32, torch.float64) and not holds_packed_weights(binding.model)
    return 1e-3 if exact else 5e-2
