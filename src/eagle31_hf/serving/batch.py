"""Texts written side by side: rows join between two rounds, leave as they end, and what they leave behind is reused.

The caches are pools (`cache.row_pool`): one block of rows for the target, one for the drafter, allocated once. A prompt
is read in pieces in caches of its own, one prompt at a time; its last scores give the text's first token, and it is
copied to a free row. A row whose text has ended stays where it is until its place is needed; a new prompt that begins
as it did (the same system prompt, the last turn of the same chat) starts from there, the drafter's keys and values
included. Rounds over the pools are `loop`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafter.session import absorbed
from ..drafting.draft_tree import DraftTree
from ..drafting.plan import DraftPlan
from ..errors import UnsupportedGenerationError
from ..loop.accept import Acceptor
from ..loop.choosing import RoundBatch
from ..loop.pair import Pair
from ..loop.pair_caches import PairCaches, PooledCaches
from ..loop.prefill import ChunkedPrefill, PrefillState, PromptEnd
from ..loop.round import Round
from ..stats import RoundClock, SpeculationStats
from ..texts.chats import shared_prefix
from .rows import NO_TOKEN, HeldText, Rows, ServedText, choose_as_generate, logprobs_of
from .text import Event, Request, Writer

logger = logging.getLogger(__name__)

TOLD_AT_ONCE = 64
"""Prompt tokens of a forward that are told with log-probabilities: each has the scores of a whole vocabulary."""


@dataclass(frozen=True)
class EngineSettings:
    """How much the engine may take on.

    Attributes:
        max_rows: texts written at once.
        context: most tokens of a text, prompt and answer.
        max_waiting: requests that may wait.
        prefill_chunk: prompt tokens read between two rounds.
    """

    max_rows: int = 8
    context: int = 4096
    max_waiting: int = 64
    prefill_chunk: int = 256


class Batch:
    """The texts that are being written, and the one whose prompt is being read.

    Rows that share their rounds share a planner, too, and what texts have shown it outlives them. A single row drafts
    as `generate` does, on a CPU by the graphs that are kept for it.

    Args:
        drafter: attached, or `NoDrafter`; its target writes.
        tokenizer: the target's.
        settings: how much to take on.

    Attributes:
        texts: by place.
        reading: whose prompt is being read.
        stats: of all texts since the start.
        seconds: of the host, by what it did.
        planner: what to draft, up to `shape`.
    """

    def __init__(self, drafter: Assistant, tokenizer: PreTrainedTokenizerBase, settings: EngineSettings):
        self.settings, self.binding, rows = settings, drafter.binding, settings.max_rows
        self.drafter, self.tokenizer, self.stats = drafter, tokenizer, SpeculationStats()
        self.clock = RoundClock(self.stats)
        self.seconds = dict.fromkeys(("prefill", "draft", "verify"), 0.0)
        drafts = Pair.of(drafter).drafting(
            rows=rows,
            sampled=True,
            processing=None,
            new_tokens=settings.context,
            on_event=partial(logger.info, "eagle31: the batch's drafts: %s, %s"),
        )
        shape, self.planner = drafts.shape, drafts.planner
        self.stats.fall_back(drafts.why)
        self.is_single = rows == 1 and drafts.graphs is None
        sizes: dict[str, Any] = {"length": settings.context, "chunk": max(settings.prefill_chunk, 2 * shape.nodes)}
        sizes["cache_type"] = drafter.generation_config.stored_cache_type
        self.caches = PooledCaches.make(drafter, shape, batch_size=rows, for_graphs=self.is_single, **sizes)
        self.cache, self.session = self.caches.target, self.caches.drafter
        self._rows = Rows(self.binding, shape, self.stats)
        self.texts = self._rows.texts
        self.rounds = Round(drafter, self.caches, self._rows, self.clock, drafts.graphs)
        self.reading: ServedText | None = None
        self.prompt_caches = PairCaches.make(drafter, shape, batch_size=1, **sizes)
        self._prefill = ChunkedPrefill(self.binding, self.prompt_caches.target, self.prompt_caches.drafter)
        self._prompt: PrefillState | None = None  # what of it no row holds
        self._position = 0  # within what is read of it
        self._parked: dict[int, HeldText] = {}  # by place
        self._resumes = not self.binding.bounds_prompts

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches."""
        return self.caches.num_bytes + self.prompt_caches.num_bytes

    # --- reading -------------------------------------------------------------------------------------------------

    def begin(self, text: ServedText) -> None:
        """Start to read a prompt, from where a row that begins alike ends."""
        self.reading, request, device = text, text.request, self.binding.input_device
        text.writer = Writer(self.tokenizer, request)
        text.chooser = choose_as_generate(self.binding.model, request, device=self.binding.head_device)
        self.caches.catch_up()  # a drafter that rests is behind the rows that could be resumed from
        place, length, end = self._longest_shared(request)
        text.usage.cached_tokens = length
        self._forget_prompt()
        if length:
            self.caches.resume(self.prompt_caches, place, length, min(length, len(request.prompt) - 1))
        if end is not None:
            self._prompt = PrefillState.at_end(end, device)
            return
        on_logits = None if request.prompt_logprobs is None else partial(_note_logprobs, text)
        self._prompt = PrefillState([request.prompt[length:]], unread=0, device=device, on_logits=on_logits)

    @property
    def to_read(self) -> int:
        """Tokens of the prompt that are to be read yet."""
        assert self._prompt is not None, "begin comes first"
        return self._prompt.to_read[0] - self._position

    def read(self, num_tokens: int) -> None:
        """Read on, so many tokens; of a target with states one or two less where else one would be read by itself."""
        assert self._prompt is not None, "begin comes first"
        start, end, chunk = self._position, self._position + num_tokens, self.settings.prefill_chunk
        if self._prompt.on_logits is not None:
            chunk = min(chunk, TOLD_AT_ONCE)
        fewest = 2 if self.cache.has_states else 1  # code for one token leaves other states than that for prompts
        if 0 < self.to_read - num_tokens < fewest:
            end -= 1
        if end - start < fewest <= self.to_read:
            return  # with what is read next
        while start < end:
            stop = min(start + chunk, end)
            if 0 < end - stop < fewest:
                stop -= 1
            with self._timed("prefill"):
                self._prefill.read_columns(self._prompt, start, stop)
            self._position = start = stop
        last = self._prompt.last_logits[0]
        if last is not None and bool(last.isnan().any()):
            raise UnsupportedGenerationError("the model's scores of this prompt are no numbers")

    def join(self) -> Event:
        """The prompt has been read: its text gets its first token, and is written on unless that ends it."""
        assert self.reading is not None, "begin comes first"
        assert self._prompt is not None, "begin comes first"
        text, prompt, caches = self.reading, self._prompt, self.prompt_caches
        event = self._first_token(text, prompt)
        if event.error:
            self.drop_reading()
            return event
        text.prompt_end = end = prompt.end
        if caches.drafter is not None and end.aux is not None:
            caches.drafter.absorb(*absorbed([event.tokens], end.aux[None, None]))
        self._parked.pop(len(self.texts), None)  # its row is written over, even where that fails half-way
        self.caches.join(caches)
        self.texts.append(text)
        self.reading = None
        if event.finish is not None:
            self.leave(text)
            return event
        self.planner.shorten_rest()  # this text may be of another kind
        if self.is_single:
            self._draft_alone(text)
        return event

    def _first_token(self, text: ServedText, prompt: PrefillState) -> Event:
        """As a round would choose it that has drafted nothing."""
        alone = Rows(self.binding, self._rows.shape, self.stats)
        alone.texts.append(text)
        batch = RoundBatch(alone, [0], [0])
        tree, logits = DraftTree.chain(batch.roots[:, None]), prompt.last_logits[0]
        assert logits is not None, "the prompt has been read"
        accepted = Acceptor(tree, logits[None, None], batch).accept()
        event = self._write(text, logits[None], accepted.paths[0], accepted.tokens[0])
        self.stats.new_tokens += len(event.tokens)
        return event

    def _draft_alone(self, text: ServedText) -> None:
        one, new_tokens = text.chooser, text.request.max_new_tokens
        found = Pair.of(self.drafter).drafting(
            rows=1, sampled=one.draws, processing=one.processing, new_tokens=new_tokens
        )
        self.planner, self._rows.shape = found.planner, found.shape
        self.stats.fall_back(found.why)
        self._rows.checks = found.graphs is None  # graphs of `generate` do not
        self.rounds = Round(self.drafter, self.caches, self._rows, self.clock, found.graphs)

    def drop_reading(self) -> None:
        """Forget the prompt that is being read, which may be no numbers, and leave nothing of it."""
        self.prompt_caches.wipe_row(0)
        self._forget_prompt()
        self.reading = None

    def _forget_prompt(self) -> None:
        self.prompt_caches.reset()
        self._prompt, self._position = None, 0

    def _longest_shared(self, request: Request) -> tuple[int, int, PromptEnd | None]:
        """The row to resume from: its place, and how many of its tokens (0 for none).

        One token less than the two share, since the drafter has joined each position with the token after it; of the
        same prompt all of it, since its end was kept.
        """
        best: tuple[int, int, PromptEnd | None] = (0, 0, None)
        if request.prompt_logprobs is not None or not self._resumes:  # what is not read has no scores
            return best
        rows = {place: text.held for place, text in enumerate(self.texts)}
        for place, held in (rows | self._parked).items():
            shared, whole = shared_prefix(held.tokens, request.prompt), len(request.prompt)
            end = held.prompt_end if shared == whole == held.prompt_length else None
            paired = min(shared - 1, self.cache.row_length(place))
            length = paired + (end is not None)
            if length > best[1] and self.caches.can_resume(place, length, paired):
                best = (place, length, end)
        return best

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Count the host's seconds within."""
        started = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += perf_counter() - started

    # --- a round -------------------------------------------------------------------------------------------------

    def round(self) -> list[tuple[ServedText, Event]]:
        """Draft, verify, accept and commit for all texts; those that have ended leave. What each of them got."""
        self.clock.begin_round()
        rows = range(len(self.texts))
        batch = RoundBatch(self._rows, rows, rows, self._plan(rows))
        with self._timed("draft"):
            tree = self.rounds.draft(batch)
        with self._timed("verify"):
            verified = self.rounds.verify(tree)
        accepted = self.rounds.accept(tree, verified, batch)
        for text in self.texts:
            text.usage.drafted += tree.size - 1
            text.usage.rounds += 1
        chosen = zip(self.texts, verified.logits, accepted.paths, accepted.tokens, strict=True)
        events = [self._write(*each) for each in chosen]
        kept = [list(event.tokens) or [0] for event in events]  # a row that fails leaves, whatever it holds
        with self._timed("draft"):  # the drafter reads what was accepted
            self.rounds.commit(accepted, verified, kept)
        self.rounds.record(self.planner, tree, batch, accepted, kept)
        self.stats.new_tokens += sum(len(event.tokens) for event in events)
        brought = list(zip(list(self.texts), events, strict=True))
        for text, event in brought:
            if event.finish is not None:
                self.leave(text, trusted=not event.error)
        self.clock.end_round()
        return brought

    def _plan(self, rows: Sequence[int]) -> DraftPlan | None:
        """What to draft for these rows; the round cuts the draft to what they may get."""
        remaining = max(text.writer.remaining for text in self.texts)
        if remaining < 2 or not self._rows.shape.depth:
            return None
        read = None if isinstance(self.drafter, Eagle31Drafter) else self._rows
        return self.planner.next_draft(rows, read, remaining)

    def leave(self, text: ServedText, *, trusted: bool = True) -> None:
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
        self._parked[parked] = text.held if trusted else HeldText()
        self.texts[place] = self.texts[-1]
        self.texts.pop()

    def reset(self) -> None:
        """Forget all texts and what they have left: after a failed round nothing of the pools is trusted.

        The prompt that is being read lies in caches of its own, and is read on.
        """
        self.caches.empty()
        self.texts.clear()
        self._parked.clear()

    def _write(self, text: ServedText, logits: Tensor, path: list[int], emitted: list[int]) -> Event:
        """`_add_to_text`; what its tokenizer raises, say, ends this text alone."""
        try:
            return self._add_to_text(text, logits, path, emitted)
        except Exception as error:
            logger.exception("eagle31: a text could not be written")
            return Event.failure(error)

    def _add_to_text(self, text: ServedText, logits: Tensor, path: list[int], emitted: list[int]) -> Event:
        """Add what a round emitted to a text, up to where that ends; `logits` `(N, V)` are of all nodes."""
        fails = emitted[-1] >= logits.shape[-1]  # the target's own choice was none
        if not self._rows.checks and bool(logits[path].isnan().any()):
            fails, emitted = True, emitted[-1:]
        count, shown = text.writer.append(emitted[:-1] if fails else emitted)
        text.usage.completion_tokens += count
        text.usage.accepted += max(count - 1, 0)
        top = text.request.top_logprobs
        logprobs = () if top is None else logprobs_of(logits[path[:count]], emitted[:count], top)
        fails = fails and text.writer.finish is None
        finish, error = ("error", text.chooser.processing.failure or NO_TOKEN) if fails else (text.writer.finish, "")
        return Event(shown, tuple(emitted[:count]), logprobs, finish, error)


def _note_logprobs(text: ServedText, start: int, logits: Tensor) -> None:
    """Keep log-probabilities of the prompt's tokens that follow those of these logits `(1, C, V)`."""
    request = text.request
    assert request.prompt_logprobs is not None, "they were asked for"
    tokens = request.prompt[start + 1 : start + 1 + logits.shape[1]]
    text.prompt_logprobs += logprobs_of(logits[0, : len(tokens)], tokens, request.prompt_logprobs)
