"""What chats and completions have in common: numbers and their ranges, what other servers take, what a text follows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .api_errors import ApiError

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_TOKEN_LIST = 4096
"""Most entries of a list of tokens or words."""

LOWEST_TEMPERATURE = 1e-5
"""Scores are divided by it: a smaller one would take them out of what float32 can hold."""

LARGEST_SEED = 2**63 - 1


def _no_extreme(temperature: float) -> float:
    if 0.0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"wanted 0 (greedy) or at least {LOWEST_TEMPERATURE:f}")
    return temperature


@dataclass(frozen=True)
class Constraint:
    """What a text has to follow.

    Attributes:
        kind: `"json"` (a schema), `"regex"`, `"choice"` (one of several texts), `"grammar"` (Lark or GBNF) or `"call"`
            (of one of several functions).
        value: the schema, the expression, the texts, the grammar, the tools.
        field: that asked for it.
    """

    kind: str
    value: Any
    field: str


class CallOptions(BaseModel):
    """What chats and completions have in common."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True)

    model: str
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    constraint: Constraint | None = None

    # Ranges of OpenAI's own fields, whose types say nothing of them.
    temperature: Annotated[float, AfterValidator(_no_extreme)] | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    seed: int | None = Field(None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED)
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None

    # Fields that are not OpenAI's and that other servers know, too.
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10.0)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list, max_length=MAX_TOKEN_LIST)
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    bad_words: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=MAX_TOKEN_LIST)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def constraint_of(told: Mapping[str, Any], response_format: Constraint | None) -> Constraint | None:
    """What a body's text has to follow, whichever field says so: vLLM's `structured_outputs` or `guided_...`, or
    OpenAI's `response_format`, as it was read.

    Raises:
        ApiError: several say so, or one says it wrongly.
    """
    found = [] if response_format is None else [response_format]
    for kind in _KINDS:
        name = f"guided_{kind}"
        if not _is_empty(told.get(name)):
            found.append(_checked(kind, told[name], name))
    found += _structured(told.get("structured_outputs"))
    if len(found) > 1:
        fields = " and ".join(each.field for each in found)
        raise ApiError(f"got {fields}; a text can follow one of them", param=found[1].field)
    return found[0] if found else None


_KINDS = ("json", "regex", "choice", "grammar")


def _is_empty(value: Any) -> bool:
    """Asks for nothing; the schema `{}` asks for any JSON."""
    return value is None or value is False or value in ("", [])


def _structured(told: Any) -> list[Constraint]:
    field = "structured_outputs"
    if _is_empty(told):
        return []
    if not isinstance(told, dict):
        raise ApiError(f"{field} is a {type(told).__name__}; wanted an object", param=field, code="invalid_type")
    found = []
    for name, value in told.items():
        if name == "json_object" and value is True:
            found.append(Constraint("json", {"type": "object"}, f"{field}.{name}"))
        elif name in _KINDS and not _is_empty(value):
            found.append(_checked(name, value, f"{field}.{name}"))
        elif not _is_empty(value):
            wanted = ", ".join((*_KINDS, "json_object"))
            raise ApiError(
                f"{field}.{name} is not served; wanted one of {wanted}", param=field, code="unsupported_parameter"
            )
    return found


def _checked(kind: str, value: Any, field: str) -> Constraint:
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ApiError(f"{field} is no JSON: {error}", param=field) from error
    is_texts = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    fits = {"json": isinstance(value, dict), "choice": is_texts}.get(kind, isinstance(value, str))
    if not fits:
        wanted = {"json": "a JSON schema", "choice": "a list of texts"}.get(kind, "a text")
        raise ApiError(f"{field} is {str(value)[:80]!r}; wanted {wanted}", param=field, code="invalid_type")
    return Constraint(kind, value, field)
