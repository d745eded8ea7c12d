"""Chats as token ids, by a target's own chat template."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigurationError
from .rows import Message


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    **template_options: Any,
) -> list[int]:
    """Token ids of a chat, by the target's own template, up to where the answer begins.

    Without a chat template (a base model) the contents are joined by line ends, as they are.

    Args:
        tools: JSON schemas of functions the model may call.
        template_options: variables of the template beside these, e.g. `enable_thinking=False`.
    """
    try:
        json.dumps(list(messages), ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:  # half of an emoji, or what a terminal could not decode: tokenizers refuse it
        raise ConfigurationError(
            f"a message holds {error.object[error.start]!a}, which is no character; wanted text in the encoding of the "
            "terminal, or UTF-8"
        ) from error
    template = tokenizer.chat_template
    if not template:
        return _without_template(tokenizer, messages, tools)
    if tools and not shows_tools(tokenizer):
        raise ConfigurationError(
            "this model's chat template has no place for tools; leave tools out, or pass a template of this model's "
            "form that has one (--chat-template FILE; for the embedded pair examples/tools.jinja)"
        )
    try:
        return apply_template(tokenizer, messages, tools, add_generation_prompt=True, **template_options)
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise ConfigurationError(f"this model's chat template refuses these messages: {error}") from error


def apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    **options: Any,
) -> list[int]:
    """Token ids of a chat; raises whatever the template raises."""
    options = {"tokenize": True, "return_dict": False, "tools": list(tools) if tools else None, **options}
    with suppress(TypeError):
        return tokenizer.apply_chat_template(list(messages), **options)  # type: ignore[return-value]
    return tokenizer.apply_chat_template([_with_written_arguments(each) for each in messages], **options)  # type: ignore[return-value]


def _with_written_arguments(message: Message) -> Message:
    """A message whose calls have their arguments as JSON: some templates (DeepSeek's) join them to text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template has a place for tools."""
    template = tokenizer.chat_template
    return (isinstance(template, dict) and "tool_use" in template) or "tools" in str(template)


def _without_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
) -> list[int]:
    roles = {message["role"] for message in messages}
    if tools or roles - {"user"}:
        raise ConfigurationError(
            f"this model has no chat template, so it knows no roles (got {', '.join(sorted(roles))}) and no tools; "
            "pass the text as one prompt, or give a template (--chat-template)"
        )
    return tokenizer("\n".join(message["content"] for message in messages))["input_ids"]


def is_reserved(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether a variable of this name is an argument of the tokenizer, so that no chat brings a template along."""
    return name == "messages" or name in inspect.signature(tokenizer.apply_chat_template).parameters


def is_read(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the chat template reads a variable of this name."""
    return name in re.findall(r"[A-Za-z_]\w*", str(tokenizer.chat_template or ""))


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    different = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))
