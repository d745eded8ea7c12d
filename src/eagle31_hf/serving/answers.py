"""What the engine tells, as objects of OpenAI's API: whole answers, streamed pieces, log-probabilities, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails

from .answer_parts import AnswerPart
from .requests import TextUsage, TokenLogprob
from .token_texts import TokenTexts


def add_usage(usages: Sequence[TextUsage]) -> CompletionUsage:
    """Of the texts of one answer: a prompt that several were written to counts once."""
    prompt = max((usage.prompt_tokens for usage in usages), default=0)
    written = sum(usage.completion_tokens for usage in usages)
    accepted = sum(usage.accepted for usage in usages)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=max((u.cached_tokens for u in usages), default=0)),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=sum(usage.drafted for usage in usages) - accepted,
        ),
    )


@dataclass
class Envelope:
    """What all pieces of one answer share."""

    model: str
    kind: str  # "chatcmpl" or "cmpl"
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.kind}-{uuid.uuid4().hex}", int(time.time())

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model, "object": kind}


# --- chats ------------------------------------------------------------------------------------------------------------


@dataclass
class ChatMessage:
    """One choice of a chat, put together from its parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, part: AnswerPart) -> dict[str, Any]:
        """Add a part; returns the streamed delta that stands for it."""
        if part.call is not None:
            call = {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": part.call.name, "arguments": part.call.arguments},
            }
            self.calls.append(call)
            return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}
        if part.reasoning:
            self.reasoning += part.reasoning
            return {"reasoning_content": part.reasoning}
        self.content += part.content
        return {"content": part.content}

    def finish_reason(self, finish: str) -> str:
        """A text that stops after it called a function stops for that."""
        return "tool_calls" if self.calls and finish == "stop" else finish

    def to_dict(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def chat_completion(
    envelope: Envelope, choices: Sequence[dict[str, Any]], usages: Sequence[TextUsage]
) -> ChatCompletion:
    return ChatCompletion.model_validate(
        {**envelope.fields("chat.completion"), "choices": list(choices), "usage": add_usage(usages)}
    )


def chat_chunk(
    envelope: Envelope,
    index: int,
    delta: dict[str, Any],
    *,
    finish: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> ChatCompletionChunk:
    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
    if logprobs is not None:
        choice["logprobs"] = logprobs
    return ChatCompletionChunk.model_validate({**envelope.fields("chat.completion.chunk"), "choices": [choice]})


def chat_usage_chunk(envelope: Envelope, usages: Sequence[TextUsage]) -> ChatCompletionChunk:
    """The last piece of a stream whose client asked for usage."""
    return ChatCompletionChunk.model_validate(
        {**envelope.fields("chat.completion.chunk"), "choices": [], "usage": add_usage(usages)}
    )


def chat_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Of tokens that come next in a text."""
    content = []
    for each in logprobs:
        others = [_token_logprob(texts.of(token), value) for token, value in each.top]
        content.append({**_token_logprob(texts.add(each.token), each.logprob), "top_logprobs": others})
    return {"content": content}


def _token_logprob(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _told(logprob), "bytes": list(text.encode())}


def _told(logprob: float) -> float:
    """-inf is no JSON, and OpenAI's own stand-in for it is -9999."""
    return max(logprob, -9999.0)


# --- completions ------------------------------------------------------------------------------------------------------


def completion(envelope: Envelope, choices: Sequence[CompletionChoice], usages: Sequence[TextUsage]) -> Completion:
    return Completion(
        **envelope.fields("text_completion"), choices=list(choices), usage=add_usage(usages) if usages else None
    )


def completion_choice(
    index: int, text: str, *, finish: str | None, logprobs: dict[str, Any] | None = None
) -> CompletionChoice:
    # While a text goes on its reason to end is null, which OpenAI's type does not foresee.
    return CompletionChoice.model_construct(index=index, text=text, finish_reason=finish, logprobs=logprobs)


def completion_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Of tokens that come next in a text; offsets count from its first character."""
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in logprobs:
        others: dict[str, float] = {}
        for token, value in each.top:  # the likeliest first; parts of characters have no text and share a name
            others.setdefault(texts.of(token), _told(value))
        told["top_logprobs"].append(others)
        told["text_offset"].append(texts.length)
        told["tokens"].append(texts.add(each.token))
        told["token_logprobs"].append(_told(each.logprob))
    return told
