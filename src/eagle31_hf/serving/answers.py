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

from ..texts.answer_forms import AnswerForm, Template, with_types
from ..texts.decoder import IncrementalDecoder
from .bodies import AnyBody, ChatBody, CompletionBody
from .text import Event, Request, TokenLogprob, Usage

Fields = dict[str, Any]

MOST_MARKS = 16
"""Marks of calls inside one another that are looked behind for a sound call."""

ENDS = ("open", "close")

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a thought's field in published templates."""


class AnswerPart(NamedTuple):
    """What a piece of text turned out to be: one of the three. Of a call `"name"` and `"arguments"`, which is JSON."""

    content: str = ""
    reasoning: str = ""
    call: dict[str, str] | None = None


def ends_in_thought(tokenizer: PreTrainedTokenizerBase, form: AnswerForm, prompt: Sequence[int]) -> bool:
    """Whether what is written to a prompt begins inside a thought."""
    tail = str(tokenizer.decode(list(prompt[-16:]))).rstrip()
    return bool(prompt) and tail.endswith(form.think[0].rstrip())


class AnswerParser:
    """See the module's description.

    Args:
        prompt: token ids of the chat that is answered.
        tools: as the template was given them; empty: nothing is taken for a call.
        is_forced: the answer is a call and nothing else; cut off behind its name, it is a call as far as it got.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: AnswerForm,
        prompt: Sequence[int] = (),
        tools: Sequence[Any] = (),
        *,
        is_forced: bool = False,
    ):
        self._tokenizer, self._form, self._is_forced = tokenizer, form, is_forced
        self._tools: list[Any] = [_with_types_known(tool) for tool in tools]
        self._names = {tool["function"]["name"] for tool in tools}
        if form.is_own:
            prefix = str(tokenizer.decode(list(prompt)))
        else:
            prefix = form.think[0] if ends_in_thought(tokenizer, form, prompt) else ""
        template = _parts_as_text(form, has_calls=bool(tools))
        marks = template["fields"].get("tool_calls", {})
        self._open, self._close = (regex.compile(marks.get(f"{end}_pattern", ""), regex.DOTALL) for end in ENDS)
        self._parser = tokenizer.get_response_parser(template, prefix=prefix)
        self._raw = ""  # text behind the last call
        self._held = ""  # an answer that may turn out to be a call in JSON alone
        self._spaces = ""  # at the end of what was said or thought: of nobody if the region ends there
        self._said = False  # content or a call has been given out
        self._trims = bool(prefix)  # white space at the beginning of what comes now is dropped

    def feed(self, text: str) -> list[AnswerPart]:
        """What `text` completes."""
        self._raw += text
        return _not_empty(self._parts(self._parser.feed(text)))

    def finish(self) -> list[AnswerPart]:
        """What is left at the answer's end."""
        return _not_empty([*self._parts(self._parser.finalize()[1]), *self._last()])

    def _last(self) -> Iterator[AnswerPart]:
        if not self._held:
            yield AnswerPart(content=self._spaces)
        elif calls := self._calls_in(_json_or_none(self._held)):
            yield from (AnswerPart(call=call) for call in calls)
        elif self._is_forced and (cut_off := self._cut_off()):
            yield AnswerPart(call=cut_off)
        else:
            yield AnswerPart(content=self._held)

    def _cut_off(self) -> dict[str, str] | None:
        """The call that a grammar forces, as far as it got; `None` before its arguments."""
        if len(self._form.call_marks) > 2:
            return None
        mark = re.escape(self._form.call_marks[0]).replace("arguments", "(?:arguments|parameters)")
        begun = re.search(mark.replace(r"\{\}", r"([^\"\s]+?)", 1), self._held)
        return begun and {"name": begun[1], "arguments": _up_to_its_end(self._held[begun.end() :])}

    def _parts(self, events: Sequence[Fields]) -> Iterator[AnswerPart]:
        for event in events:
            field, kind = event["field"], event["type"]
            if field in THOUGHTS and kind == "region_chunk":
                yield AnswerPart(reasoning=self._trimmed(event["text"]))
            elif field in THOUGHTS:  # one begins or ends
                self._spaces, self._trims = "", True
            elif field in ("content", "plain") and kind == "region_chunk":
                yield from self._say(event["text"])
            elif field == "tool_calls" and kind == "region_close":
                yield from self._close_call(event["value"]["opened"], event["value"]["body"])

    def _trimmed(self, text: str) -> str:
        """Without white space at a region's beginning, and holding back what may be at its end."""
        text = self._spaces + self._begun(text)
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        return kept

    def _begun(self, text: str) -> str:
        """Without white space at a region's beginning."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text

    def _say(self, text: str) -> Iterator[AnswerPart]:
        if self._is_forced or self._held or (self._names and not self._said and text.lstrip()[:1] in ("{", "[")):
            self._held += text
            return
        # Only a call ends content before the text ends.
        said = self._trimmed(text) if self._names else self._begun(text)
        self._said = self._said or bool(said)
        yield AnswerPart(content=said)

    def _close_call(self, opened: str, body: str) -> Iterator[AnswerPart]:
        """What lies between marks: calls, or text that only looks like one, in which a sound call may begin."""
        _, _, rest = self._raw.partition(opened + body)
        closed = self._close.match(rest)
        close = closed[0] if closed else ""
        self._raw = rest[len(close) :]
        for _ in range(MOST_MARKS):
            if calls := self._calls_in(self._read(opened + body + close)) or self._calls_in(_json_or_none(body)):
                self._said, self._trims, self._spaces = True, True, ""
                yield from (AnswerPart(call=call) for call in calls)
                return
            mark = self._open.search(body)
            if mark is None:
                break
            yield from self._say(opened + body[: mark.start()])
            opened, body = mark[0], body[mark.end() :]
        yield from self._say(opened + body + close)

    def _read(self, region: str) -> Any:
        calls = {**self._form.template["fields"]["tool_calls"], "optional": True}
        template = self._form.template | {"fields": {"tool_calls": calls}}
        try:
            found = self._tokenizer.parse_response(region, template, prefix="", tools=self._tools)
        except (ValueError, KeyError, RecursionError):
            return None
        return found.get("tool_calls")

    def _calls_in(self, found: Any) -> list[dict[str, str]]:
        """Calls in one of the shapes models write; none if one of them is no call of the tools."""
        listed = found if isinstance(found, list) else [found]
        flat = [each for entry in listed for each in (entry if isinstance(entry, list) else [entry])]
        calls = [self._call(each) for each in flat]
        return [call for call in calls if call] if all(calls) else []

    def _call(self, found: Any) -> dict[str, str] | None:
        inner = found.get("function") if isinstance(found, dict) else None
        function = inner if isinstance(inner, dict) else found
        if not isinstance(function, dict) or function.get("name") not in self._names:
            return None
        arguments = function.get("arguments", function.get("parameters", {}))
        as_json = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {"name": function["name"], "arguments": as_json}


def _with_types_known(tool: Fields) -> Fields:
    """For the parser, which reads values by the types that stand at the parameters themselves."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": with_types(function.get("parameters") or {})}}


