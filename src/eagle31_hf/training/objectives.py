"""What is trained: the drafter on its own feedback (training-time test), with the token loss or expected acceptance.

Row `i` of a packed batch joins the target's state at position `i` with token `i+1`, as in generation. Step 0 reads the
target's states; step `s` reads the feedback of step `s-1` in the same row and token `i+1+s` of the text, at position
`i+s`. It attends to the step-0 keys of rows `j <= i` of its document and to its own keys of steps 1..s: exactly what a
chain drafted from position `i` would see. Its logits answer for token `i+2+s`; the teacher is the target's distribution
at position `i+1+s`. Gradients flow through all steps.

Rows whose tokens reach past their document compute something nobody reads: their keys are seen by no earlier row.

Stage 1 learns by the token loss of all steps, stage 2 by expected acceptance along the texts that the target wrote, as
they are served, in closed form. A text sampled from the target shows what a drafter would have got accepted, so no
draft need be drawn and no score function be estimated: the pass above gives the objective and its gradient. With `p`,
`q` the served distributions (temperature, top-k, top-p as the target's generation config has them) and `x_s` the
text's tokens,

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from ..drafter.drafter import Eagle31Drafter
from ..drafter.replay import rows_of_ids
from ..errors import ConfigurationError
from ..sampling.draw import argmax
from ..sampling.logits_processing import DraftWarping
from ..targets.binding import TargetBinding
from .data import NOT_WRITTEN, Document, PackedBatch
from .measure import readers_of_text, served_warping

TOKEN_WEIGHT = 0.2
"""Of the token loss beside expected acceptance."""
STEP_DECAY = 0.8
"""Weight of step `s` is `STEP_DECAY ** s`, as in EAGLE-3."""
CACHED_NUMBERS, SPARED_NUMBERS = 2**19, 2**27
"""float32 logits worked on at a time: what a CPU core's cache holds (2 MB), and what a GPU's memory spares (0.5 GB)."""


# --- what the target says ---------------------------------------------------------------------------------------------


class TargetFeatures(NamedTuple):
    """Of packed rows: `aux` `(B, T, A*Ht)` and `logits` `(B, T, V)`, in the target's dtype."""

    aux: Tensor
    logits: Tensor


