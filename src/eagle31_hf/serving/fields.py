"""Fields of request bodies: which are served, which change no text here, and why the others are refused.

A field that other servers take and this one does not would change nothing and tell nobody. So every field of a body is
either read, or known to change no text, or refused with its name; a misspelt one, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .api_errors import ApiError

OF_ANY_CALL = frozenset({
    "model", "stream", "stream_options", "n", "stop", "seed", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "ignore_eos",
    "min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
})  # fmt: skip
OF_CHATS = OF_ANY_CALL | frozenset({
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_completion_tokens",
    "top_logprobs", "chat_template_kwargs", "reasoning_effort",
})  # fmt: skip
OF_COMPLETIONS = OF_ANY_CALL | {"prompt", "add_special_tokens"}

CHANGE_NO_TEXT = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "request_id", "cache_prompt", "id_slot", "n_cache_reuse", "backend_sampling",
    "speculative.n_max", "speculative.n_min", "speculative.p_min", "dynatemp_exponent", "xtc_threshold", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat_tau", "mirostat_eta",
    "adaptive_decay", "guided_decoding_backend",
})  # fmt: skip
"""Who asks, how prompts are kept, how much is drafted; and the numbers of samplers whose switch is refused below."""


@dataclass(frozen=True)
class Unserved:
    """A field that is refused.

    Attributes:
        advice: why, or what to pass instead.
        neutral: values that ask for nothing and are let through; `None`, `""`, `[]` and `{}` always are.
    """

    advice: str
    neutral: tuple[Any, ...] = ()


_OTHER_SAMPLER = "this sampler is none of transformers' that are served; temperature, top_p, top_k and min_p are"
_OWN_TEMPLATE = "chats are rendered by the server's own template"
_ONLY_TEXT = "only text is served"
_NOT_TOLD = "this is not told"
_ADAPTERS = "the server has the adapters it was started with (--adapter)"
_SCHEMA = "pass response_format or structured_outputs instead"

UNSERVED: dict[str, Unserved] = {
    # OpenAI's
    "functions": Unserved("pass tools instead"),
    "function_call": Unserved("pass tool_choice instead"),
    "audio": Unserved(_ONLY_TEXT),
    "modalities": Unserved(_ONLY_TEXT, (["text"],)),
    "moderation": Unserved("nothing is moderated here"),
    "store": Unserved("nothing is stored here", (False,)),
    "verbosity": Unserved("say in a message how long an answer should be"),
    "web_search_options": Unserved("nothing is searched here; give the model a tool"),
    "suffix": Unserved("only texts that go on are written"),
    "echo": Unserved("the prompt is not repeated", (False,)),
    "best_of": Unserved("ask for n and choose", (1,)),
    # vLLM's and SGLang's
    "use_beam_search": Unserved("texts are drawn or greedy", (False,)),
    "length_penalty": Unserved("it belongs to beam search", (1, 1.0)),
    "prompt_logprobs": Unserved("log-probabilities are told of what is written (logprobs), not of prompts"),
    "truncate_prompt_tokens": Unserved("cut the prompt before you send it"),
    "truncation_side": Unserved("cut the prompt before you send it"),
    "spaces_between_special_tokens": Unserved("special tokens are written as they are", (True,)),
    "add_generation_prompt": Unserved("an answer is always begun", (True,)),
    "continue_final_message": Unserved("an answer is always begun; complete a text with /v1/completions", (False,)),
    "add_special_tokens": Unserved("a chat's special tokens are its template's", (False,)),
    "documents": Unserved("put documents into a message"),
    "chat_template": Unserved(f"{_OWN_TEMPLATE} (--chat-template)"),
    "mm_processor_kwargs": Unserved(_ONLY_TEXT),
    "media_io_kwargs": Unserved(_ONLY_TEXT),
    "prompt_embeds": Unserved("pass a text or token ids"),
    "structural_tag": Unserved(_SCHEMA),
    "guided_whitespace_pattern": Unserved("white space between the parts of JSON is up to twelve characters"),
    "regex": Unserved("pass structured_outputs: {regex} instead"),
    "ebnf": Unserved("pass structured_outputs: {grammar} instead"),
    "logits_processors": Unserved("no code of clients is run"),
    "custom_logit_processor": Unserved("no code of clients is run"),
    "vllm_xargs": Unserved("there is nothing that would read it"),
    "kv_transfer_params": Unserved("keys and values stay in this process"),
    "cache_salt": Unserved("texts that begin alike share what was computed, whoever asks"),
    "priority": Unserved("first come, first served", (0,)),
    "include_reasoning": Unserved("thoughts arrive as reasoning_content; leave them unread", (True,)),
    "separate_reasoning": Unserved("thoughts arrive as reasoning_content, apart from content", (True,)),
    "thinking_token_budget": Unserved("thoughts have no limit of their own; max_tokens limits both"),
    "repetition_detection": Unserved("pass a penalty, or stop strings"),
    "return_tokens_as_token_ids": Unserved(_NOT_TOLD, (False,)),
    "return_token_ids": Unserved(_NOT_TOLD, (False,)),
    "return_prompt_text": Unserved(_NOT_TOLD, (False,)),
    "return_hidden_states": Unserved(_NOT_TOLD, (False,)),
    "include_spec_decode_stats": Unserved("usage tells accepted_prediction_tokens; /metrics the rest", (False,)),
    "stop_regex": Unserved("pass stop strings or stop_token_ids"),
    "no_stop_trim": Unserved("pass include_stop_str_in_output instead", (False,)),
    "min_new_tokens": Unserved("pass min_tokens instead"),
    "max_new_tokens": Unserved("pass max_tokens instead"),
    "lora_path": Unserved(_ADAPTERS),
    # llama.cpp's
    "n_predict": Unserved("pass max_tokens instead"),
    "n_cmpl": Unserved("pass n instead", (1,)),
    "n_probs": Unserved("pass logprobs instead", (0,)),
    "n_keep": Unserved("no text is shifted out of its context", (0, -1)),
    "n_discard": Unserved("no text is shifted out of its context", (0,)),
    "n_indent": Unserved("lines have no least indentation here", (0,)),
    "min_keep": Unserved(_OTHER_SAMPLER, (0, 1)),
    "t_max_predict_ms": Unserved("pass max_tokens instead", (0, -1)),
    "t_max_prompt_ms": Unserved("pass a shorter prompt", (0, -1)),
    "response_fields": Unserved("answers have the shape of OpenAI's"),
    "repeat_penalty": Unserved("pass repetition_penalty instead", (1, 1.0)),
    "repeat_last_n": Unserved("penalties look at the whole text", (-1,)),
    "typical_p": Unserved(_OTHER_SAMPLER, (1, 1.0)),
    "top_n_sigma": Unserved(_OTHER_SAMPLER, (-1, -1.0)),
    "xtc_probability": Unserved(_OTHER_SAMPLER, (0, 0.0)),
    "dynatemp_range": Unserved(_OTHER_SAMPLER, (0, 0.0)),
    "dry_multiplier": Unserved(_OTHER_SAMPLER, (0, 0.0)),
    "mirostat": Unserved(_OTHER_SAMPLER, (0,)),
    "adaptive_target": Unserved(_OTHER_SAMPLER, (-1, -1.0)),
    "samplers": Unserved("their order is transformers': penalties, temperature, top_k, top_p, min_p"),
    "post_sampling_probs": Unserved(_NOT_TOLD, (False,)),
    "return_tokens": Unserved(_NOT_TOLD, (False,)),
    "return_progress": Unserved(_NOT_TOLD, (False,)),
    "timings_per_token": Unserved("/metrics tells times", (False,)),
    "grammar": Unserved("pass structured_outputs: {grammar} instead"),
    "grammar_lazy": Unserved("a grammar holds from the first token on", (False,)),
    "grammar_triggers": Unserved("a grammar holds from the first token on"),
    "preserved_tokens": Unserved("pass skip_special_tokens instead"),
    "json_schema": Unserved(_SCHEMA),
    "reasoning_format": Unserved("thoughts arrive as reasoning_content", ("auto", "deepseek")),
    "reasoning_budget": Unserved("thoughts have no limit of their own; max_tokens limits both", (-1,)),
    "thinking_forced_open": Unserved("whether a thought is open is seen from the prompt", (False,)),
    "parse_tool_calls": Unserved("calls are always read where tools were given", (True,)),
    "lora": Unserved(_ADAPTERS),
}

_OF_STREAM_OPTIONS = {"include_usage"}
_NEUTRAL_STREAM_OPTIONS = {"include_obfuscation", "continuous_usage_stats"}


def check_fields(told: Mapping[str, Any], served: Collection[str], path: str) -> None:
    """Every field of a body is one that is read, or one that changes no text.

    Args:
        told: the body.
        served: fields that are read.
        path: the address that was asked, for the message.

    Raises:
        ApiError: one is neither, or misspelt.
    """
    for name, value in told.items():
        if name in served or name in CHANGE_NO_TEXT or _asks_for_nothing(name, value):
            continue
        known = UNSERVED.get(name)
        why = f"is not served: {known.advice}" if known else f"is no field of {path}{_suggestion(name, served)}"
        raise ApiError(f"{name} {why}", param=name, code="unsupported_parameter")


def check_stream_options(told: Mapping[str, Any]) -> None:
    """The same for `stream_options`.

    Raises:
        ApiError: one is not served, or misspelt.
    """
    for name, value in told.items():
        if name not in _OF_STREAM_OPTIONS and not (name in _NEUTRAL_STREAM_OPTIONS and not value):
            param = f"stream_options.{name}"
            raise ApiError(f"{param} is not served; include_usage is", param=param, code="unsupported_parameter")


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None or value in ("", [], {}):
        return name in UNSERVED or (value is None and _is_known(name))
    return name in UNSERVED and any(value == each for each in UNSERVED[name].neutral)


def _is_known(name: str) -> bool:
    return name in OF_CHATS or name in OF_COMPLETIONS


def _suggestion(name: str, served: Collection[str]) -> str:
    if _is_known(name):
        return ", only of the other call"
    close = difflib.get_close_matches(name, sorted(served), n=1)
    return f"; did you mean {close[0]}?" if close else ""