def _parts_as_text(form: AnswerForm, *, has_calls: bool) -> Template:
    """The form's template with all parts as text between their marks, none of which is ever missing or wrong."""
    fields: Fields = {}
    for name, field in form.template["fields"].items():
        if name != "tool_calls":
            marks = {mark: field[mark] for mark in ("open", "close") if mark in field}
            patterns = {mark: _unnamed(field[mark]) for mark in ("open_pattern", "close_pattern") if mark in field}
            fields[name] = {**marks, **patterns, "repeats": True, "content": "text"}
        elif has_calls:
            calls = field if form.around is None else {"open": form.around[0], "close": form.around[1]}
            close = _pattern(calls, "close")
            fields[name] = {
                "open_pattern": f"(?P<opened>{_pattern(calls, 'open')})",
                **({"close_pattern": close} if close else {}),
                "repeats": True,
                "content_args": {"strip": False},
                "transform": {"opened": "{opened}", "body": "{content}"},
            }
    return form.template | {"fields": fields}


def _pattern(field: Template, end: str) -> str:
    """The regular expression of a region's `"open"` or `"close"`, without names; empty where it has none."""
    if f"{end}_pattern" in field:
        return _unnamed(field[f"{end}_pattern"])
    marks = field.get(end, [])
    return "|".join(map(re.escape, [marks] if isinstance(marks, str) else marks))


def _unnamed(pattern: str) -> str:
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _up_to_its_end(text: str) -> str:
    """The JSON value that a text begins with, all of the text if that is not whole."""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text


def _not_empty(parts: Iterator[AnswerPart] | Sequence[AnswerPart]) -> list[AnswerPart]:
    return [part for part in parts if any(part)]


# --- what all answers have --------------------------------------------------------------------------------------------


