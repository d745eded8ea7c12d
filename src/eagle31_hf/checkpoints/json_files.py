"""JSON files of a checkpoint, read as what they are: documents from strangers.

Whatever a parser lets through meets code that was not made for it: integers wider than a tensor's sizes, nesting deeper
than the interpreter's stack, files that never end. All of it is refused here, before anybody looks at a field.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointFormatError

MOST_BYTES = 32 << 20  # the index of a model of 700 billion parameters has 9 MB
DEEPEST = 32  # published configs nest four deep
_WIDEST = 1 << 63
_HALF_A_PAIR = re.compile(r"[\ud800-\udfff]")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file: at most 32 MB, nested at most 32 deep, integers of 64 bits.

    Raises:
        CheckpointFormatError: no such file, not a file, or it holds no such object.
    """
    try:
        content = json.loads(_read_text(path))
    except CheckpointFormatError:  # a `ValueError`, too: what is wrong has been said
        raise
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CheckpointFormatError(f"{path} is not valid JSON ({error}); fetch or write it again") from error
    if not isinstance(content, dict):
        raise CheckpointFormatError(f"{path} holds a {type(content).__name__}; wanted a JSON object")
    if problem := _unusable(content):
        raise CheckpointFormatError(f"{path} {problem}; fetch or write it again")
    return content


def shown(value: Any) -> str:
    """A value from a file as an error may quote it: escaped, and short however long it is."""
    return _SHORT.repr(value)


def get_path(config: Mapping[str, Any], path: str) -> Any:
    """The entry at a dotted path, `None` if any part of it is missing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def set_path(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the entry at a dotted path, making the objects on the way."""
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


def drop_path(config: dict[str, Any], path: str) -> None:
    """Remove the entry at a dotted path, and the objects on the way that hold nothing else."""
    head, _, rest = path.partition(".")
    if rest and isinstance(config.get(head), dict):
        drop_path(config[head], rest)
        if not config[head]:
            del config[head]
    elif not rest:
        config.pop(head, None)


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe would keep us waiting for ever
            raise CheckpointFormatError(f"{path} is a {'folder' if path.is_dir() else 'device'}; wanted a JSON file")
        if size > MOST_BYTES:
            raise CheckpointFormatError(f"{path} has {size} bytes; wanted a JSON file of at most {MOST_BYTES}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointFormatError(f"{path.parent} has no {path.name}; a drafter checkpoint needs it") from error
    except OSError as error:
        raise CheckpointFormatError(
            f"{path} cannot be read ({error.strerror or error}); wanted a JSON file: fetch it again or correct its "
            "permissions"
        ) from error


def _unusable(content: dict[str, Any]) -> str:
    """What no code after us could use, in words; empty if there is nothing of the kind."""
    left: list[tuple[Any, int]] = [(content, 1)]
    while left:
        value, depth = left.pop()
        if depth > DEEPEST:
            return f"is nested more than {DEEPEST} deep"
        if isinstance(value, int) and not -_WIDEST <= value < _WIDEST:
            return "holds an integer of more than 64 bits"
        if isinstance(value, str) and _HALF_A_PAIR.search(value):
            return "holds half a surrogate pair, which is no text"
        if isinstance(value, dict):
            left += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            left += [(part, depth + 1) for part in value]
    return ""
