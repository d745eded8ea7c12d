"""Request bodies as OpenAI's API defines them, checked by the types of the `openai` package, as what we work with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .api_errors import ApiError, from_validation
from .call_options import MAX_CHOICES, MAX_TOP_LOGPROBS, CallOptions, Constraint, constraint_of
from .fields import OF_CHATS, OF_COMPLETIONS, check_fields, check_stream_options
from .prompts import Message

MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions write if nothing is said; chats go on until they end."""


@dataclass(frozen=True)
class ChatCall:
    """A body of `/v1/chat/completions`.

    Attributes:
        messages: as chat templates take them.
        tools: functions the model may call; empty where `tool_choice` is `"none"`.
        one_call: no more than one function may be called.
        top_logprobs: `None` for no log-probabilities.
    """

    options: CallOptions
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    one_call: bool = False
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
        told = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(told, dict):
        raise ApiError(f"the body is a JSON {type(told).__name__}; wanted an object", code="invalid_json")
    _refuse_surrogates(told)
    return told


def _refuse_surrogates(told: dict[str, Any]) -> None:
    """A half of a pair of UTF-16 (a text that was cut inside an emoji) is no character: no tokenizer takes it."""
    for name, value in told.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                f"{name!a} holds half a surrogate pair ({error.object[error.start]!a}); wanted whole "
                "characters: cut texts between them",
                param=name.encode(errors="replace").decode(),
                code="invalid_value",
            ) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def parse_chat(told: dict[str, Any]) -> ChatCall:
    """A chat's body.

    Raises:
        ApiError: a field is missing, of the wrong type or out of range, or asks for what is not served.
    """
    check_fields(told, OF_CHATS, "chat completions")
    constraint = constraint_of(told, _response_format(told))
    options = _call_options(told, _types("chat"), constraint)
    messages = [_message(message, i) for i, message in enumerate(told["messages"])]
    if not messages:
        raise ApiError("messages is empty; wanted at least one", param="messages")
    tools, forced = _tools(told)
    if forced:
        if constraint is not None:
            raise ApiError(
                f"tool_choice forces a call, which has a grammar of its own, and {constraint.field} asks for another; "
                "leave one of them out",
                param="tool_choice",
            )
        options = options.model_copy(update={"constraint": Constraint("call", forced, "tool_choice")})
    asks = bool(told.get("logprobs"))
    if told.get("top_logprobs") is not None and not asks:
        raise ApiError("top_logprobs is given without logprobs: true", param="top_logprobs")
    return ChatCall(
        options,
        messages,
        tools,
        one_call=told.get("parallel_tool_calls") is False,
        top_logprobs=(options.top_logprobs or 0) if asks else None,
    )


def parse_completion(told: dict[str, Any]) -> CompletionCall:
    """A completion's body.

    Raises:
        ApiError: as `parse_chat`.
    """
    check_fields(told, OF_COMPLETIONS, "completions")
    prompts = _prompts(told.get("prompt"))
    options = _call_options(told, _types("completion"), constraint_of(told, None))
    if len(prompts) * options.choices > MAX_CHOICES:
        raise ApiError(f"{len(prompts)} prompts of n={options.choices}; wanted {MAX_CHOICES} texts at most", param="n")
    top = told.get("logprobs")
    if top is not None and not 0 <= int(top) <= MAX_TOP_LOGPROBS:
        raise ApiError(
            f"logprobs is {top}; wanted 0 to {MAX_TOP_LOGPROBS} alternatives of each token", param="logprobs"
        )
    return CompletionCall(options, prompts, None if top is None else int(top))


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
def _types(of: str) -> TypeAdapter:
    """Of a `"chat"`, a `"completion"` or a `"message"`, as the `openai` package has them."""
    from openai.types import completion_create_params as completions
    from openai.types.chat import ChatCompletionMessageParam
    from openai.types.chat import completion_create_params as chats

    bodies = {"chat": chats, "completion": completions}
    wanted: Any = bodies[of].CompletionCreateParamsNonStreaming if of in bodies else ChatCompletionMessageParam
    return TypeAdapter(wanted)


def _call_options(told: dict[str, Any], types: TypeAdapter, constraint: Constraint | None) -> CallOptions:
    stream = told.get("stream") or False
    if not isinstance(stream, bool):
        raise ApiError(f"stream is {stream!r}; wanted true or false", param="stream", code="invalid_type")
    body = {name: value for name, value in told.items() if value is not None and name != "stream"}
    _check_messages(body)
    try:
        # `CallOptions` has the biases: they need not be whole, as vLLM has it.
        read = types.validate_python({name: value for name, value in body.items() if name != "logit_bias"})
        for name in read:
            _check_all(read[name], name)
        stream_options = told.get("stream_options") or {}
        check_stream_options(stream_options)
        return CallOptions.model_validate(body | {
            "stream": stream,
            "include_usage": bool(stream_options.get("include_usage")),
            "stop": _stop(told.get("stop")),
            "constraint": constraint,
        })  # fmt: skip
    except ValidationError as error:
        raise from_validation(error) from error


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
            read = _types("message").validate_python(message)
        except ValidationError as error:
            raise from_validation(error, within=f"messages[{i}]", role=role) from error
        _check_all(read, f"messages[{i}]")


ROLES = ("system", "developer", "user", "assistant", "tool")


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


def _tools(told: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tools the model sees, and those of which it has to call one."""
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
        return tools, tools
    wanted = str((choice.get("function") or {}).get("name"))
    if wanted not in names:
        raise ApiError(f"tool_choice names {wanted!r}; the tools are {', '.join(names)}", param="tool_choice")
    return tools, [tool for tool in tools if tool["function"]["name"] == wanted]


def _response_format(told: dict[str, Any]) -> Constraint | None:
    """What `response_format` asks for; its types are checked with the rest of the body."""
    wanted, field = told.get("response_format"), "response_format"
    if not isinstance(wanted, dict) or wanted.get("type") not in ("json_object", "json_schema"):
        return None
    if wanted["type"] == "json_object":
        return Constraint("json", wanted.get("schema") or {"type": "object"}, field)
    schema = (wanted.get("json_schema") or {}).get("schema")
    if not isinstance(schema, dict):
        raise ApiError("response_format.json_schema has no schema", param=field)
    return Constraint("json", schema, field)
