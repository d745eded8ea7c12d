"""Prompts with an id and a category, from files and Hub data sets that people measure drafters by.

Read as they are published: Spec-Bench and MT-bench (`question_id, category, turns`), HumanEval (`task_id, prompt`),
GSM8K (`question`), SPEED-Bench as its own preparation writes it, and any file that training takes (`conversations`).
Prompts stay where they are: records name them by id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..demo import CONVERSATIONS, Messages
from ..errors import ConfigurationError, TrainingError, first_line
from .conversations import file_rows
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
    messages: tuple[Message, ...]  # up to the user's first unanswered one

    @property
    def opening(self) -> Messages:
        """The messages up to an early question."""
        return up_to_question(self.messages, FIRST_MESSAGES) or list(self.messages)


def embedded_prompts() -> list[Prompt]:
    """The package's own, two kinds: bookings and sums."""
    prompts = []
    for number, chat in enumerate(CONVERSATIONS, 1):
        kind = "sums" if any(words in chat[-1]["content"] for words in ("How much", "How many")) else "bookings"
        prompts.append(Prompt(f"embedded/{number}", "embedded", kind, tuple(chat)))
    return prompts


def read_prompts(sources: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """Prompts of all sources, those of one source together.

    Args:
        sources: `[NAME=]FILE` or `[NAME=]ORG/DATASET[:CONFIG[:SPLIT]]`. The name is the suite; `mt-bench` takes the
            first 80 rows. Without one, the file's or data set's name.
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
    name, separator, place = source.partition("=")
    if not separator:
        name, place = "", source
    if Path(place).exists() or place.endswith((".jsonl", ".json")):
        rows, suite = _file_rows(Path(place)), name or Path(place).stem
    elif place.count("/") == 1:
        rows, suite = list(_hub_rows(place)), name or place.partition(":")[0]
    else:
        raise ConfigurationError(f"the prompts {place!r} are neither a file nor a Hub data set (ORG/NAME)")
    if name == "mt-bench":
        rows = rows[:MT_BENCH_ROWS]
    if not rows:
        raise ConfigurationError(f"the prompts {place!r} are empty; wanted one JSON object per line")
    return [_prompt(row, suite, where) for where, row in evenly(rows, limit)]


def evenly(rows: Sequence[Any], limit: int | None) -> list[Any]:
    """At most `limit` of them, evenly spaced, the first among them."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[index * len(rows) // limit] for index in range(limit)]


def _file_rows(path: Path) -> list[tuple[str, Any]]:
    try:
        return [(where, row) for _, where, row in file_rows(path)]
    except OSError as error:
        raise ConfigurationError(
            f"the prompts {str(path)!r} cannot be read ({error.strerror or error}); pass a JSON-lines file or a Hub "
            "data set (ORG/NAME)"
        ) from error
    except TrainingError as error:
        raise ConfigurationError(str(error)) from error


def _hub_rows(place: str) -> Iterable[tuple[str, dict[str, Any]]]:
    repository, config, split = (*place.split(":"), "", "")[:3]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigurationError(f"{place!r} is on the Hub, which needs: pip install datasets") from error
    try:
        found: Any = load_dataset(repository, config or None)
    except Exception as error:  # the Hub, the network, a loading script that is refused
        raise ConfigurationError(
            f"the data set {repository!r} was not to be had ({first_line(error)}); check its name, your "
            "access and the network"
        ) from error
    splits = list(found)
    wanted = split or next((name for name in ("test", "validation", "train") if name in splits), splits[0])
    if wanted not in splits:
        raise ConfigurationError(f"the data set {repository!r} has no split {wanted!r}; it has {', '.join(splits)}")
    for number, row in enumerate(found[wanted], 1):
        yield f"{repository}, row {number}", dict(row)


def _prompt(row: Any, suite: str, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise ConfigurationError(f"{where}: {str(row)[:60]!r} is no JSON object; wanted one object per line")
    number = where.rpartition(" ")[2]
    if isinstance(row.get("turns"), str):
        row = {**row, "turns": [row["turns"]]}
    try:
        found = conversation_from_row(row, where=where, fallback_id=number, category=suite)
        chat = tuple(up_to_question(found.messages))
        if not chat or not all(message["content"].strip() for message in chat if message["role"] == "user"):
            raise TrainingError("no words")
    except TrainingError as error:
        reason = first_line(error).removeprefix(f"{where}: ")
        raise ConfigurationError(
            f'{where}: no prompt in {json.dumps(row, default=str)[:80]} ({reason}); wanted "turns" with the user\'s '
            'words, or "messages" with one of the user\'s, or "prompt" or "question"'
        ) from error
    if any(PLACEHOLDER in str(text) for text in (message["content"] for message in found.messages)):
        raise ConfigurationError(f"{where} is one of SPEED-Bench's placeholders: {SPEED_BENCH_ROUTE}")
    return Prompt(f"{suite}/{found.id or number}", suite, found.category, chat)
