"""Requests, and texts as they are written: tokens as whole characters, stop strings. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import regex
from transformers import PreTrainedTokenizerBase

from ..texts.decoder import IncrementalDecoder


@dataclass(frozen=True)
class Sampling:
    """What a request says of how tokens are chosen; `None`: as the target's generation config has it.

    Attributes:
        temperature: 0 takes the likeliest token, any other draws.
        seed: the same seed writes the same text, up to rounding. `None`: any.
        top_k: 0 for all.
        logit_bias: added to the scores of these ids.
        presence_penalty, frequency_penalty: taken off the scores of tokens written so far, once or per occurrence.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One text to write.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to write; with 0 the prompt is read and no more.
        stop: strings that end the text and are cut off it.
        keep_stop: leave the string or token that ended the text in it.
        end_ids: tokens that end the text; empty to write on.
        min_new_tokens: written before anything ends the text; `None`: as the target's generation config has it.
        marks: special tokens that are shown even if others are skipped: the answer is taken apart by them.
        top_logprobs: alternatives to tell of each token, 0 for its own log-probability only; `None`: nothing.
        prompt_logprobs: the same of the prompt's tokens.
        grammar: what may be written (`grammar.Grammar`).
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    end_ids: frozenset[int] = frozenset()
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    marks: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Any = None

    @property
    def longest(self) -> int:
        """Tokens the text may grow to, prompt included."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability under the target (natural logarithm, before temperature), and others."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Usage:
    """What a text has taken so far.

    Attributes:
        cached_tokens: of the prompt, those that did not have to be read again.
        completion_tokens: written, an end-of-sequence token included.
        drafted, accepted: draft tokens verified for this text, and those written beside the target's own.
        rounds: verification passes this text took part in.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @classmethod
    def of_answer(cls, usages: Sequence[Usage]) -> Usage:
        """Of all texts of one answer: a prompt that several were written to counts once."""
        prompt, cached = max(usage.prompt_tokens for usage in usages), max(usage.cached_tokens for usage in usages)
        written = ("completion_tokens", "drafted", "accepted", "rounds")
        return cls(prompt, cached, *(sum(getattr(usage, name) for usage in usages) for name in written))


@dataclass(frozen=True)
class Event:
    """What a round brought for one text.

    Attributes:
        text: new characters; what may turn out to be the beginning of a stop string is held back.
        tokens: new ids; the last of a round is the target's own, those before it were drafted and accepted.
        finish: `"stop"` (end of sequence or a stop string), `"length"`, `"cancelled"`, `"error"` or `"shutdown"`;
            `None`: it goes on.
        error: what went wrong, with `finish` `"error"` or `"shutdown"`.
        prompt_logprobs: of the prompt's tokens but for its first, if asked for; told once, before any token.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    error: str = ""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @classmethod
    def failure(cls, error: Exception) -> Event:
        """The last of a text that an error ended."""
        return cls(finish="error", error=f"{type(error).__name__}: {error}")


OnEvent = Callable[[Event], None]


# --- tokens to text ---------------------------------------------------------------------------------------------------


class StopScanner:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    Args:
        keeps: the stop string itself is let through, too.
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False):
        shortest_first = map(regex.escape, sorted(stops, key=len))
        self._stops = regex.compile("|".join(shortest_first)) if stops else None
        self._keeps, self._held, self.found = keeps, "", False

    def feed(self, text: str, *, is_last: bool = False) -> str:
        """What can be shown now."""
        if self.found or self._stops is None:
            return "" if self.found else text
        self._held += text
        match = self._stops.search(self._held, partial=not is_last)
        end = len(self._held) if match is None else match.start()
        if match is not None and not match.partial:
            self.found = True
            end = match.end() if self._keeps else end
        shown, self._held = self._held[:end], self._held[end:]
        return shown


class Writer:
    """One text as it grows: which of a round's tokens belong to it, what can be shown, and why it ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, request: Request):
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._request = request
        self._decoder = IncrementalDecoder(
            tokenizer, prompt=request.prompt, skip_special_tokens=request.skip_special_tokens, marks=request.marks
        )
        self._scanner = StopScanner(request.stop, keeps=request.keep_stop)

    @property
    def remaining(self) -> int:
        """Tokens it may still get."""
        return 0 if self.finish else self._request.max_new_tokens - len(self.tokens)

    def append(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Add tokens up to where the text ends. Returns how many were added, and the text that can be shown."""
        shown, before = "", len(self.tokens)
        for token in tokens:
            if self.finish is not None:
                break
            shown += self._append(token)
        if self.finish is not None and not self._scanner.found:
            shown += self._scan(self._decoder.flush(), is_last=True)
            if self._scanner.found:
                self.finish = "stop"
        return len(self.tokens) - before, shown

    def _append(self, token: int) -> str:
        self.tokens.append(token)
        ends = token in self._request.end_ids and self._may_end
        shown = "" if ends and not self._request.keep_stop else self._scan(self._decoder.feed(token))
        if ends or self._scanner.found:
            self.finish = "stop"
        elif len(self.tokens) >= self._request.max_new_tokens:
            self.finish = "length"
        return shown

    def _scan(self, text: str, *, is_last: bool = False) -> str:
        """Text that may be shown; before the text may end, no stop string is looked for."""
        return self._scanner.feed(text, is_last=is_last) if self._may_end else text

    @property
    def _may_end(self) -> bool:
        return len(self.tokens) > (self._request.min_new_tokens or 0)
