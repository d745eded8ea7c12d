"""Errors as OpenAI's API shapes them: `{"error": {"message", "type", "param", "code"}}` and an HTTP status."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ..errors import Eagle31Error


class ApiError(Eagle31Error):
    """An answer that is an error.

    Args:
        message: what was got, what was wanted, what to do.
        status: of HTTP.
        code: short name for programs.
        param: the field at fault.
        headers: to send along.
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


_TYPE_NAMES = {"str", "int", "float", "bool", "dict", "list"}


def from_validation(error: ValidationError, *, within: str = "", role: str | None = None) -> ApiError:
    """What a body's first wrong field is told.

    Args:
        within: name of the field that was looked at; empty for the whole body.
        role: of the message at fault: of all kinds of messages only that kind's complaints mean anything.
    """
    found = error.errors(include_url=False, include_context=False)
    if role is not None:
        own = [each for each in found if any(role in str(part).lower() for part in each["loc"])]
        found = own or found
    first = max(_of_the_type_meant(found), key=lambda each: len(each["loc"]))
    names = [str(part) for part in first["loc"] if str(part) not in _TYPE_NAMES]
    path = ".".join([*([within] if within else []), *(name for name in names if name[:1].islower() or name.isdigit())])
    if first["type"] == "missing":
        hint = "; GET /v1/models names what is served here" if path == "model" else ""
        return ApiError(f"{path or 'body'} is missing{hint}", param=path or None, code="invalid_type")
    got = repr(first.get("input"))
    shown = got if len(got) <= 80 else f"{got[:77]}..."
    return ApiError(f"{path or 'body'}: {first['msg']}, got {shown}", param=path or None, code="invalid_type")


def _of_the_type_meant(found: list[Any]) -> list[Any]:
    """Of several kinds told apart by a field `type`, only the complaints of the kind whose type was given."""
    others = {each["loc"][:-1] for each in found if each["type"] == "literal_error" and each["loc"][-1] == "type"}
    return [each for each in found if not any(each["loc"][: len(other)] == other for other in others)] or found
