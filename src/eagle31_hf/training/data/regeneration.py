"""The target writes the assistant turns itself, so that the drafter learns the text it will be asked to draft."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from ...errors import ConfigurationError, TrainingError
from ...target.served_processing import sampling_options
from ...texts.conversations import Conversation, Message, conversation_from_row
from .json_lines import append_lines, read_whole_lines
from .padding import end_ids, left_padded, pad_token_id, until_end
from .rendering import prompt_ids

TURNS = ("each", "last", "none")
ASKING_ROLES = ("user", "tool", "text")
BYTES_PER_TOKEN = 8
"""Text and ids of one token in a JSON line, measured on English dialogue (4 + 4)."""


@dataclass(frozen=True)
class RegenerationSettings:
    """How the target writes.

    Attributes:
        turns: `"each"` rewrites every assistant turn in order, `"last"` one turn per conversation (after a user message
            drawn at random; the turns before stay as they are), `"none"` leaves the data alone. Calls of tools stay:
            their results stand in the data. Plain text is continued where it is half told.
        temperatures: 0 is greedy; several share the conversations at random; none takes the target's own generation
            config.
        max_new_tokens: most tokens per turn; a turn that is cut there ends its conversation.
        max_prompt_tokens: conversations end before a turn whose context is longer.
        batch_size: turns written at a time.
        seed: of sampling and of the choice of turns.
    """

    turns: str = "each"
    temperatures: tuple[float, ...] = ()
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    batch_size: int = 32
    seed: int = 0


def regenerate(
    conversations: Sequence[Conversation],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    settings: RegenerationSettings,
    *,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> list[Conversation]:
    """Conversations whose last turn the target wrote, in the order given.

    They are kept in `path` (JSONL), each as soon as its text has ended; called again, it continues where it was
    stopped. Rows whose context exceeds the limit before the first turn are left out.

    Args:
        on_rows: called after every token with the number of rows done since the last call, most often 0.

    Raises:
        TrainingError: too little disk, `path` was written with other settings, or a row cannot be rendered.
    """
    if settings.turns not in TURNS:
        raise ConfigurationError(f"turns is {settings.turns!r}; wanted one of {TURNS}")
    if settings.turns == "none":
        return list(conversations)
    done = {row["id"]: row for row in read_whole_lines(path, _header(settings, target))}
    missing = [conversation for conversation in conversations if conversation.id not in done]
    require_disk(path, disk_bytes(missing, settings), f"writing {len(missing):,} conversations")
    on_rows(len(conversations) - len(missing))

    def keep(rows: list[dict[str, Any]]) -> None:
        if rows:
            done.update((row["id"], row) for row in rows)
            append_lines(path, rows)
        on_rows(len(rows))

    writer = _Writer(target, tokenizer, settings)
    for batch in _batches(missing, settings):
        writer.write(batch, keep)
    rows = (done[conversation.id] for conversation in conversations)
    return [
        conversation_from_row(row, where=str(path), fallback_id=row["id"], category=row["category"])
        for row in rows
        if row["answer_ids"]
    ]


def own_temperature(target: Any) -> float:
    """What the target's generation config writes with; 0 is greedy."""
    config = target.generation_config
    if not getattr(config, "do_sample", False):
        return 0.0
    return 1.0 if config.temperature is None else float(config.temperature)


def disk_bytes(conversations: Sequence[Conversation], settings: RegenerationSettings) -> int:
    """Most disk the regenerated conversations will take."""
    kept = sum(len(message["content"]) for conversation in conversations for message in conversation.messages)
    turns = sum(len(_answered(conversation, settings)) for conversation in conversations)
    return kept + turns * settings.max_new_tokens * BYTES_PER_TOKEN


