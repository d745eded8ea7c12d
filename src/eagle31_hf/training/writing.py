"""The target writes the assistant turns itself, so that the drafter learns the text it will be asked to draft."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ..errors import TrainingError
from ..targets.served_processing import sampling_options
from ..texts.rows import Conversation, Message, conversation_from_row
from .data import prompt_ids

ASKING_ROLES = ("user", "tool", "text")
BYTES_PER_TOKEN = 8
"""Text and ids of one token in a JSON line, measured on English dialogue (4 + 4)."""


@dataclass(frozen=True)
class RegenerationSettings:
    """How the target writes."""

    # `"each"` rewrites every assistant turn in order, `"last"` one turn per conversation (after a user message drawn at
    # random; the turns before stay as they are). Calls of tools stay: their results stand in the data. Plain text is
    # continued where it is half told.
    turns: str = "each"
    # 0 is greedy; several share the conversations at random; none takes the target's own generation config
    temperatures: tuple[float, ...] = ()
    max_new_tokens: int = 256  # most tokens per turn; a turn that is cut there ends its conversation
    max_prompt_tokens: int = 1024  # conversations end before a turn whose context is longer
    batch_size: int = 32  # turns written at a time
    seed: int = 0  # of sampling and of the choice of turns


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

    They are kept in `path` (JSONL), each as soon as its text has ended, under a digest of what was asked; called again,
    it continues where it was stopped, and rows that were edited since are written anew. Rows whose context exceeds the
    limit before the first turn are left out.

    Args:
        on_rows: called after every token with the number of rows done since the last call, most often 0.

    Raises:
        TrainingError: too little disk, `path` was written with other settings, or a row cannot be rendered.
    """
    header = {**asdict(settings), "temperatures": list(settings.temperatures), "target": target.name_or_path}
    header["kept_by"] = "digest"
    del header["batch_size"]  # a resumed run may write more of them at a time, or fewer
    conversations = with_keys(conversations)
    done = {row["key"]: row for row in read_whole_lines(path, header, identity="key")}
    missing = [conversation for conversation in conversations if conversation.key not in done]
    require_disk(path, disk_bytes(missing, settings), f"writing {len(missing):,} conversations")
    on_rows(len(conversations) - len(missing))

    def keep(rows: list[dict[str, Any]]) -> None:
        if rows:
            done.update((row["key"], row) for row in rows)
            append_lines(path, rows)
        on_rows(len(rows))

    writer = _Writer(target, tokenizer, settings)
    for batch in _batches(missing, settings):
        writer.write(batch, keep)
    rows = ((conversation, done[conversation.key]) for conversation in conversations)
    return [
        replace(
            conversation_from_row(row, where=str(path), fallback_id=row["id"], category=row["category"]),
            id=conversation.id,
            category=conversation.category,
        )
        for conversation, row in rows
        if row["answer_ids"]
    ]


def with_keys(conversations: Sequence[Conversation]) -> list[Conversation]:
    """The same with keys: a digest of what is asked; those that ask the same are numbered."""
    seen: Counter[str] = Counter()
    keyed = []
    for conversation in conversations:
        content = [conversation.messages, conversation.tools, conversation.template_kwargs]
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
        seen[digest] += 1
        keyed.append(replace(conversation, key=f"{digest}-{seen[digest]}"))
    return keyed


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
    """What the conversation is written with; by its key, so that a resumed run chooses the same."""
    if not settings.temperatures:
        return None
    return random.Random(f"temperature {settings.seed} {conversation.key}").choice(settings.temperatures)


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
    # By its key, so that a resumed run chooses the same.
    return [random.Random(f"{settings.seed} {conversation.key}").choice(places)]


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
        drawn = _temperature(batch[0], self.settings)  # the same for all rows
        temperature = own_temperature(self.target) if drawn is None else drawn
        rows = [_Row(conversation, _answered(conversation, self.settings), temperature) for conversation in batch]

        def keep_ended() -> None:
            ended = [row for row in rows if not row.left]
            on_rows([row.to_json() for row in ended])
            for row in ended:
                rows.remove(row)

        while rows:
            self._write_turn(
                [row for row in rows if row.left], {} if drawn is None else sampling_options(drawn), keep_ended
            )
            keep_ended()

    @torch.no_grad()
    def _write_turn(self, rows: list[_Row], options: dict[str, Any], on_token: Callable[[], None]) -> None:
        """The next answer of each row; `on_token` is called after every token."""
        prompts: dict[_Row, list[int]] = {}
        for row in rows:
            prompt = prompt_ids(self.tokenizer, row.conversation, row.context())
            if len(prompt) > self.settings.max_prompt_tokens:
                row.left = []
            else:
                prompts[row] = prompt
        if not prompts:
            return
        longest = max(map(len, prompts.values()))
        writing = dict(enumerate(prompts))  # rows whose answer has not ended

        def hand_on(place: int, written: Tensor) -> None:
            answer = until_end(written[place, longest:].tolist(), self.ends)
            text = str(self.tokenizer.decode(answer, skip_special_tokens=True))
            writing.pop(place).add(answer, text, is_whole=bool(answer) and answer[-1] in self.ends)

        def as_they_end(written: Tensor, scores: Any, **others: Any) -> Tensor:
            """Stops nothing: hands on each answer when it ends."""
            last = written[:, -1].tolist()
            for place in [place for place in writing if last[place] in self.ends]:
                hand_on(place, written)
            on_token()
            return torch.zeros(len(written), dtype=torch.bool, device=written.device)

        first = next(iter(prompts))
        chance = random.Random(f"{self.settings.seed} {first.conversation.key} {len(prompts[first])}")
        with torch.random.fork_rng():
            torch.manual_seed(chance.getrandbits(63))
            output = generate_padded(
                self.target,
                list(prompts.values()),
                max_new_tokens=self.settings.max_new_tokens,
                stopping_criteria=StoppingCriteriaList([as_they_end]),
                **options,
            )
        for place in list(writing):  # those that were cut at the most tokens
            hand_on(place, output)


