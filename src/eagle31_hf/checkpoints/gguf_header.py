"""Read the header of a GGUF file: metadata and tensor shapes. Tensor data is never touched and nothing is executed.

Layout: github.com/ggml-org/ggml, docs/gguf.md. Every count and length comes from the file and is checked against what
the file can hold before it is believed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import CheckpointFormatError

# ggml type id -> (name, elements per block, bytes per block); ggml.h and ggml-common.h.
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip

# metadata value type -> struct format; 8 is a string, 9 an array
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4

Value = int | float | bool | str


@dataclass(frozen=True)
class GgufTensor:
    """Name, type and `shape` (row-major, rows first) of one tensor, and the bytes it takes."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Scalar metadata, the lengths of the array-valued ones (a tokenizer's vocabulary, say), and all tensors."""

    metadata: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Header of the GGUF file at `path`.

    Raises:
        CheckpointFormatError: not a GGUF file of version 2 or 3, cut off, or with lengths the file cannot hold.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _Reader(file, path.name, path.stat().st_size).header()
    except OSError as error:
        raise CheckpointFormatError(
            f"got {path.name!r}, which cannot be read ({error.strerror}); wanted a GGUF file"
        ) from error


class _Reader:
    def __init__(self, file: BinaryIO, name: str, file_bytes: int):
        self._file, self._name, self._file_bytes = file, name, file_bytes

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise self._error("it does not begin with 'GGUF'")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._error(f"its version is {version}; versions 2 and 3 are known")
        num_tensors = self._count("tensors", smallest_bytes=24)
        num_entries = self._count("metadata entries", smallest_bytes=13)
        metadata: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(num_entries):
            key, kind = self._string(), self._number("<I")
            if kind == _ARRAY:
                lengths[key] = self._skip_array(depth=0)
            else:
                metadata[key] = self._value(kind)
        return GgufHeader(metadata, lengths, tuple(self._tensor() for _ in range(num_tensors)))

    def _tensor(self) -> GgufTensor:
        name, rank = self._string(), self._number("<I")
        if not 0 <= rank <= _MAX_DIMENSIONS:
            raise self._error(f"tensor {name!r} has {rank} dimensions; wanted at most {_MAX_DIMENSIONS}")
        shape = tuple(reversed([int(self._number("<Q")) for _ in range(int(rank))]))  # the file lists columns first
        kind, _offset = self._number("<I"), self._number("<Q")
        if kind not in GGML_TYPES:
            raise self._error(f"tensor {name!r} has unknown type {kind}; known: {sorted(GGML_TYPES)}")
        type_name, block, block_bytes = GGML_TYPES[int(kind)]
        elements = math.prod(shape)
        if elements % block:
            raise self._error(f"tensor {name!r} of shape {shape} is no whole number of {type_name} blocks of {block}")
        num_bytes = elements // block * block_bytes
        if num_bytes > self._file_bytes:
            raise self._error(f"tensor {name!r} of {num_bytes:,} bytes is larger than the file ({self._file_bytes:,})")
        return GgufTensor(name, type_name, shape, num_bytes)

    def _value(self, kind: int | float) -> Value:
        if kind == _STRING:
            return self._string()
        if kind not in _SCALARS:
            raise self._error(f"metadata value type {kind} is unknown")
        return self._number(_SCALARS[int(kind)])

    def _skip_array(self, depth: int) -> int:
        kind = self._number("<I")
        length = self._count("array items", smallest_bytes=1)
        if kind in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[int(kind)]))
        elif kind == _STRING:
            for _ in range(length):
                self._skip(self._count("string bytes", smallest_bytes=1))
        elif kind == _ARRAY and depth < 4:
            for _ in range(length):
                self._skip_array(depth + 1)
        else:
            raise self._error(f"an array of value type {kind} is unknown")
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
