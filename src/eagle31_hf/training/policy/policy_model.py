"""Stage 2: the drafter trained for what serving pays for, the expected number of accepted tokens, by a policy gradient.

Drafts are drawn from the drafter and verified as rejection sampling does (temperature above 0), which other engines
serve by. Ours keeps a draft where drafter and target choose the same token by the same noise: with chance alpha at
most, and alpha / (2 - alpha) at least (arXiv 2408.07978), so what raises one raises the other. With acceptance
probabilities w_s = min(1, p_s(x_s) / q_s(x_s)) and alpha_j = sum_v min(p_j(v), q_j(v)),

    J = E_{x ~ q} [ sum_j alpha_j prod_{s<j} w_s ]

which is E[accepted tokens] with the last factor of each product taken in expectation (lower variance, same mean). Its
gradient has a pathwise part and a score part; the score part of token s weighs only what comes after it, minus the mean
of the other samples of the same context (leave-one-out, so it stays unbiased). Drafts are drawn anew for each step, so
no ratio to an older drafter needs a clip. `KL(stage-1 drafter || drafter)` on the drafted rows and the token loss of
stage 1 stay on.

The other objective, in closed form along written texts, is `text_model`. Both are a `DistillationModel` that is made of
a drafter and the same settings and reports `expected_accepted`; `make_policy_model` chooses.

Left out, and why:
- Dividing by the group's standard deviation: it overweights contexts whose samples hardly differ, and the estimate
  would no longer be the gradient of J.
- The chance to be reached under block verification (arXiv 2403.10444) in place of `prod w_s`, which is its lower bound:
  other engines judge token by token.
- Rewards of whole trees (GTO, arXiv 2509.22134): not above stage 1 in six trials (docs/LOG.md).
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
from ..distillation.training_model import DistillationModel, LossOutput, packed
from ..settings import DistillationSettings, PolicySettings
from .rollouts import Contexts, chain_logits, choose_contexts, roll_out_chains
from .text_model import TextModel

POLICY_WEIGHT = 0.5
"""Of the policy loss beside the token loss, as in GTO."""
ANCHOR_WEIGHT = 0.05
"""Of the divergence from the stage-1 drafter."""


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


def chain_policy_loss(draft_log_probs: Tensor, target_log_probs: Tensor, drafted: Tensor, *, group: int) -> Tensor:
    """Loss whose gradient is an unbiased estimate of `-dJ` (module docstring); its value is not `-J`.

    Args:
        draft_log_probs, target_log_probs, drafted: as in `expected_length_terms`, with gradients in the first, which
            the drafts were drawn from.
        group: samples per context; rows of one context stand together.
    """
    terms = expected_length_terms(draft_log_probs, target_log_probs, drafted)  # (B, K)
    with torch.no_grad():
        after = terms.flip(1).cumsum(1).flip(1) - terms  # (B, K) what comes after token s
        grouped = after.view(-1, group, after.shape[1])
        others = (grouped.sum(1, keepdim=True) - grouped) / (group - 1)
        advantage = (grouped - others).view_as(after)
    token_log_probs = draft_log_probs.gather(-1, drafted[..., None]).squeeze(-1)
    return -(terms + token_log_probs * advantage).sum(1).mean()


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

    def forward(self, **inputs: Any) -> LossOutput:
        """As `DistillationModel.forward`, with the acceptance objective added."""
        output = super().forward(**inputs)
        batch = packed(inputs)
        contexts = choose_contexts(batch, self.policy.contexts)
        if contexts is None:
            return output
        extra, figures = self._policy_loss(contexts)
        # Trainer divides by the supervised tokens of the step; the policy terms are means already.
        loss = output.loss + extra * output.steps.supervised
        return LossOutput(loss, output.steps, figures)

    def _policy_loss(self, contexts: Contexts) -> tuple[Tensor, dict[str, float]]:
        policy = self.policy
        rollout = roll_out_chains(
            self.drafter, contexts, depth=policy.depth, samples=policy.group, temperature=policy.temperature
        )
        log_probs = self._log_probs(self.drafter, rollout.contexts, rollout.tokens)
        objective = chain_policy_loss(log_probs, rollout.target_log_probs, rollout.draft_ids, group=policy.group)
        divergence = self._divergence(log_probs, rollout.contexts, rollout.tokens).mean()
        with torch.no_grad():
            length = expected_length_terms(log_probs, rollout.target_log_probs, rollout.draft_ids).sum(1).mean()
        figures = {"expected_accepted": length.item(), "anchor_kl": divergence.item()}
        return POLICY_WEIGHT * objective + ANCHOR_WEIGHT * divergence, figures

    def _log_probs(self, drafter: Eagle31Drafter, contexts: Contexts, tokens: Tensor) -> Tensor:
        return (chain_logits(drafter, contexts, tokens).float() / self.policy.temperature).log_softmax(-1)

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
    copy = Eagle31Drafter.from_checkpoint(Checkpoint(stored.config, tensors))
    copy.to(device=drafter.device, dtype=drafter.dtype)  # type: ignore[call-arg]
    copy.requires_grad_(False)
    return copy.eval().attach(drafter.require_binding().model)