def timings_of(usages: Sequence[Usage], prompt_s: float, predicted_s: float) -> Fields:
    """What an answer took, by llama.cpp's names, which home apps show.

    Args:
        prompt_s, predicted_s: seconds up to the first tokens, and from then on.
    """
    usage = Usage.of_answer(usages)
    timings: Fields = {"cache_n": usage.cached_tokens, "draft_n": usage.drafted, "draft_n_accepted": usage.accepted}
    read = max(each.prompt_tokens - each.cached_tokens for each in usages)
    for name, tokens, seconds in (("prompt", read, prompt_s), ("predicted", usage.completion_tokens, predicted_s)):
        timings[f"{name}_n"], timings[f"{name}_ms"] = tokens, 1e3 * seconds
        timings[f"{name}_per_token_ms"] = 1e3 * seconds / max(tokens, 1)
        timings[f"{name}_per_second"] = tokens / seconds if seconds > 0 else 0.0
    return timings


def _usage(usages: Sequence[Usage]) -> Fields:
    usage = Usage.of_answer(usages)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.drafted - usage.accepted,
        },
    }


class AnswerWriter:
    """Pieces of one answer, and the whole, which is what those that were kept add up to; id and model are the same."""

    def __init__(self, model: str, choices: Sequence[_ChatChoice | _CompletionChoice]):
        name = f"{choices[0].prefix}-{uuid.uuid4().hex}"
        self._shared = {"id": name, "created": int(time.time()), "model": model}
        self._choices = choices
        self._wholes: list[Fields] = [choice.opening for choice in choices]

    def _piece(self, choices: list[Fields], **more: Any) -> Fields:
        return {**self._shared, "object": self._choices[0].piece_kind, "choices": choices} | more

    def opening(self) -> list[Fields]:
        """Pieces before the first event."""
        return [self._piece([choice.opening]) for choice in self._choices if choice.opening]

    def pieces(self, index: int, event: Event) -> list[Fields]:
        """What one event of text `index` adds to a stream."""
        choice = self._choices[index]
        return [self._piece([piece], **choice.more) for piece in choice.pieces(event)]

    def add(self, pieces: Sequence[Fields]) -> None:
        """Keep pieces for the whole."""
        for choice in (choice for piece in pieces for choice in piece["choices"]):
            self._wholes[choice["index"]] = _added(self._wholes[choice["index"]], choice)

    def usage(self, usages: Sequence[Usage]) -> Fields:
        """The last piece of a stream that counts tokens."""
        return self._piece([], usage=_usage(usages))

    def whole(self, usages: Sequence[Usage]) -> Fields:
        """The answer in one piece."""
        choices = [choice.whole(pieces) for choice, pieces in zip(self._choices, self._wholes, strict=True)]
        return self._piece(choices, object=self._choices[0].kind, usage=_usage(usages))


def _added(one: Any, other: Any) -> Any:
    """Two pieces of a stream as one: texts and lists go on, of all else the later counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {name: _added(one.get(name), value) for name, value in other.items()}
    goes_on = isinstance(one, (str, list)) and type(one) is type(other)
    return one + other if goes_on else other


def writer_of(
    model: str, tokenizer: PreTrainedTokenizerBase, form: AnswerForm, body: AnyBody, texts: Sequence[Request]
) -> AnswerWriter:
    """The writer of the answer to a body, of which these are the texts."""
    if isinstance(body, ChatBody):
        return AnswerWriter(model, [_ChatChoice(n, tokenizer, form, body, text) for n, text in enumerate(texts)])
    return AnswerWriter(model, [_CompletionChoice(n, tokenizer, body, text) for n, text in enumerate(texts)])


# --- chats ------------------------------------------------------------------------------------------------------------


class _ChatChoice:
    """One choice of a chat's answer.

    Attributes:
        prefix: of the answer's id.
        kind, piece_kind: what OpenAI calls such objects.
        more: what stands beside the choice in each piece.
    """

    prefix, kind, piece_kind, more = "chatcmpl", "chat.completion", "chat.completion.chunk", Fields()

    def __init__(
        self, index: int, tokenizer: PreTrainedTokenizerBase, form: AnswerForm, body: ChatBody, text: Request
    ):  # fmt: skip
        self._index, self._body, self._call_id = index, body, form.call_id
        self._parser = AnswerParser(tokenizer, form, text.prompt, body.offered, is_forced=bool(body.forced))
        self._tokens = IncrementalDecoder(tokenizer, prompt=text.prompt, skip_special_tokens=False)
        self._calls_before, self._calls = sum(len(message.tool_calls or ()) for message in body.messages), 0
        self.opening = self._piece({"role": "assistant", "content": ""})

    def _piece(self, delta: Fields, finish: str | None = None) -> Fields:
        return {"index": self._index, "delta": delta, "finish_reason": finish}

    def pieces(self, event: Event) -> list[Fields]:
        """What an event adds."""
        parts = self._parser.feed(event.text)
        if event.finish is not None:
            parts += self._parser.finish()
        made = [self._piece(delta) for part in parts if (delta := self._delta(part))]
        if self._body.logprobs:
            made = made or [self._piece({"content": ""})]
            made[0]["logprobs"] = {"content": _chat_logprobs(self._tokens, event.logprobs)}
        if event.finish is not None:  # a text that stops after it called a function stops for that
            made.append(self._piece({}, "tool_calls" if self._calls and event.finish == "stop" else event.finish))
        return made

    def _delta(self, part: AnswerPart) -> Fields:
        if part.call is None:
            thought = {"reasoning_content": part.reasoning, "reasoning": part.reasoning}
            return thought if part.reasoning else {"content": part.content}
        if self._calls and not self._body.parallel_tool_calls:
            return {}
        number = self._calls_before + self._calls
        name = self._call_id.format(random=uuid.uuid4().hex, name=part.call["name"], number=number)
        call = {"index": self._calls, "id": name, "type": "function", "function": part.call}
        self._calls += 1
        return {"tool_calls": [call]}

    def whole(self, pieces: Fields) -> Fields:
        """The choice that its pieces add up to."""
        message = pieces.pop("delta")
        if "tool_calls" in message:
            message["content"] = message["content"] or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in message["tool_calls"]]
        return pieces | {"message": message}


def _chat_logprobs(texts: IncrementalDecoder, logprobs: Sequence[TokenLogprob]) -> list[Fields]:
    """Of tokens that come next in a text."""
    told = []
    for each in logprobs:
        others = [_token_logprob(texts.peek(token), value) for token, value in each.top]
        told.append({**_token_logprob(texts.feed(each.token), each.logprob), "top_logprobs": others})
    return told


def _token_logprob(text: str, logprob: float) -> Fields:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    """-inf is no JSON, and OpenAI's own stand-in for it is -9999."""
    return max(logprob, -9999.0)


