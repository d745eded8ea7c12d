"""What is trained: the drafter with the token loss around it (stage 1), or with expected acceptance (stage 2).

Stage 2 is in closed form: expected acceptance along the texts that the target wrote, as they are served.

A text sampled from the target shows what a drafter would have got accepted, so no draft need be drawn and no score
function be estimated: the training-time test's own pass gives the objective and its gradient. With `p`, `q` the served
distributions (temperature, top-k, top-p as the target's generation config has them) and `x_s` the text's tokens,

    temperature above 0   J = sum_j prod_{s<=j} alpha_s,  alpha_s = 1 / sum_y max(p_s(y), q_s(y) p_s(x_s) / q_s(x_s))
    temperature 0         J = sum_j prod_{s<=j} q_s(x_s)

from every token the target wrote, each text by the temperature it was written at. The first is exactly the expected
number of accepted drafts, given the text: `alpha` is the chance that `argmax q / E` is the token that `argmax p / E`
was, where both use the same noise `E` (`sampling.draw`), and noise of different positions is independent. The second is
smooth where counting matches is not; its gradient is that of cross-entropy with weights that fall where the drafts
before are unlikely.

    loss = sum over starts of (-J / S + TOKEN_WEIGHT * sum_s decay^s * cross-entropy_s)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError
from ..sampling.draw import argmax
from .data import NOT_WRITTEN, Document, PackedBatch
from .measure import served_processing, served_warping
from .unroll import (
    StepLosses,
    compute_features,
    cross_entropy,
    draft_rows,
    make_teacher,
    step_losses,
    supervised_positions,
    unroll,
    weighted_sum,
)

TOKEN_WEIGHT = 0.2
"""Of the token loss beside expected acceptance."""


@dataclass
class LossOutput:
    """What one forward of a training model gives."""

    loss: Tensor  # to be differentiated: summed over positions, not yet divided
    steps: StepLosses  # its token loss in parts, for the log
    figures: dict[str, float] = field(default_factory=dict)  # further figures for the log, each a mean


class DistillationModel(nn.Module):
    """The drafter with the token loss around it: what `Trainer` and DDP see as the model.

    The target is no submodule: it is neither trained, moved nor saved.

    Args:
        drafter: attached.
        steps: draft steps `S` of the training-time test; the longest chain that acceptance is expected of.
        gradient_checkpointing: compute draft logits twice instead of keeping those of all steps.
    """

    accepts_loss_kwargs = True  # tells Trainer that accumulated batches are already weighted

    def __init__(self, drafter: Eagle31Drafter, *, steps: int = 4, gradient_checkpointing: bool = False):
        super().__init__()
        self.drafter, self.steps, self.gradient_checkpointing = drafter, steps, gradient_checkpointing

    def forward(self, **fields: Tensor) -> LossOutput:
        """Loss of a packed batch, whose `fields` these are."""
        batch = PackedBatch(**fields)
        with torch.no_grad():
            aux, logits = self.read_target(batch)
            rows = self.counted(batch).flatten().nonzero().squeeze(1)
            teacher = make_teacher(logits, rows, self.drafter.draft_ids)
        losses = step_losses(
            self.drafter, batch, aux, teacher, steps=self.steps, checkpoint_head=self.gradient_checkpointing
        )
        return LossOutput(weighted_sum(losses), losses)

    def read_target(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The aux states `(B, T, A*Ht)` and the target's logits `(B*T, V)`, on the drafter's device."""
        device = self.drafter.device
        features = compute_features(self.drafter.binding, batch.input_ids, batch.position_ids)
        return features.aux.to(device), features.logits.flatten(0, 1).to(device)

    def counted(self, batch: PackedBatch) -> Tensor:
        """`(B, T)` bool: positions in the loss, by whose number it is divided."""
        return supervised_positions(batch)


# --- stage 2 ----------------------------------------------------------------------------------------------------------


def written_starts(batch: PackedBatch) -> Tensor:
    """`(B, T)` bool: rows whose root, the next token, the target wrote at a known temperature, and one behind it."""
    here = torch.zeros_like(batch.loss_mask)
    same = batch.document_ids[:, 2:] == batch.document_ids[:, :-2]
    here[:, :-2] = (batch.written_at[:, 1:-1] != NOT_WRITTEN) & same
    return here


def tokens_left(batch: PackedBatch) -> Tensor:
    """`(B, T)` tokens of the same document from here on."""
    left = torch.ones_like(batch.position_ids)
    for column in range(left.shape[1] - 2, -1, -1):
        same = batch.document_ids[:, column] == batch.document_ids[:, column + 1]
        left[:, column] = torch.where(same, left[:, column + 1] + 1, 1)
    return left


def expected_accepted(chances: Tensor) -> Tensor:
    """`sum_j prod_{s<=j}` of the chances `(N, S)` that drafts are accepted, `(N,)`."""
    return chances.cumprod(1).sum(1)


