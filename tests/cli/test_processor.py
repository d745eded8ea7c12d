"""Machines that list AMX and die of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from eagle31_hf.cli import processor


def lists(tmp_path: Path, *flags: str) -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(f"model name : some\nflags\t\t: fpu {' '.join(flags)} sse2\n")
    return path


def die() -> None:
    os.kill(os.getpid(), signal.SIGILL)


@pytest.mark.parametrize(
    ("flags", "work", "limit"),
    [
        (("amx_bf16", "amx_tile"), die, processor.WITHOUT_TILES),
        (("amx_bf16", "amx_tile"), lambda: None, None),
        (("avx512_bf16",), die, None),
    ],
)
def test_tiles_are_avoided_where_they_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], work: object, limit: str | None
) -> None:
    monkeypatch.setenv(processor.LIMIT, "")  # so that it is restored
    monkeypatch.delenv(processor.LIMIT)
    monkeypatch.setattr(processor, "PROCESSOR_FACTS", lists(tmp_path, *flags))
    monkeypatch.setattr(processor, "_multiply_bfloat16", work)
    processor.avoid_unusable_tiles()
    assert os.environ.get(processor.LIMIT) == limit


def test_what_the_user_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.LIMIT, "AVX2")
    monkeypatch.setattr(processor, "PROCESSOR_FACTS", lists(tmp_path, "amx_bf16"))
    monkeypatch.setattr(processor, "_multiply_bfloat16", die)
    processor.avoid_unusable_tiles()
    assert os.environ[processor.LIMIT] == "AVX2"


def test_no_such_file_is_no_such_processor(tmp_path: Path) -> None:
    assert not processor._lists_tiles(tmp_path / "missing")
