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
from transformers.models.llama.modeling_llama import repeat_kv

from ..drafter import Eagle31Drafter
from ..modeling_eagle31 import AttendingCache
from .losses import LossFunction
from .packing import PackedBatch

CACHED_NUMBERS, SPARED_NUMBERS = 2**21, 2**27
"""float32 logits worked on at a time: what a CPU's caches hold (8 MB), and what a GPU's memory spares (0.5 GB)."""


class GrowingCache:
    """Keys and values of all steps so far, side by side. Unlike a serving cache it keeps gradients."""

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append `(B, n_kv, T, d)` and return everything `(B, n_kv, S, d)`."""
        if layer_idx in self._keys:
            key = torch.cat((self._keys[layer_idx], key), dim=2)
            value = torch.cat((self._values[layer_idx], value), dim=2)
        self._keys[layer_idx], self._values[layer_idx] = key, value
        return key, value

    def repeat(self, times: int) -> None:
        """Each row `times` times in a row."""
        for store in (self._keys, self._values):
            for layer, tensor in store.items():
                store[layer] = tensor.repeat_interleave(times, dim=0)


class DiagonalCache(AttendingCache):
    """The keys of step 0 as they are, those of later steps only where they are read: row `i` sees its own alone.

    `S` times the keys, all but one diagonal of them masked out, are most of a step's time on a CPU. Scores are held in
    memory here, `(B, n, T, T)`, so on a GPU the fused kernel over `GrowingCache` is the better way.
    """

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, layer_idx: int
    ) -> Tensor:
        """See `AttendingCache`.

        Args:
            attention_mask: `(B, 1, T, T)` additive, over the keys of step 0.
        """
        assert attention_mask is not None, "texts are packed side by side"
        groups = query.shape[1] // key.shape[1]
        keys, values = self._keys.setdefault(layer_idx, []), self._values.setdefault(layer_idx, [])
        keys.append(repeat_kv(key, groups))
        values.append(repeat_kv(value, groups))
        query = query * query.shape[-1] ** -0.5
        scores = query @ keys[0].transpose(-1, -2) + attention_mask.to(query.dtype)  # (B, n, T, T)
        own = [(query * later).sum(-1, keepdim=True) for later in keys[1:]]  # s times (B, n, T, 1)
        weights = torch.cat((scores, *own), dim=-1).softmax(-1).to(value.dtype)  # (B, n, T, T + s)
        length = query.shape[2]
        out = weights[..., :length] @ values[0]
        for step, later in enumerate(values[1:]):
            out = out + weights[..., length + step, None] * later
        return out


@dataclass(frozen=True)
class Teacher:
    """The target's distribution where the drafter is trained to predict.

    Attributes:
        log_probs: `(M, Vd)` log-probability of the draft ids under the target's whole vocabulary.
        rows: `(M,)` flat positions in the batch (`b * T + t`) they were taken at, ascending: the positions whose
            *next* token is supervised and whose arg-max can be drafted (EAGLE-3 drops the others).
        best: `(M,)` which draft id is the arg-max.
        supervised: positions whose next token is supervised, those dropped included.
    """

    log_probs: Tensor
    rows: Tensor
    best: Tensor
    supervised: int


@dataclass(frozen=True)
class StepLosses:
    """Summed losses of one batch.

    Attributes:
        sums: `(S,)` loss summed over positions, per step.
        correct: `(S,)` positions where the drafter's likeliest token is the target's.
        counts: `(S,)` positions.
        supervised: what sums are divided by: supervised tokens, whether they can be drafted or not.
    """

    sums: Tensor
    correct: Tensor
    counts: Tensor
    supervised: int


def supervised_positions(batch: PackedBatch) -> Tensor:
    """`(B, T)` bool: positions at which the target predicts a supervised token that step 0 could draft.

    The first token of a document that can be drafted is its third: step 0 joins the state of the first with the second.
    """
    here = torch.zeros_like(batch.loss_mask)
    same = batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    here[:, :-1] = batch.loss_mask[:, 1:] & same & (batch.position_ids[:, :-1] >= 1)
    return here


def make_teacher(target_logits: Tensor, rows: Tensor, draft_ids: Tensor | None) -> Teacher:
    """Teacher for `rows (M,)` of flat target logits `(B*T, V)` or of logits `(M, V)` already gathered.

    Args:
        draft_ids: `(Vd,)` target ids of the draft vocabulary; `None` if it is the target's.
    """
    gathered = target_logits.shape[0] == len(rows)
    blocks: list[tuple[Tensor, Tensor, Tensor]] = []
    for block in torch.arange(len(rows), device=rows.device).split(rows_at_once(target_logits)):
        logits = target_logits[block if gathered else rows[block]].float()  # (m, V)
        blocks.append(_teach(logits, rows[block], draft_ids))
    if not blocks:
        width = target_logits.shape[-1] if draft_ids is None else len(draft_ids)
        return Teacher(target_logits.new_zeros((0, width), dtype=torch.float32), rows, rows, 0)
    log_probs, kept, best = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return Teacher(log_probs, kept, best, len(rows))


def _teach(logits: Tensor, rows: Tensor, draft_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """`log_probs`, `rows` and `best` of those among `logits (m, V)` whose arg-max can be drafted."""
    best = logits.argmax(-1)
    if draft_ids is None:
        return logits.log_softmax(-1), rows, best
    row_of = draft_ids.new_full((logits.shape[-1],), -1)
    row_of[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    best = row_of[best]
    keep = best >= 0
    logits = logits[keep]
    return logits[:, draft_ids] - logits.logsumexp(-1, keepdim=True), rows[keep], best[keep]


def holds_scores(device: torch.device) -> bool:
    """Whether scores in memory (`DiagonalCache`) are faster there than a fused kernel over masked keys."""
    return device.type == "cpu"


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
    compact = holds_scores(embeddings.device)
    mask = attention_masks(batch, 1 if compact else steps, embeddings.dtype)
    cache: Any = DiagonalCache() if compact else GrowingCache()  # all that attention asks of a cache
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
        rows = normed.flatten(0, 1)[teacher.rows[inside] - 1 - step]  # (m, H)
        every = bool(inside.all())  # what is not selected is not copied
        answers = teacher.log_probs if every else teacher.log_probs[inside]
        arguments = (drafter, rows, answers, teacher.best if every else teacher.best[inside], loss)
        if checkpoint_head and torch.is_grad_enabled():
            total, hits = checkpoint(_head_loss, *arguments, use_reentrant=False)  # type: ignore[misc]
        else:
            total, hits = _head_loss(*arguments)
        sums.append(total)
        correct.append(hits)
        counts.append(torch.tensor(len(rows), device=total.device))
    return StepLosses(torch.stack(sums), torch.stack(correct), torch.stack(counts), teacher.supervised)


def _head_loss(
    drafter: Eagle31Drafter, rows: Tensor, answers: Tensor, best: Tensor, loss: LossFunction
) -> tuple[Tensor, Tensor]:
    logits = drafter.draft_logits(rows)  # (m, Vd)
    with torch.no_grad():  # a maximum is several times faster than an arg-max
        hits = (logits.gather(-1, best[:, None]).squeeze(-1) == logits.amax(-1)).sum()
    blocks = zip(*(whole.split(rows_at_once(logits)) for whole in (logits, answers)), strict=True)
    return torch.stack([loss(*block).sum() for block in blocks]).sum(), hits


def rows_at_once(logits: Tensor) -> int:
    """How many rows of `logits (N, V)` are worked on together in float32."""
    numbers = CACHED_NUMBERS if logits.device.type == "cpu" else SPARED_NUMBERS
    return max(1, numbers // logits.shape[-1])


def weighted_sum(losses: StepLosses, decay: float) -> Tensor:
    """`sum_s decay^s * loss_s`, summed over positions (EAGLE-3: decay 0.8)."""
    weights = decay ** torch.arange(len(losses.sums), device=losses.sums.device, dtype=losses.sums.dtype)
    return (weights * losses.sums).sum()
