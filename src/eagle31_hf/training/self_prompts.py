"""Prompts from nothing: a chat model asked with the opening of a user turn writes the user's words.

So it samples what it was taught to answer (Magpie, arXiv 2406.08464). Several system prompts, first words and
temperatures spread the samples. They only steer: a kept prompt is answered without that system prompt, as it is served.
"""

from __future__ import annotations

import random
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import ConfigurationError, TrainingError
from ..sampling.logits_processing import end_ids
from ..texts.rows import Conversation
from .writing import KeptLines, OnProgress, place_of, write_batch

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
MOST_TOKENS = 72
"""A prompt that is longer is left out."""


def self_prompt_count(source: str) -> int | None:
    """How many prompts `self` or `self:N` asks for; `None` if the source is another."""
    name, _, count = source.partition(":")
    if name != SOURCE:
        return None
    if not count:
        return DEFAULT_COUNT
    if not count.isdigit() or int(count) < 1:
        raise ConfigurationError(f"{source!r} asks for no number of prompts; wanted self or self:N, N at least 1")
    return int(count)


def user_turn(tokenizer: PreTrainedTokenizerBase, system: str | None) -> tuple[str, str]:
    """What the template puts before and after a user's first words, without a system prompt where it refuses one."""
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
    count: int,
    *,
    write_rows: int = 64,
    seed: int = 0,
    on_progress: OnProgress = lambda ended, underway: None,
) -> list[Conversation]:
    """`count` distinct prompts by the target itself, kept in `path` (JSONL) batch by batch.

    Called again it goes on where it was stopped; asked for more, it adds to those that are there.

    Args:
        write_rows: most prompts written at a time.
        seed: of all draws.
    """
    lines = KeptLines(path, target=place_of(target), max_new_tokens=MOST_TOKENS, seed=seed, temperatures=TEMPERATURES)
    kept = lines.rows
    seen = {row["prompt"] for row in kept}
    on_progress(min(len(kept), count), 0.0)
    batch, fruitless = (kept[-1]["batch"] + 1 if kept else 0), 0
    while (missing := count - len(kept)) > 0:
        size = min(write_rows, max(FEWEST_AT_A_TIME, 2 * missing))
        chance = random.Random(f"prompts {seed} {batch}")
        texts = _write_batch_of_prompts(target, tokenizer, size, chance, on_progress)
        admitted = [text for text in dict.fromkeys(texts) if text and text not in seen][:missing]
        seen |= set(admitted)
        lines.add(*({"prompt": text, "batch": batch} for text in admitted))
        on_progress(len(admitted), 0.0)
        batch, fruitless = batch + 1, 0 if admitted else fruitless + 1
        if fruitless == FRUITLESS_BATCHES:
            raise TrainingError(
                f"{len(kept)} of the target's prompts can be used, and the last {fruitless} batches brought no other; "
                f"ask for fewer (self:{max(1, len(kept))}), or name files"
            )
    return [
        Conversation(f"{SOURCE}-{number}", category=SOURCE, messages=({"role": "user", "content": row["prompt"]},))
        for number, row in enumerate(kept[:count])
    ]


def _write_batch_of_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    size: int,
    chance: random.Random,
    on_progress: OnProgress,
) -> list[str]:
    """The user's words, all at one temperature; those that did not end are left out."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    openings = {system: user_turn(tokenizer, system)[0] for system in SYSTEM_PROMPTS}
    # A user's words end with the first token the template puts behind them, or with what ends any text.
    ends = {*ids(user_turn(tokenizer, None)[1])[:1], *end_ids(target)}
    starts = [(chance.choice(SYSTEM_PROMPTS), chance.choice(FIRST_WORDS)) for _ in range(size)]
    answers = write_batch(
        target,
        [ids(openings[system] + words) for system, words in starts],
        seed=chance.getrandbits(63),
        max_new_tokens=MOST_TOKENS,
        on_token=lambda written: on_progress(0, written / 2),  # of the texts about half will be kept
        ends=ends,
        enough=MOST_ENDED,
        do_sample=True,
        temperature=chance.choice(TEMPERATURES),
        top_k=0,
        min_p=MIN_P,
    )
    return [
        (words + str(tokenizer.decode(answer[:-1]))).strip()
        for (_, words), answer in zip(starts, answers, strict=True)
        if answer[-1] in ends
    ]
