"""Prompts with an id and a category, from files and Hub data sets that people measure drafters by.

Read as they are published: Spec-Bench and MT-bench (`question_id, category, turns`), HumanEval (`task_id, prompt`),
GSM8K (`question`), SPEED-Bench as its own preparation writes it, and any file that training takes (`conversations`).
Prompts stay where they are: records name them by id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..demo import PROMPTS
from ..errors import ConfigurationError, TrainingError
from .conversations import tables
from .rows import FIRST_MESSAGES, Message, conversation_from_row, up_to_question

MT_BENCH_ROWS = 80
"""MT-bench is the first so many rows of Spec-Bench."""

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
SPEED_BENCH_ROUTE = (
    "its texts may not be passed on, so they are put in on your machine: run NeMo-Skills' "
    "nemo_skills/dataset/speed-bench/prepare.py --output_dir DIR, then pass speed-bench=DIR/qualitative.jsonl"
)


@dataclass(frozen=True)
class Prompt:
    """One thing to answer."""

    id: str  # `suite/id`, unique within a run
    suite: str  # the data set's name
    category: str  # as the row says, else the suite
    messages: tuple[Message, ...]  # up to an early question of the user's


def embedded_prompts() -> list[Prompt]:
    """The package's own, two kinds: bookings and sums."""
    return read_prompts([f"embedded={PROMPTS}"])


def read_prompts(sources: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """Prompts of all sources, those of one source together.

    Args:
        sources: `[NAME=]SOURCE`, a file, a folder or a Hub data set as training takes them; its test split, if it has
            one. The name is the suite; `mt-bench` takes the first 80 rows. Without one, the file's or data set's name.
        limit: most prompts of each source, taken evenly over its rows so that every category is met.
    """
    prompts = [prompt for source in sources for prompt in _read_source(source, limit)]
    twice = [name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise ConfigurationError(
            f"{len(twice)} prompt ids stand more than once ({', '.join(twice[:5])}); records tell prompts by their "
            "ids: give every row its own, or name two files apart (a=FILE b=FILE)"
        )
    return prompts


def _read_source(source: str, limit: int | None) -> list[Prompt]:
    suite, separator, place = source.partition("=")
    if not separator:
        suite, place = "", source
    found = tables(place, ("test", "validation", "train"))
    rows = [(row, suite or name, where, str(number)) for _, name, each in found for number, where, row in each]
    rows = rows[: MT_BENCH_ROWS if suite == "mt-bench" else None]
    asked = min(limit or len(rows), len(rows))
    prompts = [_prompt(*rows[index * len(rows) // asked]) for index in range(asked)]
    if not prompts:
        raise TrainingError(f"the prompts {place!r} are empty; wanted one JSON object per line")
    return prompts


def _prompt(row: Any, suite: str, where: str, number: str) -> Prompt:
    found = conversation_from_row(row, where=where, fallback_id=number, category=suite)
    chat = tuple(up_to_question(found.messages, FIRST_MESSAGES) or up_to_question(found.messages))
    if not chat or not all(message["content"].strip() for message in chat if message["role"] == "user"):
        raise TrainingError(
            f'{where}: no prompt; wanted "turns" with the user\'s words, or "messages" with one of the user\'s, or '
            '"prompt" or "question"'
        )
    if any(PLACEHOLDER in str(message["content"]) for message in found.messages):
        raise TrainingError(f"{where} is one of SPEED-Bench's placeholders: {SPEED_BENCH_ROUTE}")
    return Prompt(f"{suite}/{found.id or number}", suite, found.category, chat)
