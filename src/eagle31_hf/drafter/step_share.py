"""How long drafts pay on a card, before anything was measured there.

Over few tokens a captured forward takes as long as its weights take to be read. So a draft step costs the share of a
target's pass that its bytes are of the target's, and a chain is worth its steps by that share and by the chance of each
token to be accepted.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from .drafter import Eagle31Drafter, MtpDrafter


def step_share(drafter: Eagle31Drafter) -> float:
    """Bytes of weights that one draft step reads, over those that the target reads for one token."""
    binding = drafter.binding
    active = _active_experts(binding.text_config)
    target = [*(each for layer in binding.layers for each in layer.parameters()), *binding.lm_head.parameters()]
    own = [*(each for layer in drafter.layers for each in layer.parameters()), *drafter.head_weights]
    if isinstance(drafter, MtpDrafter):
        own += drafter.fc.parameters()  # others go through theirs once a round
    return _num_bytes(own, active) / _num_bytes(target, active)


def longest_worthwhile(share: float, acceptance: float, *, longest: int) -> int:
    """The chain, of 1 to `longest` tokens, that writes fastest where each step costs `share` of a target's pass.

    Args:
        acceptance: chance of each token to be accepted if those before it were.
    """
    tokens = accumulate(range(longest), lambda written, _: 1 + acceptance * written, initial=1.0)
    speeds = [written / (1 + depth * share) for depth, written in enumerate(tokens)]
    return max(range(1, longest + 1), key=speeds.__getitem__)


def _active_experts(config: Any) -> float:
    """The share of its experts that a token is sent to."""
    chosen, experts = getattr(config, "num_experts_per_tok", None), None
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = experts or getattr(config, name, None)
    return chosen / experts if chosen and experts else 1.0


def _num_bytes(weights: list[Tensor] | list[nn.Parameter], active: float = 1.0) -> float:
    """Of matrices whole, and of experts, which are stored as one tensor `(E, N, K)`, as many as are `active`."""
    distinct = {weight.data_ptr(): weight for weight in weights}.values()
    return sum(weight.nbytes * (active if weight.dim() == 3 else 1.0) for weight in distinct)
