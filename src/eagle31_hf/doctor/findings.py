"""What the doctor says: one finding a check, each with what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """Outcome of one check.

    Attributes:
        check: what was looked at, a few words.
        level: `"ok"`; `"note"`, worth knowing; `"problem"`, the pair works worse than it could, or not at all.
        text: what was seen, with its figures.
        advice: what to do about it; empty if nothing.
    """

    check: str
    level: Level
    text: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)
