"""Request bodies: the fields of OpenAI's API, and of servers like it, that are read here.

A field that is not read is ignored and named (`Body.ignored`), unless it would change the text (`REFUSED`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator
from pydantic_core import from_json

from ..errors import removal
from .api_errors import ApiError, from_validation
from .text import Message

MAX_CHOICES, MAX_STOPS, MAX_TOP_LOGPROBS = 16, 16, 20
MAX_TOKEN_LIST = 4096
"""Most entries of a list of tokens or words."""

LOWEST_TEMPERATURE = 1e-5
"""Scores are divided by it: a smaller one would take them out of what float32 can hold."""

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions write if nothing is said; chats go on until they end."""

LARGEST_SEED = 2**63 - 1


def _no_extreme(temperature: float) -> float:
    if 0.0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"wanted 0 (greedy) or at least {LOWEST_TEMPERATURE:f}")
    return temperature


TokenId = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Schema = dict[str, Any]


@dataclass(frozen=True)
class Constraint:
    """What a text has to follow, by which field of the request."""

    kind: str  # "json" (a schema), "regex", "choice" (of texts), "grammar" (Lark), "call" (of one of several functions)
    value: Any
    field: str


# --- parts of bodies --------------------------------------------------------------------------------------------------


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")


class CalledFunction(_Part):
    name: str
    arguments: Schema | str | None = None


class Call(_Part):
    """A call that an earlier answer made."""

    type: Literal["function"] = "function"
    id: str | None = None
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: arguments as an object."""
        arguments: Any = self.function.arguments
        if not isinstance(arguments, dict):
            arguments = json.loads(arguments or "{}")
        shown = self.model_dump(exclude_none=True)
        return shown | {"function": shown["function"] | {"arguments": arguments}}


class ContentPart(_Part):
    type: str
    text: str | None = None


class ChatMessage(_Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def for_template(self, index: int) -> Message:
        """As chat templates take it: text as one string."""
        message: Message = {"role": "system" if self.role == "developer" else self.role, "content": self._text(index)}
        try:
            calls = [call.for_template() for call in self.tool_calls or ()]
        except ValueError as error:
            param = f"messages[{index}].tool_calls"
            raise ApiError(f"{param}: the arguments of a call are no JSON: {error}", param=param) from error
        thought = self.reasoning_content or self.reasoning
        fields = {"tool_calls": calls, "name": self.name, "tool_call_id": self.tool_call_id}
        return message | {name: value for name, value in fields.items() if value} | (
            {"reasoning_content": thought} if thought else {}
        )  # fmt: skip

    def _text(self, index: int) -> str:
        if not isinstance(self.content, list):
            return self.content or ""
        kinds = {part.type for part in self.content} - {"text"}
        if kinds:
            param = f"messages[{index}].content"
            raise ApiError(f"{param} has parts of type {', '.join(sorted(kinds))}; only text is served", param=param)
        return "".join(part.text or "" for part in self.content)


class ToolFunction(_Part):
    name: Text
    description: str | None = None
    parameters: Schema | None = None


class Tool(_Part):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(BaseModel):
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(min_length=1)


class AllowedChoice(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class JsonSchema(_Part):
    schema_: Schema = Field(alias="schema")


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Schema | None = Field(None, alias="schema")

    @property
    def constraint(self) -> Constraint | None:
        field = "response_format"
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint("json", self.schema_ or {"type": "object"}, field)
        if self.json_schema is None:
            raise ApiError(f"{field}.json_schema has no schema", param=field)
        return Constraint("json", self.json_schema.schema_, field)


class Structured(BaseModel):
    """`structured_outputs`."""

    model_config = ConfigDict(extra="forbid")

    json_: Schema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Text] | None = None
    grammar: str | None = None
    json_object: StrictBool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: Any) -> Any:
        """vLLM's client sends what it does not ask for as null or false."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value not in (None, False, "", [])}

    @property
    def constraints(self) -> list[Constraint]:
        values = {"json": self._schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        found = [
            Constraint(kind, value, f"structured_outputs.{kind}")
            for kind, value in values.items()
            if value or value == {}  # a schema that says nothing asks for any JSON
        ]
        if self.json_object:
            found.append(Constraint("json", {"type": "object"}, "structured_outputs.json_object"))
        return found

    @property
    def _schema(self) -> Schema | None:
        if not isinstance(self.json_, str):
            return self.json_
        try:
            schema = json.loads(self.json_ or "null")
        except ValueError as error:
            field = "structured_outputs.json"
            raise ApiError(f"{field} is no JSON: {error}", param=field) from error
        return schema


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = None


# --- fields that are not read -----------------------------------------------------------------------------------------

_GRAMMAR = "pass structured_outputs"
REFUSED: dict[str, tuple[Any, ...]] = {
    # what to do, and values that ask for nothing (as do null, "", [] and {})
    "functions": ("pass tools",), "function_call": ("pass tool_choice", "none", "auto"),
    "audio": ("only text is written",), "modalities": ("only text is written", ["text"]),
    "suffix": ("only texts that go on are written",), "echo": ("/v1/completions has it", False),
    "best_of": ("ask for n and choose", 1), "use_beam_search": ("texts are drawn or greedy", False),
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
    "samplers": ("their order is transformers'",),
    **dict.fromkeys(("n_indent", "xtc_probability", "dynatemp_range", "dry_multiplier", "mirostat"), ("", 0)),
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

    model: str
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    seed: int | None = Field(None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED)

    temperature: Annotated[float, AfterValidator(_no_extreme)] | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    typical_p: float | None = Field(None, gt=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)

    ignore_eos: StrictBool = False
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_TOKEN_LIST)
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True

    structured_outputs: Structured = Field(default_factory=lambda: Structured.model_validate({}))

    @property
    def ignored(self) -> list[str]:
        """Fields that are not read."""
        return sorted(self.model_extra or {})

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options.include_usage)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many to tell beside each token's log-probability; `None`: no log-probabilities."""
        raise NotImplementedError

    def _constraints(self) -> list[Constraint]:
        return self.structured_outputs.constraints

    @cached_property
    def constraint(self) -> Constraint | None:
        """What the text has to follow, whichever field says so."""
        found = self._constraints()
        if len(found) > 1:
            fields = " and ".join(each.field for each in found)
            raise ApiError(f"got {fields}; a text can follow one of them: leave the others out", param=found[1].field)
        return found[0] if found else None

    def check(self) -> None:
        """Refuse fields that contradict each other."""
        _ = self.constraint


