"""The embedded pair: a small chat model, a drafter for it, and prompts of the kind the model was trained on.

Where the weights come from is told in `model_cards/demo-target.md` and `model_cards/demo-drafter-eagle31.md`.
"""

from __future__ import annotations

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


def _dialogue(*turns: str) -> Messages:
    return [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]


CONVERSATIONS: tuple[Messages, ...] = (
    _dialogue(
        "I would like to reserve a table at an Italian restaurant in Oakland.",
        "What time would you like the reservation, and for how many people?",
        "At 7 pm tomorrow for four people, please. The restaurant is called Bella Luna.",
    ),
    _dialogue(
        "A shop sells apples at 3 dollars a bag and pears at 4 dollars a bag. Mia buys 5 bags of apples and 2 bags of "
        "pears. How much does she pay?"
    ),
    _dialogue(
        "I need two bus tickets from Fresno to Los Angeles.",
        "What day would you like to travel, and at what time?",
        "On March 8th, around 9 in the morning.",
    ),
    _dialogue(
        "A school buys 30 boxes with 24 pencils in each box. Every pupil gets 5 pencils. How many pupils get pencils?"
    ),
    _dialogue("What is the weather going to be like in Portland this weekend?"),
    _dialogue("A farmer has 6 fields with 24 rows of 15 lettuces. Rabbits eat a tenth of them. How many are left?"),
)
