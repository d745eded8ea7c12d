"""Target and drafter read text that is there already, in the same chunks: the prompt, or what a failure has cost.

Only each row's last logits and hidden states outlive a chunk: the drafter pairs each position with the token that
follows, and the last one with the first token that is written. Prompts that are more than tokens (pictures) the target
reads in one forward of its own (`targets.prompt_forward`); the drafter reads its hidden states as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.speculative import SpeculativeCache
from ..drafter.session import DraftSession
from ..targets.binding import TargetBinding, TargetOutput
from ..targets.prompt_forward import PromptForward


class PromptEnd(NamedTuple):
    """What a text's first token and its drafts are made of: logits `(V,)` after the prompt's last token and, for a
    drafter, hidden states `(A*Ht,)` there."""

    logits: Tensor
    aux: Tensor | None


class PrefillState:
    """Text of each row that lies behind what the caches hold, and how far it has been read.

    Args:
        texts: token ids per row, from the first one the caches do not hold.
        unread: how many last tokens of each row are left unread. With 1, every position that is read is followed by
            a known token, so the drafter's state afterwards belongs to the last one.
        device: of the target's input.
        on_logits: called with the first column of each forward and the logits of all of them, `(B, C, V)`.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        unread: int,
        device: torch.device,
        on_logits: Callable[[int, Tensor], None] | None = None,
    ):
        self.on_logits = on_logits
        self.known = [len(text) for text in texts]
        self.to_read = [length - unread for length in self.known]
        longest = max(self.known)
        padded = [[*text, *[0] * (longest - len(text))] for text in texts]
        self.tokens = torch.tensor(padded, device=device)  # (B, longest) right-padded
        self.last_logits: list[Tensor | None] = [None] * len(texts)  # (V,) after the last token read
        self._last_aux: dict[int, Tensor] = {}  # (A*Ht,) by row

    @classmethod
    def at_end(cls, end: PromptEnd, device: torch.device) -> PrefillState:
        """Of one prompt that was read before: the caches hold it, and nothing is left to read."""
        state = cls([[]], unread=0, device=device)
        state.keep(0, *end)
        return state

    @property
    def end(self) -> PromptEnd:
        """Of the only row, which has been read."""
        logits = self.last_logits[0]
        assert logits is not None, "the prompt has been read"
        return PromptEnd(logits, self._last_aux.get(0))

    def keep(self, row: int, logits: Tensor, aux: Tensor | None) -> None:
        """What follows the last token read: logits `(V,)` and hidden states `(A*Ht,)`.

        Copies: a view would keep a whole chunk's hidden states alive.
        """
        self.last_logits[row] = logits.clone()
        if aux is not None:
            self._last_aux[row] = aux.clone()

    @property
    def last_aux(self) -> Tensor | None:
        """`(B, 1, A*Ht)` of each row's last position, which waits for its first new token; `None` without a drafter."""
        return torch.stack([each for _, each in sorted(self._last_aux.items())])[:, None] if self._last_aux else None


DECODED_CHUNK = 8
"""Most tokens of a chunk that layers with states read as drafts: what rebuilding states takes grows with its square."""


