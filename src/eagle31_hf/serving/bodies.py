"""Request bodies: the fields of OpenAI's API, and of servers like it, that are read here.

A field that is not read is ignored and named, unless it would change the text (`REFUSED`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from ..errors import removal
from ..texts.answer_forms import TYPE_NAMES
from ..texts.rows import Message
from .api_errors import ApiError, from_validation

MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS = 16, 16, 20
MAX_TOKEN_LIST = 4096
"""Most entries of a list of tokens or words."""

LOWEST_TEMPERATURE = 1e-5
"""Scores are divided by it: a smaller one would take them out of what float32 can hold."""

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions write if nothing is said; chats go on until they end."""

LARGEST_SEED = 2**63 - 1


def _no_text_or_bool(value: Any) -> Any:
    if isinstance(value, (str, bool)):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


def _no_extreme(temperature: float) -> float:
    if 0.0 < temperature < LOWEST_TEMPERATURE:
        raise PydanticCustomError("below_min", f"0 (greedy) or at least {LOWEST_TEMPERATURE:f}")
    return temperature


@dataclass(frozen=True)
class Constraint:
    """What a text has to follow, by which field of the request."""

    kind: str  # "json" (a schema), "regex", "choice" (of texts), "grammar" (Lark), "call" (of one of several functions)
    value: Any
    field: str


# --- parts of bodies --------------------------------------------------------------------------------------------------


def _object_of(value: Any) -> Any:
    """An object, which some clients write as JSON."""
    return from_json(value or "{}") if value is None or isinstance(value, str) else value


def _text_of(content: Any) -> Any:
    """The text of a message's parts, as one."""
    if not isinstance(content, list):
        return "" if content is None else content
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        raise ValueError("only parts of type text are served")
    return "".join(part.get("text") or "" for part in content)


NO_LIMIT = -1
"""A `max_tokens` of llama.cpp's and LM Studio's clients: until the text ends, or the context is full."""


def _at_least(fewest: int) -> Any:
    def check(count: int) -> int:
        if count < fewest and count != NO_LIMIT:
            raise PydanticCustomError("below_min", f"at least {fewest}, or {NO_LIMIT} for no limit", {"fewest": fewest})
        return count

    return AfterValidator(check)


Whole = Annotated[int, BeforeValidator(_no_text_or_bool)]
Number = Annotated[float, BeforeValidator(_no_text_or_bool)]
TokenId = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Schema = dict[str, Any]
WrittenObject = Annotated[Schema, BeforeValidator(_object_of)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class CalledFunction(_Part):
    name: str
    arguments: WrittenObject = Field(default_factory=dict)


class Call(_Part):
    """A call that an earlier answer made."""

    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text_of)] = ""
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, exclude=True)

    @property
    def for_template(self) -> Message:
        """As chat templates take it."""
        fields = self.model_dump(exclude_none=True)
        fields["role"] = "system" if self.role == "developer" else self.role
        fields["reasoning_content"] = self.reasoning_content or self.reasoning
        return {name: value for name, value in fields.items() if value or name == "content"}


class ToolFunction(_Part):
    name: Text
    description: str | None = None
    parameters: Schema | None = None


class Tool(_Part):
    """One that may be called, or that `tool_choice` names."""

    type: Literal["function"] = "function"
    function: ToolFunction


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"] = "auto"
    tools: list[Tool] = Field(min_length=1)


