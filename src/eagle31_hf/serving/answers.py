"""Events of texts as answers in the shape of OpenAI's API: pieces of a stream, or one whole.

A chat's text is taken apart by transformers' response parser: thoughts, what is said, calls. The parser finds where
calls begin and end; each is then read by itself, so that one which is none is content and takes nothing else along. An
answer that is JSON alone calls functions, too, if they are among the tools.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import regex  # transformers' parser matches with it
from transformers import PreTrainedTokenizerBase

from .bodies import ChatBody, CompletionBody
from .forms import AnswerForm, Template, with_types
from .text import Event, Request, TokenLogprob, TokenTexts, Usage

Fields = dict[str, Any]

MOST_MARKS = 16
"""Marks of calls inside one another that are looked behind for a sound call."""


class ToolCall(NamedTuple):
    """A call the model wants made; `arguments` is JSON."""

    name: str
    arguments: str


class AnswerPart(NamedTuple):
    """What a piece of text turned out to be: one of the three."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


def ends_in_thought(tokenizer: PreTrainedTokenizerBase, form: AnswerForm, prompt: Sequence[int]) -> bool:
    """Whether what is written to a prompt begins inside a thought."""
    tail = str(tokenizer.decode(list(prompt[-16:]))).rstrip()
    return bool(prompt) and tail.endswith(form.think[0].rstrip())


class AnswerParser:
    """See the module's description.

    Args:
        prompt: token ids of the chat that is answered.
        tools: as the template was given them; empty: nothing is taken for a call.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: AnswerForm,
        prompt: Sequence[int] = (),
        tools: Sequence[Any] = (),
    ):
        self._tokenizer = tokenizer
        self._tools: list[Any] = [_with_types_known(tool) for tool in tools]
        self._names = {tool["function"]["name"] for tool in tools}
        self._template = _never_missing(form.template if tools else form.without_calls)
        if form.is_own:
            prefix = str(tokenizer.decode(list(prompt)))
        else:
            prefix = form.think[0] if ends_in_thought(tokenizer, form, prompt) else ""
        self._found = _found_only(self._template, form.around)
        close = self._found["fields"].get("tool_calls", {}).get("close_pattern")
        self._close = regex.compile(close, regex.DOTALL) if close else None
        self._parser = tokenizer.get_response_parser(self._found, prefix=prefix)
        self._raw, self._at = "", 0  # all text, and where the last call in it ended
        self._held = ""  # an answer that may turn out to be a call in JSON alone
        self._spaces = ""  # at the end of what was said or thought: of nobody if the region ends there
        self._depth = 0  # of marks within what looked like a call
        self._said = False  # content or a call has been given out
        self._trims = bool(prefix)  # white space at the beginning of what comes now is dropped

    def feed(self, text: str) -> list[AnswerPart]:
        """What `text` completes."""
        self._raw += text
        return _only(self._parts(self._parser.feed(text)))

    def finish(self) -> list[AnswerPart]:
        """What is left at the answer's end."""
        return _only([*self._parts(self._parser.finalize()[1]), *self._last()])

    def _last(self) -> Iterator[AnswerPart]:
        if self._held:
            calls = self._calls_in(_json_or_none(self._held))
            yield from (AnswerPart(call=call) for call in calls) if calls else [AnswerPart(content=self._held)]
        else:
            yield AnswerPart(content=self._spaces)

    def _parts(self, events: Sequence[dict[str, Any]]) -> Iterator[AnswerPart]:
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "region_open" and field in _THOUGHTS:
                self._spaces, self._trims = "", True
            elif kind == "region_chunk" and field in _THOUGHTS:
                yield AnswerPart(reasoning=self._trimmed(event["text"]))
            elif kind == "region_chunk" and field in ("content", "plain"):
                yield from self._say(event["text"])
            elif kind == "region_close" and field == "tool_calls":
                yield from self._close_call(event["value"]["opened"], event["value"]["body"])
            if kind == "region_close" and field in _THOUGHTS:
                self._spaces, self._trims = "", True

    def _trimmed(self, text: str) -> str:
        """Without white space at a region's beginning, and holding back what may be at its end."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        text = self._spaces + text
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        return kept

    def _say(self, text: str) -> Iterator[AnswerPart]:
        if self._held or (self._names and not self._said and text.lstrip()[:1] in ("{", "[")):
            self._held += text
            return
        said = self._trimmed(text)
        self._said = self._said or bool(said)
        yield AnswerPart(content=said)

    def _close_call(self, opened: str, body: str) -> Iterator[AnswerPart]:
        """What lies between marks: calls, or text that only looks like one, in which a sound call may follow."""
        begin = self._raw.index(opened + body, self._at)
        closed = self._close.match(self._raw, begin + len(opened + body)) if self._close else None
        self._at = closed.end() if closed else len(self._raw)
        whole = self._raw[begin : self._at]
        if calls := self._calls_in(self._read(whole)) or self._calls_in(_json_or_none(body)):
            self._said, self._trims, self._spaces = True, True, ""
            yield from (AnswerPart(call=call) for call in calls)
            return
        yield from self._say(opened)
        rest = whole[len(opened) :]
        if self._depth == MOST_MARKS:
            yield from self._say(rest)
            return
        inner = self._tokenizer.get_response_parser(self._found, prefix="")
        outer = self._raw, self._at
        self._depth, self._raw, self._at = self._depth + 1, rest, 0
        yield from self._parts([*inner.feed(rest), *inner.finalize()[1]])
        self._depth, (self._raw, self._at) = self._depth - 1, outer

    def _read(self, region: str) -> Any:
        try:
            found = self._tokenizer.parse_response(region, self._template, prefix="", tools=self._tools)
        except (ValueError, KeyError, RecursionError):
            return None
        return found.get("tool_calls")

    def _calls_in(self, found: Any) -> list[ToolCall]:
        """Calls in one of the shapes models write; none if one of them is no call of the tools."""
        listed = found if isinstance(found, list) else [found]
        flat = [each for entry in listed for each in (entry if isinstance(entry, list) else [entry])]
        calls = [self._call(each) for each in flat]
        return [call for call in calls if call] if all(calls) else []

    def _call(self, found: Any) -> ToolCall | None:
        inner = found.get("function") if isinstance(found, dict) else None
        function = inner if isinstance(inner, dict) else found
        if not isinstance(function, dict) or function.get("name") not in self._names:
            return None
        arguments = function.get("arguments", function.get("parameters", {}))
        as_json = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(function["name"], as_json)


def _with_types_known(tool: dict[str, Any]) -> dict[str, Any]:
    """For the parser, which reads values by the types that stand at the parameters themselves."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": with_types(function.get("parameters") or {})}}


