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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from ..drafter.drafter import Eagle31Drafter
from ..sampling.draw import argmax
from ..targets.binding import TargetBinding
from .data import PackedBatch

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
    """The same where layers with states would read on from one document into the next: each is a row of its own.

    Those of similar length are read together; pads behind a document change nothing in it.
    """
    starts = (position_ids == 0).flatten().nonzero().flatten().tolist()
    spans = list(zip(starts, [*starts[1:], input_ids.numel()], strict=True))
    alike: dict[int, list[tuple[int, int]]] = {}
    for start, end in spans:
        alike.setdefault((end - start).bit_length(), []).append((start, end))
    parts: dict[int, tuple[Tensor, ...]] = {}  # by where a document starts
    for group in alike.values():
        rows = torch.nn.utils.rnn.pad_sequence([input_ids.flatten()[slice(*span)] for span in group], batch_first=True)
        positions = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
        apart = compute_features(binding, rows, positions)
        for row, (start, end) in enumerate(group):
            parts[start] = tuple(each[row, : end - start] for each in apart)
    joined = (torch.cat(column) for column in zip(*(parts[start] for start in starts), strict=True))
    return TargetFeatures(*(states.reshape(*input_ids.shape, -1) for states in joined))


@dataclass(frozen=True)
class Teacher:
    """The target's distribution where the drafter is trained to predict."""

    log_probs: Tensor  # `(M, Vd)` log-probability of the draft ids under the target's whole vocabulary
    # `(M,)` flat positions in the batch (`b * T + t`) they were taken at, ascending: the positions whose *next* token
    # is supervised and whose arg-max can be drafted (EAGLE-3 drops the others)
    rows: Tensor
    best: Tensor  # `(M,)` which draft id is the arg-max


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


def make_teacher(target_logits: Tensor, rows: Tensor, draft_ids: Tensor | None) -> Teacher:
    """Teacher for `rows (M,)` of flat target logits `(B*T, V)`.

    Args:
        draft_ids: `(Vd,)` target ids of the draft vocabulary; `None` if it is the target's.
    """
    blocks = [
        _teach(target_logits[rows[block]].float(), rows[block], draft_ids)
        for block in torch.arange(len(rows), device=rows.device).split(rows_at_once(target_logits))
    ]
    return Teacher(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _teach(logits: Tensor, rows: Tensor, draft_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`log_probs`, `rows` and `best` of those among `logits (m, V)` whose arg-max can be drafted."""
    best = draft_rows(argmax(logits), draft_ids, logits.shape[-1])
    keep = best >= 0
    if not bool(keep.all()):  # what is not selected is not copied
        logits, rows, best = logits[keep], rows[keep], best[keep]
    log_probs = logits.log_softmax(-1)
    return log_probs if draft_ids is None else log_probs.index_select(1, draft_ids), rows, best


def draft_rows(tokens: Tensor, draft_ids: Tensor | None, vocabulary: int) -> Tensor:
    """Rows of the draft head of target ids `tokens`, -1 where there is none."""
    if draft_ids is None:
        return tokens
    row_of = draft_ids.new_full((vocabulary,), -1)
    row_of[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return row_of[tokens]


# --- what the drafter makes of it -------------------------------------------------------------------------------------


def attention_masks(batch: PackedBatch, steps: int, dtype: torch.dtype) -> Tensor:
    """`(B, 1, T, steps * T)` additive: causal within the document for step 0, then one diagonal per later step."""
    length = batch.input_ids.shape[1]
    row = torch.arange(length, device=batch.input_ids.device)
    causal = row[:, None] >= row[None, :]  # (T, T)
    same = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]  # (B, T, T)
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


def step_losses(
    drafter: Eagle31Drafter,
    batch: PackedBatch,
    aux: Tensor,
    teacher: Teacher,
    *,
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
        arguments = (drafter, rows, inside, teacher)
        if checkpoint_head and torch.is_grad_enabled():
            total, hits = checkpoint(_head_loss, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            total, hits = _head_loss(*arguments)
        sums.append(total)
        correct.append(hits)
        counts.append(inside.sum())
    return StepLosses(torch.stack(sums), torch.stack(correct), torch.stack(counts))


def _head_loss(drafter: Eagle31Drafter, rows: Tensor, inside: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Loss and hits over the rows `(M, H)` that are `inside`; to copy the others' answers away costs more than them."""
    logits = drafter.draft_logits(rows)  # (M, Vd)
    with torch.no_grad():  # a maximum is several times faster than an arg-max
        best = logits.gather(-1, teacher.best[:, None]).squeeze(-1) == logits.amax(-1)
    blocks = zip(*(whole.split(rows_at_once(logits)) for whole in (logits, teacher.log_probs)), strict=True)
    losses = torch.cat([cross_entropy(*block) for block in blocks])  # (M,)
    return torch.where(inside, losses, 0.0).sum(), (best & inside).sum()


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


def weighted_sum(losses: StepLosses) -> Tensor:
    """`sum_s STEP_DECAY^s * loss_s`, summed over positions."""
    weights = STEP_DECAY ** torch.arange(len(losses.sums), device=losses.sums.device, dtype=losses.sums.dtype)
    return (weights * losses.sums).sum()
