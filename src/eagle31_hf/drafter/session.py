"""The drafter at work: keep its cache in step with the target, and take draft steps.

Row t of the drafter joins the target's hidden state at position t with the token at t+1, so its cache always ends one
token before the root (the last token, whose hidden state the target has not computed yet). Chains are drafted by
`propose`, trees by `dynamic`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.spans import LayerKind, LayerKinds
from ..cache.speculative import SpeculativeCache
from ..drafting.host_numbers import on_device
from ..targets.devices import warn_once
from .drafter import Eagle31Drafter


class DraftState(NamedTuple):
    """What the drafter says of some positions' next tokens, logits `(B, T, Vd)`, and what it feeds back to itself,
    `(B, T, H)`."""

    logits: Tensor
    feedback: Tensor


# Tokens, hidden states, rotary tables and counts of `DraftSession.read` to the state after each row's last.
Read = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], Sequence[int]], DraftState]


class DraftSession:
    """The drafter's side of one generation.

    Args:
        drafter: attached to its target.
        batch_size: rows `B`.
        capacity: slots a row may need: longest sequence and the largest draft.
        block: most tokens written between two commits (prefill chunk, accepted path, or whole draft).
        slab: slots to grow by; default: `SLAB` for rows that may get longer than that.
    """

    cache_kind: type[SpeculativeCache] = SpeculativeCache

    def __init__(self, drafter: Eagle31Drafter, *, batch_size: int, capacity: int, block: int, slab: int | None = None):
        self.drafter = drafter
        # Attributes of a module cost 10 to 100 us each: asked once.
        self.device, self.dtype, self.draft_ids = drafter.device, drafter.dtype, drafter.draft_ids
        self.cache = self.cache_kind(
            LayerKinds((LayerKind(attention_window(drafter)),) * drafter.config.num_hidden_layers),
            batch_size=batch_size,
            capacity=capacity,
            block=block,
            slab=slab or (SLAB if capacity > SLAB else None),
            device=drafter.device,
        )
        self._root: DraftState | None = None
        self._rotary: tuple[Tensor, Tensor] | None = None  # (B, depths, d) from the present lengths on
        kind = str(drafter.rotary_emb.rope_type)
        self.rotates_by_length = "dynamic" in kind or kind == "longrope"  # all positions, by the text's length
        unread = MOST_UNREAD if batch_size == 1 else MOST_UNREAD_OF_SEVERAL
        self._unread = UnreadPositions(min(unread, self.cache.block))  # arguments of `absorb` that were put off
        self._depths: list[int] = []  # of the draft's positions that were stepped over
        window, trained = attention_window(drafter), drafter.config.max_position_embeddings
        self._trained_length = trained if window is None or window > trained else sys.maxsize  # longest it was made for

    @property
    def has_root(self) -> bool:
        """Whether something was absorbed."""
        return self._root is not None

    @property
    def root(self) -> DraftState:
        """State after the last absorbed position of each row, `T` = 1: where drafts start."""
        assert self._root is not None, "absorb comes before drafting"
        return self._root

    def absorb(self, tokens: Tensor, aux: Tensor, counts: Sequence[int], *, read: Read | None = None) -> None:
        """Run the drafter over true hidden states and keep the result in its cache.

        Args:
            tokens: `(B, T)`, the token *after* each position; the last valid one of a row is its root.
            aux: `(B, T, A*Ht)` target hidden states of the positions.
            counts: valid positions per row, first come; a row with 0 keeps its state.
            read: what stands in for `read` of this session.
        """
        self.catch_up()
        self._absorb(tokens, aux, counts, read=read)

    def put_off(self, tokens: Sequence[Sequence[int]], aux: Tensor) -> None:
        """Absorb this later, together with what follows, for as long as nothing is drafted: one pass costs as much as
        a token of it would.

        Args:
            tokens: as many of each row: the token after each position.
            aux: `(B, T, A*Ht)` as `absorb` takes it.
        """
        rows, width, _ = aux.shape
        if width > self._unread.room:
            return self.absorb(on_device(tokens, aux.device), aux, [width] * rows)
        if self._unread.count + width > self._unread.room:
            self.catch_up()
        self._unread.add(tokens, aux)

    def catch_up(self, *, read: Read | None = None) -> None:
        """Absorb what was put off; `read` is as `absorb` takes it."""
        if not self._unread.count:
            return
        tokens, aux = self._unread.read()
        self._absorb(tokens, aux, [tokens.shape[1]] * tokens.shape[0], read=read)
        self._unread.clear()  # not before: this may run out of memory, and is then tried again

    def _absorb(self, tokens: Tensor, aux: Tensor, counts: Sequence[int], *, read: Read | None = None) -> None:
        """Read at once what the cache takes at once."""
        tokens, aux = tokens.to(self.device), aux.to(device=self.device, dtype=self.dtype)
        block = self.cache.block
        for start in range(0, tokens.shape[1], block):
            end = min(start + block, tokens.shape[1])
            valid = [min(max(count - start, 0), end - start) for count in counts]
            if start and not any(valid):
                break
            rotary = self.rotary_ahead(end - start)
            state = (read or self.read)(tokens[:, start:end], aux[:, start:end], rotary, valid)
            self.commit(state, valid)

    def commit(self, state: DraftState, counts: Sequence[int]) -> None:
        """Keep what was read of each row's positions.

        Args:
            state: after each row's last position.
            counts: as in `absorb`.
        """
        self.cache.commit(counts)
        if self._rotary is not None:
            cos, sin = self._rotary
            self._rotary = (cos[:, counts[0] :], sin[:, counts[0] :]) if len(counts) == 1 else None
        self._root = self._merged(state, counts)
        if self.cache.placement.longest > self._trained_length:
            trained, self._trained_length = self._trained_length, sys.maxsize  # said
            warn_once(
                f"the text has passed the {trained} tokens that the drafter was made for: it stays the target's, but "
                f"fewer drafts may be accepted; eagle.generation_config.draft_window = {trained} lets it see no "
                "further back, and bounds its cache"
            )

    def read(self, tokens: Tensor, aux: Tensor, rotary: tuple[Tensor, Tensor], counts: Sequence[int]) -> DraftState:
        """One pass over `absorb`'s positions, not yet committed; the state after each row's last."""
        normed, feedback = self._decode(tokens, self.drafter.fuse_aux(aux), rotary, after=0)
        places = on_device([max(count - 1, 0) for count in counts], self.device)[:, None]
        rows = torch.arange(len(counts), device=self.device)[:, None]
        normed, feedback = normed[rows, places], feedback[rows, places]  # (B, 1, H); views would keep a chunk alive
        return DraftState(self.drafter.draft_logits(normed), feedback)

    def _merged(self, state: DraftState, counts: Sequence[int]) -> DraftState:
        """Rows that absorbed nothing keep what they had (prompts of unequal length end in different chunks)."""
        if self._root is None or min(counts) > 0:
            return state
        moved = on_device([count > 0 for count in counts], state.logits.device)[:, None, None]
        return DraftState(
            torch.where(moved, state.logits, self._root.logits), torch.where(moved, state.feedback, self._root.feedback)
        )

    def step(
        self, tokens: Tensor, feedback: Tensor, *, after: int, depth: int, ancestors: Tensor | None = None
    ) -> DraftState:
        """One recurrent draft step; nothing is committed.

        Args:
            tokens: drafted target ids `(B, T)`, all of one depth.
            feedback: `(B, T, H)` of the positions that proposed them.
            after: draft positions already stepped over this round.
            depth: of `tokens`; the root's children have 0.
            ancestors: which of the round's positions each may see, `(B, T, after + T)`; `None` for a chain.
        """
        self._depths = [*self._depths[:after], *[depth] * tokens.shape[1]]
        normed, feedback = self._decode(tokens, feedback, self.rotary_at(depth), after=after, ancestors=ancestors)
        return DraftState(self.drafter.draft_logits(normed), feedback)

    def reset(self) -> None:
        """Empty every row, and forget what was put off. `root` stays what it was until the next `absorb`."""
        self._unread.clear()
        self.cache.reset()
        self._rotary = None

    def _decode(
        self,
        tokens: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        *,
        after: int,
        ancestors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        drafter, cache = self.drafter, self.cache
        cache.place(tokens.shape[1], after=after)
        depths = None  # of a tree's nodes; where no window hides any, masks do not ask for them
        if ancestors is not None and cache.has_windows:
            depths = on_device([self._depths], self.device)
        mask: Tensor | None = cache.attention_mask(ancestors, depths, self.dtype)  # type: ignore[assignment]
        out = drafter.decode(drafter.embed(tokens), hidden, rotary, mask, cache)
        return out.normed, out.feedback

    def rotary_at(self, depth: int) -> tuple[Tensor, Tensor]:
        """Rotation `(B, 1, d)` of a draft depth."""
        cos, sin = self.rotary_ahead(depth + 1)
        return cos[:, depth:], sin[:, depth:]

    def rotary_ahead(self, count: int) -> tuple[Tensor, Tensor]:
        """Rotations `(B, count, d)` of each row's next positions; more are made at once."""
        if self._rotary is None or count > self._rotary[0].shape[1]:
            ahead = ROTARY_AHEAD if self.cache.batch_size == 1 else ROTARY_DEPTHS
            width = count if self.rotates_by_length else max(count, ahead)
            positions = self.cache.placement.lengths_tensor[:, None] + torch.arange(width, device=self.device)
            self._rotary = self.drafter.rotary(positions)
        cos, sin = self._rotary
        return cos[:, :count], sin[:, :count]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.catch_up()
        self.cache.select_rows(rows)
        self._take_root(rows)

    def _take_root(self, rows: Sequence[int]) -> None:
        """What is known after these rows is known from now on."""
        self._rotary = None
        if self._root is not None:
            index = on_device(list(rows), self._root.logits.device).long()
            self._root = DraftState(self._root.logits[index], self._root.feedback[index])


