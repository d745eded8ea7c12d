"""The embedded pair: a small chat model, a drafter for it, and prompts of the kind the model was trained on.

Where the weights come from is told in `model_cards/demo-target.md` and `model_cards/demo-drafter-eagle31.md`.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

Messages = list[dict[str, str]]
"""Chat messages, `{"role": ..., "content": ...}`, as `apply_chat_template` takes them."""


def target_path() -> Path:
    """Folder of the target with its tokenizer (11.5 M parameters, bf16)."""
    return Path(str(files(__name__))) / "target"


def drafter_path() -> Path:
    """Folder of the EAGLE 3.1 drafter for it (2.3 M parameters, bf16)."""
    return Path(str(files(__name__))) / "drafter"


PROMPTS = Path(str(files(__name__))) / "prompts.jsonl"
"""Bookings and sums."""
CONVERSATIONS: tuple[Messages, ...] = tuple(
    json.loads(line)["messages"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()
)