_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a thought's field in published templates."""


def _found_only(template: Template, around: tuple[str, str] | None) -> Template:
    """The template with calls as text between their marks, or those `around` several, which is never refused."""
    fields = dict(template["fields"])
    if (calls := fields.get("tool_calls")) is not None:
        calls = calls if around is None else {"open": around[0], "close": around[1]}
        fields["tool_calls"] = {
            "open_pattern": f"(?P<opened>{_pattern(calls, 'open')})",
            **({"close_pattern": close} if (close := _pattern(calls, "close")) else {}),
            "repeats": True,
            "content": "text",
            "content_args": {"strip": False},
            "transform": {"opened": "{opened}", "body": "{content}"},
        }
    return template | {"fields": fields}


def _pattern(field: Template, end: str) -> str:
    """The regular expression of a region's `"open"` or `"close"`, without names; empty where it has none."""
    if f"{end}_pattern" in field:
        return re.sub(r"\(\?P<\w+>", "(?:", str(field[f"{end}_pattern"]))
    marks = field.get(end, [])
    return "|".join(map(re.escape, [marks] if isinstance(marks, str) else marks))


def _never_missing(template: Template) -> Template:
    """The template for answers that end before they have all parts, and have parts that are not as they should be."""
    marks = ("open", "open_pattern", "close", "close_pattern")
    fields = {
        name: {**field, "optional": True} if name == "tool_calls" else {
            **{mark: re.sub(r"\(\?P<\w+>", "(?:", field[mark]) if "pattern" in mark else field[mark]
               for mark in marks if mark in field}, "repeats": True, "content": "text",
        }
        for name, field in template["fields"].items()
    }  # fmt: skip
    return template | {"fields": fields}


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _only(parts: Iterator[AnswerPart] | Sequence[AnswerPart]) -> list[AnswerPart]:
    return [part for part in parts if part.content or part.reasoning or part.call]


# --- what all answers have --------------------------------------------------------------------------------------------


def _usage(usages: Sequence[Usage]) -> Fields:
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


def timings_of(usages: Sequence[Usage], prompt_s: float, predicted_s: float) -> Fields:
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


class AnswerWriter:
    """Pieces of one answer, and the whole; its id and model are the same in all of them.

    Args:
        kind, kind_of_pieces: what OpenAI calls such objects.
        more: what stands in each piece of a text.
    """

    def __init__(self, model: str, prefix: str, kind: str, kind_of_pieces: str, choices: Sequence[Any], **more: Any):
        self._shared = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._kind, self._kind_of_pieces, self._more = kind, kind_of_pieces, more
        self._choices = choices

    def _piece(self, choices: list[Fields], **more: Any) -> Fields:
        return {**self._shared, "object": self._kind_of_pieces, "choices": choices} | more

    def opening(self) -> list[Fields]:
        """Pieces before the first event."""
        return [self._piece([piece]) for choice in self._choices for piece in choice.opening()]

    def pieces(self, index: int, event: Event) -> list[Fields]:
        """What one event of text `index` adds to a stream."""
        return [self._piece([piece], **self._more) for piece in self._choices[index].pieces(event)]

    def usage(self, usages: Sequence[Usage]) -> Fields:
        """The last piece of a stream that counts tokens."""
        return self._piece([], usage=_usage(usages))

    def whole(self, usages: Sequence[Usage]) -> Fields:
        """The answer in one piece."""
        choices = [choice.whole() for choice in self._choices]
        return self._piece(choices, object=self._kind, usage=_usage(usages))


