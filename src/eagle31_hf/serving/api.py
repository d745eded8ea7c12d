"""From request bodies to texts the engine writes: prompts by the template, sampling, grammars."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigurationError
from ..sampling.grammar import Grammar, GrammarCompiler, LarkText, OpenThought, with_white_space
from ..texts.answer_forms import UNIONS, AnswerForm, options_of, with_types
from ..texts.chats import encode_chat, is_read, is_reserved
from .answers import ends_in_thought
from .api_errors import ApiError, TooLongError
from .bodies import DEFAULT_COMPLETION_TOKENS, NO_LIMIT, AnyBody, ChatBody, CompletionBody, Constraint
from .engine import Engine
from .text import Request, Sampling


class Translator:
    """Translates for one engine. May be used from several threads."""

    def __init__(self, engine: Engine):
        self._engine, self._tokenizer = engine, engine.tokenizer
        self._vocabulary = engine.drafter.binding.text_config.vocab_size
        self._grammars = GrammarCompiler(engine.tokenizer, self._vocabulary, engine.eos_ids)
        self._lock = threading.Lock()

    def texts_of(self, body: AnyBody) -> list[Request]:
        """The texts of an answer: of a chat one per choice, of a completion each prompt's choices."""
        return self._of_chat(body) if isinstance(body, ChatBody) else self._of_completion(body)

    def _of_chat(self, body: ChatBody) -> list[Request]:
        form, grammar = self._engine.form, self._grammar(body.constraint)
        try:
            kwargs, _ = self._template_kwargs(body)
            prompt = encode_chat(self._tokenizer, body.for_template, tools=body.offered, **kwargs)
        except ConfigurationError as error:
            raise ApiError(str(error), param="tools" if "tools" in str(error) else "messages") from error
        texts = self._choices(prompt, body, grammar)
        if grammar is not None and ends_in_thought(self._tokenizer, form, prompt):
            thought = OpenThought(self._tokenizer, form.think[1], texts[0].max_new_tokens // 2)
            grammar = replace(grammar, thought=thought)
        return [replace(text, grammar=grammar, marks=form.marks) for text in texts]

    def _of_completion(self, body: CompletionBody) -> list[Request]:
        grammar, texts = self._grammar(body.constraint), list[Request]()
        for prompt in body.prompts:
            ids = prompt
            if isinstance(ids, str):
                ids = self._tokenizer(ids, add_special_tokens=body.add_special_tokens)["input_ids"]
            self._check_ids(ids, "prompt")
            texts += self._choices(ids, body, grammar, DEFAULT_COMPLETION_TOKENS)
        return [replace(text, prompt_logprobs=body.logprobs if body.echo else None) for text in texts]

    def ignored(self, body: AnyBody) -> list[str]:
        """Fields of a body that change nothing: they are not read, here or by the chat template."""
        unread = sorted(body.model_extra or {})
        if not isinstance(body, ChatBody):
            return unread
        if body.has_strict_tools and not body.forced:  # a call that is forced keeps to its schema, others need not
            unread.append("tools.function.strict")
        return unread + self._template_kwargs(body)[1]

    def _template_kwargs(self, body: ChatBody) -> tuple[dict[str, Any], list[str]]:
        """Variables that the chat template reads, and the fields of the others."""
        values = {f"chat_template_kwargs.{name}": (name, value) for name, value in body.chat_template_kwargs.items()}
        for name, _ in values.values():
            if is_reserved(self._tokenizer, name):
                message = f"chat_template_kwargs: {name!r} is the server's own to set; leave it out"
                raise ApiError(message, param="chat_template_kwargs", code="invalid_value")
        if body.reasoning_effort is not None:
            values["reasoning_effort"] = "reasoning_effort", body.reasoning_effort
        unread = [field for field, (name, _) in values.items() if not is_read(self._tokenizer, name)]
        return dict(values[field] for field in values if field not in unread), unread

    def _choices(
        self, prompt: Sequence[int], body: AnyBody, grammar: Grammar | None, default_tokens: int | None = None
    ) -> list[Request]:
        longest = self._engine.settings.context
        if len(prompt) >= longest:
            raise TooLongError(longest, len(prompt))
        most, room = body.max_new_tokens, longest - len(prompt)
        if most is None:
            configured = self._engine.drafter.binding.model.generation_config.max_new_tokens
            most = min(default_tokens or configured or room, room)
        elif most == NO_LIMIT:
            most = room
        if (body.min_tokens or 0) > most:
            raise ApiError(f"min_tokens is {body.min_tokens}, and {most} are written at most", param="min_tokens")
        for name in ("stop_token_ids", "logit_bias"):
            self._check_ids(getattr(body, name), name)
        request = Request(
            prompt=tuple(prompt),
            max_new_tokens=most,
            stop=body.stops,
            keep_stop=body.include_stop_str_in_output,
            end_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self._engine.eos_ids),
            min_new_tokens=body.min_tokens,
            skip_special_tokens=body.skip_special_tokens,
            top_logprobs=body.alternatives,
            grammar=grammar,
        )
        return [replace(request, sampling=_sampling(body, index)) for index in range(body.n)]

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        if any(token >= self._vocabulary for token in ids):
            raise ApiError(f"{param}: a token id is {max(ids)}; wanted ids below {self._vocabulary}", param=param)

    def _grammar(self, wanted: Constraint | None) -> Grammar | None:
        if wanted is None:
            return None
        kind, value = wanted.kind, wanted.value
        try:
            if kind == "call":
                kind, value = "grammar", call_grammar(self._engine.form, value, self._tokenizer)
            with self._lock:
                return self._grammars.compile(kind, value)
        except ConfigurationError as error:
            raise ApiError(f"{wanted.field}: {error}", param=wanted.field, code="invalid_schema") from error


