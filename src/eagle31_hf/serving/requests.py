"""What a client asks the engine for, and what it hears of it. No torch, no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FinishReason = str
"""`"stop"` (end of sequence or a stop string), `"length"`, `"cancelled"` or `"error"`."""


@dataclass(frozen=True)
class Sampling:
    """What a request says of how tokens are chosen; `None`: as the target's generation config has it.

    Attributes:
        temperature: 0 takes the likeliest token, any other draws.
        seed: of this text's random numbers: the same seed writes the same text, up to rounding. `None`: any.
        top_k: 0 for all.
        logit_bias: added to the scores of these ids.
        presence_penalty, frequency_penalty: taken off the scores of tokens written so far, once or per occurrence.
        repetition_penalty: divides (multiplies, if negative) the scores of all tokens seen, prompt included.
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
class TextRequest:
    """One text to write.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to write.
        stop: strings that end the text and are cut off it.
        keep_stop: leave the string or token that ended the text in it.
        stop_token_ids: tokens that end the text, beside the target's own.
        ignore_eos: write on after an end-of-sequence token.
        min_new_tokens: so many are written before anything ends the text; `None`: as the target's generation config
            has it.
        skip_special_tokens: leave special tokens out of the text.
        marks: special tokens that are shown all the same: the answer is taken apart by them.
        bad_words: token sequences that are not written.
        allowed_tokens: if any, no others are written.
        top_logprobs: how many alternatives to tell of each token, 0 for its own log-probability only; `None`: nothing.
        grammar: a constraint on what may be written (`serving.grammar`), `None` for none.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    marks: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_tokens: tuple[int, ...] = ()
    top_logprobs: int | None = None
    grammar: Any = None

    @property
    def longest(self) -> int:
        """Tokens the text may grow to, prompt included."""
        return len(self.prompt) + self.max_new_tokens

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end the text, of a target whose own are `eos_ids`."""
        return self.stop_token_ids | (frozenset() if self.ignore_eos else eos_ids)


@dataclass(frozen=True)
class TokenLogprob:
    """A written token, its log-probability under the target (natural logarithm, before temperature), and others."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TextUsage:
    """What a text took.

    Attributes:
        prompt_tokens, cached_tokens: of the prompt, and how many of them needed not be read again.
        completion_tokens: written, an end-of-sequence token included.
        drafted, accepted: draft tokens verified for this text, and those that the target agreed with.
        rounds: verification passes this text took part in.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class TextEvent:
    """What a round brought for one text.

    Attributes:
        text: new characters; what may turn out to be the beginning of a stop string is held back.
        tokens: new token ids; the last of a round is the target's own, those before it were drafted and accepted.
        logprobs: of the tokens, if asked for.
        finish: why the text has ended, `None` if it goes on.
        error: what went wrong, with `finish` `"error"`.
        usage: so far.
    """

    text: str
    tokens: tuple[int, ...]
    usage: TextUsage
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str = ""


OnEvent = Callable[[TextEvent], None]
