"""A chat with one pair, turn after turn, without a terminal: what is said, what is kept, how an answer is stopped.

Answers are written by `generate`. One cache travels from turn to turn, so that only what is new is read; how much of it
holds for the next prompt is `loop.carried_cache`'s to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ..cache.stock import CACHE_ARGUMENT
from ..drafter.assistant import Assistant
from ..errors import ConfigurationError
from ..sampling.logits_processing import sampling_options
from ..stats import SpeculationStats
from ..targets.fresh_drafter import trained_context
from ..texts.answer_forms import form_of
from ..texts.chats import encode_chat
from ..texts.decoder import IncrementalDecoder, RoundStreamer
from ..texts.rows import Message
from .answers import AnswerParser, AnswerPart

__all__ = ["Answer", "ChatSession", "Piece"]


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: its text, whether it was drafted and accepted, whether it is thought rather than said."""

    text: str
    drafted: bool
    thought: bool


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        content, thought: what was said, and what was thought before.
        stats: of the generation.
        prompt_tokens: of the whole conversation; `stats.prefilled_tokens` of them had to be read.
        first_token_s, seconds: until the first token, and in all.
        finish: `"stop"`, `"length"` or `"stopped"` (by `ChatSession.stop`).
    """

    content: str
    thought: str
    stats: SpeculationStats
    prompt_tokens: int
    first_token_s: float
    seconds: float
    finish: str

    @property
    def tok_per_s(self) -> float:
        """Tokens written per second of the whole answer, reading the prompt included."""
        return self.stats.new_tokens / self.seconds if self.seconds else 0.0


class ChatSession:
    """See the module's description.

    Args:
        target, drafter, tokenizer: a pair; the drafter is attached.
        system: system prompt.
        temperature: 0 is greedy.
        max_new_tokens: longest answer.
        context: most tokens of the conversation; `None`: what the target was trained for.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: Assistant,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        temperature: float = 0.0,
        max_new_tokens: int = 512,
        context: int | None = None,
    ):
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.system, self.max_new_tokens = system, max_new_tokens
        self.set_temperature(temperature)
        self.context = context or trained_context(target.config) or 2**31
        self.turns: list[Message] = []
        self.answers: list[Answer] = []
        self._is_stopped = False
        self._cache = DynamicCache(config=target.config)

    @property
    def messages(self) -> list[Message]:
        """The conversation as the template takes it."""
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else list(self.turns)

    def ask(self, content: str, on_piece: Callable[[Piece], None] = lambda piece: None) -> Answer:
        """Say something and get an answer, piece by piece. The conversation is longer by both afterwards.

        Raises:
            ConfigurationError: the conversation has no room for an answer, or the template refuses it; it is then as
                it was.
        """
        self.turns.append({"role": "user", "content": content})
        try:
            answer = self._answer(on_piece)
        except BaseException:
            self.turns.pop()
            raise
        self.turns.append({"role": "assistant", "content": answer.content})
        self.answers.append(answer)
        return answer

    def retry(self, on_piece: Callable[[Piece], None] = lambda piece: None) -> Answer:
        """Answer the last message anew.

        Raises:
            ConfigurationError: nothing has been said yet.
        """
        before = list(self.turns)
        content = self.undo()
        try:
            return self.ask(content, on_piece)
        except BaseException:
            self.turns = before
            raise

    def stop(self) -> None:
        """End the answer that is being written at its next token; it stays in the conversation as far as it got."""
        self._is_stopped = True

    def _answer(self, on_piece: Callable[[Piece], None]) -> Answer:
        ids = encode_chat(self.tokenizer, self.messages)
        room = self.context - len(ids)
        if room < 1:
            raise ConfigurationError(
                f"the conversation has {len(ids):,} tokens, and {self.context:,} are possible; take turns back with "
                "undo, or begin anew with reset"
            )
        form, most = form_of(self.tokenizer), min(self.max_new_tokens, room)
        decoder, parser = IncrementalDecoder(self.tokenizer, marks=form.marks), AnswerParser(self.tokenizer, form, ids)
        answered: list[AnswerPart] = []
        self._is_stopped = False
        started, first_at = time.perf_counter(), 0.0

        def show(parts: Sequence[AnswerPart], drafted: bool) -> None:
            answered.extend(parts)
            for part in parts:
                on_piece(Piece(part.content or part.reasoning, drafted, thought=bool(part.reasoning)))

        def show_text(text: str, drafted: bool) -> None:
            nonlocal first_at
            first_at = first_at or time.perf_counter()
            show(parser.feed(text), drafted)

        written = self._generate(ids, most, RoundStreamer(decoder, show_text))
        show(parser.finish(), drafted=False)
        seconds = time.perf_counter() - started
        stats = self.drafter.stats
        assert stats is not None, "generate with our drafter leaves stats"
        if stats.loop != "own":  # the cache holds a text that is recorded nowhere
            self._cache = DynamicCache(config=self.target.config)
        finish = "stopped" if self._is_stopped else "length" if written >= most else "stop"
        content, thought = "".join(part.content for part in answered), "".join(part.reasoning for part in answered)
        return Answer(content, thought, stats, len(ids), (first_at or started) - started, seconds, finish)

    def _generate(self, ids: list[int], max_new_tokens: int, streamer: RoundStreamer) -> int:
        """Write the answer; returns how many tokens it has."""
        prompt = torch.tensor([ids], device=self.drafter.binding.input_device)
        options = sampling_options(self.temperature)
        if not self.drafter.binding.tree_unsupported_reason:  # else the target makes a cache of its own kind
            options[CACHE_ARGUMENT] = self._cache
        output: Tensor = self.target.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            assistant_model=self.drafter,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([self._stops]),
            **options,
        )
        return output.shape[1] - len(ids)

    def _stops(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self._is_stopped, dtype=torch.bool, device=input_ids.device)

    def undo(self) -> str:
        """Take the last message and its answer back. Returns the message.

        Raises:
            ConfigurationError: there is none.
        """
        if not self.turns:
            raise ConfigurationError("nothing has been said yet")
        while (removed := self.turns.pop())["role"] != "user":
            pass
        return str(removed["content"])

    def reset(self) -> None:
        """Begin anew; the system prompt stays."""
        self.turns.clear()

    def set_temperature(self, temperature: float) -> None:
        """0 is greedy.

        Raises:
            ConfigurationError: not a number from 0 to 5.
        """
        if not 0.0 <= temperature <= 5.0:
            raise ConfigurationError(f"got temperature {temperature}; wanted a number from 0 (greedy) to 5")
        self.temperature = temperature
