"""Every field that OpenAI's, vLLM's and llama.cpp's servers take is read, changes no text, or is refused by name."""

from __future__ import annotations

import json

import httpx2
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from eagle31_hf.serving.api_errors import ApiError
from eagle31_hf.serving.calls import CallTranslator
from eagle31_hf.serving.fields import CHANGE_NO_TEXT, OF_CHATS, OF_COMPLETIONS, UNSERVED, check_fields
from eagle31_hf.serving.wire import parse_chat, parse_completion, parse_json
from loopback import MESSAGES, MODEL, QUESTION, TOOL_TEMPLATE, chat, error_of

VLLM = [
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids", "bad_words", "echo", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "documents", "chat_template", "chat_template_kwargs",
    "media_io_kwargs", "mm_processor_kwargs", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag", "priority",
    "request_id", "return_tokens_as_token_ids", "return_token_ids", "return_prompt_text", "include_spec_decode_stats",
    "cache_salt", "kv_transfer_params", "vllm_xargs", "repetition_detection", "thinking_token_budget",
    "include_reasoning", "logits_processors", "prompt_embeds",
]  # fmt: skip

LLAMA_CPP = [
    "n_predict", "n_indent", "n_keep", "n_discard", "n_cmpl", "n_cache_reuse", "cache_prompt", "return_tokens",
    "return_progress", "t_max_predict_ms", "t_max_prompt_ms", "response_fields", "top_n_sigma", "xtc_probability",
    "xtc_threshold", "typical_p", "dynatemp_range", "dynatemp_exponent", "repeat_last_n", "repeat_penalty",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat",
    "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay", "n_probs", "min_keep", "backend_sampling",
    "post_sampling_probs", "speculative.n_min", "speculative.n_max", "speculative.p_min", "lora", "json_schema",
    "grammar", "grammar_lazy", "grammar_triggers", "preserved_tokens", "samplers", "timings_per_token", "id_slot",
    "reasoning_format", "thinking_forced_open", "parse_tool_calls",
]  # fmt: skip

FIELDS = {
    "chat completions": (OF_CHATS, sorted({*ChatParams.__annotations__, *VLLM, *LLAMA_CPP})),
    "completions": (OF_COMPLETIONS, sorted({*CompletionParams.__annotations__, *VLLM, *LLAMA_CPP})),
}


def refusal_of(told, served, path):
    try:
        check_fields(told, served, path)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("path", list(FIELDS))
def test_no_field_of_other_servers_is_passed_over(path):
    served, names = FIELDS[path]
    passed, refused = set(), set()
    for name in names:
        if (error := refusal_of({name: ["asks for something"]}, served, path)) is None:
            passed.add(name)
        else:
            assert (error.status, error.param) == (400, name)
            assert name in str(error)
            refused.add(name)
    assert passed <= set(served) | CHANGE_NO_TEXT
    assert len(refused) > 50


def test_no_field_is_in_two_lists():
    assert not (OF_CHATS & CHANGE_NO_TEXT)
    assert not (set(UNSERVED) & CHANGE_NO_TEXT)
    assert set(UNSERVED) & (OF_CHATS | OF_COMPLETIONS) == {"add_special_tokens"}, "of completions alone"


def test_what_asks_for_nothing_is_let_through():
    """Clients send all that they know, most of it as it is by itself."""
    idle = {name: unserved.neutral[0] for name, unserved in UNSERVED.items() if unserved.neutral}
    check_fields({**idle, "suffix": "", "lora": [], "tools": None, "echo": None}, OF_CHATS, "chat completions")


# --- what is said to be served is read --------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
READ = {
    "messages": [{"role": "user", "content": "Hm?"}], "n": 2, "stop": ["x"], "seed": 3, "max_tokens": 7,
    "max_completion_tokens": 8, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 1,
    "frequency_penalty": 1, "repetition_penalty": 1.5, "logit_bias": {"5": 0.5}, "logprobs": True, "ignore_eos": True,
    "min_tokens": 4, "stop_token_ids": [9], "bad_words": ["rain"], "allowed_token_ids": [5, 6],
    "include_stop_str_in_output": True, "skip_special_tokens": False, "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"}, "guided_regex": "b+", "guided_choice": ["yes", "no"],
    "guided_grammar": 'root ::= "a" | "b"', "tools": [TOOL],
    "response_format": {"type": "json_object"}, "chat_template_kwargs": {"shouts": True}, "reasoning_effort": "low",
}  # fmt: skip
OF_THE_CALL = {"model", "stream", "stream_options", "tool_choice", "top_logprobs", "parallel_tool_calls"}
"""Read by other tests."""
TEMPLATE = TOOL_TEMPLATE + "{% if shouts %}!{% endif %}{{ reasoning_effort }}"


@pytest.fixture
def texts_of(served, monkeypatch):
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TEMPLATE)
    translator = CallTranslator(served.engine)
    return lambda **more: translator.of_chat(parse_chat({"model": MODEL, "messages": MESSAGES, **more}))


