"""Events of texts as answers in OpenAI's shape: pieces of a stream, or one whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from . import answers
from .answer_parts import AnswerParser
from .calls import ChatTexts
from .requests import TextEvent, TextRequest, TextUsage
from .token_texts import TokenTexts


class AnswerWriter:
    """Events of an answer's texts as pieces of a stream, and as a whole."""

    def opening(self) -> list[BaseModel]:
        """Pieces before the first event."""
        return []

    def pieces(self, index: int, event: TextEvent) -> list[BaseModel]:
        """What one event of text `index` adds to a stream."""
        raise NotImplementedError

    def whole(self, usages: Sequence[TextUsage]) -> BaseModel:
        """The answer in one piece."""
        raise NotImplementedError

    def usage(self, usages: Sequence[TextUsage]) -> BaseModel:
        """The last piece of a stream that counts tokens."""
        raise NotImplementedError


class ChatWriter(AnswerWriter):
    """Of a chat completion."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, texts: ChatTexts):
        self.envelope = answers.Envelope(model, "chatcmpl")
        self.one_call, count = texts.one_call, len(texts.requests)
        self.tokens = [TokenTexts(tokenizer, text.prompt) for text in texts.requests]
        self.parsers = [AnswerParser(thinks=texts.thinks, tools=texts.tool_names) for _ in range(count)]
        self.messages = [answers.ChatMessage() for _ in range(count)]
        self.logprobs: list[list[dict[str, Any]] | None] = [[] if texts.tells_logprobs else None for _ in range(count)]
        self.finish: list[str | None] = [None] * count

    def opening(self) -> list[BaseModel]:
        return [
            answers.chat_chunk(self.envelope, index, {"role": "assistant", "content": ""})
            for index in range(len(self.messages))
        ]

    def pieces(self, index: int, event: TextEvent) -> list[BaseModel]:
        parser, message = self.parsers[index], self.messages[index]
        parts = parser.feed(event.text)
        if event.finish is not None:
            parts += parser.finish()
        deltas = [message.add(part) for part in parts if not (self.one_call and part.call and message.calls)]
        told = None
        kept = self.logprobs[index]
        if kept is not None:
            told = answers.chat_logprobs(self.tokens[index], event.logprobs)
            kept += told["content"]
            deltas = deltas or [{"content": ""}]
        made: list[BaseModel] = []
        for number, delta in enumerate(deltas):
            made.append(answers.chat_chunk(self.envelope, index, delta, logprobs=told if number == 0 else None))
        if event.finish is not None:
            self.finish[index] = message.finish_reason(event.finish)
            made.append(answers.chat_chunk(self.envelope, index, {}, finish=self.finish[index]))
        return made

    def whole(self, usages: Sequence[TextUsage]) -> BaseModel:
        choices = []
        for index, message in enumerate(self.messages):
            kept = self.logprobs[index]
            told = {} if kept is None else {"logprobs": {"content": kept}}
            choices.append({"index": index, "message": message.to_dict(), "finish_reason": self.finish[index], **told})
        return answers.chat_completion(self.envelope, choices, usages)

    def usage(self, usages: Sequence[TextUsage]) -> BaseModel:
        return answers.chat_usage_chunk(self.envelope, usages)


class CompletionWriter(AnswerWriter):
    """Of a completion."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, texts: Sequence[TextRequest]):
        self.envelope, count = answers.Envelope(model, "cmpl"), len(texts)
        self.tokens = [TokenTexts(tokenizer, text.prompt) for text in texts]
        self.texts = [""] * count
        self.logprobs = [
            None if text.top_logprobs is None else answers.completion_logprobs(t, [])
            for text, t in zip(texts, self.tokens, strict=True)
        ]
        self.finish: list[str | None] = [None] * count

    def pieces(self, index: int, event: TextEvent) -> list[BaseModel]:
        self.texts[index] += event.text
        self.finish[index] = event.finish
        told, kept = None, self.logprobs[index]
        if kept is not None:
            told = answers.completion_logprobs(self.tokens[index], event.logprobs)
            for name, values in told.items():
                kept[name] += values
        if not event.text and event.finish is None and not event.logprobs:
            return []
        choice = answers.completion_choice(index, event.text, finish=event.finish, logprobs=told)
        return [answers.completion(self.envelope, [choice], [])]

    def whole(self, usages: Sequence[TextUsage]) -> BaseModel:
        choices = [
            answers.completion_choice(i, text, finish=self.finish[i], logprobs=self.logprobs[i])
            for i, text in enumerate(self.texts)
        ]
        return answers.completion(self.envelope, choices, usages)

    def usage(self, usages: Sequence[TextUsage]) -> BaseModel:
        return answers.completion(self.envelope, [], usages)
