"""How chat templates have models write thoughts and calls: a template of transformers' response parser for each form.

A tokenizer may bring its own (`response_template`); for others the form is recognised by marks in the chat template.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

Template = dict[str, Any]

ANCHOR = "\x00"
"""`start_anchor` of our templates, in no text: of a prompt the parser is shown only what its answer begins with."""


@dataclass(frozen=True)
class AnswerForm:
    """How one target writes its answers.

    Attributes:
        name: to say which was recognised.
        template: of `tokenizer.get_response_parser`.
        is_own: whether it is the tokenizer's, and so wants to see the whole prompt.
        think: marks around a thought.
        around: marks around several calls, where each has others of its own.
        marks: special tokens that the parser has to see.
        call_marks: what stands before and behind the arguments of a call that is forced, `{}` for the function's name;
            of forms with a mark for each parameter what stands before the call, before and behind a parameter's value,
            `{}` for its name, and behind the call.
        call_id: how calls are named, of `{random}` letters and digits, the function's `{name}`, and a `{number}` that
            counts the calls of the chat. Templates show names to the model: Mistral's refuse any but nine characters.
    """

    name: str
    template: Template
    is_own: bool = False
    think: tuple[str, str] = ("<think>", "</think>")
    around: tuple[str, str] | None = None
    marks: frozenset[int] = frozenset()
    call_marks: tuple[str, ...] = ('{"name": "{}", "arguments": ', "}")
    call_id: str = "call_{random:.24}"


def form_of(tokenizer: PreTrainedTokenizerBase) -> AnswerForm:
    """The form of a tokenizer's chat template."""
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, dict):
        form = AnswerForm("the tokenizer's own", own, is_own=True)
    else:
        text = str(tokenizer.chat_template or "")
        form = next((form for marks, form in _FORMS if all(mark in text for mark in marks)), _BARE)
    patterns = json.dumps([form.template, form.around], ensure_ascii=False).replace("\\", "")
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    special = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    marks = frozenset(i for i, text in special.items() if text in patterns and i not in ends)
    return replace(form, marks=marks)


def _call(**arguments: Any) -> Template:
    """A field of calls whose parts the parser finds by itself."""
    function = {"name": "{name}", "arguments": "{content}"}
    return {"repeats": True, "transform": {"type": "function", "function": function}, **arguments}


def _json(**arguments: Any) -> Template:
    """A field of calls that are JSON as a whole."""
    return {"repeats": True, "content": "json"} | arguments


def _around_json(before: str, behind: str) -> tuple[str, str]:
    """`call_marks` of such calls."""
    return before + '{"name": "{}", "arguments": ', "}" + behind


def _form(
    name: str, calls: Template | None, think: tuple[str, str] = ("<think>", "</think>"), **more: Any
) -> AnswerForm:
    thought = {"open_pattern": rf"\A\s*{re.escape(think[0])}", "close": think[1]}
    fields: Template = {"reasoning_content": thought, "content": {"content": "text"}}
    template = _template(fields | ({"tool_calls": calls} if calls else {}))
    return AnswerForm(name, template, think=think, **more)


def _template(fields: Template) -> Template:
    return {"start_anchor": ANCHOR, "fields": fields}


