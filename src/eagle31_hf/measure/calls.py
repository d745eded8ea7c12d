"""What `eagle31 bench run` writes down: one record per `generate` call. Plain numbers, no torch."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .exactness import Kind, Verdict

if TYPE_CHECKING:
    from ..stats import SpeculationStats

PLAIN, PLAIN_COMPILED, LOOKUP = "plain generate", "plain compiled", "own lookup"
"""The methods that draft nothing, by which others are measured."""

SAME, TIE, DIFFERENT, SAMPLED, REFERENCE = Kind.SAME, Kind.TIE, Kind.DIFFERENT, "sampled", Kind.REFERENCE
"""What an answer is against plain decoding's: equal; different only where the target's own rounding decides; different
beyond that; drawn, so that only the distribution is comparable; plain decoding's own."""


@dataclass(frozen=True)
class Drafting:
    """Counts of one call, as `SpeculationStats` has them, and host seconds of its parts."""

    rounds: int
    drafted: int
    accepted: int
    drafted_at: list[int]
    reached_at: list[int]
    accepted_at: list[int]
    prefill_s: float
    draft_s: float
    verify_s: float
    other_s: float
    passes: int = 0

    @classmethod
    def of(cls, stats: SpeculationStats | None) -> Drafting | None:
        """A copy of what the call's statistics say; `None` where nothing was drafted for it."""
        if stats is None:
            return None
        return cls(**copy.deepcopy({each.name: getattr(stats, each.name) for each in fields(cls)}))


def digest_of(tokens: Sequence[int]) -> str:
    """What stands for an answer in a record, which holds no text."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def served_by(stats: SpeculationStats | None) -> str:
    """The loop that wrote the text, and why where it was not the first choice; empty where ours was not asked."""
    if stats is None or not stats.reason:
        return "" if stats is None else stats.loop
    return f"{stats.loop}: {stats.reason}"


@dataclass(frozen=True)
class TextPart:
    """Rounds and the tokens they wrote, in one part of the answers."""

    rounds: int = 0
    tokens: int = 0

    def __add__(self, other: TextPart) -> TextPart:
        return TextPart(self.rounds + other.rounds, self.tokens + other.tokens)

    @property
    def acceptance_length(self) -> float | None:
        return self.tokens / self.rounds if self.rounds else None


@dataclass(frozen=True)
class CallRecord:
    """One `generate` call of one method.

    Attributes:
        turn: which prompts, in which repeat and how: all methods of a turn wrote the same prompts one after the other.
        method: its name.
        temperature, seed, batch_size, repeat: how it was called.
        prompts, suite, category: ids of the rows' prompts; "mixed" where rows are not of one kind.
        prompt_tokens, new_tokens: over all rows, padding and what follows an end not counted.
        seconds: of the whole call; `first_token_s` until the first token was handed out.
        window_s: seconds of each `WINDOW_TOKENS` tokens after the first one (one row only).
        blocks: tokens each round wrote, the first token left out (one row only).
        thinking, answering: rounds inside and outside `<think>` (one row only).
        drafting: of our drafter; `None` for methods without it.
        target_passes: forwards of the whole target where they could be counted, the one for the prompt included.
        peak_bytes, energy_j: most memory and the energy of the call, where the machine tells.
        bare_round_s: seconds of the bare forwards of one of its rounds, timed beside it where that was asked for.
        served_by: the loop that ran and why, if it was not the one asked for.
        texts: a digest of each row's tokens.
        verdicts: one per row.
    """

    turn: str
    method: str
    temperature: float
    seed: int
    batch_size: int
    repeat: int
    prompts: list[str]
    suite: str
    category: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    first_token_s: float
    texts: list[str]
    window_s: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    thinking: TextPart = TextPart()
    answering: TextPart = TextPart()
    drafting: Drafting | None = None
    target_passes: int | None = None
    peak_bytes: int | None = None
    energy_j: float | None = None
    bare_round_s: float | None = None
    served_by: str = ""
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def tok_per_s(self) -> float:
        return self.new_tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, seconds to a hundredth of a millisecond."""
        row = _rounded(asdict(self))
        plain = asdict(Verdict(""))  # type: ignore[arg-type]
        row["verdicts"] = [{k: v for k, v in verdict.items() if v != plain[k]} for verdict in row["verdicts"]]
        return {"kind": "call", **row}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> CallRecord:
        """The record `to_dict` made; fields of later versions are left out."""
        known = {f.name: row[f.name] for f in fields(cls) if f.name in row}
        known["verdicts"] = [Verdict(**verdict) for verdict in row.get("verdicts", [])]
        for part in ("thinking", "answering"):
            known[part] = TextPart(**row.get(part, {}))
        known["drafting"] = None if row.get("drafting") is None else Drafting(**row["drafting"])
        return cls(**known)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5) if abs(value) >= 1e-3 else float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


# --- inside and outside <think> ---------------------------------------------------------------------------------------

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ThinkMarks:
    """Ids of the two marks. Drafters trained on answers alone are often accepted less between them."""

    open: int
    close: int

    @classmethod
    def of(cls, tokenizer: Any) -> ThinkMarks | None:
        """A tokenizer's, if both are tokens of their own; `None` for those that only spell them."""
        ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in (OPEN, CLOSE)]
        return cls(ids[0][0], ids[1][0]) if all(len(mark) == 1 for mark in ids) else None


def split_rounds(
    blocks: Sequence[int], answer: Sequence[int], prompt: Sequence[int], marks: ThinkMarks | None
) -> tuple[TextPart, TextPart]:
    """Rounds inside and outside thinking, told by where a round's first token stands.

    Args:
        blocks: tokens of each round; the answer's first token came before them.
        answer, prompt: ids; a template may have opened the thinking.
        marks: `None`: everything is outside.
    """
    inside = _inside(answer, prompt, marks)
    parts, place = {True: TextPart(), False: TextPart()}, 1
    for block in blocks:
        where = inside[min(place, len(inside) - 1)] if inside else False
        parts[where] += TextPart(1, block)
        place += block
    return parts[True], parts[False]


def _inside(answer: Sequence[int], prompt: Sequence[int], marks: ThinkMarks | None) -> list[bool]:
    """For each token of the answer whether it is thought; the closing mark still is."""
    if marks is None:
        return [False] * len(answer)
    inside, thinks = [], False
    for token in (*prompt, *answer):
        thinks = thinks or token == marks.open
        inside.append(thinks)
        thinks = thinks and token != marks.close
    return inside[len(prompt) :]
