"""Stage 2: the drafter trained for what serving pays for, the expected number of accepted tokens.

Two forms, by how the drafter will be served:

    chain   drafts drawn from the drafter, rejection sampling (temperature above 0). With acceptance probabilities
            w_s = min(1, p_s(x_s) / q_s(x_s)) and alpha_j = sum_v min(p_j(v), q_j(v)),
                J = E_{x ~ q} [ sum_j alpha_j prod_{s<j} w_s ]
            which is E[accepted tokens] with the last factor of each product taken in expectation (lower variance, same
            mean). Its gradient has a pathwise part and a score part; the score part of token s weighs only what comes
            after it, minus the mean of the other samples of the same context (leave-one-out, so it stays unbiased).
    tree    trees as greedy serving drafts them (GTO, arXiv 2509.22134): reward of a tree sum_v prod_{k<=v} p(x_k) over
            its nodes, which is what it gets accepted on average, minus the reward of the stage-1 drafter's tree at the
            same place, and standardised over neighbouring places; the branch of largest value carries the gradient,
            down to where it may be accepted.

Both: ratio clip (PPO), `KL(stage-1 drafter || drafter)` on the drafted rows, and the token loss of stage 1 stays on.

Left out, and why:
- GTO's log sum_b exp(L_b) over branches: it counts them, so a tree of three branches of which none is accepted is worth
  log 3, and rewards of trees of other shapes do not compare.
- GTO's ratio against the stage-1 drafter: here the ratio is against the drafter that made the drafts, so that clipping
  bounds one step instead of the whole training; the anchor to stage 1 is the KL term.
- Dividing by the group's standard deviation in the chain form: it overweights contexts whose samples hardly differ, and
  the estimate would no longer be the gradient of J. The tree form keeps it, as published.
- The chance to be reached under block verification (`sampling.accept_block`) in place of `prod w_s`, which is its lower
  bound: other engines judge token by token.
- VSD's EM over oracle-filtered samples (arXiv 2602.05774) and PPOW's cost-aware windows (arXiv 2605.14978): both need a
  model of the serving cost; draft length is chosen at run time here, by calibration.
- Draft-OPD's replay from rejection points (arXiv 2605.29343): contexts are positions of texts the target wrote itself
  (where it is known which it wrote), which is what a drafter meets after every rejection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...checkpoints import Checkpoint
from ...drafter.drafter import Eagle31Drafter
from ...trees.draft_tree import DraftTree
from ..distillation.objective import DistillationSettings
from ..distillation.training_model import DistillationModel, LossOutput, packed
from .objective import PolicySettings
from .rollouts import (
    ChainRollout,
    Contexts,
    TreeRollout,
    chain_logits,
    choose_contexts,
    roll_out_chains,
    roll_out_trees,
)
from .text_model import TextModel

# --- chain form -------------------------------------------------------------------------------------------------------


def expected_length_terms(draft_log_probs: Tensor, target_log_probs: Tensor, drafted: Tensor) -> Tensor:
    """`alpha_j * prod_{s<j} w_s`, `(B, K)`: chance that token `j` is accepted, given the drafted tokens before it.

    Args:
        draft_log_probs: `(B, K, Vd)` log q.
        target_log_probs: `(B, K, Vd)` log p over the target's whole vocabulary, draft ids only.
        drafted: `(B, K)` drafted tokens, ids of the draft vocabulary.
    """
    alpha = torch.minimum(draft_log_probs.exp(), target_log_probs.exp()).sum(-1)  # (B, K)
    log_ratio = (target_log_probs - draft_log_probs).gather(-1, drafted[..., None]).squeeze(-1)
    accepted = log_ratio.clamp(max=0).exp()
    before = torch.cat((torch.ones_like(accepted[:, :1]), accepted[:, :-1].cumprod(1)), dim=1)
    return alpha * before


def chain_policy_loss(
    draft_log_probs: Tensor,
    old_log_probs: Tensor,
    target_log_probs: Tensor,
    drafted: Tensor,
    *,
    group: int,
    clip: float,
) -> Tensor:
    """Loss whose gradient, at `draft_log_probs == old_log_probs`, is an unbiased estimate of `-dJ` (module docstring).

    Args:
        draft_log_probs, target_log_probs, drafted: as in `expected_length_terms`, with gradients in the first.
        old_log_probs: `(B, K)` log-probability of the drafted tokens when they were drawn.
        group: samples per context; rows of one context stand together.
        clip: range of the ratio.
    """
    terms = expected_length_terms(draft_log_probs, target_log_probs, drafted)  # (B, K)
    with torch.no_grad():
        after = terms.flip(1).cumsum(1).flip(1) - terms  # (B, K) what comes after token s
        grouped = after.view(-1, group, after.shape[1])
        others = (grouped.sum(1, keepdim=True) - grouped) / (group - 1)
        advantage = (grouped - others).view_as(after)
    token_log_probs = draft_log_probs.gather(-1, drafted[..., None]).squeeze(-1)
    ratio = (token_log_probs - old_log_probs).exp()
    score = clipped(ratio, advantage, clip)
    return -(terms + score).sum(1).mean()


def clipped(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """`min(ratio * A, clip(ratio) * A)` (PPO, arXiv 1707.06347)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


