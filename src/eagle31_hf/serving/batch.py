"""Texts written side by side: rows join between two rounds, leave as they end, and what they leave behind is reused.

The caches are pools (`cache.row_pool`): one block of rows for the target, one for the drafter, allocated once. A prompt
is read in pieces in caches of its own, one prompt at a time, and then copied to a free row. A row whose text has ended
stays where it is until its place is needed; a new prompt that begins as it did (the same system prompt, the last turn
of the same chat) starts from there, the drafter's keys and values included. Rounds over the pools are `decoding`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..decoding.accept import sync_accepted
from ..decoding.decoder import make_round
from ..decoding.kept_graphs import captured_graphs
from ..decoding.pair_caches import PairCaches
from ..decoding.round import RoundBatch, Written
from ..drafter.assistant import Assistant
from ..drafting.plan import DraftPlan
from ..stats import PhaseClock, SpeculationStats
from ..trees.draft_tree import DraftTree
from .batch_drafts import BatchDrafts, batch_shape
from .batch_texts import BatchTexts
from .pooled_caches import PooledCaches
from .prompt_reader import PromptReader
from .requests import TextEvent, TextRequest
from .written_text import NO_TOKEN, WrittenText, logprobs_of

logger = logging.getLogger(__name__)


class TextBatch:
    """The texts that are being written, and the one whose prompt is being read.

    Args:
        drafter: attached, or `NoDrafter`; its target writes.
        max_rows: most texts at once.
        context: most tokens of a text, prompt included.
        prefill_chunk: most prompt tokens of one forward.
    """

    def __init__(self, drafter: Assistant, *, max_rows: int, context: int, prefill_chunk: int):
        self.drafter, self.binding = drafter, drafter.binding
        self.max_rows, self.context, self.prefill_chunk = max_rows, context, prefill_chunk
        self.stats = SpeculationStats()
        self.clock = PhaseClock(self.stats)
        shape = batch_shape(drafter, compiled=captured_graphs(drafter) is not None)
        sizes: dict[str, Any] = {"length": context, "chunk": max(prefill_chunk, 2 * shape.nodes)}
        sizes["cache_type"] = drafter.generation_config.stored_cache_type
        self.caches = PooledCaches.make(drafter, shape, batch_size=max_rows, **sizes)
        self.cache, self.session = self.caches.target, self.caches.drafter
        windows = self.session is not None and self.session.cache.has_windows
        self.graphs = None if windows else captured_graphs(drafter)
        maker = None if self.graphs is None else self.graphs.maker
        self._rows = BatchTexts(self.binding, shape, self.stats, maker)
        self.texts = self._rows.texts  # by place
        self.drafts = BatchDrafts(drafter, self._rows, shape, compiled=maker is not None)
        self.rounds = make_round(drafter, self.caches, self._rows, self.clock, compiled=maker is not None)
        self._reading = PairCaches.make(drafter, shape, batch_size=1, **sizes)
        self._reader = PromptReader(drafter, self._reading, self.caches, piece=prefill_chunk)
        self._parked: dict[int, list[int]] = {}  # tokens by place

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches."""
        return self.caches.num_bytes + self._reading.num_bytes

    # --- reading -------------------------------------------------------------------------------------------------

    def begin(self, text: WrittenText) -> int:
        """Start to read a prompt, from where a row that begins alike ends. Returns how many tokens are left to read."""
        self.caches.catch_up()  # a drafter that rests is behind the rows that could be resumed from
        place, length = self._longest_shared(text.request)
        text.usage = replace(text.usage, cached_tokens=length)
        return self._reader.begin(text, place, length)

    def read(self, num_tokens: int) -> None:
        """Read on."""
        with self.clock.phase("prefill"):
            self._reader.read(num_tokens)

    def join(self) -> None:
        """The prompt has been read: its text is written from the next round on."""
        self._parked.pop(len(self.texts), None)  # its row is written over, even where that fails half-way
        self.caches.join(self._reading)
        self.texts.append(self._reader.text)
        self.drafts.text_joins()

    def drop_reading(self) -> None:
        """Forget the prompt that is being read."""
        self._reader.wipe()

    def _longest_shared(self, request: TextRequest) -> tuple[int, int]:
        """The row to resume from: its place, and how many of its tokens (0 for none).

        One token less than the two share, since the drafter has joined each position with the token after it; and the
        prompt's last two tokens are left to be read, for where drafts start is not kept with a row.
        """
        prompt, best = request.prompt, (0, 0)
        rows = {place: text.tokens for place, text in enumerate(self.texts)}
        for place, tokens in (rows | self._parked).items():
            length = min(shared_prefix(tokens, prompt) - 1, len(prompt) - 2, self.cache.row_length(place))
            if length > best[1] and self.caches.can_resume(place, length):
                best = (place, length)
        return best

    # --- a round -------------------------------------------------------------------------------------------------

    def round(self) -> list[tuple[WrittenText, TextEvent]]:
        """Draft, verify, accept and commit for all texts; those that have ended leave. What each of them got."""
        self.clock.begin_round()
        rows = range(len(self.texts))
        batch = RoundBatch(self._rows, rows, rows)
        batch = replace(batch, plan=self._plan(batch))
        tree = self.rounds.draft(batch)
        verified = self.rounds.verify(tree)
        accepted = self.rounds.accept(tree, verified, batch)
        paths, emitted, _ = sync_accepted(
            accepted, lambda: torch.zeros((), dtype=torch.bool, device=tree.tokens.device)
        )
        self.clock.note_wait()
        outputs = [self._write(b, tree, verified.logits, paths[b], emitted[b]) for b in rows]
        kept = [list(output.tokens) or [0] for output in outputs]  # a row that fails leaves, whatever it holds
        self.rounds.commit(accepted, verified, Written(paths, kept))
        self._record(batch.plan, tree, [len(path) - 1 for path in paths])
        self.stats.new_tokens += sum(len(output.tokens) for output in outputs)
        told = list(zip(list(self.texts), outputs, strict=True))
        for text, output in told:
            if output.finish is not None:
                self.leave(text, trusted=not output.error)
        self.clock.end_round()
        return told

    def leave(self, text: WrittenText, *, trusted: bool = True) -> None:
        """Let a text go. What was computed for it stays until its place is needed.

        Args:
            trusted: if not, its row may hold what is no number, and is wiped: masked keys and values are multiplied by
                zero, which does not make numbers of them, so they would spoil the next text in this place.
        """
        place = self.texts.index(text)
        if not trusted:
            self.caches.catch_up()
            self.caches.wipe_row(place)
        parked = self.caches.leave(place)
        self._parked[parked] = text.tokens if trusted else []
        self.texts[place] = self.texts[-1]
        self.texts.pop()

    def reset(self) -> None:
        """Forget all texts and what they have left: after a failed round nothing of the pools is trusted.

        The prompt that is being read lies in caches of its own, and is read on.
        """
        self.caches.empty()
        self.texts.clear()
        self._parked.clear()

    def _plan(self, batch: RoundBatch) -> DraftPlan:
        remaining = max(text.writer.remaining for text in self.texts)
        return self.drafts.next_draft(len(self.texts), remaining=remaining)

    def _record(self, plan: DraftPlan | None, tree: DraftTree, accepted: list[int]) -> None:
        assert plan is not None, "every round has one"
        self.drafts.record(plan, tree.max_depth, accepted, self.clock.round_s)
        self.stats.record_round(depth=tree.max_depth, nodes=tree.size - 1, accepted=accepted)
        self.stats.skipped_rounds += plan.skips

    def _write(self, b: int, *round_of: Any) -> TextEvent:
        """`_add_to_text`; what its tokenizer raises, say, ends this text alone."""
        try:
            return self._add_to_text(b, *round_of)
        except Exception as error:
            logger.exception("eagle31: a text could not be written")
            failure = f"{type(error).__name__}: {error}"
            return TextEvent("", (), self.texts[b].usage, finish="error", error=failure)

    def _add_to_text(self, b: int, tree: DraftTree, logits: Tensor, path: list[int], emitted: list[int]) -> TextEvent:
        """Add a row's tokens to its text, up to where that ends."""
        text = self.texts[b]
        fails = emitted[-1] >= logits.shape[-1]  # the target's own choice was none
        count, shown = text.writer.append(emitted[:-1] if fails else emitted)
        text.usage = replace(
            text.usage,
            completion_tokens=text.usage.completion_tokens + count,
            drafted=text.usage.drafted + tree.size - 1,
            accepted=text.usage.accepted + min(count, len(path) - 1),
            rounds=text.usage.rounds + 1,
        )
        top = text.request.top_logprobs
        logprobs = () if top is None else logprobs_of(logits[b, path[:count]], emitted[:count], top)
        fails = fails and text.writer.finish is None
        finish, error = ("error", text.chooser.processing.failure or NO_TOKEN) if fails else (text.writer.finish, "")
        return TextEvent(shown, tuple(emitted[:count]), text.usage, logprobs, finish, error)


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    width = min(len(one), len(other))
    return next((i for i in range(width) if one[i] != other[i]), width)
