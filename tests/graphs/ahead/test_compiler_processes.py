"""Packages that other processes write: they compute the same, and what goes wrong there is told here."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eagle31_hf.graphs.ahead.compiler_processes import CompilerError, CompilerProcesses


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (2 * x,)


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Doubling(), (torch.ones(3),))


@pytest.fixture
def processes() -> Iterator[CompilerProcesses]:
    with CompilerProcesses(2) as started:
        yield started


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[subprocess.Popen[str], str]]:
    """Each process that begins from now on, and where inductor writes in it."""
    begun, start = list[tuple[subprocess.Popen[str], str]](), subprocess.Popen

    def noting(*command: Any, env: dict[str, str], **how: Any) -> subprocess.Popen[str]:
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
        failing = processes.compile(exported(), tmp_path / "a.pt2")
    written = processes.compile(exported(), Path("b.pt2"))
    with pytest.raises(CompilerError, match=r"^\w*(Error|BadZipFile): "):
        failing.result()
    written.result()
    code = torch._inductor.aoti_load_package(str(tmp_path / "b.pt2"))
    assert torch.equal(code(torch.arange(3.0))[0], torch.tensor([0.0, 2.0, 4.0]))
    assert list(Path(processes._folder.name).glob("*.pt2")) == [], "what was handed on is cleared away"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_one_that_is_killed_says_so_and_each_has_a_folder_of_its_own(
    processes: CompilerProcesses, started: list[tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    """By the system where memory runs out, say. Inductor names files by what it compiles: of two processes that compile
    the same, one would read what is half written."""
    jobs = [processes.compile(exported(), tmp_path / f"{number}.pt2") for number in range(2)]
    while len(started) < len(jobs):
        wait(jobs, timeout=0.01)
    for process, _ in started:
        os.killpg(process.pid, signal.SIGKILL)
    assert all("has ended; memory may have run out" in str(job.exception()) for job in jobs)
    folders = [folder for _, folder in started]
    assert len({*folders}) == len(jobs)
    assert all(folder.startswith(processes._folder.name) for folder in folders)


def test_closing_ends_what_has_begun_and_begins_nothing_more(
    started: list[tuple[subprocess.Popen[str], str]], tmp_path: Path
) -> None:
    with CompilerProcesses(1) as processes:
        begun = [processes.compile(exported(), tmp_path / f"{number}.pt2") for number in range(3)]
    assert len(started) <= 1
    assert all(process.returncode is not None for process, _ in started)
    assert all(each.cancelled() or each.exception() for each in begun)
    assert not Path(processes._folder.name).exists()
    assert list(tmp_path.iterdir()) == []
