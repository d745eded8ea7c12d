"""Packages that other processes write: they compute the same, and what goes wrong there is told here."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle31_hf.graphs.ahead import compiler_processes
from eagle31_hf.graphs.ahead.compiler_processes import CompilerError, CompilerProcesses


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (2 * x,)


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Doubling(), (torch.ones(3),))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[CompilerProcesses]:
    with CompilerProcesses(tmp_path) as started:
        started._most = 2
        yield started


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[subprocess.Popen[bytes], str]]:
    """Each process that begins from now on, and where inductor writes in it."""
    begun, start = list[tuple[subprocess.Popen[bytes], str]](), subprocess.Popen

    def noting(*command: Any, env: dict[str, str], **how: Any) -> subprocess.Popen[bytes]:
        begun.append((start(*command, env=env, **how), env["TORCHINDUCTOR_CACHE_DIR"]))
        return begun[-1][0]

    monkeypatch.setattr(subprocess, "Popen", noting)
    return begun


@pytest.mark.slow
@pytest.mark.thorough
def test_what_fails_is_told_and_the_next_package_is_written(
    processes: CompilerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('modules of a working folder are not imported')")
    with monkeypatch.context() as patch:
        patch.setattr(torch.export, "save", lambda _, path: Path(path).write_text("no program"))
        failing = processes.compile(exported())
    written = processes.compile(exported())
    with pytest.raises(CompilerError, match=r"^\w*(Error|BadZipFile): "):
        failing()
    code = torch._inductor.aoti_load_package(str(written()))
    assert torch.equal(code(torch.arange(3.0))[0], torch.tensor([0.0, 2.0, 4.0]))


def test_one_that_is_killed_says_so_and_makes_room_for_the_next(
    processes: CompilerProcesses, started: list[tuple[subprocess.Popen[bytes], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the system where memory runs out, say. Inductor names files by what it compiles: of two processes that compile
    the same, one would read what is half written."""
    jobs = [processes.compile(exported()) for _ in range(2)]
    first, second = started
    assert first[1] != second[1]
    monkeypatch.setattr(compiler_processes.time, "sleep", lambda _: first[0].kill())
    jobs.append(processes.compile(exported()))
    assert started[2][1] == first[1]
    for process, folder in started:
        assert folder.startswith(processes._folder.name)
        process.kill()
    for job in jobs:
        with pytest.raises(CompilerError, match="has ended; memory may have run out"):
            job()


def test_what_has_begun_ends_and_leaves_nothing(
    started: list[tuple[subprocess.Popen[bytes], str]], tmp_path: Path
) -> None:
    with CompilerProcesses(tmp_path) as processes:
        processes.compile(exported())
    assert [process.returncode is not None for process, _ in started] == [True]
    assert list(tmp_path.iterdir()) == []
