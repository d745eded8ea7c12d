"""Reading GGUF headers: right bytes from good files, clear errors from bad ones, nothing else."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle31_hf.checkpoints.gguf_header import GGML_TYPES, read_gguf_header
from eagle31_hf.errors import CheckpointFormatError, MemoryPlanError
from eagle31_hf.memory import MemoryPlan, plan_memory

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", U32, value)


def tensor(name: str, shape: tuple[int, ...], kind: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, 0)


TENSORS = (
    ("token_embd.weight", (64, 256), 1),
    ("blk.0.attn_q.weight", (256, 256), 12),
    ("blk.0.ffn_up.weight", (512, 256), 14),
    ("output_norm.weight", (256,), 0),
    ("blk.0.ffn_down.weight", (256, 512), 2),
)
EXPECTED = 64 * 256 * 2 + 256 * 144 + 512 * 210 + 256 * 4 + 256 * 512 // 32 * 18


def header_bytes(**changes: int) -> bytes:
    sizes = {"embedding_length": 256, "block_count": 1, "attention.head_count": 8, "attention.head_count_kv": 2,
             "feed_forward_length": 512, "context_length": 4096} | changes  # fmt: skip
    vocabulary = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 64)
    vocabulary += b"".join(text(f"t{i}") for i in range(64))
    scores = text("tokenizer.ggml.scores") + struct.pack("<IIQ", ARRAY, 6, 64) + bytes(4 * 64)
    entries = [text("general.architecture") + struct.pack("<I", STRING) + text("llama"), vocabulary, scores]
    entries += [number(f"llama.{key}", value) for key, value in sizes.items() if value]
    body = b"".join(entries) + b"".join(tensor(*entry) for entry in TENSORS)
    return b"GGUF" + struct.pack("<IQQ", 3, len(TENSORS), len(entries)) + body


def write(path: Path, head: bytes) -> Path:
    path.write_bytes(head + bytes(EXPECTED))
    return path


def test_bytes_and_shapes_come_from_the_header(tmp_path: Path) -> None:
    header = read_gguf_header(write(tmp_path / "model.gguf", header_bytes()))
    assert sum(entry.num_bytes for entry in header.tensors) == EXPECTED
    assert [entry.shape for entry in header.tensors] == [shape for _, shape, _ in TENSORS]
    assert header.array_lengths["tokenizer.ggml.tokens"] == 64
    assert header.metadata["llama.block_count"] == 1


def test_a_gguf_file_is_planned(tmp_path: Path) -> None:
    plan = plan_memory(write(tmp_path / "model.gguf", header_bytes()), card="RTX 3060", context=1024)
    assert plan.fits
    parameters = sum(math.prod(shape) for _, shape, _ in TENSORS)
    assert plan.target.weights.total == 2 * parameters, "unpacked to bf16 while loading"
    assert plan.target.packed_file_bytes == EXPECTED
    assert (plan.target.shape.kv_heads, plan.target.shape.vocab_size) == (2, 64)
    assert any("GGUF weights are unpacked to bf16" in warning for warning in plan.warnings)
    assert MemoryPlan.from_dict(plan.to_dict()) == plan


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", header_bytes(block_count=0))
    with pytest.raises(MemoryPlanError, match=r"llama\.block_count"):
        plan_memory(path, card="RTX 3060")
    with pytest.raises(MemoryPlanError, match="brings its own"):
        plan_memory(path, card="RTX 3060", quantization="bnb-nf4")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"PK\x03\x04" + bytes(64), "does not begin"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version is 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "more than its"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "more than its"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor("w", (2**40, 2**20), 1), "larger than the file"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor("w", (3, 100), 12), "whole number"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor("w", (4, 4), 999), "unknown type 999"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 77), "value type 77"),
    ],
)
def test_bad_files_say_why(tmp_path: Path, head: bytes, reason: str) -> None:
    with pytest.raises(CheckpointFormatError, match=reason):
        read_gguf_header(write(tmp_path / "bad.gguf", head))


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="cannot be read"):
        read_gguf_header(tmp_path / "none.gguf")
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
        header = read_gguf_header(path)
    except CheckpointFormatError:
        return
    assert not cut
    assert all(entry.type_name in {name for name, _, _ in GGML_TYPES.values()} for entry in header.tensors)
