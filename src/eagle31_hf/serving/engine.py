"""One worker thread that writes all texts: it takes requests in, decides with the scheduler, runs the batch, tells.

    submit (any thread) ──► waiting ──► worker: turn ─► begin / read / join / round ─► on_event (worker thread)

The model is touched by the worker alone. What fails in a round fails the texts of that round, and the worker goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from ..drafter.assistant import Assistant
from ..errors import Eagle31Error, UnsupportedGenerationError
from ..loop.pair import Pair
from ..sampling.logits_processing import end_ids
from ..targets.grouped_attention import why_attention_is_unknown
from .batch import Batch
from .forms import form_of
from .rows import Row, choose_as_generate, unfollowed
from .scheduler import QueueFullError, Scheduler, Ticket
from .text import Event, OnEvent, Request, Usage, Writer

logger = logging.getLogger(__name__)

__all__ = ["Engine", "EngineSettings", "QueueFullError", "ShuttingDownError", "TooLongError"]

COUNTED = ("prompt_tokens", "cached_tokens", "completion_tokens", "drafted", "accepted", "rounds")


class TooLongError(Eagle31Error):
    """Prompt and answer together are longer than any text may be.

    Worded as OpenAI words it: by these words LiteLLM, opencode and others know that a chat has to be shortened.
    """

    def __init__(self, context: int, prompt: int, answer: int | None = None):
        asked = "" if answer is None else f" and up to {answer} are to be written"
        super().__init__(
            f"this model's maximum context length is {context} tokens, prompt and answer together; the prompt has "
            f"{prompt}{asked}"
        )


class ShuttingDownError(Eagle31Error):
    """No new requests are taken."""


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


class Engine:
    """See the module's description.

    Args:
        drafter: attached, or `NoDrafter`; its target writes.
        tokenizer: the target's.
        settings: how much to take on.

    Attributes:
        form: how the target writes thoughts and calls.
        requests, totals: texts that have ended, by how, and sums of their `Usage`; written by the worker alone.
        round_s: seconds of all rounds.
    """

    def __init__(self, drafter: Assistant, tokenizer: PreTrainedTokenizerBase, settings: EngineSettings):
        self.drafter, self.tokenizer = drafter, tokenizer
        self.settings = settings = within_what_the_target_can(drafter, settings)
        self.eos_ids, self.form = end_tokens(drafter, tokenizer), form_of(tokenizer)
        self.requests, self.totals, self.round_s = Counter[str](), Counter[str](), 0.0
        chunk, rows = settings.prefill_chunk, settings.max_rows
        self.batch = Batch(drafter, max_rows=rows, context=settings.context, prefill_chunk=chunk)
        self.scheduler = Scheduler(max_rows=rows, max_waiting=settings.max_waiting, read_budget=chunk)
        self._work = threading.Condition()
        self._accepts, self._stopping = True, False
        self._thread = threading.Thread(target=self._run, name="eagle31-engine", daemon=True)
        self._thread.start()

    # --- any thread ------------------------------------------------------------------------------------------------

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        """Line a request up; `on_event` is called from the worker's thread, with a `finish` in the last event."""
        if request.longest > self.settings.context:
            raise TooLongError(self.settings.context, len(request.prompt), request.max_new_tokens)
        if not request.prompt:
            raise UnsupportedGenerationError("the prompt is empty; wanted at least one token")
        with self._work:
            if not self._accepts:
                raise ShuttingDownError("the server is shutting down and takes no new requests")
            ticket = self.scheduler.submit(request, on_event)
            self._work.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Its client has gone: let it go at the next round's end."""
        with self._work:
            ticket.cancelled = True
            self._work.notify()

    @property
    def unfollowed(self) -> list[str]:
        """Settings of the target's generation config that served texts do not follow."""
        return unfollowed(self.drafter.binding.model.generation_config)

    @property
    def default_new_tokens(self) -> int | None:
        """Tokens of an answer to a request that sets no limit, where the target's generation config does."""
        return self.drafter.binding.model.generation_config.max_new_tokens

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self.scheduler.waiting)

    @property
    def running(self) -> int:
        """Texts that are read or written."""
        return len(self.scheduler.writing) + (self.scheduler.reading is not None)

    @property
    def retry_after_s(self) -> int:
        """A guess how long a full queue takes to move."""
        return max(1, min(60, round(self.round_s / max(1, self.batch.stats.passes) * 30)))

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._accepts

    def close(self, grace_s: float = 10.0) -> None:
        """Take nothing more, finish what runs within `grace_s`, cancel the rest."""
        self._accepts = False
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and self.scheduler.tickets and self._thread.is_alive():
            time.sleep(0.02)
        with self._work:
            self._stopping = True
            self._work.notify()
        self._thread.join(timeout=30)

    # --- the worker ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self) -> None:
        with self.drafter.binding.masked_attention():
            while True:
                with self._work:
                    self._work.wait_for(lambda: self._stopping or self.scheduler.tickets)
                if self._stopping:
                    break
                self.scheduler.turn(self)
        for ticket in self.scheduler.tickets:
            self._end(ticket, "error", "the server was shut down before this text was finished")

    # What the scheduler asks for in a turn. Who ends, by whatever, is let go by `Scheduler.leave`.

    def drop(self, ticket: Ticket) -> None:
        """Cancelled before it wrote anything."""
        if ticket is self.scheduler.reading:
            self.batch.drop_reading()
        self._end(ticket, "cancelled")

    def begin(self, ticket: Ticket) -> int:
        """Start to read a prompt. Returns how many tokens are to be read."""
        binding, request = self.drafter.binding, ticket.request
        chooser = choose_as_generate(binding.model, request, device=binding.head_device, eos_ids=self.eos_ids)
        ticket.text = Row(request, Writer(self.tokenizer, request, request.end_ids(self.eos_ids)), chooser)
        return self.batch.begin(ticket.text)

    def read(self, ticket: Ticket, num_tokens: int) -> None:
        self.batch.read(num_tokens)

    def join(self, ticket: Ticket) -> None:
        """The prompt has been read: its text is written from the next round on."""
        text = ticket.text
        assert text is not None, "it has begun"
        if text.request.prompt_logprobs is not None:
            self._tell(ticket, Event("", (), text.usage, prompt_logprobs=tuple(text.prompt_logprobs)))
        if text.request.max_new_tokens:
            self.batch.join()
        else:
            self.batch.drop_reading()
            self._end(ticket, "length")

    def reading_failed(self, ticket: Ticket, error: Exception) -> None:
        """One of the above has raised; no other request is touched by it."""
        logger.error("eagle31: a prompt of %d tokens could not be read", len(ticket.request.prompt), exc_info=error)
        self.batch.drop_reading()
        self._end(ticket, "error", f"{type(error).__name__}: {error}")

    def round(self) -> None:
        """A pass of all that write. A failure ends all texts of the round; nothing they have left behind is trusted."""
        try:
            self._round()
        except Exception as error:
            tickets = list(self.scheduler.writing)
            logger.exception("eagle31: a round of %d texts failed", len(tickets))
            self.batch.reset()
            for ticket in tickets:
                self._end(ticket, "error", f"{type(error).__name__}: {error}")

    def _round(self) -> None:
        for ticket in [ticket for ticket in self.scheduler.writing if ticket.cancelled]:
            assert ticket.text is not None, "it has begun"
            self.batch.leave(ticket.text)
            self._end(ticket, "cancelled")
        if not self.batch.texts:
            return
        started = time.perf_counter()
        brought = self.batch.round()
        self.round_s += time.perf_counter() - started
        tickets = {id(ticket.text): ticket for ticket in self.scheduler.writing}
        for text, event in brought:
            self._tell(tickets[id(text)], event)

    def _end(self, ticket: Ticket, finish: str, error: str = "") -> None:
        usage = Usage(len(ticket.request.prompt)) if ticket.text is None else ticket.text.usage
        self._tell(ticket, Event(text="", tokens=(), usage=usage, finish=finish, error=error))

    def _tell(self, ticket: Ticket, event: Event) -> None:
        if event.finish is not None:
            self.scheduler.leave(ticket)
            self.requests[event.finish] += 1
            self.totals.update({name: getattr(event.usage, name) for name in COUNTED})
        try:
            ticket.on_event(event)
        except Exception:  # of a listener, which is no other text's
            logger.exception("eagle31: a listener failed")


