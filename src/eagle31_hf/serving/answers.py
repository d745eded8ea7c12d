"""Events of texts as answers in the shape of OpenAI's API: pieces of a stream, or one whole."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .answer_forms import form_of
from .answer_parts import AnswerParser, AnswerPart
from .requests import TextEvent, TextRequest, TextUsage, TokenLogprob
from .text import TokenTexts
from .wire import ChatBody

Fields = dict[str, Any]


def _shared_fields(model: str, kind: str) -> Fields:
    """What all pieces of one answer share; `kind` is `"chatcmpl"` or `"cmpl"`."""
    return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def _sum_of(usages: Sequence[TextUsage]) -> Fields:
    """Of the texts of one answer: a prompt that several were written to counts once."""
    prompt = max(usage.prompt_tokens for usage in usages)
    written = sum(usage.completion_tokens for usage in usages)
    accepted = sum(usage.accepted for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": max(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(usage.drafted for usage in usages) - accepted,
        },
    }


def timings_of(usages: Sequence[TextUsage], prompt_s: float, predicted_s: float) -> Fields:
    """What an answer took, by llama.cpp's names, which home apps show.

    Args:
        prompt_s, predicted_s: seconds up to the first tokens, and from then on.
    """
    read = max(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    written = sum(usage.completion_tokens for usage in usages)
    return {
        "cache_n": max(usage.cached_tokens for usage in usages),
        **_timed("prompt", read, prompt_s),
        **_timed("predicted", written, predicted_s),
        "draft_n": sum(usage.drafted for usage in usages),
        "draft_n_accepted": sum(usage.accepted for usage in usages),
    }


def _timed(name: str, tokens: int, seconds: float) -> Fields:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / max(tokens, 1),
        f"{name}_per_second": tokens / seconds if seconds > 0 else 0.0,
    }


# --- chats ------------------------------------------------------------------------------------------------------------


class ChatWriter:
    """Of a chat completion."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, call: ChatBody, texts: Sequence[TextRequest]):
        self._shared = _shared_fields(model, "chatcmpl")
        self._choices = [_ChatChoice(index, tokenizer, call, text) for index, text in enumerate(texts)]

    def opening(self) -> list[Fields]:
        """Pieces before the first event."""
        return [self._chunk([choice.piece({"role": "assistant", "content": ""})]) for choice in self._choices]

    def pieces(self, index: int, event: TextEvent) -> list[Fields]:
        """What one event of text `index` adds to a stream."""
        return [self._chunk([piece]) for piece in self._choices[index].pieces(event)]

    def usage(self, usages: Sequence[TextUsage]) -> Fields:
        """The last piece of a stream that counts tokens."""
        return self._chunk([]) | {"usage": _sum_of(usages)}

    def whole(self, usages: Sequence[TextUsage]) -> Fields:
        """The answer in one piece."""
        choices = [choice.whole() for choice in self._choices]
        return {**self._shared, "object": "chat.completion", "choices": choices, "usage": _sum_of(usages)}

    def _chunk(self, choices: list[Fields]) -> Fields:
        return {**self._shared, "object": "chat.completion.chunk", "choices": choices}


