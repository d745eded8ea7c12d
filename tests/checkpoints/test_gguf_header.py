"""Reading GGUF headers: what good files say, clear errors from bad ones, nothing else."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_hf.checkpoints.gguf_header import read_gguf_metadata
from eagle31_hf.errors import CheckpointFormatError, MemoryPlanError
from eagle31_hf.memory import plan_memory
from gguf_file import KV_HEADS, write_gguf

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def header_bytes(**changes: int) -> bytes:
    sizes = {"embedding_length": 256, "block_count": 1, "attention.head_count": 8, "attention.head_count_kv": 2,
             "feed_forward_length": 512, "context_length": 4096} | changes  # fmt: skip
    vocabulary = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 64)
    vocabulary += b"".join(text(f"t{i}") for i in range(64))
    scores = text("tokenizer.ggml.scores") + struct.pack("<IIQ", ARRAY, 6, 64) + bytes(4 * 64)
    entries = [text("general.architecture") + struct.pack("<I", STRING) + text("llama"), vocabulary, scores]
    entries += [number(f"llama.{key}", value) for key, value in sizes.items() if value]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)


def write(path: Path, head: bytes) -> Path:
    path.write_bytes(head + bytes(1024))
    return path


def test_entries_are_read_and_arrays_counted(tmp_path: Path) -> None:
    found = read_gguf_metadata(write(tmp_path / "model.gguf", header_bytes()))
    assert (found["general.architecture"], found["llama.block_count"]) == ("llama", 1)
    assert (found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"]) == (64, 64)


def test_a_gguf_file_is_planned(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    plan = plan_memory(path, card="RTX 3060", context=1024)
    assert plan.fits
    assert plan.target.weights.total > 2 * plan.target.num_parameters, "unpacked to bf16 while loading, and buffers"
    assert plan.target.packed_file_bytes == path.stat().st_size
    assert plan.target.shape.kv_heads == KV_HEADS
    assert any("GGUF weights are unpacked to bf16" in warning for warning in plan.warnings)
    with pytest.raises(MemoryPlanError, match="brings its own"):
        plan_memory(path, card="RTX 3060", quantization="bnb-nf4")


def test_what_transformers_cannot_read_is_not_planned(tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"cannot read 'model\.gguf'"):
        plan_memory(write_gguf(tmp_path / "model.gguf", architecture="no-such"), card="RTX 3060")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"PK\x03\x04" + bytes(64), "does not begin"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "more than its"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "more than its"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 77), "value type 77"),
    ],
)
def test_bad_files_say_why(tmp_path: Path, head: bytes, reason: str) -> None:
    with pytest.raises(CheckpointFormatError, match=reason):
        read_gguf_metadata(write(tmp_path / "bad.gguf", head))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="cannot be read"):
        read_gguf_metadata(tmp_path / "none.gguf")
    with pytest.raises(MemoryPlanError, match="cannot be read"):
        plan_memory(tmp_path / "none.gguf", card="RTX 3060")


@given(st.integers(4, len(header_bytes()) - 1), st.binary(min_size=1, max_size=9), st.booleans())
@settings(max_examples=300, deadline=None)
def test_damaged_headers_never_escape(
    tmp_path_factory: pytest.TempPathFactory, at: int, junk: bytes, cut: bool
) -> None:
    head = header_bytes()
    damaged = head[:at] if cut else head[:at] + junk + head[at + len(junk) :]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        read_gguf_metadata(path)
    except CheckpointFormatError:
        return
    assert not cut
