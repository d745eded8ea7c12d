"""Prompts from nothing: a chat model asked with the opening of a user turn writes the user's words.

So it samples what it was taught to answer (Magpie, arXiv 2406.08464). Several system prompts, first words and
temperatures spread the samples. They only steer: a kept prompt is answered without that system prompt, as it is served.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ..errors import ConfigurationError, TrainingError
from ..texts.rows import Conversation
from .writing import append_lines, end_ids, generate_padded, read_whole_lines, until_end

SOURCE = "self"
DEFAULT_COUNT = 2000
FRUITLESS_BATCHES = 4
"""After so many batches without a new prompt the target has no more to say."""
FEWEST_AT_A_TIME = 8
MOST_ENDED = 0.75
MIN_P = 0.05
"""Draws from tokens at least so likely beside the likeliest: unlike top-p that needs no sorted vocabulary."""

SYSTEM_PROMPTS = (
    None,
    None,
    "You are a helpful assistant.",
    "You are an assistant for people who write Python programs.",
    "You are a patient tutor of mathematics who solves word problems step by step.",
    "You help people to write letters, stories and speeches.",
    "You answer questions on science, history and geography.",
    "You summarise, sort and extract what stands in texts.",
    "You give advice for work, health, travel and the household.",
    "You play the roles you are given.",
)
FIRST_WORDS = (
    *[""] * 5,
    "Write a",
    "Write a Python function",
    "Complete this Python function:\n\ndef",
    "How",
    "What",
    "Explain",
    "Can you",
)
USERS_WORDS = "\u2063user\u2063"
"""Stands where the user's words would: invisible separators, which no template trims."""


TEMPERATURES = (0.7, 0.85, 1.0)
"""Each batch is written at one of them."""


@dataclass(frozen=True)
class SelfPromptSettings:
    """How prompts are written."""

    count: int = DEFAULT_COUNT  # how many are wanted
    max_new_tokens: int = 72  # a prompt that is longer is left out
    batch_size: int = 64  # most prompts written at a time
    seed: int = 0  # of all draws


def self_prompt_count(source: str) -> int | None:
    """How many prompts `self` or `self:N` asks for; `None` if the source is another.

    Raises:
        ConfigurationError: what follows `self:` is no positive number.
    """
    name, _, count = source.partition(":")
    if name != SOURCE:
        return None
    if not count:
        return DEFAULT_COUNT
    if not count.isdigit() or int(count) < 1:
        raise ConfigurationError(f"{source!r} asks for no number of prompts; wanted self or self:N, N at least 1")
    return int(count)


def user_turn(tokenizer: PreTrainedTokenizerBase, system: str | None) -> tuple[str, str]:
    """What the template puts before and after a user's first words; one that knows no system prompt is asked without.

    Raises:
        TrainingError: there is no chat template, it refuses a user message, or does not show it.
    """
    if not tokenizer.chat_template:
        raise TrainingError(
            "the target's tokenizer has no chat template, so the target cannot be asked to write prompts; name a JSONL "
            'file of plain text instead of self: rows {"text": ...} or {"prompt": ...}'
        )
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": USERS_WORDS})
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template may raise anything
        if system is not None:
            return user_turn(tokenizer, None)
        raise TrainingError(f"the target's chat template refuses a lone user message ({error})") from error
    opening, found, closing = text.partition(USERS_WORDS)
    if not found:
        raise TrainingError("the target's chat template does not show the user's words, so it cannot write prompts")
    return opening, closing


def write_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    settings: SelfPromptSettings,
    *,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> list[Conversation]:
    """`settings.count` distinct prompts by the target itself, kept in `path` (JSONL) batch by batch.

    Called again it goes on where it was stopped; asked for more, it adds to those that are there.

    Args:
        on_batch: called with the number of prompts kept since the last call, and with 0 after every token.

    Raises:
        TrainingError: the tokenizer has no chat template, `path` was written with other settings, or the target writes
            nothing more that can be used.
    """
    writer = _PromptWriter(target, tokenizer, settings)
    header = {**asdict(settings), "temperatures": list(TEMPERATURES), "target": target.name_or_path}
    kept = read_whole_lines(path, {name: value for name, value in header.items() if name != "count"})
    prompt_filter = PromptFilter()
    for row in kept:
        prompt_filter.admits(row["prompt"])
    on_batch(min(len(kept), settings.count))
    batch, fruitless = (kept[-1]["batch"] + 1 if kept else 0), 0
    while len(kept) < settings.count:
        size = min(settings.batch_size, max(FEWEST_AT_A_TIME, 2 * (settings.count - len(kept))))
        texts = [text for text in writer.write(batch, size, on_batch) if prompt_filter.admits(text)][
            : settings.count - len(kept)
        ]
        rows = [{"id": f"{SOURCE}-{len(kept) + i}", "prompt": text, "batch": batch} for i, text in enumerate(texts)]
        append_lines(path, rows)
        kept += rows
        on_batch(len(rows))
        batch, fruitless = batch + 1, 0 if rows else fruitless + 1
        if fruitless == FRUITLESS_BATCHES:
            raise TrainingError(
                f"the target wrote {len(kept)} prompts that can be used, and in {fruitless} batches no more "
                f"({prompt_filter.summary()}); ask for fewer (self:{max(1, len(kept))}), or name files"
            )
    return [
        Conversation(id=row["id"], category=SOURCE, messages=({"role": "user", "content": row["prompt"]},))
        for row in kept[: settings.count]
    ]