class _ChatChoice:
    """One choice, put together from its parts."""

    def __init__(self, index: int, tokenizer: PreTrainedTokenizerBase, call: ChatBody, text: TextRequest):
        self._index, self._one_call = index, not call.parallel_tool_calls
        self._tells_logprobs = call.logprobs
        form = form_of(tokenizer)
        self._parser = AnswerParser(tokenizer, form, text.prompt, call.offered)
        self._new_id = short_id if form.has_short_ids else long_id
        self._tokens = TokenTexts(tokenizer, text.prompt)
        self._content = self._reasoning = ""
        self._calls: list[Fields] = []
        self._logprobs: list[Fields] = []
        self._finish: str | None = None

    def pieces(self, event: TextEvent) -> list[Fields]:
        """What an event adds."""
        parts = self._parser.feed(event.text)
        if event.finish is not None:
            parts += self._parser.finish()
        made = [self.piece(self._add(part)) for part in parts if not (self._one_call and part.call and self._calls)]
        if self._tells_logprobs:
            told = _chat_logprobs(self._tokens, event.logprobs)
            self._logprobs += told
            made = made or [self.piece({"content": ""})]
            made[0]["logprobs"] = {"content": told}
        if event.finish is not None:
            # A text that stops after it called a function stops for that.
            self._finish = "tool_calls" if self._calls and event.finish == "stop" else event.finish
            made.append(self.piece({}))
        return made

    def piece(self, delta: Fields) -> Fields:
        return {"index": self._index, "delta": delta, "finish_reason": self._finish}

    def _add(self, part: AnswerPart) -> Fields:
        """Add a part; returns the streamed delta that stands for it."""
        if part.call is not None:
            call = {
                "id": self._new_id(),
                "type": "function",
                "function": {"name": part.call.name, "arguments": part.call.arguments},
            }
            self._calls.append(call)
            return {"tool_calls": [{"index": len(self._calls) - 1, **call}]}
        if part.reasoning:
            self._reasoning += part.reasoning
            return {"reasoning_content": part.reasoning, "reasoning": part.reasoning}
        self._content += part.content
        return {"content": part.content}

    def whole(self) -> Fields:
        message: Fields = {"role": "assistant", "content": self._content or (None if self._calls else "")}
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = self._reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {"index": self._index, "message": message, "finish_reason": self._finish}
        return choice | ({"logprobs": {"content": self._logprobs}} if self._tells_logprobs else {})


def long_id() -> str:
    """Of a call, as OpenAI's are."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """Of a call to a model whose template takes nine letters and digits and no other."""
    return uuid.uuid4().hex[:9]


def _chat_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> list[Fields]:
    """Of tokens that come next in a text."""
    told = []
    for each in logprobs:
        others = [_token_logprob(texts.of(token), value) for token, value in each.top]
        told.append({**_token_logprob(texts.add(each.token), each.logprob), "top_logprobs": others})
    return told


def _token_logprob(text: str, logprob: float) -> Fields:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    """-inf is no JSON, and OpenAI's own stand-in for it is -9999."""
    return max(logprob, -9999.0)


# --- completions ------------------------------------------------------------------------------------------------------


class CompletionWriter:
    """Of a completion; methods as `ChatWriter`'s."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, texts: Sequence[TextRequest]):
        self._shared = _shared_fields(model, "cmpl") | {"object": "text_completion"}
        self._tokens = [TokenTexts(tokenizer, text.prompt) for text in texts]
        self._choices: list[Fields] = []
        for index, (text, tokens) in enumerate(zip(texts, self._tokens, strict=True)):
            told = None if text.top_logprobs is None else _completion_logprobs(tokens, [])
            self._choices.append({"index": index, "text": "", "finish_reason": None, "logprobs": told})

    def opening(self) -> list[Fields]:
        return []

    def pieces(self, index: int, event: TextEvent) -> list[Fields]:
        choice = self._choices[index]
        new = {"index": index, "text": event.text, "finish_reason": event.finish, "logprobs": None}
        choice["text"] += event.text
        choice["finish_reason"] = event.finish
        if choice["logprobs"] is not None:
            new["logprobs"] = told = _completion_logprobs(self._tokens[index], event.logprobs)
            for name, values in told.items():
                choice["logprobs"][name] += values
        adds = event.text or event.finish is not None or event.logprobs
        return [{**self._shared, "choices": [new], "usage": None}] if adds else []

    def usage(self, usages: Sequence[TextUsage]) -> Fields:
        return {**self._shared, "choices": [], "usage": _sum_of(usages)}

    def whole(self, usages: Sequence[TextUsage]) -> Fields:
        return {**self._shared, "choices": self._choices, "usage": _sum_of(usages)}


def _completion_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> Fields:
    """Of tokens that come next in a text; offsets count from its first character."""
    told: Fields = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in logprobs:
        others: dict[str, float] = {}
        for token, value in each.top:  # the likeliest first; parts of characters have no text and share a name
            others.setdefault(texts.of(token), _finite(value))
        told["top_logprobs"].append(others)
        told["text_offset"].append(texts.length)
        told["tokens"].append(texts.add(each.token))
        told["token_logprobs"].append(_finite(each.logprob))
    return told
