"""Training-time test: the drafter trained on its own feedback, all positions of a text at once (arXiv 2503.01840 §3.2).

Row `i` of a packed batch joins the target's state at position `i` with token `i+1`, as in generation. Step 0 reads the
target's states; step `s` reads the feedback of step `s-1` in the same row and token `i+1+s` of the text, at position
`i+s`. It attends to the step-0 keys of rows `j <= i` of its document and to its own keys of steps 1..s: exactly what a
chain drafted from position `i` would see. Its logits answer for token `i+2+s`; the teacher is the target's distribution
at position `i+1+s`. Gradients flow through all steps.

Rows whose tokens reach past their document compute something nobody reads: their keys are seen by no earlier row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from ...drafter.drafter import Eagle31Drafter
from ...sampling.draw import argmax
from ..data.packing import NOT_WRITTEN, PackedBatch
from .losses import LossFunction
from .step_attention import DocumentCache, attention_masks, document_lengths, holds_scores

CACHED_NUMBERS, SPARED_NUMBERS = 2**19, 2**27
"""float32 logits worked on at a time: what a CPU core's cache holds (2 MB), and what a GPU's memory spares (0.5 GB)."""


@dataclass(frozen=True)
class Teacher:
    """The target's distribution where the drafter is trained to predict."""

    log_probs: Tensor  # `(M, Vd)` log-probability of the draft ids under the target's whole vocabulary
    # `(M,)` flat positions in the batch (`b * T + t`) they were taken at, ascending: the positions whose *next* token
    # is supervised and whose arg-max can be drafted (EAGLE-3 drops the others)
    rows: Tensor
    best: Tensor  # `(M,)` which draft id is the arg-max
    weights: Tensor  # `(M,)` of their losses


@dataclass(frozen=True)
class StepLosses:
    """Summed losses of one batch."""

    sums: Tensor  # `(S,)` loss summed over positions, per step
    correct: Tensor  # `(S,)` positions where the drafter's likeliest token is the target's
    counts: Tensor  # `(S,)` positions


def supervised_positions(batch: PackedBatch) -> Tensor:
    """`(B, T)` bool: positions at which the target predicts a supervised token that step 0 could draft.

    The first token of a document that can be drafted is its third: step 0 joins the state of the first with the second.
    """
    here = torch.zeros_like(batch.loss_mask)
    same = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    here[:, :-1] = batch.loss_mask[:, 1:] & same & (batch.position_ids[:, :-1] >= 1)
    return here


def position_weights(batch: PackedBatch, given_weight: float) -> Tensor:
    """`(B, T)` float32 weight of each position's loss: 0 where `supervised_positions` says no.

    Args:
        given_weight: of positions whose next token the target did not write itself; 1 for the others.
    """
    weights = supervised_positions(batch).float()
    if given_weight != 1.0:
        written = batch.written_at.roll(-1, dims=1) != NOT_WRITTEN
        weights = torch.where(written, weights, given_weight * weights)
    return weights