class UnreadPositions:
    """Tokens of positions that a resting drafter will read later, and their hidden states in one buffer.

    Kept one by one, they would lie between what each forward of the target allocates: that alone made the matrix
    products of a small one 5 % slower.

    Args:
        room: most positions that may wait.
    """

    def __init__(self, room: int):
        self.room = room
        self._tokens: list[list[int]] = []  # of each row
        self._buffer: Tensor | None = None  # (B, room, A*Ht); kept for the next ones, if they are like these

    @property
    def count(self) -> int:
        """Of each row."""
        return len(self._tokens[0]) if self._tokens else 0

    def add(self, tokens: Sequence[Sequence[int]], aux: Tensor) -> None:
        """Keep copies of `T` tokens of each row and their hidden states `(B, T, A*Ht)`, behind those that wait."""
        rows, width, size = aux.shape
        held = self._buffer
        if held is None or (held.dtype, held.device, held.shape[::2]) != (aux.dtype, aux.device, (rows, size)):
            held = self._buffer = aux.new_empty(rows, self.room, size)
        held.narrow(1, self.count, width).copy_(aux)
        self._tokens = [[*before, *more] for before, more in zip(self._tokens or [[]] * rows, tokens, strict=True)]

    def read(self) -> tuple[Tensor, Tensor]:
        """Tokens `(B, n)` and hidden states of all that waits; valid until the next `add`."""
        assert self._buffer is not None, "nothing waits"
        return on_device(self._tokens, self._buffer.device), self._buffer.narrow(1, 0, self.count)

    def clear(self) -> None:
        """Nothing waits any more."""
        self._tokens = []