def test_all_that_is_said_to_be_read_is_tried():
    assert set(READ) | OF_THE_CALL == OF_CHATS


@pytest.mark.parametrize("name", list(READ))
def test_a_field_that_is_served_reaches_the_text(texts_of, name):
    if name.startswith(("guided", "structured", "response")):
        pytest.importorskip("llguidance")
    assert texts_of(**{name: READ[name]}) != texts_of()


def test_of_completions_they_reach_the_text_too(served):
    translator = CallTranslator(served.engine)

    def texts_of(**more):
        return translator.of_completion(parse_completion({"model": MODEL, "prompt": "A shop", **more}))

    values = {**READ, "prompt": "The weather", "logprobs": 2}
    for name in OF_COMPLETIONS - OF_THE_CALL - {"add_special_tokens"}:
        assert texts_of(**{name: values[name]}) != texts_of(), name
    asked = []

    def tokenize(text, *, add_special_tokens):
        asked.append(add_special_tokens)
        return {"input_ids": [5]}

    translator._tokenizer = tokenize
    texts_of(add_special_tokens=False)
    texts_of()
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"no_such_field": 1}, "no_such_field is no field of chat completions"),
        ({"max_token": 5}, "did you mean max_tokens?"),
        ({"prompt": "x"}, "only of the other call"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens is 9, and 5"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids: a token id is 1000000"),
        ({"guided_json": {"type": "object"}, "guided_regex": "a"}, "guided_json and guided_regex"),
        ({"guided_json": "{"}, "guided_json is no JSON"),
        ({"guided_choice": "yes"}, "wanted a list of texts"),
        ({"guided_regex": "("}, "guided_regex: this regular expression cannot be followed"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar: this grammar cannot be followed"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn is not served"),
        ({"structured_outputs": [1]}, "structured_outputs is a list"),
        ({"stream": True, "stream_options": {"includ_usage": True}}, "stream_options.includ_usage"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "leave one of them out"),
    ],
)
def test_what_is_asked_wrongly_is_named(client, settings, says):
    assert says in error_of(client, 400, extra_body=settings)["message"]


# --- nobody brings a template along -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chat_template": "{{ 6 * 7 }}"}, "'chat_template' is the server's own to set"),
        ({"tools": []}, "'tools' is the server's own"),
        ({"messages": []}, "'messages' is the server's own"),
        ({"tokenize": False}, "'tokenize' is the server's own"),
        ({"padding": "max_length", "max_length": 10**6}, "'padding' is the server's own"),
        ({"tokenizer_kwargs": {"truncation": True}}, "'tokenizer_kwargs' is the server's own"),
        ({"return_tensors": "pt"}, "'return_tensors' is the server's own"),
        ({"enable_thinkin": False}, "does not read 'enable_thinkin'"),
    ],
)
def test_a_clients_template_options_are_variables_that_the_template_reads(texts_of, options, says):
    with pytest.raises(ApiError, match=says) as refused:
        texts_of(chat_template_kwargs=options)
    assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")


def test_an_effort_that_the_template_does_not_read_is_refused(client):
    assert "does not read 'reasoning_effort'" in error_of(client, 400, reasoning_effort="low")["message"]
    assert "chat_template is not served" in error_of(client, 400, extra_body={"chat_template": "x"})["message"]


# --- extremes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        '"temperature": 1e-38', '"temperature": 1e-6', '"temperature": NaN', '"temperature": -1',
        '"repetition_penalty": 1e-40', '"repetition_penalty": 0', '"repetition_penalty": 1e9',
        '"logit_bias": {"5": NaN}', '"logit_bias": {"5": Infinity}', '"logit_bias": {"5": 1e39}',
        '"logit_bias": {"5": -1e999}', '"presence_penalty": NaN', '"frequency_penalty": 1e30', '"min_p": 2',
        '"top_p": 0', f'"top_k": {2**70}', f'"seed": {"9" * 4000}', f'"seed": {2**64}', '"min_tokens": -1',
        '"top_logprobs": 21', '"n": 1e9',
    ],
)  # fmt: skip
def test_extremes_are_refused_at_the_door(setting):
    body = f'{{"model": "x", "messages": [{{"role": "user", "content": "x"}}], "logprobs": true, {setting}}}'
    with pytest.raises(ApiError) as refused:
        parse_chat(parse_json(body.encode()))
    assert refused.value.status == 400


@pytest.mark.parametrize("top", [-1, 21, 10**6])
def test_more_alternatives_than_are_told_are_refused(client, top):
    with pytest.raises(openai.BadRequestError, match="0 to 20"):
        client.completions.create(model=MODEL, prompt="A shop", logprobs=top)


# --- and what they do -------------------------------------------------------------------------------------------------


