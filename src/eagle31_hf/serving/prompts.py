"""Chats as token ids, by the target's own template."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigurationError

Message = dict[str, Any]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    **template_options: Any,
) -> list[int]:
    """Token ids of a chat up to where the answer begins.

    Without a chat template (a base model) the contents are joined by line ends, as they are.

    Args:
        tools: JSON schemas of functions the model may call.
        template_options: what the template is told beside these, e.g. `enable_thinking=False`; a template or an
            argument of the tokenizer is refused (`why_not_set`).
    """
    _refuse_half_characters(messages)
    for name in template_options:
        if why := why_not_set(tokenizer, name):
            raise ConfigurationError(why)
        if not is_read(tokenizer, name):
            raise ConfigurationError(f"this model's chat template does not read {name!r}; leave it out")
    if not tokenizer.chat_template:
        return _without_template(tokenizer, messages, tools)
    if tools and not template_takes_tools(tokenizer):
        raise ConfigurationError(
            "this model's chat template has no place for tools; leave tools out, or give a template that has "
            "(--chat-template)"
        )
    try:
        return tokenizer.apply_chat_template(  # type: ignore[return-value]
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **template_options,
        )
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        raise ConfigurationError(f"this model's chat template refuses these messages: {error}") from error


def _refuse_half_characters(messages: Sequence[Message]) -> None:
    """What a terminal or a client could not decode; no tokenizer takes it."""
    for number, message in enumerate(messages):
        try:
            json.dumps(message, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f"message {number} holds {error.object[error.start]!a}, which is no character; wanted text in the "
                "encoding of the terminal, or UTF-8"
            ) from error


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


def why_not_set(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """Why a client may not set a variable of this name; empty if it may.

    Names of `apply_chat_template`'s own arguments may not be set, so that no chat brings a template along.
    """
    if name == "messages" or name in inspect.signature(tokenizer.apply_chat_template).parameters:
        return f"{name!r} is the server's own to set; only variables that the chat template reads can be given"
    return ""


def is_read(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the chat template reads a variable of this name."""
    return name in re.findall(r"[A-Za-z_]\w*", str(tokenizer.chat_template or ""))


def template_takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template does anything with tools."""
    template = tokenizer.chat_template
    return (isinstance(template, dict) and "tool_use" in template) or "tools" in str(template)
