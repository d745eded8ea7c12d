"""From what a client calls for to texts the engine writes: prompts by the template, sampling, grammars."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigurationError
from .answer_parts import OPEN_THOUGHT, call_grammar
from .api_errors import ApiError
from .engine import Engine, TooLongError
from .grammar import Grammar, GrammarCompiler
from .prompts import encode_chat
from .requests import Sampling, TextRequest
from .wire import DEFAULT_COMPLETION_TOKENS, CallOptions, ChatCall, CompletionCall


@dataclass(frozen=True)
class ChatTexts:
    """A chat's choices to be written.

    Attributes:
        requests: one per choice.
        thinks: the prompt ends inside a thought.
        tool_names: what may be called.
        tells_logprobs: whether the client wants them.
    """

    requests: list[TextRequest]
    thinks: bool
    tool_names: list[str]
    tells_logprobs: bool


class CallTranslator:
    """Translates for one engine. May be used from several threads."""

    def __init__(self, engine: Engine):
        self._engine, self._tokenizer = engine, engine.tokenizer
        vocabulary = engine.drafter.require_binding().text_config.vocab_size
        self._grammars = GrammarCompiler(engine.tokenizer, vocabulary, engine.eos_ids)
        self._lock = threading.Lock()
        self._usual = engine.drafter.require_binding().model.generation_config

    def of_chat(self, call: ChatCall) -> ChatTexts:
        """The texts of a chat.

        Raises:
            ApiError: the template, a tool or a schema cannot be followed.
            TooLongError: the prompt leaves no room for an answer.
        """
        names = [tool["function"]["name"] for tool in call.tools]
        try:
            prompt = encode_chat(
                self._tokenizer, call.messages, tools=call.tools, **call.options.extras.chat_template_kwargs
            )
        except ConfigurationError as error:
            raise ApiError(str(error), param="tools" if "tools" in str(error) else "messages") from error
        end = str(self._tokenizer.decode(prompt[-8:])).rstrip()
        requests = self._choices(prompt, call.options, call.top_logprobs, self._grammar(call))
        return ChatTexts(requests, end.endswith(OPEN_THOUGHT), names, call.top_logprobs is not None)

    def of_completion(self, call: CompletionCall) -> list[TextRequest]:
        """The texts of a completion: of each prompt its choices.

        Raises:
            ApiError: a token id is none of the target's.
            TooLongError: a prompt leaves no room for an answer.
        """
        vocabulary = self._engine.drafter.require_binding().text_config.vocab_size
        texts = []
        for prompt in call.prompts:
            ids = self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            if any(token >= vocabulary for token in ids):
                raise ApiError(f"a token id is {max(ids)}; wanted ids below {vocabulary}", param="prompt")
            texts += self._choices(ids, call.options, call.top_logprobs, None, DEFAULT_COMPLETION_TOKENS)
        return texts

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
        sampling = self._sampling(options)
        return [
            TextRequest(
                prompt=tuple(prompt),
                max_new_tokens=options.max_new_tokens or min(usual_tokens or room, room),
                sampling=_for_choice(sampling, index),
                stop=options.stop,
                ignore_eos=options.extras.ignore_eos,
                top_logprobs=top_logprobs,
                grammar=grammar,
            )
            for index in range(options.choices)
        ]

    def _sampling(self, options: CallOptions) -> Sampling:
        """What was asked for; what was not is as `generate` of the target has it."""
        numbers, extras, usual = options.numbers, options.extras, self._usual
        own = usual.temperature if usual.do_sample else 0.0
        temperature = (1.0 if own is None else own) if numbers.temperature is None else numbers.temperature
        samples = usual.do_sample and numbers.temperature is None
        bias = numbers.logit_bias or {}
        vocabulary = self._engine.drafter.require_binding().text_config.vocab_size
        if any(not 0 <= token < vocabulary for token in bias):
            raise ApiError(f"logit_bias names ids that are not below {vocabulary}", param="logit_bias")
        return Sampling(
            temperature=temperature,
            top_p=_first(numbers.top_p, usual.top_p if samples else None, 1.0),
            top_k=_first(extras.top_k, usual.top_k if samples else None, 0),
            min_p=_first(extras.min_p, usual.min_p if samples else None, 0.0),
            seed=numbers.seed,
            repetition_penalty=_first(extras.repetition_penalty, usual.repetition_penalty, 1.0),
            presence_penalty=numbers.presence_penalty or 0.0,
            frequency_penalty=numbers.frequency_penalty or 0.0,
            logit_bias=bias,
        )

    def _grammar(self, call: ChatCall) -> Grammar | None:
        if not call.forced_tools and call.json_schema is None:
            return None
        param = "tool_choice" if call.forced_tools else "response_format"
        try:
            with self._lock:
                if call.forced_tools:
                    template = str(self._tokenizer.chat_template)
                    return self._grammars.lark(call_grammar(call.tools, call.forced_tools, template))
                return self._grammars.json_schema(call.json_schema)
        except ConfigurationError as error:
            raise ApiError(str(error), param=param, code="invalid_schema") from error


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _for_choice(sampling: Sampling, index: int) -> Sampling:
    """Several choices of one seed are several texts."""
    return sampling if sampling.seed is None or index == 0 else replace(sampling, seed=sampling.seed + index)
