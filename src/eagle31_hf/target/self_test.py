"""Can this target verify a tree? Asked once, when a drafter is attached, by trying it.

One four-node tree is verified in one forward and compared with plain forwards along its two paths. The answer decides
between our loop and the fallbacks, so it is found by measurement and not by a list of model families. Where layers keep
states (`state_test`), what rounds leave in them is compared, too, and whether prompts may be read in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import SpeculativeCache
from ..errors import Eagle31Error
from ..trees.draft_tree import DraftTree, ancestors_from_parents
from .binding import TargetBinding
from .quantized import holds_packed_weights
from .state_test import reading_on_error, state_error
from .verify import Verification

LONGEST_PROBE = 128
"""A sliding window is worth crossing in the probe only if it is shorter than this."""


@torch.no_grad()
def probe_tree_verification(binding: TargetBinding) -> None:
    """Set `binding.masks_by_type` and `binding.tree_unsupported_reason` (empty if trees are verified right)."""
    reasons = []
    with binding.masked_attention(), binding.one_token_arithmetic.active():
        for masks_by_type in (None, True, False):
            try:
                error = (
                    _tree_error(binding, masks_by_type)
                    if not binding.has_states
                    else _state_error(binding, masks_by_type)
                )
            except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError, Eagle31Error) as failure:
                reasons.append(f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}")
                continue
            if error <= tolerance(binding):
                binding.masks_by_type, binding.tree_unsupported_reason = masks_by_type, ""
                _choose_tape(binding)
                binding.batch_unsupported_reason = _why_not_in_batches(binding)
                binding.reads_on = not binding.has_states or _reads_on(binding)
                return
            reasons.append(f"logits differ by {error:.2g} of their range")
    binding.tree_unsupported_reason = f"the target failed the tree self-test ({reasons[0]})"


def _why_not_in_batches(binding: TargetBinding) -> str:
    """Some models want a mask for each row of a batch. Where layers keep states, two rows were tried already."""
    if binding.has_states:
        return ""
    try:
        error = _tree_error(binding, binding.masks_by_type, rows=2)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError, Eagle31Error) as failure:
        why = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    else:
        why = "" if error <= tolerance(binding) else f"logits differ by {error:.2g} of their range"
    return why and f"the target failed the tree self-test of a batch ({why})"


def _tree_error(binding: TargetBinding, masks_by_type: bool | None, *, rows: int = 1) -> float:
    """Largest difference between tree and path logits, as a share of the logits' range; of `rows` that are alike."""
    windows = [w for w in (getattr(binding.text_config, "sliding_window", None),) if w]
    length = min(windows[0] + 3, LONGEST_PROBE) if windows else 6
    tokens = probe_tokens(binding, length + 4)
    prefix, nodes = tokens[:, :length], tokens[:, length:]  # (1, length), (1, 4): root, its children a and b, c below a
    parents = torch.tensor([[0, 0, 0, 1]] * rows, device=tokens.device)
    ancestors = ancestors_from_parents(parents, max_depth=2)
    tree = DraftTree(nodes.expand(rows, -1), parents, ancestors.sum(2) - 1, ancestors, max_depth=2, max_children=2)

    cache = SpeculativeCache.from_config(
        binding.text_config, batch_size=rows, capacity=length + 4, block=length, masks_by_type=masks_by_type,
        device=tokens.device,
    )  # fmt: skip
    cache.place(length)
    mask = cache.attention_mask(dtype=binding.compute_dtype, none_is_causal=binding.none_is_causal)
    binding.forward(prefix.expand(rows, -1), cache.position_ids(), mask, cache, logits_to_keep=1)
    cache.commit(length)
    found = Verification(binding, cache)(tree).logits.float()  # (rows, 4, V)

    long_path = _plain_logits(binding, torch.cat((prefix, nodes[:, [0, 1, 3]]), 1))[-3:]
    short_path = _plain_logits(binding, torch.cat((prefix, nodes[:, [0, 2]]), 1))[-1:]
    wanted = torch.cat((long_path[:2], short_path, long_path[2:]))  # (4, V) in node order
    return logits_error(found, wanted)


def _state_error(binding: TargetBinding, masks_by_type: bool | None) -> float:
    return state_error(binding, masks_by_type, probe_tokens(binding, 16))


def _choose_tape(binding: TargetBinding) -> None:
    """Read chains by recorded kernels where that is right, too; else they are stepped, which is."""
    mixers = binding.mixers
    if mixers is None or mixers.tape_is_right is not None:
        return
    mixers.use_tape(True)
    try:
        mixers.tape_is_right = _state_error(binding, binding.masks_by_type) <= tolerance(binding)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError, Eagle31Error):
        mixers.tape_is_right = False
    mixers.use_tape(mixers.tape_is_right)


def _reads_on(binding: TargetBinding) -> bool:
    """Whether states are continued by a forward over many tokens. Some layers begin anew there (Mamba 1)."""
    return reading_on_error(binding, probe_tokens(binding, 16)) <= tolerance(binding)


def logits_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference between logits, as a share of the range of those that are wanted."""
    found, wanted = found.float(), wanted.float()
    return ((found - wanted).abs().max() / (wanted.max() - wanted.min())).item()


def _plain_logits(binding: TargetBinding, tokens: Tensor) -> Tensor:
    return binding.model(input_ids=tokens, use_cache=False).logits[0].float()


def probe_tokens(binding: TargetBinding, count: int) -> Tensor:
    """Unlike ids without touching a random generator."""
    vocabulary = binding.text_config.vocab_size
    ids = (torch.arange(1, count + 1, device=binding.input_device) * 7919) % vocabulary
    return ids[None]


def tolerance(binding: TargetBinding) -> float:
    """A wrong mask changes logits by tenths of their range; rounding by far less, that of packed weights too."""
    exact = binding.compute_dtype in (torch.float32, torch.float64) and not holds_packed_weights(binding.model)
    return 1e-3 if exact else 5e-2