def make_teacher(target_logits: Tensor, rows: Tensor, draft_ids: Tensor | None, weights: Tensor) -> Teacher:
    """Teacher for `rows (M,)` of flat target logits `(B*T, V)`, whose losses have these `weights (M,)`.

    Args:
        draft_ids: `(Vd,)` target ids of the draft vocabulary; `None` if it is the target's.
    """
    blocks = [
        _teach(target_logits[rows[block]].float(), rows[block], weights[block], draft_ids)
        for block in torch.arange(len(rows), device=rows.device).split(rows_at_once(target_logits))
    ]
    return Teacher(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _teach(
    logits: Tensor, rows: Tensor, weights: Tensor, draft_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`log_probs`, `rows`, `best` and `weights` of those among `logits (m, V)` whose arg-max can be drafted."""
    best = draft_rows(argmax(logits), draft_ids, logits.shape[-1])
    keep = best >= 0
    if not bool(keep.all()):  # what is not selected is not copied
        logits, rows, best, weights = logits[keep], rows[keep], best[keep], weights[keep]
    log_probs = logits.log_softmax(-1)
    return log_probs if draft_ids is None else log_probs.index_select(1, draft_ids), rows, best, weights


def draft_rows(tokens: Tensor, draft_ids: Tensor | None, vocabulary: int) -> Tensor:
    """Rows of the draft head of target ids `tokens`, -1 where there is none."""
    if draft_ids is None:
        return tokens
    row_of = draft_ids.new_full((vocabulary,), -1)
    row_of[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return row_of[tokens]


def unroll(drafter: Eagle31Drafter, batch: PackedBatch, aux: Tensor, steps: int) -> Iterator[Tensor]:
    """Post-norm hidden states `(B, T, H)` of step 0, 1, ... `steps - 1`; see the module docstring.

    Args:
        aux: `(B, T, A*Ht)` the target's hidden states.
    """
    embeddings = drafter.embed(batch.input_ids)  # (B, T, H)
    hidden = drafter.fuse_aux(aux.to(embeddings.dtype))
    length = batch.input_ids.shape[1]
    cache: Any  # all that attention asks of a cache
    if holds_scores(embeddings.device):
        mask, cache = None, DocumentCache(document_lengths(batch))
    else:
        mask, cache = attention_masks(batch, steps, embeddings.dtype), DynamicCache()  # which keeps gradients
    for step in range(steps):
        out = drafter.decode(
            embeddings.roll(-1 - step, dims=1),  # what wraps around lies past the end of a document
            hidden,
            drafter.rotary(batch.position_ids + step),
            None if mask is None else mask[..., : (step + 1) * length],
            cache,
        )
        hidden = out.feedback
        yield out.normed


def step_losses(
    drafter: Eagle31Drafter,
    batch: PackedBatch,
    aux: Tensor,
    teacher: Teacher,
    *,
    loss: LossFunction,
    steps: int,
    checkpoint_head: bool = False,
) -> StepLosses:
    """Losses of every step against the teacher.

    Args:
        checkpoint_head: compute draft logits again in the backward pass instead of keeping `S` of them in memory.
    """
    sums, correct, counts = [], [], []
    flat_positions = batch.position_ids.flatten()
    for step, normed in enumerate(unroll(drafter, batch, aux, steps)):
        # The teacher at position t judges row t - 1 - step, if that row is in the same document.
        inside = flat_positions[teacher.rows] >= 1 + step
        rows = normed.flatten(0, 1)[(teacher.rows - 1 - step).clamp(min=0)]  # (M, H)
        arguments = (drafter, rows, inside, teacher, loss)
        if checkpoint_head and torch.is_grad_enabled():
            total, hits = checkpoint(_head_loss, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            total, hits = _head_loss(*arguments)
        sums.append(total)
        correct.append(hits)
        counts.append(inside.sum())
    return StepLosses(torch.stack(sums), torch.stack(correct), torch.stack(counts))


def _head_loss(
    drafter: Eagle31Drafter, rows: Tensor, inside: Tensor, teacher: Teacher, loss: LossFunction
) -> tuple[Tensor, Tensor]:
    """Loss and hits over the rows `(M, H)` that are `inside`; to copy the others' answers away costs more than them."""
    logits = drafter.draft_logits(rows)  # (M, Vd)
    with torch.no_grad():  # a maximum is several times faster than an arg-max
        best = logits.gather(-1, teacher.best[:, None]).squeeze(-1) == logits.amax(-1)
    blocks = zip(*(whole.split(rows_at_once(logits)) for whole in (logits, teacher.log_probs)), strict=True)
    losses = torch.cat([loss(*block) for block in blocks])  # (M,)
    return torch.where(inside, teacher.weights * losses, 0.0).sum(), (best & inside).sum()


def rows_at_once(logits: Tensor) -> int:
    """How many rows of `logits (N, V)` are worked on together in float32."""
    numbers = CACHED_NUMBERS if logits.device.type == "cpu" else SPARED_NUMBERS
    return max(1, numbers // logits.shape[-1])


def weighted_sum(losses: StepLosses, decay: float) -> Tensor:
    """`sum_s decay^s * loss_s`, summed over positions (EAGLE-3: decay 0.8)."""
    weights = decay ** torch.arange(len(losses.sums), device=losses.sums.device, dtype=losses.sums.dtype)
    return (weights * losses.sums).sum()