def agreement(target_probs: Tensor, draft_probs: Tensor, written: Tensor) -> Tensor:
    """Chance `(N,)` that a draft is the token that was written, where both were chosen by the same noise.

    With `p` and `q` the distributions of target and drafter, `argmax p / E` and `argmax q / E` are both `x` with
    chance `1 / sum_y max(p(y) / p(x), q(y) / q(x))`; given that the first is `x`, which has chance `p(x)`, what is
    left is `q(x) / sum_y max(p(y) q(x), q(y) p(x))`.

    Args:
        target_probs: `(N, Vd)` of the tokens that can be drafted; what is missing to 1 lies on others.
        draft_probs: `(N, Vd)`.
        written: `(N,)` row of the token that was written; -1: it cannot be drafted, the chance is 0.
    """
    row = written.clamp(min=0)[:, None]
    p, q = target_probs.gather(1, row), draft_probs.gather(1, row)
    elsewhere = (1 - target_probs.sum(1, keepdim=True)).clamp(min=0) * q
    either = torch.maximum(target_probs * q, draft_probs * p).sum(1, keepdim=True) + elsewhere
    chance = q / either.clamp(min=torch.finfo(either.dtype).tiny)
    return torch.where(written >= 0, chance.squeeze(1), 0.0)


class AcceptanceModel(DistillationModel):
    """Expected acceptance along written texts, and a little of the token loss on the same tokens."""

    def __init__(self, drafter: Eagle31Drafter, *, steps: int = 4, gradient_checkpointing: bool = False):
        super().__init__(drafter, steps=steps, gradient_checkpointing=gradient_checkpointing)
        self.warping_at = cache(lambda temperature: served_warping(drafter.binding.model, temperature))

    def counted(self, batch: PackedBatch) -> Tensor:
        """`(B, T)` bool: starts, not positions that answer."""
        return written_starts(batch)

    def forward(self, **fields: Tensor) -> LossOutput:
        """As `DistillationModel.forward`."""
        batch = PackedBatch(**fields)
        steps, ids = self.steps, batch.input_ids.flatten()
        starts = written_starts(batch).flatten().nonzero().squeeze(1)  # (N,)
        behind = tokens_left(batch).flatten()[starts] - 1
        temperature = batch.written_at.flatten()[starts + 1]
        with torch.no_grad():
            aux, target_logits = self.read_target(batch)
        chances, sums, correct, counts = [], [], [], []
        for step, normed in enumerate(unroll(self.drafter, batch, aux, steps)):
            inside = behind >= 2 + step
            place = (starts + 2 + step).clamp(max=len(ids) - 1)  # of the token that a draft answers for
            said = target_logits[place - 1].float()  # (N, V)
            best = draft_rows(argmax(said), self.drafter.draft_ids, said.shape[-1])
            logits = self.drafter.draft_logits(normed.flatten(0, 1)[starts]).float()  # (N, Vd)
            chances.append(torch.where(inside, self._chance(logits, said, best, temperature, ids[place]), 0.0))
            loss = cross_entropy(logits, self._of_drafts(said.log_softmax(-1)))
            sums.append(torch.where(inside & (best >= 0), loss, 0.0).sum())
            correct.append(((logits.argmax(-1) == best) & inside).sum())
            counts.append(inside.sum())
        losses = StepLosses(torch.stack(sums), torch.stack(correct), torch.stack(counts))
        expected = expected_accepted(torch.stack(chances, 1))
        loss = TOKEN_WEIGHT * weighted_sum(losses) - expected.sum() / steps
        figures = {"expected_accepted": expected.detach().mean().item()} if len(starts) else {}
        return LossOutput(loss, losses, figures)

    def _chance(self, logits: Tensor, said: Tensor, best: Tensor, temperature: Tensor, token: Tensor) -> Tensor:
        """`(N,)` chance that each draft is accepted.

        Args:
            logits, said: of the drafter `(N, Vd)` and of the target `(N, V)`.
            best: `(N,)` row of the draft head of the target's arg-max, -1 where it cannot be drafted.
            temperature, token: `(N,)` of the text, and the token that was written.
        """
        greedy = logits.log_softmax(-1).gather(1, best.clamp(min=0)[:, None]).squeeze(1).exp()
        chance = torch.where(best >= 0, greedy, 0.0)
        written = draft_rows(token, self.drafter.draft_ids, said.shape[-1])
        for each in temperature.unique().tolist():
            if each > 0:
                these, warping = (temperature == each).nonzero().squeeze(1), self.warping_at(each)
                served = self._of_drafts(warping(said[these]).softmax(-1))
                agree = agreement(served, warping(logits[these]).softmax(-1), written[these])
                chance = chance.index_put((these,), agree)
        return chance

    def _of_drafts(self, values: Tensor) -> Tensor:
        """Those `(N, Vd)` of the tokens that can be drafted, of `values (N, V)`."""
        ids = self.drafter.draft_ids
        return values if ids is None else values.index_select(1, ids)


def require_stage_two(target: PreTrainedModel, documents: Sequence[Document], temperatures: Sequence[float]) -> None:
    """Raise a `ConfigurationError` if stage 2 has nothing to learn from, or cannot tell what would be accepted."""
    if not any(document.written_from is not None and document.temperature is not None for document in documents):
        raise ConfigurationError(
            "stage 2 learns from what the target wrote at a temperature that is known, and of these texts it wrote "
            "none; use --regenerate last or each"
        )
    for temperature in temperatures:
        processing = served_processing(target, temperature)
        if not processing.fits_draft_vocabulary:
            names = ", ".join(type(processor).__name__ for processor in processing.processors)
            raise ConfigurationError(
                f"the target is served with {names}; stage 2 can tell acceptance under temperature, top-k, top-p and "
                "min-p alone: take the others out of its generation config, or train stage 1"
            )