@torch.no_grad()
def compute_features(binding: TargetBinding, input_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
    """One target forward over packed rows `(B, T)`: positions that restart at 0 separate the documents."""
    if binding.has_states and int((position_ids == 0).sum()) > len(input_ids):
        return _features_apart(binding, input_ids, position_ids)
    with binding.masked_attention(), binding.capturing():
        output = binding.model(
            input_ids=input_ids.to(binding.input_device),
            position_ids=position_ids.to(binding.input_device),
            use_cache=False,
        )
        return TargetFeatures(binding.take_aux(), output.logits)


def _features_apart(binding: TargetBinding, input_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
    """The same where layers with states would read on from one document into the next: each is read by itself."""
    ids, positions = input_ids.flatten(), position_ids.flatten()
    starts = (positions == 0).nonzero().flatten().tolist()
    spans = pairwise([*starts, len(ids)])
    parts = [compute_features(binding, ids[None, start:end], positions[None, start:end]) for start, end in spans]
    joined = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
    return TargetFeatures(*(states.reshape(*input_ids.shape, -1) for states in joined))


@dataclass(frozen=True)
class Teacher:
    """The target's distribution where the drafter is trained to predict."""

    rows: Tensor  # `(M,)` flat positions in the batch (`b * T + t`) it was taken at, ascending
    log_probs: Tensor  # `(M, Vd)` log-probability of the draft ids under the target's whole vocabulary
    # `(M,)` which draft id is the arg-max; -1 where that cannot be drafted, which no token loss is of (as in EAGLE-3)
    best: Tensor


@dataclass(frozen=True)
class WrittenTeacher(Teacher):
    """The same where the target wrote the text itself, for stage 2."""

    sampled: list[tuple[DraftWarping, Tensor]]  # how it is served at a temperature above 0, and which of the `M` are
    token: Tensor  # `(M,)` which draft id the next token is, -1 where it cannot be drafted
    served: Tensor  # `(M, Vd)` probability of the draft ids as served at that temperature; 0 where it is greedy


@dataclass
class Losses:
    """What one forward of a training model gives, summed over positions; `S` steps."""

    loss: Tensor  # to be differentiated, not yet divided
    sums: Tensor  # `(S,)` token loss
    correct: Tensor  # `(S,)` positions where the drafter's likeliest token is the target's
    counts: Tensor  # `(S,)` positions


def answering(batch: PackedBatch, learned: Tensor) -> Tensor:
    """`(B, T)` bool: positions `(B, T - 1)` that are `learned` from and whose next token step 0 could draft.

    The first token of a document that can be drafted is its third: step 0 joins the state of the first with the second.
    """
    here = torch.zeros_like(batch.loss_mask)
    here[:, :-1] = learned & (batch.position_ids[:, 1:] >= 2)
    return here


def of_drafts(values: Tensor, draft_ids: Tensor | None) -> Tensor:
    """Those `(N, Vd)` of the tokens that can be drafted, of `values (N, V)`."""
    return values if draft_ids is None else values.index_select(1, draft_ids)


# --- what the drafter makes of it -------------------------------------------------------------------------------------


def attention_masks(batch: PackedBatch, steps: int, dtype: torch.dtype) -> Tensor:
    """`(B, 1, T, steps * T)` additive: causal within the document for step 0, then one diagonal per later step."""
    length = batch.input_ids.shape[1]
    row = torch.arange(length, device=batch.input_ids.device)
    causal = row[:, None] >= row[None, :]  # (T, T)
    document = (batch.position_ids == 0).cumsum(1)  # (B, T)
    same = document[:, :, None] == document[:, None, :]  # (B, T, T)
    diagonal = (row[:, None] == row[None, :]).expand_as(same)
    visible = torch.cat([causal & same, *[diagonal] * (steps - 1)], dim=-1)[:, None]
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def unroll(drafter: Eagle31Drafter, batch: PackedBatch, aux: Tensor, steps: int) -> Iterator[Tensor]:
    """Post-norm hidden states `(B, T, H)` of step 0, 1, ... `steps - 1`; see the module docstring.

    Args:
        aux: `(B, T, A*Ht)` the target's hidden states.
    """
    embeddings = drafter.embed(batch.input_ids)  # (B, T, H)
    hidden = drafter.fuse_aux(aux.to(embeddings.dtype))
    length = batch.input_ids.shape[1]
    mask, cache = attention_masks(batch, steps, embeddings.dtype), DynamicCache()  # which keeps gradients
    for step in range(steps):
        out = drafter.decode(
            embeddings.roll(-1 - step, dims=1),  # what wraps around lies past the end of a document
            hidden,
            drafter.rotary(batch.position_ids + step),
            mask[..., : (step + 1) * length],
            cache,
        )
        hidden = out.feedback
        yield out.normed


def cross_entropy(draft_logits: Tensor, target_log_probs: Tensor) -> Tensor:
    """`-sum p' log q`, `(N,)` in nats: the token loss of EAGLE-3 (arXiv 2503.01840; SafeAILab/EAGLE, SpecForge).

    Args:
        draft_logits: `(N, Vd)`, of `q`.
        target_log_probs: `(N, Vd)` of the target's whole vocabulary at the draft ids; `p'` sums to 1 over these.
    """
    target_probs = target_log_probs.float().softmax(-1)
    return -(target_probs * draft_logits.float().log_softmax(-1)).sum(-1)


def rows_at_once(logits: Tensor) -> int:
    """How many rows of `logits (N, V)` are worked on together in float32."""
    numbers = CACHED_NUMBERS if logits.device.type == "cpu" else SPARED_NUMBERS
    return max(1, numbers // logits.shape[-1])


# --- stage 1 ----------------------------------------------------------------------------------------------------------


class DistillationModel(nn.Module):
    """The drafter with the token loss around it: what `Trainer` and DDP see as the model.

    The target is no submodule: it is neither trained, moved nor saved.

    Args:
        drafter: attached.
        steps: draft steps `S` of the training-time test; the longest chain that acceptance is expected of.
        keeps_logits: keep draft logits for the gradient; without, they are computed twice, which takes less memory.
    """

    accepts_loss_kwargs = True  # tells Trainer that accumulated batches are already weighted

    def __init__(self, drafter: Eagle31Drafter, *, steps: int = 4, keeps_logits: bool = False):
        super().__init__()
        self.drafter, self.steps, self.keeps_logits = drafter, steps, keeps_logits

    def forward(self, **fields: Tensor) -> Losses:
        """Loss of a packed batch, whose `fields` these are."""
        batch = PackedBatch(**fields)
        with torch.no_grad():
            features = compute_features(self.drafter.binding, batch.input_ids, batch.position_ids)
            aux, logits = (each.to(self.drafter.device) for each in features)
            counted = self.counted(batch).flatten()
            teacher = self.teach(batch, logits.flatten(0, 1), counted.nonzero().squeeze(1))
        begins, positions = self.begins(counted), batch.position_ids.flatten()[teacher.rows]
        judge = self.judge if self.keeps_logits else partial(checkpoint, self.judge, use_reentrant=False)
        steps = []
        for step, normed in enumerate(unroll(self.drafter, batch, aux, self.steps)):
            # The teacher at position t judges row t - 1 - step, if that row is in the same document.
            row = (teacher.rows - 1 - step).clamp(min=0)
            inside = (positions >= 1 + step) & begins[row]
            steps.append(judge(normed.flatten(0, 1)[row], inside, teacher))
        return self.losses(*map(torch.stack, zip(*steps, strict=True)))

    def counted(self, batch: PackedBatch) -> Tensor:
        """`(B, T)` bool: positions in the loss, by whose number it is divided."""
        return answering(batch, batch.loss_mask[:, 1:])

    def begins(self, counted: Tensor) -> Tensor:
        """`(B*T,)` bool: rows whose chains are judged, all of them, given the flat positions that are counted."""
        return torch.ones_like(counted)

    def teach(self, batch: PackedBatch, target_logits: Tensor, rows: Tensor) -> Teacher:
        """What flat target logits `(B*T, V)` teach at the positions `rows (M,)` that are counted."""
        row_of, log_probs, best = rows_of_ids(self.drafter), [], []
        for block in rows.split(rows_at_once(target_logits)):
            logits = target_logits[block].float()
            best.append(row_of[argmax(logits)])
            log_probs.append(of_drafts(logits.log_softmax(-1), self.drafter.draft_ids))
        return Teacher(rows, torch.cat(log_probs), torch.cat(best))

    def judge(self, states: Tensor, inside: Tensor, teacher: Teacher) -> tuple[Tensor, ...]:
        """Of one step: token loss, hits and positions, summed over the states `(M, H)` that are `inside`."""
        return token_loss(self.drafter.draft_logits(states), inside, teacher)

    def losses(self, sums: Tensor, correct: Tensor, counts: Tensor) -> Losses:
        """Of all steps, from what `judge` gave of each."""
        weights = STEP_DECAY ** torch.arange(len(sums), device=sums.device, dtype=sums.dtype)
        return Losses((weights * sums).sum(), sums, correct, counts)


def token_loss(logits: Tensor, inside: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, hits and positions of draft logits `(M, Vd)` that are `inside`; to copy the others away costs more."""
    inside = inside & (teacher.best >= 0)
    with torch.no_grad():  # a maximum is several times faster than an arg-max
        is_best = logits.gather(-1, teacher.best.clamp(min=0)[:, None]).squeeze(-1) == logits.amax(-1)
    blocks = zip(*(whole.split(rows_at_once(logits)) for whole in (logits, teacher.log_probs)), strict=True)
    losses = torch.cat([cross_entropy(*block) for block in blocks])  # (M,)
    return torch.where(inside, losses, 0.0).sum(), (is_best & inside).sum(), inside.sum()


# --- stage 2 ----------------------------------------------------------------------------------------------------------


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

    def counted(self, batch: PackedBatch) -> Tensor:
        """`(B, T)` bool: tokens that the target wrote at a known temperature, and that another one follows."""
        return answering(batch, batch.written_at[:, :-1] != NOT_WRITTEN)

    def begins(self, counted: Tensor) -> Tensor:
        """`(B*T,)` bool: rows whose root, the next token, is counted."""
        return counted.roll(-1)

    def teach(self, batch: PackedBatch, target_logits: Tensor, rows: Tensor) -> Teacher:
        """With the tokens that were written, and the distributions they were drawn from."""
        teacher = super().teach(batch, target_logits, rows)
        written_at, served = batch.written_at.flatten()[rows], torch.zeros_like(teacher.log_probs)
        sampled = []
        for temperature in written_at[written_at > 0].unique().tolist():
            warping = served_warping(self.drafter.binding.model, temperature)
            these = (written_at == temperature).nonzero().squeeze(1)
            sampled.append((warping, these))
            for block in these.split(rows_at_once(target_logits)):
                scores = target_logits[rows[block]].float()
                served[block] = of_drafts(warping(scores).softmax(-1), self.drafter.draft_ids)
        token = rows_of_ids(self.drafter)[batch.input_ids.flatten()[rows + 1]]
        return WrittenTeacher(**vars(teacher), sampled=sampled, token=token, served=served)

    def judge(self, states: Tensor, inside: Tensor, teacher: Teacher) -> tuple[Tensor, ...]:
        """As `DistillationModel.judge`, and the chance `(M,)` that each draft is accepted."""
        assert isinstance(teacher, WrittenTeacher), "made by `teach`"
        logits = self.drafter.draft_logits(states).float()
        greedy = logits.log_softmax(-1).gather(1, teacher.best.clamp(min=0)[:, None]).squeeze(1).exp()
        chance = torch.where(teacher.best >= 0, greedy, 0.0)
        for warping, these in teacher.sampled:
            drafted = warping(logits[these]).softmax(-1)
            chance = chance.index_put((these,), agreement(teacher.served[these], drafted, teacher.token[these]))
        return *token_loss(logits, inside, teacher), torch.where(inside, chance, 0.0)

    def losses(self, sums: Tensor, correct: Tensor, counts: Tensor, *chances: Tensor) -> Losses:
        """With the expected acceptance of each start; the positions behind it in a text stand behind it here, too."""
        losses = super().losses(sums, correct, counts)
        along = torch.stack([chance.roll(-step) for step, chance in enumerate(chances[0])])
        losses.loss = TOKEN_WEIGHT * losses.loss - along.cumprod(0).sum() / self.steps
        return losses


def require_stage_two(target: PreTrainedModel, documents: Sequence[Document], temperatures: Sequence[float]) -> None:
    """Raise a `ConfigurationError` if stage 2 has nothing to learn from, or cannot tell what would be accepted."""
    if not any(document.written_from is not None and document.temperature is not None for document in documents):
        raise ConfigurationError(
            "stage 2 learns from what the target wrote at a temperature that is known, and of these texts it wrote "
            "none; use --regenerate last or each"
        )
    for temperature in temperatures:
        if names := readers_of_text(target, temperature):
            raise ConfigurationError(
                f"the target is served with {names}; stage 2 can tell acceptance under temperature, top-k, top-p and "
                "min-p alone: take the others out of its generation config, or train stage 1"
            )
