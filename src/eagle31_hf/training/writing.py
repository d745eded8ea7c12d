"""The target writes: the assistant's turns, so that the drafter learns the text it will be asked to draft.

Whatever is written for training (turns, prompts, texts to measure on) is written by `write_batch`, which is plain
`generate`, so that every target can be trained for. What is written is kept line by line, batch by batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from ..errors import TrainingError, first_line
from ..sampling.logits_processing import end_ids, sampling_options
from ..texts.rows import Conversation, Message
from .data import prompt_ids
from .settings import TrainingSettings

ASKING_ROLES = ("user", "tool", "text")
ROOM_FOR_AN_ANSWER = 8

OnProgress = Callable[[int, float], None]
"""Called with how many rows have ended since the last call, and how much of the others is written, in rows."""


# --- a batch ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def write_batch(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    max_new_tokens: int,
    on_token: Callable[[float], None] = lambda written: None,
    ends: set[int] | None = None,
    enough: float = 1.0,
    **options: Any,
) -> list[list[int]]:
    """Let `target.generate` answer prompts side by side; random generators are left as they were.

    Args:
        seed: of torch's generators.
        on_token: called after every token with how much of the answers is written, in answers.
        ends: tokens that end an answer; default: those of the target's generation config.
        enough: share of the answers after whose end the others are not waited for.
        options: more arguments of `generate`.

    Returns:
        The ids of each prompt's answer, the token that ends it included; one that was cut has none.
    """
    ends = end_ids(target) if ends is None else ends
    longest, device = max(map(len, prompts)), target.get_input_embeddings().weight.device
    end_tokens = torch.tensor(sorted(ends), dtype=torch.long, device=device)

    def look(written: Tensor, scores: Any, **others: Any) -> Tensor:
        on_token(len(written) * (written.shape[1] - longest) / max_new_tokens)
        ended = torch.isin(written[:, longest:], end_tokens).any(1)
        return torch.full_like(ended, bool(ended.sum() >= enough * len(prompts)))

    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        written = target.generate(
            input_ids=pad_sequence(rows, batch_first=True, padding_side="left"),
            attention_mask=pad_sequence(list(map(torch.ones_like, rows)), batch_first=True, padding_side="left"),
            max_new_tokens=max_new_tokens,
            num_beams=1,
            pad_token_id=0,  # behind answers that have ended, where nothing is read
            eos_token_id=sorted(ends) or None,
            stopping_criteria=StoppingCriteriaList([look]),
            **options,
        )
    answers = written[:, longest:].tolist()
    lengths = [next((n for n, token in enumerate(answer, 1) if token in ends), len(answer)) for answer in answers]
    return [answer[:length] for answer, length in zip(answers, lengths, strict=True)]


def place_of(target: PreTrainedModel) -> str:
    """Its Hub id, or its folder from the root, from wherever a run is started."""
    name = str(target.name_or_path)
    return str(Path(name).resolve()) if name and Path(name).exists() else name


# --- the assistant's turns --------------------------------------------------------------------------------------------


def regenerate(
    conversations: Sequence[Conversation],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    settings: TrainingSettings,
    *,
    on_progress: OnProgress = lambda ended, underway: None,
) -> list[Conversation | None]:
    """Conversations whose last turn the target wrote, `None` for one whose context is too long for its first turn.

    They are kept in `path` (JSONL), batch by batch, under a digest of what was asked; called again, it continues where
    it was stopped, and rows that were edited since are written anew.

    Args:
        settings: resolved.
    """
    lines = KeptLines(
        path,
        target=place_of(target),
        turns=settings.regenerate,
        temperatures=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
        max_prompt_tokens=max_prompt_tokens(settings),
        seed=settings.seed,
    )
    kept, keys = {row["key"]: row for row in lines.rows}, keys_of(conversations)
    missing = [
        RowToWrite.of(each, key, settings) for each, key in zip(conversations, keys, strict=True) if key not in kept
    ]
    on_progress(len(conversations) - len(missing), 0.0)
    for batch in batches(missing, settings.write_rows):
        write_turns(batch, target, tokenizer, settings, on_progress)
        written = [row.to_json() for row in batch]
        lines.add(*written)
        kept |= {row["key"]: row for row in written}
        on_progress(len(batch), 0.0)
    return [
        replace(
            conversation,
            messages=tuple(row["conversations"]),
            answer_ids=tuple(row["answer_ids"]),
            answer_temperature=row["answer_temperature"],
        )
        if (row := kept[key])["answer_ids"]
        else None
        for conversation, key in zip(conversations, keys, strict=True)
    ]


def keys_of(conversations: Sequence[Conversation]) -> list[str]:
    """What each is kept by: a digest of what is asked; those that ask the same are numbered."""
    seen: Counter[str] = Counter()
    keys = []
    for conversation in conversations:
        asked = digest([conversation.messages, conversation.tools, conversation.template_kwargs])
        seen[asked] += 1
        keys.append(f"{asked}-{seen[asked]}")
    return keys


def max_prompt_tokens(settings: TrainingSettings) -> int:
    """Conversations end before a turn whose context is longer."""
    return max(1, settings.max_length - ROOM_FOR_AN_ANSWER)


def _asks(messages: Sequence[Message], place: int) -> bool:
    """Whether the assistant speaks next, and not in a call of tools, whose results stand in the data."""
    if messages[place]["role"] not in ASKING_ROLES:
        return False
    following = messages[place + 1 : place + 3]
    if not following:
        return True
    calls = "tool_calls" in following[0] or (len(following) == 2 and following[1]["role"] == "tool")
    return following[0]["role"] != "tool" and not calls


@dataclass(eq=False)
class RowToWrite:
    """A conversation being written."""

    conversation: Conversation
    key: str  # what it is kept by
    temperature: float  # what it is written with
    given: list[list[Message]]  # what comes before each answer that is still to be written, behind the one before
    messages: list[Message] = field(default_factory=list)  # up to and with its last answer
    answer_ids: list[int] = field(default_factory=list)  # of that; none where its context is too long for any

    @classmethod
    def of(cls, conversation: Conversation, key: str, settings: TrainingSettings) -> RowToWrite:
        """Its temperature and, of `--regenerate last`, its one answer are chosen by its key."""
        messages = conversation.messages
        temperature = random.Random(f"temperature {settings.seed} {key}").choice(settings.temperature)
        places = [place for place in range(len(messages)) if _asks(messages, place)]
        if settings.regenerate == "last" and places:
            places = [random.Random(f"{settings.seed} {key}").choice(places)]
        given, start = [], 0
        for place in places:
            given.append(list(messages[start : place + 1]))
            start = place + 1
            if start < len(messages) and messages[start]["role"] == "assistant":
                start += 1
        return cls(conversation, key, temperature, given)

    @property
    def length(self) -> int:
        """Characters of the conversation."""
        return sum(len(message["content"]) for message in self.conversation.messages)

    def to_json(self) -> dict[str, Any]:
        conversation = self.conversation
        return {
            "key": self.key,
            "id": conversation.id,
            "category": conversation.category,
            "conversations": self.messages or list(conversation.messages),
            "answer_ids": self.answer_ids,
            "answer_temperature": self.temperature,
            **({"tools": list(conversation.tools)} if conversation.tools else {}),
            **({"chat_template_kwargs": conversation.template_kwargs} if conversation.template_kwargs else {}),
        }


def batches(rows: Sequence[RowToWrite], size: int) -> list[list[RowToWrite]]:
    """Rows of one temperature and like length; the longest first, so that a lack of memory shows early."""
    found = []
    for temperature in dict.fromkeys(row.temperature for row in rows):
        alike = [row for row in rows if row.temperature == temperature]
        ordered = sorted(alike, key=lambda row: row.length, reverse=True)
        found += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    return found


def write_turns(
    rows: Sequence[RowToWrite],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: TrainingSettings,
    on_progress: OnProgress,
) -> None:
    """Let the target answer conversations of one temperature, turn by turn; one whose context is too long ends."""
    turns, ends = max(len(row.given) for row in rows), end_ids(target)
    chance = random.Random(f"{settings.seed} {rows[0].key}")

    def on_turn(earlier: int, written: float) -> None:
        on_progress(0, (earlier + written) / turns)

    for turn in range(turns):
        asked = [row for row in rows if row.given]
        prompts = {row: prompt_ids(tokenizer, row.conversation, row.messages + row.given[0]) for row in asked}
        rows = [row for row, ids in prompts.items() if len(ids) <= max_prompt_tokens(settings)]
        if not rows:
            return
        answers = write_batch(
            target,
            [prompts[row] for row in rows],
            seed=chance.getrandbits(63),
            max_new_tokens=settings.max_new_tokens,
            on_token=partial(on_turn, turn * len(rows)),
            **sampling_options(rows[0].temperature),
        )
        for row, answer in zip(rows, answers, strict=True):
            text = str(tokenizer.decode(answer, skip_special_tokens=True))
            row.messages += [*row.given.pop(0), {"role": "assistant", "content": text}]
            row.answer_ids = answer
            if answer[-1] not in ends:  # an answer that was cut ends the conversation
                row.given.clear()


# --- lines that are kept ----------------------------------------------------------------------------------------------

MARK = b'{"written_by": "'
"""How every line of a run begins; a digest of the settings follows that the line was written by."""


class KeptLines:
    """Lines of a file (JSONL) that a run adds to and a later one finds; one that a kill cut short is removed.

    Args:
        path: of the file.
        written_by: settings. Lines that were written by others stay in the file, and are not found.

    Attributes:
        rows: lines written by these settings, in order.
    """

    def __init__(self, path: Path, **written_by: Any):
        self.path, self._digest = path, digest(written_by)
        self.rows: list[dict[str, Any]] = []
        if not path.exists():
            return
        *whole, cut = path.read_bytes().split(b"\n")
        try:
            self.rows = [row for row in map(json.loads, whole) if row["written_by"] == self._digest]
            if not MARK.startswith(cut[: len(MARK)]):
                raise ValueError("the last one")
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"{path} holds a line that is damaged or that no run has written ({error!r}); move the file away"
            ) from error
        os.truncate(path, path.stat().st_size - len(cut))

    def add(self, *rows: dict[str, Any]) -> None:
        """Add rows, and wait until they are on the disk."""
        self.rows += rows
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps({"written_by": self._digest, **row}, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TrainingError(
                f"{self.path} cannot be written ({first_line(error)}); make room, and go on with --resume"
            ) from error


def digest(content: Any) -> str:
    """32 letters that stand for JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def data_file(out: Path, name: str, process: int) -> Path:
    """Where one of several processes keeps what the target writes."""
    return out / "data" / (f"{name}-{process}.jsonl" if process else f"{name}.jsonl")