def within_what_the_target_can(drafter: Assistant, settings: EngineSettings) -> EngineSettings:
    """Settings under which texts that are written side by side do not feel each other.

    None gets so long that the target rotates it, and those beside it, otherwise; and they are written one after the
    other where the target cannot verify batches.
    """
    binding = drafter.binding
    if why := binding.tree_unsupported_reason or why_attention_is_unknown(binding.model):
        raise UnsupportedGenerationError(
            f"{why}; only targets that our own loop serves can write texts side by side: use generate, which falls back"
        )
    if binding.batch_unsupported_reason:
        settings = replace(settings, max_rows=1)
    longest, why = binding.most_positions or settings.context, "the target's positions end"
    if (limit := binding.rotates_alike_up_to) is not None:
        shape = (
            Pair.of(drafter)
            .drafting(rows=settings.max_rows, sampled=True, processing=None, new_tokens=settings.context)
            .shape
        )
        if limit - shape.depth < 2:
            raise UnsupportedGenerationError(
                f"this target rotates all positions of a text in another way behind {limit} tokens (rope scaling), and "
                "texts of so few cannot be served side by side"
            )
        if limit - shape.depth < longest:
            longest, why = limit - shape.depth, f"behind {limit} the target rotates all positions in another way"
    if longest < settings.context:
        logger.warning(
            "eagle31: texts of up to %d tokens are served instead of %d: %s", longest, settings.context, why
        )  # fmt: skip
        settings = replace(settings, context=longest)
    return settings


def end_tokens(drafter: Assistant, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids after which the target's texts end, as `generate` takes them."""
    ids = end_ids(drafter.binding.model)
    if not ids and tokenizer.eos_token_id is not None:
        ids = {tokenizer.eos_token_id}
    return frozenset(ids)
