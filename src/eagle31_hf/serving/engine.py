"""One worker thread that writes all texts: requests come in from any thread, events go out from the worker's.

    submit (any thread) ──► waiting ──► worker: turn of the scheduler ─► on_event (worker thread)

The model is touched by the worker alone. What fails in a round fails the texts of that round, and the worker goes on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from ..cache.grouped_attention import why_attention_is_unknown
from ..drafter.assistant import Assistant
from ..errors import UnsupportedGenerationError
from ..loop.pair import Pair
from ..sampling.logits_processing import end_ids
from ..texts.answer_forms import form_of
from .api_errors import ShuttingDownError, TooLongError
from .batch import Batch, EngineSettings
from .rows import ServedText, unfollowed
from .scheduler import Scheduler
from .text import OnEvent, Request

logger = logging.getLogger(__name__)


class Engine:
    """See the module's description.

    Args:
        drafter: attached, or `NoDrafter`; its target writes.
        tokenizer: the target's.
        settings: how much to take on.

    Attributes:
        form: how the target writes thoughts and calls.
        deadline: when a close ends what still runs, by `time.monotonic`; 0 for at once.
    """

    def __init__(self, drafter: Assistant, tokenizer: PreTrainedTokenizerBase, settings: EngineSettings):
        self.drafter, self.tokenizer = drafter, tokenizer
        self.settings = settings = within_what_the_target_can(drafter, settings)
        self.eos_ids = frozenset(end_ids(drafter.binding.model) or {tokenizer.eos_token_id} - {None})
        self.form = form_of(tokenizer)
        self.batch = Batch(drafter, tokenizer, settings)
        self.scheduler = Scheduler(self.batch)
        self._work = threading.Condition()
        self._accepts, self._stopping = True, False
        self.deadline = math.inf
        self._thread = threading.Thread(target=self._run, name="eagle31-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> ServedText:
        """Line a request up; `on_event` is called from the worker's thread, with a `finish` in the last event."""
        if request.longest > self.settings.context:
            raise TooLongError(self.settings.context, len(request.prompt), request.max_new_tokens)
        if not request.prompt:
            raise UnsupportedGenerationError("the prompt is empty; wanted at least one token")
        text = ServedText(request, on_event)
        with self._work:
            if not self._accepts:
                raise ShuttingDownError("the server is shutting down and takes no new requests")
            self.scheduler.submit(text)
            self._work.notify()
        return text

    def cancel(self, text: ServedText) -> None:
        """Its client has gone: let it go at the next round's end."""
        with self._work:
            text.cancelled = True
            self._work.notify()

    @property
    def unfollowed(self) -> list[str]:
        """Settings of the target's generation config that served texts do not follow."""
        return unfollowed(self.drafter.binding.model.generation_config)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._accepts

    def close(self, grace_s: float = 10.0) -> None:
        """Take nothing more, finish what runs within `grace_s`, cancel the rest."""
        self._accepts = False
        self.deadline = min(self.deadline, time.monotonic() + grace_s)
        while time.monotonic() < self.deadline and self.scheduler.texts and self._thread.is_alive():
            time.sleep(0.02)
        with self._work:
            self._stopping = True
            self._work.notify()
        self._thread.join(timeout=30)

    @torch.inference_mode()
    def _run(self) -> None:
        with self.drafter.binding.masked_attention():
            while True:
                with self._work:
                    self._work.wait_for(lambda: self._stopping or self.scheduler.texts)
                if self._stopping:
                    break
                self.scheduler.turn()
        self.scheduler.stop("the server was shut down before this text was finished")


def within_what_the_target_can(drafter: Assistant, settings: EngineSettings) -> EngineSettings:
    """Settings under which texts that are written side by side do not feel each other.

    None gets so long that the target rotates it, and those beside it, otherwise.
    """
    binding = drafter.binding
    if why := binding.tree_unsupported_reason or why_attention_is_unknown(binding.model):
        raise UnsupportedGenerationError(
            f"{why}; only targets that our own loop serves can write texts side by side: use generate, which falls back"
        )
    longest, why = binding.most_positions or settings.context, "the target's positions end"
    if (limit := binding.rotates_alike_up_to) is not None:
        pair, why = Pair.of(drafter), f"behind {limit} the target rotates all positions in another way (rope scaling)"
        drafts = pair.drafting(rows=settings.max_rows, sampled=True, processing=None, new_tokens=settings.context)
        longest = min(longest, limit - drafts.shape.depth)
    if longest < 2:
        raise UnsupportedGenerationError(f"{why}, and texts of so few tokens cannot be served side by side")
    if longest < settings.context:
        logger.warning("eagle31: texts of up to %d tokens are served instead of %d: %s", longest, settings.context, why)
    return replace(settings, context=min(longest, settings.context))