class AllowedChoice(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    schema_: Schema | None = Field(None, alias="schema")

    @property
    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        schema: Any = self.schema_ or {"type": "object"}
        if self.type == "json_schema":
            schema = (self.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise ApiError("response_format.json_schema has no schema", param="response_format")
        return Constraint("json", schema, "response_format")


class Structured(BaseModel):
    """`structured_outputs`."""

    model_config = ConfigDict(extra="forbid")

    json_: WrittenObject | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: StrictBool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: Any) -> Any:
        """vLLM's client sends what it does not ask for as null or false."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value not in (None, False, "")}

    @property
    def constraints(self) -> list[Constraint]:
        """What it asks for; a schema that says nothing asks for any JSON."""
        asked = self.model_dump(exclude_none=True, by_alias=True)
        if asked.pop("json_object", False):
            asked.setdefault("json", {"type": "object"})
        return [Constraint(kind, value, f"structured_outputs.{kind}") for kind, value in asked.items()]


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = None


# --- fields that are not read -----------------------------------------------------------------------------------------

_GRAMMAR, _NO_BEAMS = "pass structured_outputs", "texts are drawn or greedy"
REFUSED: dict[str, tuple[Any, ...]] = {
    # what to do, and values that ask for nothing (as do null, "", [] and {})
    "functions": ("pass tools",), "function_call": ("pass tool_choice", "none", "auto"),
    "audio": ("only text is written",), "modalities": ("only text is written", ["text"]),
    "suffix": ("only texts that go on are written",), "echo": ("/v1/completions has it", False),
    "best_of": ("ask for n and choose", 1), "use_beam_search": (_NO_BEAMS, False), "num_beams": (_NO_BEAMS, 1),
    "length_penalty": ("it belongs to beam search", 1), "add_generation_prompt": ("an answer is always begun", True),
    "truncate_prompt_tokens": ("cut the prompt before it is sent", -1),
    "continue_final_message": ("complete a text with /v1/completions", False),
    "documents": ("put documents into a message",), "chat_template": ("start the server with --chat-template",),
    "prompt_embeds": ("pass a text or token ids",),
    **dict.fromkeys(("structural_tag", "json_schema", "regex", "ebnf", "grammar", "grammar_triggers"), (_GRAMMAR,)),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), ("",)),
    "grammar_lazy": (_GRAMMAR, False),
    **dict.fromkeys(("logits_processors", "custom_logit_processor"), ("no code of clients is run",)),
    "stop_regex": ("pass stop or stop_token_ids",), "no_stop_trim": ("pass include_stop_str_in_output", False),
    "no_repeat_ngram_size": ("set it in the target's generation config", 0),
    "min_new_tokens": ("pass min_tokens", 0), "max_new_tokens": ("pass max_tokens",),
    "n_predict": ("pass max_tokens", -1), "t_max_predict_ms": ("pass max_tokens", 0, -1), "n_cmpl": ("pass n", 1),
    **dict.fromkeys(("lora", "lora_path"), ("the server has the adapters it was started with",)),
    "repeat_penalty": ("pass repetition_penalty", 1), "repeat_last_n": ("penalties look at the whole text", -1, 64),
    "guidance_scale": ("", 1), "samplers": ("their order is transformers'",),
    **dict.fromkeys(("n_indent", "xtc_probability", "dynatemp_range", "dry_multiplier", "mirostat"), ("", 0)),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff"), ("", 0)),
    **dict.fromkeys(("top_n_sigma", "adaptive_target"), ("", -1)),
}  # fmt: skip
"""Fields of other servers that would change the text and are not served here: these are refused, not ignored."""

CHANGES_NO_TEXT = frozenset({"guided_decoding_backend"})


def refuse_unserved(fields: Mapping[str, Any]) -> None:
    """Of fields that are not read, those that would change the text."""
    for name, value in fields.items():
        guides = name.startswith("guided_") and name not in CHANGES_NO_TEXT
        advice, *neutral = REFUSED.get(name, (_GRAMMAR,) if guides else ("", value))
        if value not in ("", [], {}) and value not in neutral:
            served_not = f"{name} would change the text and is not served; {advice or 'leave it out'}"
            raise ApiError(removal(name) or served_not, param=name, code="unsupported_parameter")


# --- bodies -----------------------------------------------------------------------------------------------------------


class Body(BaseModel):
    """What chats and completions have in common. What is `None` is as the target's generation config has it."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    model: str | None = None  # there is one
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    n: Whole = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: Annotated[Whole, _at_least(1)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    seed: Whole | None = Field(None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED)

    temperature: Annotated[Number, AfterValidator(_no_extreme)] | None = Field(None, ge=0.0, le=2.0)
    top_p: Number | None = Field(None, gt=0.0, le=1.0)
    top_k: Whole | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: Number | None = Field(None, ge=0.0, le=1.0)
    typical_p: Number | None = Field(None, gt=0.0, le=1.0)
    repetition_penalty: Number | None = Field(None, ge=0.01, le=10.0)
    presence_penalty: Number = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: Number = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)

    ignore_eos: StrictBool = False
    min_tokens: Whole | None = Field(None, ge=0)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_TOKEN_LIST)
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True

    structured_outputs: Structured = Field(default_factory=lambda: Structured.model_validate({}))

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def constraint(self) -> Constraint | None:
        """What the text has to follow, whichever field says so."""
        asked = self._constraints
        if len(asked) > 1:
            fields = " and ".join(each.field for each in asked)
            raise ApiError(f"got {fields}; a text can follow one of them: leave the others out", param=asked[-1].field)
        return asked[0] if asked else None

    @property
    def _constraints(self) -> list[Constraint]:
        return self.structured_outputs.constraints