_MISTRAL: dict[str, Any] = {"think": ("[THINK]", "[/THINK]"), "call_id": "{random:.9}"}
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_HARMONY_START = r"(?:<\|start\|>assistant)?"
_BARE = _form("JSON alone", None)
_LFM = _form(
    "LFM2 (Python)", _json(open="<|tool_call_start|>", close="<|tool_call_end|>", content="python-call-list"),
    call_marks=_around_json("<|tool_call_start|>[", "]<|tool_call_end|>"),
)  # fmt: skip
_FORMS: tuple[tuple[tuple[str, ...], AnswerForm], ...] = (
    # marks in the chat template, the form; the first whose marks are all there
    (("<|channel|>", "<|message|>"), AnswerForm("gpt-oss (harmony)", _template({
        "reasoning_content": {
            "open_pattern": rf"{_HARMONY_START}<\|channel\|>analysis<\|message\|>", "close": "<|end|>",
        },
        "tool_calls": _call(
            open_pattern=rf"{_HARMONY_START}(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]+)(?:<\|channel\|>\w+)?"
            r"\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>",
            close_pattern=r"<\|call\|>|<\|end\|>", content="json",
        ),
        "content": {
            "open_pattern":
                rf"{_HARMONY_START}<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>",
            "close_pattern": r"<\|end\|>|<\|return\|>",
        },
        "plain": {"content": "text"},
    }), think=("<|channel|>analysis<|message|>", "<|end|>"), call_marks=(
        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", "<|call|>",
    ))),
    (("<minimax:tool_call>",), _form("MiniMax XML", _call(
        open_pattern=r"<invoke name=\"(?P<name>[^\"\n]+)\">", close="</invoke>", content="xml-inline",
        content_args={"tag_pattern": r"<parameter name=\"(?P<key>[^\"\n]+)\">\n?(?P<value>.*?)\n?</parameter>"},
    ), around=("<minimax:tool_call>", "</minimax:tool_call>"), call_marks=(
        '<minimax:tool_call>\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ))),
    (("<arg_key>",), _form("GLM XML", _call(
        open_pattern=r"<tool_call>\s*(?P<name>[^<\s]+)\s*", close="</tool_call>", content="xml-inline",
        content_args={"tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
    ), call_marks=("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"))),
    (("<tool_call>", "<function="), _form("Qwen XML", _call(
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>", close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline", content_args={"tag_pattern":
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))"},
    ), call_marks=(
        "<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>",
    ))),
    (("<|tool_call>",), _form("Gemma 4", _call(
        open_pattern=r"<\|tool_call>call:(?P<name>[\w.-]+)", close="<tool_call|>", content="json",
        content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
    ), ("<|channel>thought\n", "<channel|>"), call_marks=("<|tool_call>call:{}", "<tool_call|>"))),
    (("<|tool_call_start|>",), _LFM),
    (("<|tool_list_start|>",), _LFM),
    (("<TOOLCALL>",), _form(
        "Nemotron JSON", _json(open="<TOOLCALL>", close="</TOOLCALL>"),
        call_marks=_around_json("<TOOLCALL>[", "]</TOOLCALL>"),
    )),
    (("[TOOL_CALLS]", "[ARGS]"), _form("Mistral", _call(
        open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
        close_pattern=r"(?=\[TOOL_CALLS\])", content="json",
    ), call_marks=("[TOOL_CALLS]{}[ARGS]", ""), **_MISTRAL)),
    (("[TOOL_CALLS]",), _form(
        "Mistral JSON", _json(open="[TOOL_CALLS]"), call_marks=_around_json("[TOOL_CALLS] [", "]"), **_MISTRAL,
    )),
    (("tool_declare<|im_middle|>",), _form("Kimi K2", _call(
        open_pattern=r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>",
        close="<|tool_call_end|>", content="json",
    ), around=_KIMI, call_id="functions.{name}:{number}", call_marks=(
        f"{_KIMI[0]}<|tool_call_begin|>functions.{{}}:0<|tool_call_argument_begin|>", f"<|tool_call_end|>{_KIMI[1]}",
    ))),
    (("<｜tool▁call▁begin｜>", "```json"), _form("DeepSeek R1", _call(
        open_pattern=r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[\w.-]+)\s*```json\n",
        close_pattern=r"\n```\s*<｜tool▁call▁end｜>", content="json",
    ), around=_DEEPSEEK, call_marks=(
        f"{_DEEPSEEK[0]}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{}}\n```json\n",
        f"\n```<｜tool▁call▁end｜>{_DEEPSEEK[1]}",
    ))),
    (("<｜tool▁call▁begin｜>",), _form("DeepSeek V3.1", _call(
        open_pattern=r"<｜tool▁call▁begin｜>(?P<name>[\w.-]+)<｜tool▁sep｜>",
        close="<｜tool▁call▁end｜>", content="json",
    ), around=_DEEPSEEK, call_marks=(
        f"{_DEEPSEEK[0]}<｜tool▁call▁begin｜>{{}}<｜tool▁sep｜>", f"<｜tool▁call▁end｜>{_DEEPSEEK[1]}",
    ))),
    (("<|python_tag|>",), _form("Llama 3 JSON", _json(open="<|python_tag|>", close="<|eom_id|>"))),
    (("<tool_call>",), _form(
        "Hermes JSON", _json(open="<tool_call>", close="</tool_call>"),
        call_marks=_around_json("<tool_call>\n", "\n</tool_call>"),
    )),
)  # fmt: skip


# --- types of parameters ----------------------------------------------------------------------------------------------

UNIONS = ("anyOf", "oneOf")
MOST_REFERENCES = 8
"""Followed from one schema to the next; some lead in a circle."""

TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object",
              list: "array"}  # fmt: skip


def with_types(parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters with a type at each that has one: calls in XML are read, and written, by these.

    Pydantic leaves it to a definition, `{"$ref": "#/$defs/Place"}`; others leave it to the values, `{"enum": [1, 2]}`.
    """
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return parameters
    return {**parameters, "properties": {name: _typed(schema, parameters) for name, schema in properties.items()}}


def _typed(schema: Any, root: dict[str, Any]) -> Any:
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        others = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**_referred(schema["$ref"], root), **others}
    if not isinstance(schema, dict) or "type" in schema:
        return schema
    if options := options_of(schema):
        return {**schema, "type": sorted({TYPE_NAMES[type(option)] for option in options})}
    return {name: [_typed(each, root) for each in value] if name in UNIONS and isinstance(value, list) else value
            for name, value in schema.items()}  # fmt: skip


def options_of(schema: dict[str, Any]) -> list[Any]:
    options = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return options if isinstance(options, list) else []


def _referred(reference: str, root: dict[str, Any]) -> dict[str, Any]:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}
