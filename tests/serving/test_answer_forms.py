"""Thoughts, content and calls in each form that chat templates have models write, whole and in pieces."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS

from eagle31_hf.errors import ConfigurationError
from eagle31_hf.sampling.grammar import GrammarCompiler, GrammarProcessor
from eagle31_hf.serving.answers import AnswerParser, writer_of
from eagle31_hf.serving.api import call_grammar
from eagle31_hf.serving.bodies import ChatBody, parse
from eagle31_hf.serving.text import Event, Request, Usage
from eagle31_hf.texts.answer_forms import form_of
from eagle31_hf.texts.decoder import IncrementalDecoder
from helpers import demo_tokenizer
from loopback import MESSAGES

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"},
        "sure": {"type": "boolean"}, "nothing": {"type": "null"}, "inner": {"type": "object"},
        "list": {"type": "array"},
    }}}}
    for name in ("get_weather", "f-2")
]  # fmt: skip


def as_json(call, arguments="arguments"):
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def written(call, *, around="{}", between="\n", pair=None):
    """A writer of calls by patterns: one of a call, of its name and arguments, where these have one of their own
    `pair` by pair, else as JSON; and one around all of them."""

    def inside(arguments):
        if pair is None:
            return json.dumps(arguments)
        return "".join(
            pair.format(k, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for k, v in arguments.items()
        )

    return lambda calls: around.format(between.join(call.format(name, inside(args)) for name, args in calls))


def python(calls):
    def one(call):
        return f"{call[0]}({', '.join(f'{k}={v!r}' for k, v in call[1].items())})"

    return f"<|tool_call_start|>[{', '.join(map(one, calls))}]<|tool_call_end|>"


def kimi(calls):
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for n, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
FORMS: dict[str, tuple[str, Any]] = {
    # what the chat template has, and how calls are written
    "Hermes JSON": ("<tool_call>", lambda calls: "\n".join(f"<tool_call>\n{as_json(c)}\n</tool_call>" for c in calls)),
    "Qwen XML": ("<tool_call>\n<function=x>", written(
        "<tool_call>\n<function={}>\n{}</function>\n</tool_call>", pair="<parameter={}>\n{}\n</parameter>\n")),
    "GLM XML": ("<tool_call>x<arg_key>", written(
        "<tool_call>{}\n{}</tool_call>", pair="<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")),
    "MiniMax XML": ("<minimax:tool_call>", written(
        '<invoke name="{}">\n{}</invoke>', pair='<parameter name="{}">{}</parameter>\n',
        around="<minimax:tool_call>\n{}\n</minimax:tool_call>")),
    "Gemma 4": ("<|tool_call>", written("<|tool_call>call:{}{}<tool_call|>", between="")),
    "LFM2 (Python)": ("<|tool_call_start|>", python),
    "Nemotron JSON": ("<TOOLCALL>", lambda calls: f"<TOOLCALL>[{', '.join(map(as_json, calls))}]</TOOLCALL>"),
    "Mistral": ("[TOOL_CALLS]x[ARGS]", written("[TOOL_CALLS]{}[ARGS]{}", between="")),
    "Mistral JSON": ("[TOOL_CALLS]", lambda calls: f"[TOOL_CALLS] [{', '.join(map(as_json, calls))}]"),
    "Llama 3 JSON": ("<|python_tag|>", lambda calls: "<|python_tag|>" + as_json(calls[0], "parameters")),
    "Kimi K2": ("<|im_system|>tool_declare<|im_middle|>", kimi),
    "DeepSeek R1": ("<｜tool▁call▁begin｜>x<｜tool▁sep｜>y\n```json", written(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>", around=DEEPSEEK)),
    "DeepSeek V3.1": ("<｜tool▁call▁begin｜>", written(
        "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>", around=DEEPSEEK, between="")),
    "JSON alone": ("", lambda calls: f"[{', '.join(map(as_json, calls))}]"),
    "gpt-oss (harmony)": ("<|channel|><|message|>", written(
        "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>", between="<|start|>assistant")),
}  # fmt: skip
AMONG_TEXT = set(FORMS) - {"JSON alone", "gpt-oss (harmony)"}
ONE_CALL = {"Llama 3 JSON"}


def tokenizer_of(name: str) -> Any:
    made = copy.deepcopy(demo_tokenizer())
    made.chat_template = FORMS[name][0]
    return made


def parsed(tokenizer, text, cut=None, prompt=(), tools=TOOLS):
    form = form_of(tokenizer)
    parser = AnswerParser(tokenizer, form, prompt, tools)
    pieces = [text] if cut is None else [text[at : at + cut] for at in range(0, len(text), cut)]
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    content, reasoning = "".join(p.content for p in parts), "".join(p.reasoning for p in parts)
    return content, reasoning, [(p.call["name"], json.loads(p.call["arguments"])) for p in parts if p.call]


PLAIN = st.text(st.sampled_from("ab ,.:é{}[]\"'\\日"), min_size=1, max_size=8).filter(lambda t: t == t.strip())
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": PLAIN,
        "count": st.integers(-99, 99),
        "share": st.sampled_from([0.5, -2.25]),
        "sure": st.booleans(),
        "inner": st.dictionaries(st.sampled_from("xy"), PLAIN, max_size=2).map(lambda d: {"deep": d}),
        "list": st.lists(st.integers(0, 9), max_size=3),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "f-2"]), VALUES), min_size=1, max_size=2)


READ = [name for name in FORMS if name != "LFM2 (Python)" or "python-call-list" in CONTENT_PARSERS]
"""By the transformers that is installed."""


@pytest.mark.parametrize("name", READ)
def test_calls_are_read_whole_and_in_pieces(name):
    tokenizer, write = tokenizer_of(name), FORMS[name][1]
    assert form_of(tokenizer).name == name

    @settings(max_examples=30, deadline=None)
    @given(CALLS, st.integers(1, 5))
    def check(calls, cut):
        calls = calls[:1] if name in ONE_CALL else calls
        for before in ("", "Let me look.") if name in AMONG_TEXT else ("",):
            text = f"{before}\n{write(calls)}" if before else write(calls)
            assert parsed(tokenizer, text) == parsed(tokenizer, text, cut) == (before, "", calls)

    check()


@pytest.mark.parametrize("name", ["Hermes JSON", "Qwen XML", "Nemotron JSON", "Mistral", "gpt-oss (harmony)", "Kimi K2",
                                  "DeepSeek R1", "DeepSeek V3.1"])  # fmt: skip
def test_marks_inside_strings_stay_there(name):
    values = {"text": 'say "<b>", <tool_call and [TOOL_CALLS', "inner": {"x": "</think>"}}
    calls = [("get_weather", values)]
    assert parsed(tokenizer_of(name), FORMS[name][1](calls), 3) == ("", "", calls)


@pytest.mark.parametrize("name", [n for n in FORMS if n != "gpt-oss (harmony)"])
@pytest.mark.parametrize("cut", [1, 3, None])
def test_what_is_no_call_is_content(name, cut):
    tokenizer, write = tokenizer_of(name), FORMS[name][1]
    unknown = write([("unknown", {"text": "x"})])
    for text in (
        unknown,
        "Hello <world> [x] <tool",
        "I say <think> and mean it",
        "{ not JSON",
        "<tool_call>{ no</tool_call>!",
    ):
        content, _, calls = parsed(tokenizer, text, cut)
        assert (content, calls) == (text, [])
    assert parsed(tokenizer, unknown, cut, tools=[]) == (unknown, "", [])


@pytest.mark.parametrize("name", ["Hermes JSON", "Qwen XML", "Llama 3 JSON"])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_white_space_waits_only_where_a_call_may_follow(name, tools):
    parser = AnswerParser(tokenizer_of(name), form_of(tokenizer_of(name)), tools=tools)
    assert parser.feed("One:")
    assert [part.content for part in parser.feed("\n")] == ([] if tools else ["\n"])
    assert "".join(part.content for part in [*parser.feed("two"), *parser.finish()]) == ("\n" if tools else "") + "two"


CALL = [("f-2", {"text": "x"})]
MARKED = FORMS["Hermes JSON"][1](CALL)
HARMONY, LOOKS = "gpt-oss (harmony)", "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"


def thoughts(name):
    call = FORMS[name][1](CALL)
    return [
        (name, "", "<think>Let me see.</think>\n\nYes.", ("Yes.", "Let me see.", [])),
        (name, "", "\n<think>\nHm.</think>Yes. ", ("Yes. ", "Hm.", [])),
        (name, "<think>\n", "So be it.\n</think>\n\nYes.", ("Yes.", "So be it.", [])),
        (name, "<think>\n", "never ends", ("", "never ends", [])),
        (name, "", f"<think>a</think>\n{call}", ("", "a", CALL)),
        (name, "<think>\n", f"Hm.</think>Now:\n{call}\n", ("Now:", "Hm.", CALL)),
    ]


@pytest.mark.parametrize("cut", [1, 3, None])
@pytest.mark.parametrize(
    ("name", "begun", "text", "wanted"),
    [
        # the form, what the prompt has begun, the answer, its parts
        *thoughts("Hermes JSON"),
        *thoughts("Qwen XML"),
        (HARMONY, "", f"{LOOKS}<|channel|>final<|message|>Yes.", ("Yes.", "Let me see.", [])),
        *[
            (HARMONY, "", f'{LOOKS}{to}<|message|>{{"text": "x"}}', ("", "Let me see.", CALL))
            for to in ("<|channel|>commentary to=functions.f-2", " to=functions.f-2<|channel|>commentary json")
        ],
        (HARMONY, "", '{"a": 1}', ('{"a": 1}', "", [])),
        ("LFM2 (Python)", "", f"<|tool_call_start|>[{as_json(CALL[0])}]<|tool_call_end|>Done.", ("Done.", "", CALL)),
        # a mark that is only mentioned takes no call along
        ("Hermes JSON", "", f"I use <tool_call> now. {MARKED} Done.", ("I use <tool_call> now.Done.", "", CALL)),
        ("Hermes JSON", "", f"<tool_call>\n{MARKED} Done.", ("<tool_call>Done.", "", CALL)),
    ],
)  # fmt: skip
def test_an_answer_falls_into_its_parts(name, begun, text, wanted, cut):
    tokenizer = tokenizer_of(name)
    prompt = tokenizer(f"x {begun}", add_special_tokens=False)["input_ids"]
    assert parsed(tokenizer, text, cut, prompt) == wanted


def test_a_tokenizers_own_template_is_taken():
    tokenizer = tokenizer_of("Hermes JSON")
    tokenizer.response_template = {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "((", "close": "))", "optional": False},
            "tool_calls": {"open": "call:", "close_pattern": r";(?P<end>)", "repeats": True, "content": "json",
                           "transform": {"function": "{content}", "end": "{end}"}},
            "content": {"content": "text"},
        },
    }  # fmt: skip
    text = f"((Hm.))So: call:{as_json(('f-2', {}))}; call:nothing; end"
    assert form_of(tokenizer).name == "the tokenizer's own"
    assert parsed(tokenizer, text, 2) == ("So:call:nothing; end", "Hm.", [("f-2", {})])
    assert parsed(tokenizer, "Yes.") == ("Yes.", "", [])


def test_lfm2_lists_tools_in_two_ways():
    tokenizer = tokenizer_of("LFM2 (Python)")
    tokenizer.chat_template = "List of tools: <|tool_list_start|>["
    assert form_of(tokenizer).name == "LFM2 (Python)"


def test_marks_within_marks_end():
    text = "<tool_call>" * 3000
    assert parsed(tokenizer_of("Hermes JSON"), text) == (text, "", [])


@pytest.mark.parametrize(
    ("name", "more", "ids"),
    [
        ("Hermes JSON", {}, "call_[0-9a-f]{24} call_[0-9a-f]{24}"),
        ("Hermes JSON", {"parallel_tool_calls": False}, "call_[0-9a-f]{24}"),
        ("Mistral", {}, "[0-9a-f]{9} [0-9a-f]{9}"),
        ("Kimi K2", {}, r"functions\.get_weather:1 functions\.f-2:2"),
    ],
)
def test_calls_are_named_as_the_template_wants_them_back(name, more, ids):
    called = {"id": "x", "type": "function", "function": {"name": "f-2", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "x", "content": "Sunny."},
    ]
    tokenizer, body = tokenizer_of(name), parse(ChatBody, {"messages": messages, "tools": TOOLS, **more})
    writer = writer_of("demo", tokenizer, form_of(tokenizer), body, [Request((5,), 9)])
    pieces = writer.pieces(0, Event(FORMS[name][1]([("get_weather", {}), ("f-2", {})]), (5,), finish="stop"))
    writer.add(pieces)
    (choice,) = writer.whole([Usage(1)])["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    calls = choice["message"]["tool_calls"]
    assert re.fullmatch(ids, " ".join(call["id"] for call in calls))
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", ())] == [*range(len(calls))]
    assert deltas[0]["tool_calls"][0]["id"] == calls[0]["id"]


@pytest.mark.parametrize("name", ["Mistral", "Kimi K2", "DeepSeek V3.1"])
def test_special_tokens_that_are_marks_are_shown(name):
    tokenizer, text = tokenizer_of(name), FORMS[name][1]([("f-2", {})])
    special = set(re.findall(r"<.*?>|\[[A-Z_]+\]", text))
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(special | {"<|other|>"})})
    marks = form_of(tokenizer).marks
    assert set(tokenizer.convert_ids_to_tokens(sorted(marks))) == special
    ids = tokenizer(f"a {text}<|other|> b", add_special_tokens=False)["input_ids"]
    decoder = IncrementalDecoder(tokenizer, marks=marks)
    shown = "".join(decoder.feed(token) for token in [*ids, tokenizer.eos_token_id])
    assert text in shown
    assert "<|other|>" not in shown
    assert tokenizer.eos_token not in shown


def assert_forced(tokenizer, tools, text):
    """A call that has to be made may be written like this."""
    grammar = call_grammar(form_of(tokenizer), tools, tokenizer)
    compiled = GrammarCompiler(tokenizer, len(tokenizer), frozenset([2])).compile("grammar", grammar)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        assert compiled.matcher.consume_token(token), tokenizer.decode([token])
    assert compiled.matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("choice", ["<tool_call>"], "<tool_call>"),
        ("choice", ["a <tool_call> b"], "a <tool_call> b"),
        ("regex", "<tool_call>/x", "<tool_call>/x"),
        ("json", {"const": "<tool_call>"}, '"<tool_call>"'),
        ("grammar", 'start: "<tool_call>"', "<tool_call>"),
    ],
)
def test_the_text_of_an_added_token_can_be_asked_for(kind, value, text):
    pytest.importorskip("llguidance")
    tokenizer = tokenizer_of("Hermes JSON")
    tokenizer.add_tokens(["<tool_call>"])
    end = tokenizer.eos_token_id
    grammar = GrammarCompiler(tokenizer, len(tokenizer), frozenset([end])).compile(kind, value)
    allows, written, allowed = GrammarProcessor(grammar, 0), torch.zeros(1, 0, dtype=torch.long), torch.tensor([0])
    while end not in allowed:
        allowed = allows(written, torch.zeros(1, len(tokenizer))).isfinite().nonzero()[:, 1]
        assert len(allowed), tokenizer.decode(written[0])
        written = torch.cat([written, allowed[None, -1:]], 1)
    assert tokenizer.decode(written[0, :-1]) == text


@pytest.mark.parametrize("has_tokens", [False, True], ids=["text", "added tokens"])
@pytest.mark.parametrize("name", list(FORMS))
def test_forced_calls_are_read_back(name, has_tokens):
    pytest.importorskip("llguidance")
    tokenizer = tokenizer_of(name)
    calls = [("get_weather", {"text": "a b", "count": 3, "sure": True, "inner": {"x": [1]}})]
    text = FORMS[name][1](calls)
    if name in ("JSON alone", "Llama 3 JSON"):  # Llama's mark is for tools of its own
        text = as_json(calls[0])
    if name == "LFM2 (Python)":
        text = f"<|tool_call_start|>[{as_json(calls[0])}]<|tool_call_end|>"
    if has_tokens:  # as published tokenizers have them
        tokenizer.add_tokens(re.findall(r"<(?!param|invoke|func).*?>|\[[A-Z_]+\]", text))
    assert_forced(tokenizer, TOOLS, text)
    assert parsed(tokenizer, text) == ("", "", calls)


@pytest.mark.parametrize("name", ["Mistral", "MiniMax XML", "Hermes JSON"])
@pytest.mark.parametrize("function", ["files/read all", 'say "x"'])
def test_functions_that_a_form_cannot_name_are_called_in_json_alone(name, function):
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": function}}]
    tokenizer, call = tokenizer_of(name), (function, {"x": 1})
    assert_forced(tokenizer, tools, as_json(call))
    assert parsed(tokenizer, as_json(call), tools=tools) == ("", "", [call])


@pytest.mark.parametrize("parameters", [{"properties": None}, {"properties": {}, "required": "x"}])
def test_parameters_that_are_no_schema_are_refused_in_each_form(parameters):
    pytest.importorskip("llguidance")
    for name in ("Qwen XML", "Hermes JSON"):
        tokenizer = tokenizer_of(name)
        with pytest.raises(ConfigurationError, match=r"must be an object|Expected array"):
            assert_forced(tokenizer, [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "")


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("Hermes JSON", '<tool_call>\n{"name": "f-2", "arguments": {"text": "a lo', '{"text": "a lo'),
        ("Hermes JSON", '<tool_call>\n{"name": "f-2", "arguments": {"text": "a"}}\n</tool', '{"text": "a"}'),
        ("JSON alone", '{"name": "f-2", "arguments": ', ""),
        ("Llama 3 JSON", '{"name": "f-2", "parameters": {"count": 1}', '{"count": 1}'),
        ("Mistral", '[TOOL_CALLS]f-2[ARGS]{"text": "a lo', '{"text": "a lo'),
        ("Mistral JSON", '[TOOL_CALLS] [{"name": "f-2", "arguments": {"count": 1}}', '{"count": 1}'),
        ("DeepSeek V3.1", FORMS["DeepSeek V3.1"][1]([("f-2", {"count": 1})])[:-30], '{"count": 1}'),
        ("gpt-oss (harmony)", FORMS["gpt-oss (harmony)"][1]([("f-2", {"count": 1})])[:-11], '{"count":'),
        ("Hermes JSON", '<tool_call>\n{"name": "f', None),
        ("Qwen XML", "<tool_call>\n<function=f", None),
    ],
)
def test_a_forced_call_that_is_cut_off_is_one_as_far_as_it_got(name, text, arguments):
    """As OpenAI has it; before its name it is content."""
    asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    tokenizer, body = tokenizer_of(name), parse(ChatBody, asked)
    writer = writer_of("demo", tokenizer, form_of(tokenizer), body, [Request((5,), 9)])
    writer.add(writer.pieces(0, Event(text, (5,), finish="length")))
    (choice,) = writer.whole([Usage(1)])["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    wanted = [{"name": "f-2", "arguments": arguments}] if arguments is not None else []
    assert (calls, choice["message"]["content"] or "") == (wanted, "" if wanted else text)
    assert choice["finish_reason"] == "length"


TYPED_ELSEWHERE = {
    "type": "object",
    "$defs": {
        "Place": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "Unit": {"$ref": "#/$defs/Letter"},
        "Letter": {"enum": ["c", "f"], "type": "string"},
        "Circle": {"$ref": "#/$defs/Circle"},
    },
    "properties": {
        "place": {"$ref": "#/$defs/Place"},
        "unit": {"$ref": "#/$defs/Unit", "default": "c"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list_of": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "integer"}]},
        "either": {"type": ["string", "integer"]},
        "count": {"enum": [2, 3]},
        "sure": {"const": True},
        "mixed": {"enum": ["a", None]},
        "round": {"$ref": "#/$defs/Circle"},
    },
    "required": ["place"],
}
"""As pydantic writes types (definitions, unions), and as others leave them to the values."""


@pytest.mark.parametrize("name", ["Qwen XML", "GLM XML", "Hermes JSON"])
@pytest.mark.parametrize(
    "values",
    [
        {"place": {"city": "Bonn"}, "unit": "f", "maybe": "so", "list_of": {"city": "Ulm"}, "either": "x", "count": 2,
         "sure": True, "mixed": "a"},
        {"place": {"city": "Bonn"}, "maybe": None, "list_of": 5, "either": 7, "count": 3, "mixed": None},
    ],
)  # fmt: skip
def test_values_are_read_and_forced_by_types_that_stand_elsewhere(name, values):
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": TYPED_ELSEWHERE}}]
    tokenizer, calls = tokenizer_of(name), [("get_weather", values)]
    text = FORMS[name][1](calls)
    assert parsed(tokenizer, text, 3, tools=tools) == ("", "", calls)
    assert_forced(tokenizer, tools, text)