def test_a_least_length_puts_the_end_off(client, pair):
    usual = chat(client)
    least = usual.usage.completion_tokens + 5
    longer = chat(client, extra_body={"min_tokens": least}, max_tokens=least + 40)
    assert longer.usage.completion_tokens >= least
    assert longer.choices[0].message.content.startswith(usual.choices[0].message.content)


def test_stop_tokens_end_a_text_without_being_told(client, pair):
    whole = pair.answer(QUESTION)
    ids = pair.tokenizer(whole, add_special_tokens=False)["input_ids"]
    told = chat(client, extra_body={"stop_token_ids": [ids[6]]}).choices[0]
    first = ids.index(ids[6])
    assert (told.message.content, told.finish_reason) == (pair.tokenizer.decode(ids[:first]), "stop")
    kept = chat(client, extra_body={"stop_token_ids": [ids[6]], "include_stop_str_in_output": True}).choices[0]
    assert kept.message.content == pair.tokenizer.decode(ids[: first + 1])


def test_words_and_tokens_that_are_not_wanted_are_not_written(client, pair):
    word = next(word for word in pair.answer(QUESTION).split()[1:] if word.isalpha())
    told = chat(client, extra_body={"bad_words": [word]}).choices[0].message.content
    assert word not in told.split()
    ids = pair.tokenizer("a b c", add_special_tokens=False)["input_ids"]
    only = client.completions.create(
        model=MODEL, prompt="A shop", temperature=0, max_tokens=6, extra_body={"allowed_token_ids": ids}, logprobs=0
    )
    assert set(only.choices[0].logprobs.tokens) <= {pair.tokenizer.decode([token]) for token in ids}


@pytest.mark.parametrize(
    ("field", "fits"),
    [
        ({"guided_json": {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"],
          "additionalProperties": False}},
         lambda text: json.loads(text)["x"] == 1),
        ({"guided_json": '{"enum": ["one"]}'}, lambda text: json.loads(text) == "one"),
        ({"guided_regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"guided_choice": ["sunny", "ra\"in\n"]}, lambda text: text in ("sunny", "ra\"in\n")),
        ({"guided_grammar": 'root ::= "ab" | "cd"'}, lambda text: text in ("ab", "cd")),
        ({"structured_outputs": {"grammar": 'start: "ab" | "cd"'}}, lambda text: text in ("ab", "cd")),
        ({"response_format": {"type": "json_object", "schema": {"enum": [{"a": 1}]}}},
         lambda text: json.loads(text) == {"a": 1}),
    ],
)  # fmt: skip
def test_texts_follow_what_other_servers_call_structured(client, field, fits):
    pytest.importorskip("llguidance")
    assert fits(chat(client, extra_body=field).choices[0].message.content)
    if "response_format" not in field:
        told = client.completions.create(model=MODEL, prompt="It is", temperature=0, max_tokens=64, extra_body=field)
        assert fits(told.choices[0].text)


def test_one_of_many_texts_can_be_chosen_and_a_grammar_that_is_too_large_is_an_error(client):
    pytest.importorskip("llguidance")
    texts = [f"w{number}" * 20 for number in range(5000)]
    assert chat(client, extra_body={"guided_choice": texts}, max_tokens=200).choices[0].message.content in texts
    too_large = "start: " + " | ".join(json.dumps(text) for text in texts)
    assert "too large to be followed" in error_of(client, 500, extra_body={"guided_grammar": too_large})["message"]


def test_offsets_of_a_streamed_completion_go_on(client):
    settings = {"model": MODEL, "prompt": "A shop", "temperature": 0, "max_tokens": 12, "logprobs": 0}
    whole = client.completions.create(**settings).choices[0]
    pieces = [piece.choices[0] for piece in client.completions.create(**settings, stream=True) if piece.choices]
    assert len([piece for piece in pieces if piece.logprobs]) > 1
    assert [at for piece in pieces if piece.logprobs for at in piece.logprobs.text_offset] == whole.logprobs.text_offset
    for text, at in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert whole.text[at : at + len(text)] == text


def test_one_call_where_one_was_asked_for(client, served, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", TOOL_TEMPLATE)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    settings = {"tools": [TOOL], "extra_body": {"guided_choice": [call * 2]}}
    assert len(chat(client, **settings).choices[0].message.tool_calls) == 2
    assert len(chat(client, **settings, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    streamed = chat(client, **settings, parallel_tool_calls=False, stream=True)
    assert sum(len(piece.choices[0].delta.tool_calls or []) for piece in streamed) == 1


def test_what_changes_no_text_is_taken(client, served, pair):
    body = {"user": "x", "cache_prompt": True, "speculative.n_max": 5, "store": False, "typical_p": 1.0, "mirostat": 0}
    assert chat(client, extra_body=body).choices[0].message.content == pair.answer(QUESTION)
    told = httpx2.post(
        f"{served.url}/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, "temperature": 0, **body}
    )
    assert told.json()["choices"][0]["message"]["content"] == pair.answer(QUESTION)
