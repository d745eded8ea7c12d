"""Fields of other servers that would change the text and are not served here: these are refused, not ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .api_errors import ApiError

_GRAMMAR = "pass structured_outputs"
_ADAPTERS = "the server has the adapters it was started with"

REFUSED: dict[str, tuple[Any, ...]] = {
    # what to do, and values that ask for nothing (as do null, "", [] and {})
    "functions": ("pass tools",),
    "function_call": ("pass tool_choice", "none", "auto"),
    "audio": ("only text is written",),
    "modalities": ("only text is written", ["text"]),
    "suffix": ("only texts that go on are written",),
    "echo": ("the prompt is not repeated", False),
    "best_of": ("ask for n and choose", 1),
    "use_beam_search": ("texts are drawn or greedy", False),
    "length_penalty": ("it belongs to beam search", 1),
    "truncate_prompt_tokens": ("cut the prompt before it is sent", -1),
    "add_generation_prompt": ("an answer is always begun", True),
    "continue_final_message": ("complete a text with /v1/completions", False),
    "documents": ("put documents into a message",),
    "chat_template": ("start the server with --chat-template",),
    "prompt_embeds": ("pass a text or token ids",),
    "structural_tag": (_GRAMMAR,),
    "json_schema": (_GRAMMAR,),
    "regex": (_GRAMMAR,),
    "ebnf": (_GRAMMAR,),
    "grammar": (_GRAMMAR,),
    "grammar_lazy": (_GRAMMAR, False),
    "grammar_triggers": (_GRAMMAR,),
    "logits_processors": ("no code of clients is run",),
    "custom_logit_processor": ("no code of clients is run",),
    "stop_regex": ("pass stop or stop_token_ids",),
    "no_stop_trim": ("pass include_stop_str_in_output", False),
    "no_repeat_ngram_size": ("set it in the target's generation config", 0),
    "min_new_tokens": ("pass min_tokens", 0),
    "max_new_tokens": ("pass max_tokens",),
    "n_predict": ("pass max_tokens", -1),
    "n_cmpl": ("pass n", 1),
    "n_indent": ("", 0),
    "t_max_predict_ms": ("pass max_tokens", 0, -1),
    "lora": (_ADAPTERS,),
    "lora_path": (_ADAPTERS,),
    "repeat_penalty": ("pass repetition_penalty", 1),
    "repeat_last_n": ("penalties look at the whole text", -1, 64),
    "samplers": ("their order is transformers'",),
    "top_n_sigma": ("", -1),
    "xtc_probability": ("", 0),
    "dynatemp_range": ("", 0),
    "dry_multiplier": ("", 0),
    "mirostat": ("", 0),
    "adaptive_target": ("", -1),
}
CHANGES_NO_TEXT = frozenset({"guided_decoding_backend"})


def refuse_unserved(fields: Mapping[str, Any]) -> None:
    """Of fields that are not read, those that would change the text."""
    for name, value in fields.items():
        guides = name.startswith("guided_") and name not in CHANGES_NO_TEXT
        advice, *neutral = REFUSED.get(name, (_GRAMMAR,) if guides else ("", value))
        if value not in ("", [], {}) and value not in neutral:
            message = f"{name} would change the text and is not served; {advice or 'leave it out'}"
            raise ApiError(message, param=name, code="unsupported_parameter")
