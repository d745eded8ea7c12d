"""From what a client calls for to texts the engine writes: prompts by the template, sampling, grammars."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigurationError
from .answer_parts import call_grammar
from .api_errors import ApiError
from .call_options import Constraint
from .constraints import spellings
from .engine import Engine, TooLongError
from .grammar import Grammar, GrammarCompiler
from .prompts import encode_chat, why_not_told
from .requests import Sampling, TextRequest
from .wire import DEFAULT_COMPLETION_TOKENS, CallOptions, ChatCall, CompletionCall


class CallTranslator:
    """Translates for one engine. May be used from several threads."""

    def __init__(self, engine: Engine):
        self._engine, self._tokenizer = engine, engine.tokenizer
        vocabulary = engine.drafter.binding.text_config.vocab_size
        self._grammars = GrammarCompiler(engine.tokenizer, vocabulary, engine.eos_ids)
        self._lock = threading.Lock()
        self._usual = engine.drafter.binding.model.generation_config

    def of_chat(self, call: ChatCall) -> list[TextRequest]:
        """The texts of a chat, one per choice.

        Raises:
            ApiError: the template, a tool or a schema cannot be followed.
            TooLongError: the prompt leaves no room for an answer.
        """
        try:
            prompt = encode_chat(
                self._tokenizer, call.messages, tools=call.tools, **self._template_options(call.options)
            )
        except ConfigurationError as error:
            raise ApiError(str(error), param="tools" if "tools" in str(error) else "messages") from error
        return self._choices(prompt, call.options, call.top_logprobs, self._grammar(call.options.constraint))

    def _template_options(self, options: CallOptions) -> dict[str, Any]:
        """What the chat template is told beside messages and tools."""
        effort = options.reasoning_effort
        told = options.chat_template_kwargs | ({} if effort is None else {"reasoning_effort": effort})
        for name in told:
            if why := why_not_told(self._tokenizer, name):
                param = name if name == "reasoning_effort" else "chat_template_kwargs"
                raise ApiError(f"{param}: {why}", param=param, code="unsupported_parameter")
        return told

    def of_completion(self, call: CompletionCall) -> list[TextRequest]:
        """The texts of a completion: of each prompt its choices.

        Raises:
            ApiError: a token id is none of the target's.
            TooLongError: a prompt leaves no room for an answer.
        """
        grammar, special = self._grammar(call.options.constraint), call.options.add_special_tokens
        texts = []
        for prompt in call.prompts:
            ids: list[int] = prompt if isinstance(prompt, list) else self._encoded(prompt, special)
            self._check_ids(ids, "prompt")
            texts += self._choices(ids, call.options, call.top_logprobs, grammar, DEFAULT_COMPLETION_TOKENS)
        return texts

    def _encoded(self, text: str, special: bool) -> list[int]:
        return self._tokenizer(text, add_special_tokens=special)["input_ids"]

    def _choices(
        self,
        prompt: Sequence[int],
        options: CallOptions,
        top_logprobs: int | None,
        grammar: Grammar | None,
        usual_tokens: int | None = None,
    ) -> list[TextRequest]:
        longest = self._engine.settings.context
        if len(prompt) >= longest:
            raise TooLongError(
                f"the prompt has {len(prompt)} tokens, and prompt and answer together may have {longest}", longest
            )
        room = longest - len(prompt)
        most = options.max_new_tokens or min(usual_tokens or room, room)
        if options.min_tokens > most:
            raise ApiError(f"min_tokens is {options.min_tokens}, and {most} are written at most", param="min_tokens")
        self._check_ids(options.stop_token_ids, "stop_token_ids")
        self._check_ids(options.allowed_token_ids or (), "allowed_token_ids")
        request = TextRequest(
            prompt=tuple(prompt),
            max_new_tokens=most,
            sampling=self._sampling(options),
            stop=options.stop,
            keep_stop=options.include_stop_str_in_output,
            stop_token_ids=frozenset(options.stop_token_ids),
            ignore_eos=options.ignore_eos,
            min_new_tokens=options.min_tokens,
            skip_special_tokens=options.skip_special_tokens,
            bad_words=tuple(spellings(self._tokenizer, options.bad_words)),
            allowed_tokens=tuple(options.allowed_token_ids or ()),
            top_logprobs=top_logprobs,
            grammar=grammar,
        )
        return [replace(request, sampling=_for_choice(request.sampling, index)) for index in range(options.choices)]

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        vocabulary = self._engine.drafter.binding.text_config.vocab_size
        if any(token >= vocabulary for token in ids):
            raise ApiError(f"{param}: a token id is {max(ids)}; wanted ids below {vocabulary}", param=param)

    def _sampling(self, options: CallOptions) -> Sampling:
        """What was asked for; what was not is as `generate` of the target has it."""
        usual = self._usual
        own = usual.temperature if usual.do_sample else 0.0
        temperature = (1.0 if own is None else own) if options.temperature is None else options.temperature
        samples = usual.do_sample and options.temperature is None
        bias = options.logit_bias or {}
        vocabulary = self._engine.drafter.binding.text_config.vocab_size
        if any(not 0 <= token < vocabulary for token in bias):
            raise ApiError(f"logit_bias names ids that are not below {vocabulary}", param="logit_bias")
        return Sampling(
            temperature=temperature,
            top_p=_first(options.top_p, usual.top_p if samples else None, 1.0),
            top_k=_first(None if options.top_k is None else max(options.top_k, 0), usual.top_k if samples else None, 0),
            min_p=_first(options.min_p, usual.min_p if samples else None, 0.0),
            seed=None if options.seed == -1 else options.seed,  # any, as other servers have it
            repetition_penalty=_first(options.repetition_penalty, usual.repetition_penalty, 1.0),
            presence_penalty=options.presence_penalty or 0.0,
            frequency_penalty=options.frequency_penalty or 0.0,
            logit_bias=bias,
        )

    def _grammar(self, wanted: Constraint | None) -> Grammar | None:
        if wanted is None:
            return None
        kind, value = wanted.kind, wanted.value
        if kind == "call":
            kind, value = "lark", call_grammar(value, str(self._tokenizer.chat_template))
        try:
            with self._lock:
                return self._grammars.compile(kind, value)
        except ConfigurationError as error:
            raise ApiError(f"{wanted.field}: {error}", param=wanted.field, code="invalid_schema") from error


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _for_choice(sampling: Sampling, index: int) -> Sampling:
    """Several choices of one seed are several texts."""
    return sampling if sampling.seed is None or index == 0 else replace(sampling, seed=sampling.seed + index)