def require_disk(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse before writing what will not fit.

    Raises:
        TrainingError: the disk has too little room; both figures are named.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise TrainingError(
            f"{purpose} needs {needed_bytes / 1e9:.2f} GB, but {existing} has {free / 1e9:.2f} GB free; name a folder "
            "on a larger disk, or use fewer prompts"
        )


def _header(settings: RegenerationSettings, target: PreTrainedModel) -> dict[str, Any]:
    """What the texts depend on."""
    header = {**asdict(settings), "temperatures": list(settings.temperatures), "target": target.name_or_path}
    header.pop("batch_size")
    return header


def _batches(conversations: Sequence[Conversation], settings: RegenerationSettings) -> list[list[Conversation]]:
    """Conversations of one temperature and like work together; the longest first, so that a lack of memory shows early.

    A batch writes until its last row has ended, and the answer that stands in the data tells best how much that is.
    Among answers of like length, contexts of like length share a batch, so that little of it is padding.
    """
    batches, size = [], settings.batch_size
    for temperature in dict.fromkeys(settings.temperatures or (None,)):
        alike = [conversation for conversation in conversations if _temperature(conversation, settings) == temperature]
        ordered = sorted(alike, key=lambda conversation: _work(conversation, settings), reverse=True)
        batches += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return batches


def _temperature(conversation: Conversation, settings: RegenerationSettings) -> float | None:
    """What the conversation is written with; by id, so that a resumed run chooses the same."""
    if not settings.temperatures:
        return None
    return random.Random(f"temperature {settings.seed} {conversation.id}").choice(settings.temperatures)


def _work(conversation: Conversation, settings: RegenerationSettings) -> tuple[int, int]:
    """Doublings of the characters to be written, and characters of the first context."""
    lengths = [len(message["content"]) for message in conversation.messages]
    answered = _answered(conversation, settings)
    replaced = sum(sum(lengths[user + 1 : user + 2]) for user in answered)
    return replaced.bit_length(), sum(lengths[: answered[0] + 1]) if answered else 0


def _answered(conversation: Conversation, settings: RegenerationSettings) -> list[int]:
    """Messages that are answered by text of the target's own."""
    places = [i for i in range(len(conversation.messages)) if _asks(conversation.messages, i)]
    if settings.turns == "each" or not places:
        return places
    # By id, so that a resumed run chooses the same.
    return [random.Random(f"{settings.seed} {conversation.id}").choice(places)]


def _asks(messages: Sequence[Message], place: int) -> bool:
    """Whether the assistant speaks next, and not in a call of tools, whose results stand in the data."""
    if messages[place]["role"] not in ASKING_ROLES:
        return False
    following = messages[place + 1 : place + 3]
    if not following:
        return True
    calls = "tool_calls" in following[0] or (len(following) == 2 and following[1]["role"] == "tool")
    return following[0]["role"] != "tool" and not calls


class _Writer:
    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: RegenerationSettings):
        self.target: Any = target
        self.tokenizer = tokenizer
        self.settings = settings
        self.ends = end_ids(target)

    def write(self, batch: list[Conversation], on_rows: Callable[[list[dict[str, Any]]], None]) -> None:
        """Write the answers of `batch`; `on_rows` gets the rows that have ended, after each token (most often none).

        A row's `answer_ids` are empty where nothing could be written.
        """
        written_at = _temperature(batch[0], self.settings)  # one of all rows
        temperature = own_temperature(self.target) if written_at is None else written_at
        rows = [_Row(conversation, _answered(conversation, self.settings), temperature) for conversation in batch]
        told: set[str] = set()

        def tell() -> None:
            ended = [row for row in rows if row.next_context() is None and row.conversation.id not in told]
            told.update(row.conversation.id for row in ended)
            on_rows([row.to_json() for row in ended])

        while True:
            waiting = [row for row in rows if row.next_context() is not None]
            if not waiting:
                return tell()
            self._write_turn(waiting, tell)

    def _write_turn(self, rows: list[_Row], tell: Callable[[], None]) -> None:
        prompts = []
        fitting = []
        for row in rows:
            prompt = prompt_ids(self.tokenizer, row.conversation, row.next_context() or [])
            if len(prompt) > self.settings.max_prompt_tokens:
                row.stop()
            else:
                prompts.append(prompt)
                fitting.append(row)
        if not fitting:
            return

        def add(index: int, answer: list[int]) -> None:
            fitting[index].add(answer, str(self.tokenizer.decode(answer, skip_special_tokens=True)))
            if not answer or answer[-1] not in self.ends:
                fitting[index].stop()

        self._generate(prompts, fitting[0].conversation, _AsTheyEnd(self.ends, add, tell))

    @torch.no_grad()
    def _generate(self, prompts: list[list[int]], first: Conversation, as_they_end: _AsTheyEnd) -> None:
        ids, mask = left_padded(prompts, self.target.get_input_embeddings().weight.device)
        options: dict[str, Any] = {}
        temperature = _temperature(first, self.settings)
        if temperature is not None:
            options = sampling_options(temperature)
        as_they_end.prompt_length = ids.shape[1]
        with torch.random.fork_rng():
            torch.manual_seed(random.Random(f"{self.settings.seed} {first.id} {len(prompts[0])}").getrandbits(63))
            output = self.target.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self.settings.max_new_tokens,
                pad_token_id=pad_token_id(self.target),
                stopping_criteria=StoppingCriteriaList([as_they_end]),
                **options,
            )
        as_they_end.finish(output)


