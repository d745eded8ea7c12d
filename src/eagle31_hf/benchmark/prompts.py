"""Prompts of a benchmark: from a file or built in, and in batches of one size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..demo import Messages
from ..errors import ConfigurationError

LAST_TURN = 4
"""Index of the last message a chat prompt may end with: longer contexts would make the rows of a batch too unlike."""


@dataclass(frozen=True)
class PromptBatch:
    """Left-padded prompts as `generate` takes them: `input_ids` and `attention_mask` `(B, T)`."""

    input_ids: Tensor
    attention_mask: Tensor

    @property
    def padding(self) -> list[int]:
        """Pads in front of each row."""
        return (self.input_ids.shape[1] - self.attention_mask.sum(1)).tolist()

    def to_generate(self) -> dict[str, Tensor]:
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


def read_conversations(path: str | Path, limit: int) -> list[Messages]:
    """The first `limit` prompts of a JSON-lines file.

    A row is a chat, `{"conversations": [{"role", "content"}, ...]}`, asked up to its last user message (the fifth
    message at most), or one question: `{"prompt": ...}`, `{"question": ...}`, or the first of `{"turns": [...]}`.

    Raises:
        ConfigurationError: there is no such file, it holds no prompt, or a row is of another kind (with its line).
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the prompts {str(path)!r} cannot be read ({error}); pass a JSON-lines file"
        ) from error
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    if not rows:
        raise ConfigurationError(f"the prompts file {str(path)!r} is empty; wanted one JSON object per line")
    return [_conversation(line, f"{path}, line {number}") for number, line in rows]


def _conversation(line: str, where: str) -> Messages:
    try:
        row = json.loads(line)
        chat = _chat(row)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        chat = []
    if not chat:
        raise ConfigurationError(
            f'{where}: no prompt in {line[:60]!r}; wanted a JSON object with "conversations" (messages with "role" and '
            '"content", one of them the user\'s), "prompt", "question" or "turns"'
        )
    return chat


def _chat(row: dict[str, Any]) -> Messages:
    if "conversations" in row:
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in row["conversations"]]
        last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
        return messages[: min(last_user, LAST_TURN) + 1]
    text = row.get("prompt") or row.get("question") or row["turns"][0]
    return [{"role": "user", "content": text}] if isinstance(text, str) else []


def batches_of(prompts: Sequence[Tensor], size: int, pad_id: int) -> list[PromptBatch]:
    """Batches of exactly `size` rows over all prompts `(T,)`; the last one is filled up from the first prompts."""
    count = -(-len(prompts) // size)
    rows = [prompts[index % len(prompts)] for index in range(count * size)]
    return [_left_padded(rows[start : start + size], pad_id) for start in range(0, len(rows), size)]


def _left_padded(rows: Sequence[Tensor], pad_id: int) -> PromptBatch:
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0), value=pad_id) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    return PromptBatch(ids, mask)