class _Row:
    """A conversation being written; `left` are the messages still to be answered by the target."""

    def __init__(self, conversation: Conversation, left: list[int], temperature: float):
        self.conversation, self.left, self.temperature = conversation, left, temperature
        self._written: dict[int, str] = {}
        self._answer_ids: list[int] = []

    def context(self) -> list[Message]:
        """Messages up to the next one to be answered, earlier answers replaced."""
        return self._messages_to(self.left[0])

    def _messages_to(self, asking: int) -> list[Message]:
        messages: list[Message] = []
        for index, message in enumerate(self.conversation.messages[: asking + 1]):
            if message["role"] == "assistant" and index - 1 in self._written:
                continue  # the target's own answer stands there already
            messages.append(message)
            if index in self._written:
                messages.append({"role": "assistant", "content": self._written[index]})
        return messages

    def add(self, answer_ids: list[int], text: str, *, is_whole: bool) -> None:
        asking, *left = self.left
        self._written[asking], self._answer_ids = text, answer_ids
        self.left = left if is_whole else []

    def to_json(self) -> dict[str, Any]:
        written, conversation = self._written, self.conversation
        return {
            "key": conversation.key,
            "id": conversation.id,
            "category": conversation.category,
            "conversations": self._messages_to(max(written)) if written else list(conversation.messages),
            "answer_ids": self._answer_ids,
            "answer_temperature": self.temperature,
            **({"tools": list(conversation.tools)} if conversation.tools else {}),
            **({"chat_template_kwargs": conversation.template_kwargs} if conversation.template_kwargs else {}),
        }


# --- by generate ------------------------------------------------------------------------------------------------------


def generate_padded(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Tensor:
    """Prompts, padded on the left to the longest, and what `model.generate` writes behind them, `(B, L + n)`."""
    device = model.get_input_embeddings().weight.device
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return model.generate(input_ids=ids, attention_mask=mask, pad_token_id=_pad_token_id(model), **options)


def _pad_token_id(model: Any) -> int:
    """The target's padding id, else its first end-of-text id, else 0."""
    for value in (model.generation_config.pad_token_id, model.generation_config.eos_token_id):
        if isinstance(value, list) and value:
            return int(value[0])
        if isinstance(value, int):
            return value
    return 0


def end_ids(model: Any) -> set[int]:
    """Tokens that end the target's texts, by its generation config."""
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends]) - {None}


def until_end(answer: list[int], ends: Collection[int]) -> list[int]:
    """An answer up to and with its end."""
    stop = next((place for place, token in enumerate(answer, 1) if token in ends), len(answer))
    return answer[:stop]


# --- lines that are kept ----------------------------------------------------------------------------------------------


def read_whole_lines(path: Path, header: dict[str, Any], *, identity: str = "id") -> list[dict[str, Any]]:
    """Rows written so far; a line cut short by a kill is removed. The settings go into a file beside `path`.

    Args:
        identity: a field that every row has.

    Raises:
        TrainingError: `path` was written with another `header`, or holds a line that cannot be read.
    """
    notes = settings_beside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        notes.write_text(json.dumps(header), encoding="utf-8")
        return []
    stored = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    differing = [
        f"{name}: {stored.get(name)!r}, now {value!r}" for name, value in header.items() if stored.get(name) != value
    ]
    if differing:
        raise TrainingError(
            f"{path} was written otherwise ({'; '.join(differing)}); remove it to write again, or use its settings"
        )
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        for row in rows:
            row[identity]
        return rows
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{path} holds a damaged line ({error}); remove the file to write again") from error


def settings_beside(path: Path) -> Path:
    """Where the settings stand that the lines in `path` were written with."""
    return path.with_suffix(".settings.json")


def append_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows, and wait until they are on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