def absorbed(tokens: Sequence[Sequence[int]], aux: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Arguments of `DraftSession.absorb` for `tokens` of each row."""
    counts = [len(row) for row in tokens]
    width = max(counts)
    padded = [[*row, *[0] * (width - len(row))] for row in tokens]
    return on_device(padded, aux.device), aux[:, :width], counts


def positions_read_at_once(drafter: Eagle31Drafter, chunk: int) -> int:
    """Of a prompt's chunk of so many tokens."""
    return chunk if attention_window(drafter) is None else min(chunk, WINDOWED_READ)


def attention_window(drafter: Eagle31Drafter) -> int | None:
    """Positions that each layer sees back, its own included, as it was trained and as its user wishes; `None`: all."""
    windows = (drafter.config.sliding_window, drafter.generation_config.draft_window)
    return min((window for window in windows if window is not None), default=None)


ROTARY_DEPTHS = 16
"""Draft depths whose rotary tables are made at once: a table costs as much as a linear layer, whatever its length."""

ROTARY_AHEAD = 64
"""Positions whose tables are made at once for a single row, whose rounds follow one another in them."""

SLAB = 4096
"""Caches longer than this grow by it, so that a generous `max_new_tokens` costs no memory before it is used."""

WINDOWED_READ = 512
"""Prompt positions that a drafter reads at once which sees a window only: its cache has room for so many beside it."""

MOST_UNREAD = 192
"""Positions that may be put off: as many as the longest rest passes over."""

MOST_UNREAD_OF_SEVERAL = 64
"""The same of each row of a batch, whose hidden states lie beside each other."""