def _sampling(body: AnyBody, choice: int) -> Sampling:
    """Several choices of one seed are several texts."""
    sampling = Sampling(**{field.name: getattr(body, field.name) for field in fields(Sampling)})
    top_k = None if body.top_k is None else max(body.top_k, 0)
    seed = None if body.seed in (None, -1) else body.seed + choice  # -1: any, as other servers have it
    return replace(sampling, top_k=top_k, seed=seed)


# --- calls that are forced --------------------------------------------------------------------------------------------


NAME = re.compile(r"[\w.-]+")
"""Functions that every form can name; others are called in JSON alone."""


def call_grammar(form: AnswerForm, tools: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> str:
    """Texts that call one of the tools, in Lark's notation: in the form's own words or as JSON alone."""
    functions, lark, own = [tool["function"] for tool in tools], LarkText(tokenizer), form.call_marks
    if own == AnswerForm.call_marks and '"parameters":' in str(tokenizer.chat_template):
        own = (own[0].replace("arguments", "parameters"), own[1])
    rules = []
    for number, function in enumerate(functions):
        marks = own if NAME.fullmatch(function["name"]) else AnswerForm.call_marks
        rules.append((_xml_rules if len(marks) == 4 else _json_rules)(lark, number, function, marks))
    return "\n".join(["start: " + " | ".join(f"call{n}" for n in range(len(rules))), *rules])


def _json_rules(lark: LarkText, number: int, function: dict[str, Any], marks: Sequence[str]) -> str:
    """The parameters are a schema of their own, so that its references point into it."""
    before, behind = marks
    schema = json.dumps(with_white_space(function.get("parameters") or {"type": "object"}))
    name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
    call = f"call{number}: {lark(before.replace('{}', name))} arguments{number} {lark(behind)}"
    return f"{call}\narguments{number}: %json {schema}"


def _xml_rules(lark: LarkText, number: int, function: dict[str, Any], marks: Sequence[str]) -> str:
    """Each parameter by itself, in their order; those that are not required may be left out."""
    begin, key, key_end, end = marks
    parameters = with_types(function.get("parameters") or {})
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ConfigurationError(f"properties of {function['name']} must be an object, and required an array")
    definitions = {k: parameters[k] for k in ("$defs",) if k in parameters}
    parts, rules = [], []
    for place, (name, schema) in enumerate(properties.items()):
        value = f"value{number}x{place}"
        parts.append(f"({lark(key.format(name))} {value})" + ("" if name in required else "?"))
        rules.append(f"{value}: {_value_rule(lark, schema, definitions, key_end)}")
    call = " ".join([lark(begin.format(function["name"])), *parts, lark(end)])
    return "\n".join([f"call{number}: {call}", *rules])


def _value_rule(lark: LarkText, schema: Any, definitions: dict[str, Any], end: str) -> str:
    """Strings stand for themselves, all else is JSON; `end` comes after either."""
    if not isinstance(schema, dict):
        schema = {}
    if options := options_of(schema):
        texts = [option if isinstance(option, str) else json.dumps(option) for option in options]
        return " | ".join(lark(text + end) for text in texts)
    kinds, union = schema.get("type"), next((u for u in UNIONS if isinstance(schema.get(u), list)), None)
    if isinstance(kinds, list) and "string" in kinds:
        return " | ".join(f"({_value_rule(lark, {**schema, 'type': kind}, definitions, end)})" for kind in kinds)
    if union is not None and kinds is None:
        return " | ".join(f"({_value_rule(lark, choice, definitions, end)})" for choice in schema[union])
    if kinds == "string":  # one expression with its end: matched as far as it goes, it would take that too
        text = lark.before_token(end)
        until = re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")
        return f"/[^<]{{0,{schema.get('maxLength', 1000)}}}{until}/ {lark(end[len(text) :])}"
    return f"%json {json.dumps(with_white_space({**schema, **definitions}))} {lark(end)}"