class ChunkedPrefill:
    """Reads with these models and caches.

    Args:
        session: the drafter's; `None` without one.
        as_drafts: layers with states read as they have decoded: by code for one token.
    """

    def __init__(
        self, binding: TargetBinding, cache: SpeculativeCache, session: DraftSession | None, *, as_drafts: bool = False
    ):
        self.binding, self.cache, self.session = binding, cache, session
        self.as_drafts = as_drafts

    def read(self, reading: PrefillState, chunk: int) -> None:
        """Read to the end, `chunk` columns per forward. A failure leaves both caches with whole tokens of the text."""
        start, end = 0, max(reading.to_read)
        chunk = min(chunk, DECODED_CHUNK) if self.as_drafts else chunk
        while start < end:
            stop = self._end_of_chunk(reading.to_read, start, min(start + chunk, end))
            self.read_columns(reading, start, stop)
            start = stop

    def _end_of_chunk(self, ends: Sequence[int], start: int, stop: int) -> int:
        """`stop` or a little before it. A single token left for the next chunk would be read by the target's code for
        one token, which may compute another state than the prompt at once does."""
        if self.cache.has_states and not self.as_drafts:
            while stop > start + 2 and any(end - stop == 1 for end in ends):
                stop -= 1
        return stop

    def read_columns(self, reading: PrefillState, start: int, end: int) -> None:
        """One forward over columns `start` to `end`."""
        counts = [min(max(length - start, 0), end - start) for length in reading.to_read]
        ending = [row for row, n in enumerate(counts) if 0 < n == reading.to_read[row] - start]
        ends = sorted({counts[row] - 1 for row in ending})
        if reading.on_logits is not None:
            ends = list(range(end - start))
        out = self._forward(reading.tokens[:, start:end], ends or [0], counts)
        self.cache.commit(counts)
        if reading.on_logits is not None:
            reading.on_logits(start, out.logits)
        for row in ending:
            last = counts[row] - 1
            reading.keep(row, out.logits[row, ends.index(last)], None if out.aux is None else out.aux[row, last])
        self._join(reading, start, counts, out.aux)

    def _join(self, reading: PrefillState, start: int, counts: Sequence[int], aux: Tensor | None) -> None:
        """The drafter reads `counts` positions of each row from `start` on, whose hidden states are `(B, C, A*Ht)`.

        Position t pairs with token t+1; where that does not exist yet, it waits for it (`PrefillState.last_aux`).
        """
        if self.session is None:
            return
        assert aux is not None
        paired = [min(n, max(known - start - 1, 0)) for n, known in zip(counts, reading.known, strict=True)]
        width = max(paired)
        if width > 0:
            self.session.absorb(reading.tokens[:, start + 1 : start + 1 + width], aux[:, :width], paired)

    def read_prompts(self, prompts: PromptForward, rows: Sequence[int], reading: PrefillState, chunk: int) -> None:
        """Read prompts in the model's own first forward, into empty caches; the drafter in chunks.

        Args:
            prompts: of all texts.
            rows: which of them the caches' rows are.
            reading: texts of these rows, of which the prompts are the beginning.
        """
        with self.binding.capturing() if self.session is not None else nullcontext():
            out = prompts(self.binding)
        lengths, padding = prompts.lengths(rows), [prompts.padding[row] for row in rows]
        if list(rows) != list(range(len(prompts.input_ids))):
            out.cache.reorder_cache(torch.tensor(rows, device=out.logits.device))  # type: ignore[arg-type]
        self.cache.load_dynamic(out.cache, padding)
        self.cache.offset_positions(None if out.offsets is None else out.offsets[:, rows])
        out.cache.layers.clear()  # copied
        aux = None if out.aux is None else _shifted_left(out.aux, rows, padding)
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            reading.keep(b, out.logits[row], None if aux is None else aux[b, length - 1])
        for start in range(0, max(lengths), chunk):
            counts = [min(max(length - start, 0), chunk) for length in lengths]
            self._join(reading, start, counts, None if aux is None else aux[:, start : start + chunk])

    def _forward(self, columns: Tensor, keep: list[int], counts: Sequence[int]) -> TargetOutput:
        """One chunk `(B, C)`: logits of the columns to keep, hidden states `(B, C, A*Ht)` if there is a drafter."""
        self.cache.place(columns.shape[1], counts=None if self.as_drafts else counts, is_draft=self.as_drafts)
        with self.binding.capturing() if self.session is not None else nullcontext():
            return self.binding.forward(
                columns,
                self.cache.position_ids(),
                self.cache.attention_mask(dtype=self.binding.compute_dtype, none_is_causal=self.binding.none_is_causal),
                self.cache,
                logits_to_keep=torch.tensor(keep, device=columns.device),
            )


def _shifted_left(states: Tensor, rows: Sequence[int], padding: Sequence[int]) -> Tensor:
    """These rows of `(B, L, *)` without the pads in front of each; as many columns of no meaning come behind."""
    if not any(padding) and len(rows) == len(states):
        return states
    return torch.stack([states[row].roll(-pads, 0) for row, pads in zip(rows, padding, strict=True)])
