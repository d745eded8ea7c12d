"""An answer's text as it comes, taken apart: what was thought, what is said, which functions are called.

<think> ... </think>                              reasoning; also where the prompt itself ends with <think>
<tool_call> {"name", "arguments"} </tool_call>    a call, as Qwen, Hermes and their kin write it
{"name", "parameters" or "arguments"}             a call, if tools were given and the answer is that object alone,
                                                  or a list of them (Llama 3, Mistral)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .grammar import with_white_space
from .text import StopScanner, begun_at_end

OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"


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


def ends_in_thought(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> bool:
    """Whether what is written to a prompt begins inside a thought."""
    return str(tokenizer.decode(list(prompt[-8:]))).rstrip().endswith(OPEN_THOUGHT)


class AnswerParser:
    """See the module's description.

    Args:
        thinks: the prompt ends inside a thought.
        tools: names that may be called; empty: nothing is taken for a call.
    """

    def __init__(self, *, thinks: bool = False, tools: Sequence[str] = ()):
        self._tools = frozenset(tools)
        self._thinks = thinks
        self._may_think = not thinks  # a thought comes first, or not at all
        self._scanner = StopScanner([CLOSE_THOUGHT])
        self._held = ""
        self._said = False  # content or a call has been given out
        self._trims = thinks  # white space at the beginning of what comes now belongs to nobody

    def feed(self, text: str) -> list[AnswerPart]:
        """What `text` completes."""
        if self._thinks:
            return self._feed_thought(text)
        self._held += text
        return self._take(at_end=False)

    def finish(self) -> list[AnswerPart]:
        """What is left at the answer's end."""
        if self._thinks:
            return _only(AnswerPart(reasoning=self._scanner.flush()))
        return self._take(at_end=True)

    def _feed_thought(self, text: str) -> list[AnswerPart]:
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        before = self._scanner.pending + text
        parts = _only(AnswerPart(reasoning=self._scanner.feed(text)))
        if self._scanner.found:
            self._thinks, self._trims = False, True
            parts += self.feed(before.split(CLOSE_THOUGHT, 1)[1])
        return parts

    def _take(self, *, at_end: bool) -> list[AnswerPart]:
        if self._trims:
            self._held = self._held.lstrip()
            self._trims = not self._held
        if self._may_think:
            started = self._held.lstrip()
            if started.startswith(OPEN_THOUGHT):
                self._may_think, self._thinks, self._trims, self._held = False, True, True, ""
                return self._feed_thought(started[len(OPEN_THOUGHT) :])
            if not at_end and OPEN_THOUGHT.startswith(started):
                return []
            self._may_think = False
        return self._take_calls(at_end=at_end) if self._tools else self._say(len(self._held))

    def _take_calls(self, *, at_end: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while OPEN_CALL in self._held:
            before, _, rest = self._held.partition(OPEN_CALL)
            if CLOSE_CALL not in rest and not at_end:
                return parts + self._say(len(before.rstrip()))
            inside, _, after = rest.partition(CLOSE_CALL)
            calls = self._calls_in(inside)
            if not calls:  # the mark is mentioned only; a sound call may follow
                parts += self._say(len(before) + len(OPEN_CALL))
                continue
            parts += _only(AnswerPart(content=before.rstrip()))
            parts += [AnswerPart(call=call) for call in calls]
            self._held = after.lstrip()
            self._said, self._trims = True, not self._held
        return parts + self._take_rest(at_end=at_end)

    def _take_rest(self, *, at_end: bool) -> list[AnswerPart]:
        """What is not inside marks: content, or a call that is all of the answer."""
        if not self._said and self._held.lstrip()[:1] in ("{", "["):
            if not at_end:
                return []
            if calls := self._calls_in(self._held):
                self._held = ""
                return [AnswerPart(call=call) for call in calls]
        if at_end:
            return self._say(len(self._held))
        surely = self._held[: len(self._held) - begun_at_end(self._held, OPEN_CALL)]
        return self._say(len(surely.rstrip()))  # white space before a call is not said

    def _say(self, length: int) -> list[AnswerPart]:
        """Give out the first `length` characters as content."""
        text, self._held = self._held[:length], self._held[length:]
        self._said = self._said or bool(text.strip())
        return _only(AnswerPart(content=text))

    def _calls_in(self, text: str) -> list[ToolCall]:
        try:
            told = json.loads(text)
        except ValueError:
            return []
        calls = [self._call(each) for each in (told if isinstance(told, list) else [told])]
        return [call for call in calls if call] if all(calls) else []

    def _call(self, told: Any) -> ToolCall | None:
        if not isinstance(told, dict) or told.get("name") not in self._tools:
            return None
        arguments = told.get("arguments", told.get("parameters", {}))
        as_json = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolCall(told["name"], as_json)


def _only(part: AnswerPart) -> list[AnswerPart]:
    return [part] if part.content or part.reasoning or part.call else []


def call_grammar(tools: Sequence[dict[str, Any]], template: str) -> str:
    """A Lark grammar of texts that call one of the tools, written as the chat template writes calls.

    The parameters of each are a schema of their own, so that its references point into it.
    """
    arguments = "parameters" if OPEN_CALL not in template and '"parameters":' in template else "arguments"
    rules, names = [], []
    for number, tool in enumerate(each["function"] for each in tools):
        begin = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "{arguments}": ')
        schema = json.dumps(with_white_space(tool.get("parameters") or {"type": "object"}))
        rules.append(f'call{number}: {begin} arguments{number} "}}"\narguments{number}: %json {schema}')
        names.append(f"call{number}")
    call = " | ".join(names)
    marked = f'"{OPEN_CALL}\\n" call "\\n{CLOSE_CALL}"' if OPEN_CALL in template else "call"
    return "\n".join([f"start: {marked}", f"call: {call}", *rules])