def chat_writer(
    model: str, tokenizer: PreTrainedTokenizerBase, form: AnswerForm, body: ChatBody, texts: Sequence[Request]
) -> AnswerWriter:
    """Of `/v1/chat/completions`."""
    choices = [_ChatChoice(index, tokenizer, form, body, text) for index, text in enumerate(texts)]
    return AnswerWriter(model, "chatcmpl", "chat.completion", "chat.completion.chunk", choices)


def completion_writer(
    model: str, tokenizer: PreTrainedTokenizerBase, body: CompletionBody, texts: Sequence[Request]
) -> AnswerWriter:
    """Of `/v1/completions`."""
    choices = [_CompletionChoice(index, tokenizer, body, text) for index, text in enumerate(texts)]
    return AnswerWriter(model, "cmpl", "text_completion", "text_completion", choices, usage=None)


# --- chats ------------------------------------------------------------------------------------------------------------


class _ChatChoice:
    """One choice, put together from its parts."""

    def __init__(
        self, index: int, tokenizer: PreTrainedTokenizerBase, form: AnswerForm, body: ChatBody, text: Request
    ):  # fmt: skip
        self._index, self._one_call, self._tells_logprobs = index, not body.parallel_tool_calls, body.logprobs
        self._parser = AnswerParser(tokenizer, form, text.prompt, body.offered)
        self._call_id = form.call_id
        self._calls_before = sum(len(message.tool_calls or ()) for message in body.messages)
        self._tokens = TokenTexts(tokenizer, text.prompt)
        self._content = self._reasoning = ""
        self._calls: list[Fields] = []
        self._logprobs: list[Fields] = []
        self._finish: str | None = None

    def opening(self) -> list[Fields]:
        return [self.piece({"role": "assistant", "content": ""})]

    def pieces(self, event: Event) -> list[Fields]:
        """What an event adds."""
        parts = self._parser.feed(event.text)
        if event.finish is not None:
            parts += self._parser.finish()
        made = [self.piece(self._add(part)) for part in parts if not (self._one_call and part.call and self._calls)]
        if self._tells_logprobs:
            new = _chat_logprobs(self._tokens, event.logprobs)
            self._logprobs += new
            made = made or [self.piece({"content": ""})]
            made[0]["logprobs"] = {"content": new}
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
            number = self._calls_before + len(self._calls)
            name = self._call_id.format(random=uuid.uuid4().hex, name=part.call.name, number=number)
            call = {"id": name, "type": "function", "function": part.call._asdict()}
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


class _CompletionChoice:
    """One choice; methods as `_ChatChoice`'s."""

    def __init__(self, index: int, tokenizer: PreTrainedTokenizerBase, body: CompletionBody, text: Request):
        self._tokenizer, self._prompt = tokenizer, text.prompt
        self._tokens, self._echoed = TokenTexts(tokenizer, text.prompt), ""
        if body.echo:
            prompt = body.prompts[index // body.n]
            decoded = tokenizer.decode(list(text.prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._echoed = prompt if isinstance(prompt, str) else str(decoded)
        told = None if body.logprobs is None else _completion_logprobs(self._tokens, [])
        self._whole: Fields = {"index": index, "text": "", "finish_reason": None, "logprobs": told}

    def opening(self) -> list[Fields]:
        return []

    def pieces(self, event: Event) -> list[Fields]:
        echoed, self._echoed = self._echoed, ""
        whole, text = self._whole, echoed + event.text
        new = {**whole, "text": text, "finish_reason": event.finish}
        whole["text"] += text
        whole["finish_reason"] = event.finish
        if whole["logprobs"] is not None:
            new["logprobs"] = self._logprobs(event, echoed)
            for name, values in new["logprobs"].items():
                whole["logprobs"][name] += values
        return [new] if text or event.finish is not None or event.logprobs else []

    def _logprobs(self, event: Event, echoed: str) -> Fields:
        if event.prompt_logprobs is None:
            return _completion_logprobs(self._tokens, event.logprobs)
        self._tokens.length = len(echoed)
        return _prompt_logprobs(self._tokenizer, self._prompt, event.prompt_logprobs, echoed)

    def whole(self) -> Fields:
        return self._whole


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


def _prompt_logprobs(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], echoed: str
) -> Fields:
    """Of a prompt's tokens, of which the first follows nothing; offsets count within the text that is echoed."""
    texts = TokenTexts(tokenizer, ())
    first = texts.add(prompt[0])
    told = _completion_logprobs(texts, logprobs)
    whole = "".join([first, *told["tokens"]])
    before = len(whole) - len(echoed) if whole.endswith(echoed) else 0  # what the tokenizer begins texts with
    return {
        "tokens": [first, *told["tokens"]],
        "token_logprobs": [None, *told["token_logprobs"]],
        "top_logprobs": [None, *told["top_logprobs"]],
        "text_offset": [max(0, at - before) for at in (0, *told["text_offset"])],
    }