class _AsTheyEnd(StoppingCriteria):
    """Stops nothing: hands on the answers of a batch, each when it ends, and the rest when the batch does."""

    def __init__(self, ends: set[int], add: Callable[[int, list[int]], None], tell: Callable[[], None]):
        self._ends, self._add, self._tell = ends, add, tell
        self._ended: set[int] = set()
        self.prompt_length = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        for index, token in enumerate(input_ids[:, -1].tolist()):
            if token in self._ends:
                self._hand_on(index, input_ids)
        self._tell()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def finish(self, output: Any) -> None:
        """The answers that were cut at the most tokens."""
        for index in range(len(output)):
            self._hand_on(index, output)

    def _hand_on(self, index: int, ids: Any) -> None:
        if index not in self._ended:
            self._ended.add(index)
            self._add(index, until_end(ids[index, self.prompt_length :].tolist(), self._ends))


class _Row:
    """A conversation being written."""

    def __init__(self, conversation: Conversation, answered: list[int], temperature: float):
        self.conversation = conversation
        self._temperature = temperature
        self._answered = answered  # user messages whose answer the target writes
        self._written: dict[int, str] = {}
        self._answer_ids: list[int] = []
        self._last: int | None = None
        self._stopped = False

    def next_context(self) -> list[Message] | None:
        """Messages up to the next user message to be answered, earlier answers replaced."""
        left = [user for user in self._answered if user not in self._written]
        return None if self._stopped or not left else self._messages_to(left[0])

    def _messages_to(self, user: int) -> list[Message]:
        messages: list[Message] = []
        for index, message in enumerate(self.conversation.messages[: user + 1]):
            if message["role"] == "assistant" and index - 1 in self._written:
                continue  # the target's own answer stands there already
            messages.append(message)
            if index in self._written:
                messages.append({"role": "assistant", "content": self._written[index]})
        return messages

    def add(self, answer_ids: list[int], text: str) -> None:
        user = next(user for user in self._answered if user not in self._written)
        self._written[user], self._answer_ids, self._last = text, answer_ids, user

    def stop(self) -> None:
        self._stopped = True

    def to_json(self) -> dict[str, Any]:
        messages = [] if self._last is None else self._messages_to(self._last)
        return {
            "id": self.conversation.id,
            "category": self.conversation.category,
            "conversations": messages or list(self.conversation.messages),
            "answer_ids": self._answer_ids,
            "answer_temperature": self._temperature,
            **({"tools": list(self.conversation.tools)} if self.conversation.tools else {}),
            **({"chat_template_kwargs": kwargs} if (kwargs := self.conversation.template_kwargs) else {}),
        }
