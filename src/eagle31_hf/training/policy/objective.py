"""What stage 2 minimises, as plain values: settings can be read without importing the trainer."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigurationError

REWARDS = ("text", "chain", "tree")


@dataclass(frozen=True)
class PolicySettings:
    """What stage 2 adds to the token loss.

    Attributes:
        reward: `"text"` (in closed form along what the target wrote), `"chain"` (rollouts, sampled serving) or `"tree"`
            (rollouts, greedy serving). What follows is of the last two, but for `token_weight`.
        depth: drafted tokens per chain, levels per tree.
        contexts: places drafted from per batch (chain), or groups of neighbouring places (tree).
        group: samples per place (chain), or neighbouring places per group (tree).
        temperature: of drafter and target (chain, above 0), or of the target (tree; 0 is greedy).
        clip: ratios beyond `1 +- clip` give no further gradient.
        policy_weight: of the policy loss beside the token loss (GTO: 0.5).
        anchor_weight: of the divergence from the stage-1 drafter.
        top_k, tree_size: of trees.
        token_weight: of the token loss beside expected acceptance along texts.
    """

    reward: str = "chain"
    depth: int = 5
    contexts: int = 8
    group: int = 4
    temperature: float = 1.0
    clip: float = 0.2
    policy_weight: float = 0.5
    anchor_weight: float = 0.05
    top_k: int = 4
    tree_size: int = 24
    token_weight: float = 0.2

    def check(self) -> None:
        """Raise a `ConfigurationError` naming the first field that makes no sense."""
        if self.reward not in REWARDS:
            raise ConfigurationError(f"reward is {self.reward!r}; wanted one of {REWARDS}")
        if self.group < 2:
            raise ConfigurationError(f"group is {self.group}; a baseline needs at least 2 samples to compare")
        if self.reward == "chain" and self.temperature <= 0:
            raise ConfigurationError(
                f"temperature is {self.temperature}, but the chain reward draws drafts; use a temperature above 0, or "
                "reward='tree' for greedy serving"
            )