# --- tree form --------------------------------------------------------------------------------------------------------


def node_chances(tree: DraftTree, target_probs: Tensor) -> Tensor:
    """`(B, N)` chance that each node is accepted, `prod_{k<=j} p(x_k | x_{<k})` down its path; 0 where it may not be.

    Args:
        target_probs: `(B, N, V)` the target's distribution after each node.
    """
    batch = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
    kept = target_probs[batch[:, None], tree.parents, tree.tokens]  # (B, N) chance of each node after its parent
    chances = [torch.ones_like(kept[:, 0])]
    for node in range(1, tree.size):  # parents have smaller numbers
        chances.append(torch.stack(chances, 1)[batch, tree.parents[:, node]] * kept[:, node])
    found = torch.stack(chances, 1)
    return found if tree.valid is None else found * tree.valid


def tree_reward(chances: Tensor) -> Tensor:
    """`(B,)` expected accepted tokens: the chances of all nodes but the root."""
    return chances[:, 1:].sum(1)


def best_branch(tree: DraftTree, chances: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes `(B, D)` of the branch that most is expected of, root left out, and which of them may be accepted."""
    value = (tree.ancestors * chances[:, None]).sum(2)  # along the path to each node
    leaf = value.masked_fill(~tree.leaves(), float("-inf")).argmax(1)
    path, count = tree.path_to(leaf)
    nodes = path[:, 1:]
    on_path = torch.arange(nodes.shape[1], device=nodes.device) < (count - 1)[:, None]
    return nodes, on_path & (chances.gather(1, nodes) > 0)


def standardised(rewards: Tensor, group: int) -> Tensor:
    """`(B,)` rewards minus the mean of their group, over its standard deviation or `LEAST_SPREAD` if that is more."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / grouped.std(1, keepdim=True).clamp(min=LEAST_SPREAD)).flatten()


LEAST_SPREAD = 0.1
"""Accepted tokens: below it rewards of a group are called equal, and what tells them apart is not blown up."""


# --- model ------------------------------------------------------------------------------------------------------------


class PolicyModel(DistillationModel):
    """Token loss and acceptance objective around the drafter.

    Args:
        drafter: attached; it starts as the stage-1 drafter, of which a frozen copy is kept.
        settings: of the token loss.
        policy: of the acceptance objective.
    """

    def __init__(self, drafter: Eagle31Drafter, settings: DistillationSettings, policy: PolicySettings):
        super().__init__(drafter, settings)
        policy.check()
        self.policy = policy
        self._anchor = [frozen_copy(drafter)]  # in a list: no submodule, so neither trained nor saved

    @property
    def anchor(self) -> Eagle31Drafter:
        """The stage-1 drafter."""
        return self._anchor[0]

    def forward(self, *args: Any, **inputs: Any) -> LossOutput:
        """As `DistillationModel.forward`, with the acceptance objective added."""
        output = super().forward(*args, **inputs)
        batch = packed(inputs)
        policy = self.policy
        adjacent = policy.group if policy.reward == "tree" else 1
        contexts = choose_contexts(batch, policy.contexts, adjacent)
        if contexts is None:
            return output
        extra, figures = self._chain_loss(contexts) if policy.reward == "chain" else self._tree_loss(contexts)
        # Trainer divides by the supervised tokens of the step; the policy terms are means already.
        loss = output.loss + extra * output.steps.supervised
        return LossOutput(loss, output.steps, figures)

    def _chain_loss(self, contexts: Contexts) -> tuple[Tensor, dict[str, float]]:
        policy = self.policy
        rollout: ChainRollout = roll_out_chains(
            self.drafter, contexts, depth=policy.depth, samples=policy.group, temperature=policy.temperature
        )
        log_probs = self._log_probs(self.drafter, rollout.contexts, rollout.tokens)
        old = rollout.draft_log_probs.gather(-1, rollout.draft_ids[..., None]).squeeze(-1)
        objective = chain_policy_loss(
            log_probs, old, rollout.target_log_probs, rollout.draft_ids, group=policy.group, clip=policy.clip
        )
        divergence = self._divergence(log_probs, rollout.contexts, rollout.tokens).mean()
        with torch.no_grad():
            length = expected_length_terms(log_probs, rollout.target_log_probs, rollout.draft_ids).sum(1).mean()
        figures = {"expected_accepted": length.item(), "anchor_kl": divergence.item()}
        return policy.policy_weight * objective + policy.anchor_weight * divergence, figures

    def _tree_loss(self, contexts: Contexts) -> tuple[Tensor, dict[str, float]]:
        policy = self.policy
        rollout, reference = (self._trees(drafter, contexts) for drafter in (self.drafter, self.anchor))
        chances = node_chances(rollout.tree, rollout.target_probs)
        reward = tree_reward(chances)
        gain = reward - tree_reward(node_chances(reference.tree, reference.target_probs))
        advantage = standardised(gain, policy.group)

        nodes, valid = best_branch(rollout.tree, chances)  # (B, D)
        tokens = rollout.tree.tokens.gather(1, nodes)
        draft_ids = self._draft_rows(tokens).masked_fill(~valid, 0)
        log_probs = self._log_probs(self.drafter, rollout.contexts, tokens)
        branch = log_probs.gather(-1, draft_ids[..., None]).squeeze(-1)  # (B, D)
        depth = valid.sum(1).clamp(min=1)
        mean_log = (branch * valid).sum(1) / depth
        ratio = (mean_log - mean_log.detach()).exp()  # drafts are fresh: the drafter that made them is this one
        objective = -clipped(ratio, advantage, policy.clip).mean()
        divergence = self._divergence(log_probs, rollout.contexts, tokens)
        divergence = (divergence * valid).sum() / valid.sum().clamp(min=1)
        figures = {
            "tree_reward": reward.mean().item(),
            "tree_gain": gain.mean().item(),
            "anchor_kl": divergence.item(),
        }
        return policy.policy_weight * objective + policy.anchor_weight * divergence, figures

    def _trees(self, drafter: Eagle31Drafter, contexts: Contexts) -> TreeRollout:
        policy = self.policy
        return roll_out_trees(
            drafter,
            contexts,
            depth=policy.depth,
            top_k=policy.top_k,
            size=policy.tree_size,
            temperature=policy.temperature,
        )

    def _draft_rows(self, tokens: Tensor) -> Tensor:
        ids = self.drafter.draft_ids
        return tokens if ids is None else torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)

    def _log_probs(self, drafter: Eagle31Drafter, contexts: Contexts, tokens: Tensor) -> Tensor:
        temperature = self.policy.temperature or 1.0
        return (chain_logits(drafter, contexts, tokens).float() / temperature).log_softmax(-1)

    def _divergence(self, log_probs: Tensor, contexts: Contexts, tokens: Tensor) -> Tensor:
        """`KL(stage-1 drafter || drafter)` `(B, K)`."""
        with torch.no_grad():
            anchor = self._log_probs(self.anchor, contexts, tokens)
        return (anchor.exp() * (anchor - log_probs)).sum(-1)


def make_policy_model(
    drafter: Eagle31Drafter, settings: DistillationSettings, policy: PolicySettings
) -> DistillationModel:
    """The model of stage 2 for `policy.reward`."""
    policy.check()
    kind = TextModel if policy.reward == "text" else PolicyModel
    return kind(drafter, settings, policy)


def frozen_copy(drafter: Eagle31Drafter) -> Eagle31Drafter:
    """A drafter with the same weights that no training reaches, attached to the same target."""
    stored = drafter.to_checkpoint()
    tensors = {name: tensor.detach().clone() for name, tensor in stored.tensors.items()}
    return _attached_copy(Checkpoint(stored.config, tensors), drafter)


def _attached_copy(checkpoint: Checkpoint, like: Eagle31Drafter) -> Eagle31Drafter:
    copy = Eagle31Drafter.from_checkpoint(checkpoint)
    copy.to(device=like.device, dtype=like.dtype)  # type: ignore[call-arg]
    copy.requires_grad_(False)
    return copy.eval().attach(like.require_binding().model)
