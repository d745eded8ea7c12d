"""An answer's text as it comes, taken apart by transformers' response parser: thoughts, what is said, calls.

The parser finds where calls begin and end; each is then read by itself, so that one which is none is content and takes
nothing else along. An answer that is JSON alone calls functions, too, if they are among the tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import regex  # transformers' parser matches with it
from transformers import PreTrainedTokenizerBase

from .answer_forms import AnswerForm, Template

MOST_MARKS = 16
"""Marks of calls inside one another that are looked behind for a sound call."""


@dataclass(frozen=True)
class ToolCall:
    """A call the model wants made; `arguments` is JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class AnswerPart:
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
        self._tokenizer, self._tools = tokenizer, [*tools]
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
