"""Errors as OpenAI's API shapes them: `{"error": {"message", "type", "param", "code"}}` and an HTTP status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ..errors import Eagle31Error


class ApiError(Eagle31Error):
    """An answer that is an error, with a `status` of HTTP.

    Args:
        code: short name for programs.
        param: the field at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class TooLongError(ApiError):
    """Prompt and answer together are longer than any text may be.

    Worded as OpenAI words it: by these words LiteLLM, opencode and others know that a chat has to be shortened.
    """

    def __init__(self, context: int, prompt: int, answer: int | None = None):
        asked = "" if answer is None else f" and up to {answer} are to be written"
        super().__init__(
            f"this model's maximum context length is {context} tokens, prompt and answer together; the prompt has "
            f"{prompt}{asked}",
            code="context_length_exceeded",
            param="messages",
        )


class ShuttingDownError(ApiError):
    """The server stops: it takes nothing new, or did not finish this text."""

    def __init__(self, message: str):
        super().__init__(
            message, status=503, code="shutting_down", headers={"Retry-After": "30", "Connection": "close"}
        )


_TAGS = {"str", "int", "float", "bool", "dict", "list", "constrained-str", "constrained-int", "constrained-float"}
"""What pydantic adds to a place to say which type of several it has tried."""

_WANTED = {
    "greater_than_equal": "at least {ge}", "greater_than": "more than {gt}", "less_than_equal": "at most {le}",
    "too_short": "at least {min_length} of them", "too_long": "at most {max_length} of them",
    "literal_error": "{expected}", "string_too_short": "some text", "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "an array", "dict_type": "an object", "model_type": "an object",
    **dict.fromkeys(("number_type", "float_type", "float_parsing", "finite_number"), "a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    "extra_forbidden": "a field that is served",
}  # fmt: skip
"""What is wanted, by pydantic's kind of error."""

_CODES = {
    **dict.fromkeys(("greater_than_equal", "greater_than", "below_min"), "{number}_below_min_value"),
    "less_than_equal": "{number}_above_max_value", "too_short": "array_below_min_length",
    "too_long": "array_above_max_length", "string_too_short": "string_below_min_length",
    "literal_error": "invalid_value", "value_error": "invalid_value", "missing": "missing_required_parameter",
    "extra_forbidden": "unsupported_parameter",
}  # fmt: skip
"""OpenAI's names of these kinds; `invalid_type` for all others."""


def from_validation(error: ValidationError) -> ApiError:
    """What a body's first wrong field is told: of several types that were tried the one that got farthest."""
    found = error.errors(include_url=False)
    first = max(found, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    path, kind, details = _path(first["loc"]), first["type"], first.get("ctx", {})
    number = "integer" if any(isinstance(each, int) for each in details.values()) else "decimal"
    code = _CODES.get(kind, "invalid_type").format(number=number)
    if kind == "missing":
        return ApiError(f"{path} is missing", param=path, code=code)
    got = json.dumps(first["input"], ensure_ascii=False)
    shown = got if len(got) <= 80 else f"{got[:77]}..."
    if kind == "value_error":  # ours, in a whole sentence
        return ApiError(f"{path}: got {shown}; {details['error']}", param=path, code=code)
    is_of_types = kind.endswith(("_type", "literal_error"))
    tried = [each for each in found if _path(each["loc"]) == path] if is_of_types else [first]
    wanted = dict.fromkeys(_WANTED.get(each["type"], each["msg"]).format(**each.get("ctx", {})) for each in tried)
    in_json = " or ".join(wanted).replace("'", '"')
    return ApiError(f"{path}: got {shown}; wanted {in_json}", param=path, code=code)


def _path(place: Sequence[str | int]) -> str:
    """`messages[0].content` of `("messages", 0, "content", "str")`."""
    path = ""
    for index, part in enumerate(place):
        if isinstance(part, int):
            path += f"[{part}]"
        elif index == 0:
            path = part
        elif part not in _TAGS and (part[:1].islower() or part.isdigit()) and "[" not in part:
            path += f".{part}"
    return path