class _PromptWriter:
    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: SelfPromptSettings):
        self.target: Any = target
        self.tokenizer, self.settings = tokenizer, settings
        self.openings = {system: user_turn(tokenizer, system)[0] for system in SYSTEM_PROMPTS}
        # A user's words end with the first token the template puts behind them, or with what ends any text.
        self.ends = {*self._ids(user_turn(tokenizer, None)[1])[:1], *end_ids(target)}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def write(self, batch: int, size: int, on_token: Callable[[int], None]) -> list[str]:
        """The user's words of a batch of `size`, at one temperature; those that did not end are left out."""
        chance = random.Random(f"prompts {self.settings.seed} {batch}")
        starts = [(chance.choice(SYSTEM_PROMPTS), chance.choice(FIRST_WORDS)) for _ in range(size)]
        prompts = [self._ids(self.openings[system] + words) for system, words in starts]
        longest = max(map(len, prompts))
        ends = torch.tensor(sorted(self.ends))

        def most_have_ended(written: Tensor, scores: Any, **others: Any) -> Tensor:
            """Few rows that still write would keep all waiting, and they mostly ramble."""
            on_token(0)
            ended = torch.isin(written[:, longest:], ends.to(written.device)).any(1)
            return ended | (ended.float().mean() >= MOST_ENDED)

        with torch.random.fork_rng():
            torch.manual_seed(chance.getrandbits(63))
            output = generate_padded(
                self.target,
                prompts,
                do_sample=True,
                temperature=chance.choice(TEMPERATURES),
                top_k=0,
                min_p=MIN_P,
                max_new_tokens=self.settings.max_new_tokens,
                eos_token_id=sorted(self.ends),
                stopping_criteria=StoppingCriteriaList([most_have_ended]),
            )
        written = [until_end(row, self.ends) for row in output[:, longest:].tolist()]
        return [
            (words + str(self.tokenizer.decode(row[:-1]))).strip()
            for (_, words), row in zip(starts, written, strict=True)
            if row[-1] in self.ends
        ]


# --- what is kept of them ---------------------------------------------------------------------------------------------


GRAM = 8
MOST_SEEN = 0.5
"""A text is like one before if so many of its runs of `GRAM` words were seen."""
FEWEST_WORDS = 3
MOST_REPETITION = 0.3
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+")
"""Scripts that put no spaces between words (Thai, Khmer, Japanese, Chinese) are counted by their letters."""


class PromptFilter:
    """Admits a text once. `left_out` counts the others by reason."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, ...]] = set()
        self.left_out: Counter[str] = Counter()

    def admits(self, text: str) -> bool:
        """Whether `text` is kept; if so it counts as seen."""
        words, own = words_of(text), grams(text)
        objections = {
            "too short": len(words) < FEWEST_WORDS,
            "repeating themselves": repetition(words) > MOST_REPETITION,
            "like one before": sum(gram in self._seen for gram in own) >= MOST_SEEN * len(own),
        }
        reason = next((reason for reason, holds in objections.items() if holds), None)
        if reason is None:
            self._seen |= own
        else:
            self.left_out[reason] += 1
        return reason is None

    def summary(self) -> str:
        """How many were left out, and why."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.most_common()) or "none left out"


def words_of(text: str) -> list[str]:
    """Words and numbers in lower case."""
    return _WORD.findall(text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """Runs of `GRAM` words; of a shorter text the whole."""
    words = words_of(text)
    return {tuple(words[i : i + GRAM]) for i in range(max(1, len(words) - GRAM + 1))}


def repetition(words: list[str]) -> float:
    """Share of the runs of three words that stood before in the same text."""
    runs = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