# --- completions ------------------------------------------------------------------------------------------------------


class _CompletionChoice:
    """One choice; methods and attributes as `_ChatChoice`'s."""

    prefix, kind, piece_kind, more = "cmpl", "text_completion", "text_completion", Fields(usage=None)

    def __init__(self, index: int, tokenizer: PreTrainedTokenizerBase, body: CompletionBody, text: Request):
        self._index, self._tokenizer, self._prompt = index, tokenizer, text.prompt
        self._tokens = IncrementalDecoder(tokenizer, prompt=text.prompt, skip_special_tokens=False)
        self._echoed, self._tells_logprobs, self.opening = "", body.logprobs is not None, Fields()
        if body.echo:
            prompt = body.prompts[index // body.n]
            decoded = tokenizer.decode(list(text.prompt), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._echoed = prompt if isinstance(prompt, str) else str(decoded)

    def pieces(self, event: Event) -> list[Fields]:
        echoed, self._echoed = self._echoed, ""
        if not (echoed or event.text or event.finish is not None or event.logprobs):
            return []
        logprobs = self._logprobs(event, echoed) if self._tells_logprobs else None
        text = echoed + event.text
        return [{"index": self._index, "text": text, "finish_reason": event.finish, "logprobs": logprobs}]

    def _logprobs(self, event: Event, echoed: str) -> Fields:
        if event.prompt_logprobs is None:
            return _completion_logprobs(self._tokens, event.logprobs)
        self._tokens.length = len(echoed)
        return _prompt_logprobs(self._tokenizer, self._prompt, event.prompt_logprobs, echoed)

    def whole(self, pieces: Fields) -> Fields:
        return pieces


def _completion_logprobs(texts: IncrementalDecoder, logprobs: Sequence[TokenLogprob]) -> Fields:
    """Of tokens that come next in a text; offsets count from its first character."""
    told: Fields = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in logprobs:
        others: dict[str, float] = {}
        for token, value in each.top:  # the likeliest first; parts of characters have no text and share a name
            others.setdefault(texts.peek(token), _finite(value))
        told["top_logprobs"].append(others)
        told["text_offset"].append(texts.length)
        told["tokens"].append(texts.feed(each.token))
        told["token_logprobs"].append(_finite(each.logprob))
    return told


def _prompt_logprobs(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], echoed: str
) -> Fields:
    """Of a prompt's tokens, of which the first follows nothing; offsets count within the text that is echoed."""
    texts = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    told = _completion_logprobs(texts, [TokenLogprob(prompt[0], 0.0), *logprobs])
    told["token_logprobs"][0] = told["top_logprobs"][0] = None
    whole = "".join(told["tokens"])
    before = len(whole) - len(echoed) if whole.endswith(echoed) else 0  # what the tokenizer begins texts with
    return told | {"text_offset": [max(0, at - before) for at in told["text_offset"]]}
