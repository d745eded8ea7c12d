"""Request bodies as OpenAI's API defines them, checked by the types of the `openai` package, as what we work with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from .api_errors import ApiError, from_validation
from .prompts import Message

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions write if nothing is said; chats go on until they end."""


class Extras(BaseModel):
    """Fields that are not OpenAI's and that other servers know, too."""

    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0, le=10.0)
    ignore_eos: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class Numbers(BaseModel):
    """Ranges of OpenAI's own fields, whose types say nothing of them."""

    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    seed: int | None = None
    logit_bias: dict[int, float] | None = None


@dataclass(frozen=True)
class CallOptions:
    """What chats and completions have in common."""

    model: str
    stream: bool
    include_usage: bool
    numbers: Numbers
    extras: Extras
    stop: tuple[str, ...]

    @property
    def choices(self) -> int:
        return self.numbers.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        return self.numbers.max_completion_tokens or self.numbers.max_tokens


@dataclass(frozen=True)
class ChatCall:
    """A body of `/v1/chat/completions`.

    Attributes:
        messages: as chat templates take them.
        tools: functions the model may call; empty where `tool_choice` is `"none"`.
        forced_tools: names of which one has to be called; empty if none has to be.
        json_schema: what the answer has to follow; `{}` for any JSON object, `None` for no constraint.
        top_logprobs: `None` for no log-probabilities.
    """

    options: CallOptions
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    forced_tools: list[str] = field(default_factory=list)
    json_schema: dict[str, Any] | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True)
class CompletionCall:
    """A body of `/v1/completions`: texts or token ids to go on with."""

    options: CallOptions
    prompts: list[str | list[int]]
    top_logprobs: int | None = None


