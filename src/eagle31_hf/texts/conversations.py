"""Conversations from files (JSONL, a JSON list of rows, CSV), folders or the Hub; `rows` says what a row may hold."""

from __future__ import annotations

import csv
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import TrainingError, first_line
from .rows import Conversation, conversation_from_row, parsed

TABLES = {".csv": ",", ".tsv": "\t"}
"""Files of tables, by their endings, and what stands between two fields."""


def read_conversations(
    sources: Sequence[str | Path], *, limit: int | None = None, on_empty: Callable[[str], None] = lambda where: None
) -> list[Conversation]:
    """Read files (JSONL, or one JSON list), folders of them, or Hub data sets (`NAME[:CONFIG][:SPLIT]`, needs
    `datasets`).

    Args:
        sources: read in order, each file once.
        limit: most rows per source.
        on_empty: told where a row without any text stands; it is left out.
    """
    found: list[Conversation] = []
    read: set[str] = set()
    for source in sources:
        found += itertools.islice(_read_source(str(source), read, on_empty), limit)
    if not found:
        raise TrainingError(f"no conversations in {', '.join(map(str, sources)) or 'no source'}; name a JSONL file")
    return found


def _read_source(source: str, read: set[str], on_empty: Callable[[str], None]) -> Iterator[Conversation]:
    """Conversations of a source, whose files are added to those `read`."""
    for origin, name, rows in tables(source):
        if origin in read:
            raise TrainingError(f"{origin} is named twice; name every file once")
        read.add(origin)
        for number, where, row in rows:
            category = name.rpartition("/")[2]
            found = conversation_from_row(row, where=where, fallback_id=f"{name}-{number}", category=category)
            if found.is_empty:
                on_empty(where)
            else:
                yield found


Rows = Iterator[tuple[int, str, Any]]
"""Number, place and content of each."""


def tables(source: str, splits: Sequence[str] = ("train",)) -> Iterator[tuple[str, str, Rows]]:
    """Each file or data set of a source: where it lies, what it is called, its rows.

    Args:
        splits: of a data set on the Hub the first that it has of these, if the source names none.
    """
    path = Path(source)
    if path.is_dir():
        files = next(filter(None, (sorted(path.glob(f"*{kind}")) for kind in (".jsonl", ".json", *TABLES))), None)
        if not files:
            raise TrainingError(
                f"the folder {source!r} holds no *.jsonl, *.json or *.csv file; name a folder of such files"
            )
        yield from ((str(file), file.stem, _file_rows(file)) for file in files)
    elif path.is_file():
        yield str(path), path.stem, _file_rows(path)
    elif path.suffix in (".jsonl", ".json", *TABLES) or source.startswith((".", "/", "~")):
        raise TrainingError(f"no file or folder {source!r}; check the path")
    elif source.isdecimal() or " " in source:  # no name, no doubt: the Hub would be asked for minutes
        raise TrainingError(f"got {source!r} where prompts are wanted; name a JSONL file, a folder or a Hub data set")
    else:
        yield source, source.partition(":")[0], _hub_rows(source, splits)


def _file_rows(file: Path) -> Rows:
    """Number, place and content of each row: one a line, the items of one list, or the lines of a table."""
    is_first = True
    try:
        if file.suffix in TABLES:
            yield from _table_rows(file)
            return
        with file.open(encoding="utf-8-sig") as lines:  # editors of Windows put a mark in front
            for number, line in enumerate(lines, start=1):
                if is_first and line.lstrip().startswith("["):
                    content = "\n" * (number - 1) + line + lines.read()  # so that errors name lines of the file
                    items = parsed(content, f"{file}, read as one list of rows", is_file=True)
                    yield from ((number, f"{file}, row {number}", row) for number, row in enumerate(items, start=1))
                elif line.strip():
                    is_first, where = False, f"{file}, line {number}"
                    yield number, where, parsed(line.rstrip(), where)
    except UnicodeDecodeError as error:
        raise TrainingError(f"{file} is not UTF-8 text ({error.reason}); convert it") from None
    except OSError as error:
        raise TrainingError(f"{file} cannot be read ({error.strerror or error}); name a file that can") from error


def _table_rows(file: Path) -> Rows:
    """Rows of a CSV file whose first line names the columns."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, delimiter=TABLES[file.suffix], strict=True)
        try:
            for number, row in enumerate(rows, start=1):
                if None in row or None in row.values():
                    raise TrainingError(
                        f"{file}, row {number}: more or fewer fields than the first line names columns; quote fields "
                        "that hold the delimiter"
                    )
                yield number, f"{file}, row {number}", row
        except csv.Error as error:
            raise TrainingError(f"{file}, after line {rows.line_num}: no table ({error}); mend it") from None


def _hub_rows(source: str, splits: Sequence[str]) -> Rows:
    """Of `NAME`, `NAME:CONFIG`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`; without a split, of the first of `splits`, or the
    only one. A split may be several or a part of one, as `datasets` has them: `train[:1000]`, `train+test`."""
    try:
        import datasets  # an extra: reading files must not need it
    except ImportError:
        raise TrainingError(f"no file or folder {source!r}; to read it from the Hub: pip install datasets") from None
    name, *parts = re.split(r":(?![^\[]*\])", source)  # no colon of a slice
    try:
        if len(parts) == 1 and parts[0] not in datasets.get_dataset_config_names(name):
            parts = ["", *parts]
        config, split = (*parts, "", "")[:2]
        found: Any = datasets.load_dataset(name, config or None, split=split or None)
    except Exception as error:  # the Hub, the network, a loading script that is refused
        raise TrainingError(
            f"no file or folder {source!r}, and the Hub did not give it: {first_line(error)}; check its name, your "
            "access and the network"
        ) from error
    if not split:
        split = next((each for each in splits if each in found), next(iter(found)) if len(found) == 1 else "")
        if not split:
            raise TrainingError(f"the data set {source!r} has no split {splits[0]!r}; name one of {', '.join(found)}")
        found = found[split]
    yield from ((number, f"{source}, row {number}", row) for number, row in enumerate(map(dict, found), 1))