class ChatBody(Body):
    """Of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | Tool | AllowedChoice = "auto"
    parallel_tool_calls: StrictBool = True
    response_format: ResponseFormat | None = None
    max_completion_tokens: Annotated[Whole, _at_least(1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many to tell beside each token's log-probability; `None`: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def for_template(self) -> list[Message]:
        """The messages as chat templates take them."""
        return [message.for_template for message in self.messages]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that the model is shown and may call."""
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def has_strict_tools(self) -> bool:
        return any((tool.function.model_extra or {}).get("strict") for tool in self.tools)

    @property
    def forced(self) -> list[dict[str, Any]]:
        """Tools of which the model has to call one."""
        choice = self.tool_choice
        if isinstance(choice, Tool):
            return [tool for tool in self.offered if tool["function"]["name"] == choice.function.name]
        return self.offered if choice == "required" else []

    @property
    def _constraints(self) -> list[Constraint]:
        formats = [self.response_format.constraint] if self.response_format else []
        calls = [Constraint("call", self.forced, "tool_choice")] if self.forced else []
        return [each for each in formats if each] + super()._constraints + calls

    def check(self) -> None:
        """Refuse fields that contradict each other."""
        choice, names = self.tool_choice, [tool.function.name for tool in self.tools]
        if not names and choice not in ("none", "auto"):
            raise ApiError("tool_choice is given without tools", param="tool_choice")
        allowed = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else []
        named = [tool.function.name for tool in ([choice] if isinstance(choice, Tool) else allowed)]
        for name in named:
            if name not in names:
                raise ApiError(f"tool_choice names {name!r}; the tools are {', '.join(names)}", param="tool_choice")
        if isinstance(choice, AllowedChoice):  # as if there were no others
            self.tools = [tool for tool in self.tools if tool.function.name in named]
            self.tool_choice = choice.allowed_tools.mode
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            message = f"got max_tokens {limits[0]} and max_completion_tokens {limits[1]}; pass one of them"
            raise ApiError(message, param="max_tokens", code="invalid_parameter_combination")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs is given without logprobs: true", param="top_logprobs")


class CompletionBody(Body):
    """Of `/v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_tokens: Annotated[Whole, _at_least(0)] | None = None
    add_special_tokens: StrictBool = True
    echo: StrictBool = False

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids to go on with."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]  # type: ignore[return-value, list-item]

    def check(self) -> None:
        if not all(self.prompts):
            raise ApiError("prompt is empty; wanted a text, token ids, or several of either", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens is 0 without echo: true; wanted at least 1", param="max_tokens")
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise ApiError(f"{len(self.prompts)} prompts of n={self.n}; wanted {MAX_CHOICES} texts at most", param="n")


def parse_json(body: bytes) -> dict[str, Any]:
    """The object a body holds."""
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:  # half a surrogate pair, too, which no tokenizer takes
        raise ApiError(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(f"the body is JSON of type {TYPE_NAMES[type(fields)]}; wanted an object", code="invalid_json")
    return fields


AnyBody = ChatBody | CompletionBody


def parse(kind: type[AnyBody], told: dict[str, Any]) -> AnyBody:
    """The body of these fields, of which null ones count as left out."""
    fields = {name: value for name, value in told.items() if value is not None}
    refuse_unserved({name: value for name, value in fields.items() if name not in kind.model_fields})
    try:
        body = kind.model_validate(fields)
        body.check()
    except ValidationError as error:
        raise from_validation(error) from error
    return body
