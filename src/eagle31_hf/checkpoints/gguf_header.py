"""Read the metadata of a GGUF file. Tensors are never touched and nothing is executed.

Layout: github.com/ggml-org/ggml, docs/gguf.md. Every count and length comes from the file and is checked against what
the file can hold before it is believed.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointFormatError

# metadata value type -> struct format; 8 is a string, 9 an array
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY, _DEEPEST = 8, 9, 4

Value = int | float | bool | str


def read_gguf_metadata(path: str | Path) -> dict[str, Value]:
    """Metadata of the GGUF file at `path`; of arrays (a tokenizer's vocabulary, say) the lengths.

    Raises:
        CheckpointFormatError: not a GGUF file of version 2 or 3, cut off, or with lengths the file cannot hold.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _Reader(file, path.name, path.stat().st_size).metadata()
    except OSError as error:
        raise CheckpointFormatError(
            f"got {path.name!r}, which cannot be read ({error.strerror}); wanted a GGUF file"
        ) from error


class _Reader:
    def __init__(self, file: BinaryIO, name: str, file_bytes: int):
        self._file, self._name, self._file_bytes = file, name, file_bytes

    def metadata(self) -> dict[str, Value]:
        if self._bytes(4) != b"GGUF":
            raise self._error("it does not begin with 'GGUF'")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._error(f"its version is {version}; versions 2 and 3 are known")
        self._count("tensors", smallest_bytes=24)
        num_entries = self._count("metadata entries", smallest_bytes=13)
        metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        return metadata

    def _value(self, kind: int | float, depth: int = 0) -> Value:
        """A value; of an array its length."""
        if kind in _SCALARS:
            return self._number(_SCALARS[int(kind)])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > _DEEPEST:
            raise self._error(f"metadata value type {kind} is unknown")
        kind, length = self._number("<I"), self._count("array items", smallest_bytes=1)
        if kind in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[int(kind)]))
        else:
            for _ in range(length):
                self._value(kind, depth + 1)
        return length

    def _count(self, what: str, smallest_bytes: int) -> int:
        count = int(self._number("<Q"))
        if count * smallest_bytes > self._file_bytes:
            raise self._error(f"it claims {count:,} {what}, more than its {self._file_bytes:,} bytes can hold")
        return count

    def _string(self) -> str:
        return self._bytes(self._count("string bytes", smallest_bytes=1)).decode("utf-8", errors="replace")

    def _number(self, form: str) -> int | float:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _bytes(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise self._error("it ends in the middle of its header")
        return data

    def _skip(self, count: int) -> None:
        if self._file.tell() + count > self._file_bytes:
            raise self._error("it ends in the middle of its header")
        self._file.seek(count, 1)

    def _error(self, reason: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self._name!r} is not a GGUF file we can read: {reason}; download it again")