class ChatBody(Body):
    """Of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChoice = "auto"
    parallel_tool_calls: StrictBool = True
    response_format: ResponseFormat | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: StrictBool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @cached_property
    def for_template(self) -> list[Message]:
        """The messages as chat templates take them."""
        return [message.for_template(index) for index, message in enumerate(self.messages)]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that the model is shown and may call."""
        if self.tool_choice == "none":
            return []
        names = self._allowed if isinstance(self.tool_choice, AllowedChoice) else None
        tools = [tool for tool in self.tools if names is None or tool.function.name in names]
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def forced(self) -> list[dict[str, Any]]:
        """Tools of which the model has to call one."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.offered if tool["function"]["name"] == choice.function.name]
        requires = isinstance(choice, AllowedChoice) and choice.allowed_tools.mode == "required"
        return self.offered if choice == "required" or requires else []

    @property
    def _allowed(self) -> list[str]:
        assert isinstance(self.tool_choice, AllowedChoice)
        return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]

    def _constraints(self) -> list[Constraint]:
        asked = self.response_format.constraint if self.response_format else None
        found = ([asked] if asked else []) + super()._constraints()
        if not self.forced:
            return found
        if found:
            raise ApiError(
                f"tool_choice forces a call, which has a grammar of its own, and {found[0].field} asks for another; "
                "leave one of them out",
                param="tool_choice",
            )
        return [Constraint("call", self.forced, "tool_choice")]

    def check(self) -> None:
        self._check_tool_choice()
        super().check()
        _ = self.for_template
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs is given without logprobs: true", param="top_logprobs")

    def _check_tool_choice(self) -> None:
        choice, names = self.tool_choice, [tool.function.name for tool in self.tools]
        if not names and choice not in ("none", "auto"):
            raise ApiError("tool_choice is given without tools", param="tool_choice")
        named = [choice.function.name] if isinstance(choice, NamedTool) else []
        for name in self._allowed if isinstance(choice, AllowedChoice) else named:
            if name not in names:
                raise ApiError(f"tool_choice names {name!r}; the tools are {', '.join(names)}", param="tool_choice")


class CompletionBody(Body):
    """Of `/v1/completions`."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_tokens: int | None = Field(None, ge=0)
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
        super().check()
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
        raise ApiError(f"the body is a JSON {type(fields).__name__}; wanted an object", code="invalid_json")
    return fields


AnyBody = TypeVar("AnyBody", bound=Body)


def _parsed(kind: type[AnyBody], told: dict[str, Any]) -> AnyBody:
    fields = {name: value for name, value in told.items() if value is not None}
    refuse_unserved({name: value for name, value in fields.items() if name not in kind.model_fields})
    try:
        body = kind.model_validate(fields)
        body.check()
    except ValidationError as error:
        raise from_validation(error) from error
    return body


parse_chat, parse_completion = partial(_parsed, ChatBody), partial(_parsed, CompletionBody)