def parse_json(body: bytes) -> dict[str, Any]:
    """The object a body holds.

    Raises:
        ApiError: it holds no JSON object.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(told, dict):
        raise ApiError(f"the body is a JSON {type(told).__name__}; wanted an object", code="invalid_json")
    return told


def parse_chat(told: dict[str, Any]) -> ChatCall:
    """A chat's body.

    Raises:
        ApiError: a field is missing, of the wrong type or out of range, or asks for what is not served.
    """
    options = _call_options(told, _chat_types())
    _refuse(told, functions="pass tools instead", function_call="pass tool_choice instead", audio="only text is served")
    if told.get("modalities") not in (None, ["text"]):
        raise ApiError(f"modalities is {told['modalities']}; only text is served", param="modalities")
    messages = [_message(message, i) for i, message in enumerate(told["messages"])]
    if not messages:
        raise ApiError("messages is empty; wanted at least one", param="messages")
    tools, forced = _tools(told)
    asks = bool(told.get("logprobs"))
    if told.get("top_logprobs") is not None and not asks:
        raise ApiError("top_logprobs is given without logprobs: true", param="top_logprobs")
    return ChatCall(
        options, messages, tools, forced, _schema(told), (options.numbers.top_logprobs or 0) if asks else None
    )  # fmt: skip


def parse_completion(told: dict[str, Any]) -> CompletionCall:
    """A completion's body.

    Raises:
        ApiError: as `parse_chat`.
    """
    prompts = _prompts(told.get("prompt"))
    options = _call_options(told, _completion_types())
    _refuse(told, suffix="only texts that go on are written", echo="the prompt is not repeated")
    if (told.get("best_of") or 1) > options.choices:
        raise ApiError("best_of is not served; ask for n and choose", param="best_of")
    if len(prompts) * options.choices > MAX_CHOICES:
        raise ApiError(f"{len(prompts)} prompts of n={options.choices}; wanted {MAX_CHOICES} texts at most", param="n")
    return CompletionCall(options, prompts, told.get("logprobs"))


def _prompts(prompt: Any) -> list[str | list[int]]:
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    prompts = prompt if several else [prompt]
    if not all(isinstance(each, str) or _are_ids(each) for each in prompts):
        raise ApiError(f"prompt is {str(prompt)[:80]}; wanted a text, token ids, or several of either", param="prompt")
    return prompts


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int and token >= 0 for token in prompt)


# --- parts ------------------------------------------------------------------------------------------------------------


@cache
def _chat_types() -> TypeAdapter:
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

    return TypeAdapter(CompletionCreateParamsNonStreaming)


@cache
def _completion_types() -> TypeAdapter:
    from openai.types.completion_create_params import CompletionCreateParamsNonStreaming

    return TypeAdapter(CompletionCreateParamsNonStreaming)


def _call_options(told: dict[str, Any], types: TypeAdapter) -> CallOptions:
    stream = told.get("stream") or False
    if not isinstance(stream, bool):
        raise ApiError(f"stream is {stream!r}; wanted true or false", param="stream", code="invalid_type")
    body = {name: value for name, value in told.items() if value is not None and name != "stream"}
    _check_messages(body)
    try:
        read = types.validate_python(body)
        numbers, extras = Numbers.model_validate(body), Extras.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from error
    for name in read:
        _check_all(read[name], name)
    return CallOptions(
        model=told["model"],
        stream=stream,
        include_usage=bool((told.get("stream_options") or {}).get("include_usage")),
        numbers=numbers,
        extras=extras,
        stop=_stop(told.get("stop")),
    )


def _check_messages(body: dict[str, Any]) -> None:
    """Messages one by one, so that a complaint is about the right one."""
    messages = body.get("messages")
    if messages is None:
        return
    if not isinstance(messages, list):
        raise ApiError(f"messages is a {type(messages).__name__}; wanted a list", param="messages", code="invalid_type")
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise ApiError(
                f"messages[{i}]: got role {role!r}; wanted one of {', '.join(ROLES)}",
                param=f"messages[{i}].role",
                code="invalid_value",
            )
        try:
            read = _message_types().validate_python(message)
        except ValidationError as error:
            raise from_validation(error, within=f"messages[{i}]", role=role) from error
        _check_all(read, f"messages[{i}]")


ROLES = ("system", "developer", "user", "assistant", "tool")


@cache
def _message_types() -> TypeAdapter:
    from openai.types.chat import ChatCompletionMessageParam

    return TypeAdapter(ChatCompletionMessageParam)


def _check_all(value: Any, name: str) -> None:
    """Read all of it: iterables are only checked as they are read."""
    try:
        _exhaust(value)
    except ValidationError as error:
        raise from_validation(error, within=name) from error


def _exhaust(value: Any) -> None:
    if isinstance(value, Mapping):
        for each in value.values():
            _exhaust(each)
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for each in value:
            _exhaust(each)


def _refuse(told: dict[str, Any], **unserved: str) -> None:
    for name, advice in unserved.items():
        if told.get(name):
            raise ApiError(f"{name} is not served: {advice}", param=name, code="unsupported_parameter")


def _stop(told: Any) -> tuple[str, ...]:
    stops = (told,) if isinstance(told, str) else tuple(told or ())
    if len(stops) > MAX_STOPS or any(not stop for stop in stops):
        raise ApiError(f"stop has {len(stops)} strings or an empty one; wanted up to {MAX_STOPS}", param="stop")
    return stops


def _message(told: dict[str, Any], index: int) -> Message:
    """As chat templates take it: text as one string, arguments of calls as objects."""
    role = "system" if told["role"] == "developer" else told["role"]
    message: Message = {"role": role, "content": _content(told.get("content"), index)}
    if told.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, index) for call in told["tool_calls"]]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if told.get(name):
            message[name] = told[name]
    return message


def _content(content: Any, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        kinds = ", ".join(sorted({part.get("type", "?") for part in content} - {"text"}))
        raise ApiError(
            f"messages[{index}] has parts of type {kinds}; only text is served", param=f"messages[{index}].content"
        )
    return "".join(part["text"] for part in content)


def _tool_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError as error:
        raise ApiError(
            f"messages[{index}] has a call whose arguments are no JSON: {error}", param=f"messages[{index}].tool_calls"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(told: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Tools the model sees, and names of which it has to call one."""
    tools, choice = told.get("tools") or [], told.get("tool_choice")
    wrong = [tool.get("type") for tool in tools if tool.get("type") != "function"]
    if wrong:
        raise ApiError(f"got tools of type {wrong}; only functions are served", param="tools")
    names = [tool["function"]["name"] for tool in tools]
    if not tools and choice not in (None, "none", "auto"):
        raise ApiError("tool_choice is given without tools", param="tool_choice")
    if choice in (None, "auto"):
        return tools, []
    if choice == "none":
        return [], []
    if choice == "required":
        return tools, names
    wanted = str((choice.get("function") or {}).get("name"))
    if wanted not in names:
        raise ApiError(f"tool_choice names {wanted!r}; the tools are {', '.join(names)}", param="tool_choice")
    return tools, [wanted]


def _schema(told: dict[str, Any]) -> dict[str, Any] | None:
    wanted = told.get("response_format") or {"type": "text"}
    if wanted["type"] == "text":
        return None
    if wanted["type"] == "json_object":
        return {"type": "object"}
    schema = wanted["json_schema"].get("schema")
    if not isinstance(schema, dict):
        raise ApiError("response_format.json_schema has no schema", param="response_format")
    return schema
