"""Benchmark records in a file of JSON lines: written as they are made, read as far as they go, taken up again.

The first line says what was measured on what; each further one is a call. Calls are written a turn at a time, so a run
that was stopped anywhere is taken up behind the last whole turn, and measures the same calls as if it had not been.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .calls import CallRecord

FORMAT = 1
TOLD_AGAIN = ("command", "started", "eagle31_hf", "commit")
"""Of the first line, what may differ where a run is taken up again: figures do not depend on it, or are told apart."""


class RecordFileError(ConfigurationError):
    """A record file that cannot be read, or taken up by this run."""


@dataclass(frozen=True)
class Records:
    """What a file holds.

    Attributes:
        name: of the file.
        run: its first line: settings and provenance.
        calls: of whole turns, in order.
        notes: other lines by kind: `compiled`, `warm-up`, `left-out`, `ledger`.
        cut_at: number of the line the file breaks off in, 0 if it is whole; `why_cut` says how.
        whole_bytes: length of the file up to the end of the last whole turn.
    """

    name: str
    run: dict[str, Any]
    calls: list[CallRecord]
    notes: list[dict[str, Any]] = field(default_factory=list)
    cut_at: int = 0
    why_cut: str = ""
    whole_bytes: int = 0

    @property
    def cut(self) -> str:
        """Where the file breaks off; empty if it is whole."""
        return f"{self.name} breaks off in line {self.cut_at} ({self.why_cut})" if self.cut_at else ""

    @property
    def turns(self) -> list[str]:
        """Whole turns, in order."""
        return list(dict.fromkeys(call.turn for call in self.calls))

    def notes_of(self, kind: str) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["kind"] == kind]

    @property
    def left_out(self) -> dict[str, str]:
        """Methods that could not run, and why."""
        return {note["method"]: note["reason"] for note in self.notes_of("left-out")}


def read_records(path: str | Path) -> Records:
    """Everything up to where the file breaks off, which `cut_at` tells.

    Raises:
        RecordFileError: there is no such file, or its first line is none of `eagle31 bench run`.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordFileError(f"the records {str(path)!r} cannot be read ({error.strerror})") from error
    lines = content.split(b"\n")
    run = _parsed(lines[0])
    if run is None or run.get("kind") != "run" or len(lines) == 1:
        raise RecordFileError(
            f"{path.name} does not begin as the records of `eagle31 bench run` do; wanted that command's --out file"
        )
    if run.get("format", 0) > FORMAT:
        raise RecordFileError(f"{path.name} was written by a later version (format {run['format']}); update this one")
    return _read_turns(path.name, run, lines)


def _read_turns(name: str, run: dict[str, Any], lines: list[bytes]) -> Records:
    """Line by line behind the first; a turn counts once its last line is there."""
    calls: list[CallRecord] = []
    notes: list[dict[str, Any]] = []
    turn: list[CallRecord] = []  # whose end is not there yet
    whole = size = len(lines[0]) + 1
    cut, why = 0, ""
    for number, line in enumerate(lines[1:], 2):
        is_last = number == len(lines)
        if is_last and not line:
            break
        row = _parsed(line)
        if row is None or is_last:  # what has no end of line may be half a record that looks like a whole one
            cut, why = number, "the line ends in its middle" if is_last else "the line is no JSON object"
            break
        kind = row.get("kind")
        call = _call(row) if kind == "call" else None
        if kind is None or (kind == "call" and call is None):
            cut, why = number, f"the line is no record ({kind!r})"
            break
        size += len(line) + 1
        if call is not None:
            turn.append(call)
            continue
        if kind == "turn":
            calls += turn
            turn = []
        else:
            notes.append(row)
        whole = whole if turn else size
    if not cut and turn:
        cut, why = len(lines), f"the turn {turn[0].turn!r} lacks methods"
    return Records(name, run, calls, notes, cut, why, whole)


def _call(row: dict[str, Any]) -> CallRecord | None:
    try:
        return CallRecord.from_dict(row)
    except (TypeError, KeyError, AttributeError):
        return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def check_place(path: str | Path, *, resume: bool) -> bool:
    """Whether records are there that are to be taken up.

    Raises:
        RecordFileError: there is no such folder, or a run's records are there and are not to be taken up.
    """
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise RecordFileError(f"{path.name} cannot be written: there is no folder {path.absolute().parent}")
    is_begun = path.exists() and b"\n" in path.read_bytes()
    if is_begun and not resume:
        raise RecordFileError(f"{path.name} is there already; add --resume to go on with it, or write to another file")
    return is_begun


class RecordWriter:
    """Appends records to a file, a turn at a time.

    Args:
        path: made, or taken up where `resume` is set: what follows its last whole turn is cut off.
        run: the first line.
        resume: go on with what is there.

    Raises:
        RecordFileError: as `check_place` says, or the file was made by another run.
    """

    def __init__(self, path: str | Path, run: Mapping[str, Any], *, resume: bool):
        self.path = Path(path)
        self.done = self._take_up(run) if check_place(path, resume=resume) else None
        if self.path.exists():  # and if it was stopped in its first line, that is written again
            with self.path.open("r+b") as file:
                file.truncate(0 if self.done is None else self.done.whole_bytes)
        self._file = self.path.open("a", encoding="utf-8")
        if self.done is None:
            self.write([{**run, "kind": "run", "format": FORMAT}])
        else:
            again = {name: run[name] for name in TOLD_AGAIN if name in run}
            self.write([{"kind": "resumed", **again, "cut_at": self.done.cut_at}])

    def _take_up(self, run: Mapping[str, Any]) -> Records:
        done = read_records(self.path)
        changed = differences(done.run, dict(run), ignored=(*TOLD_AGAIN, "kind", "format"))
        if changed:
            raise RecordFileError(
                f"{self.path.name} is of another run and cannot be gone on with: {'; '.join(changed[:6])}. Write to "
                "another file, or give the options it was begun with"
            )
        return done

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Put lines on the disk before returning."""
        self._file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    def write_turn(self, calls: Iterable[CallRecord]) -> None:
        """All calls of one turn, and its end."""
        calls = list(calls)
        self.write([*(call.to_dict() for call in calls), {"kind": "turn", "turn": calls[0].turn}])

    def close(self) -> None:
        self._file.close()


def differences(one: Mapping[str, Any], other: Mapping[str, Any], *, ignored: Iterable[str] = ()) -> list[str]:
    """Where two first lines differ, as `name: this, that`; nested names are joined with dots."""
    found = []
    for name in dict.fromkeys((*one, *other)):
        if name in ignored:
            continue
        left, right = json.loads(json.dumps(one.get(name))), json.loads(json.dumps(other.get(name)))
        if isinstance(left, dict) and isinstance(right, dict):
            found += [f"{name}.{line}" for line in differences(left, right)]
        elif left != right:
            found.append(f"{name}: {_short(left)}, {_short(right)}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
