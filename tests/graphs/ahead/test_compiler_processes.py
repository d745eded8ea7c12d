"""Packages that other processes write: they compute the same, and what goes wrong there is told here."""

from __future__ import annotations

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
    with CompilerProcesses(1) as started:
        yield started


def hand_on_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that fails at once: to compile the smallest program takes a quarter of a minute."""
    monkeypatch.setattr(torch.export, "save", lambda _, path: Path(path).write_text("no program"))


@pytest.mark.slow
@pytest.mark.thorough
def test_what_fails_is_told_and_the_next_package_is_written(
    processes: CompilerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('modules of a working folder are not imported')")
    with monkeypatch.context() as patch:
        hand_on_no_program(patch)
        failing = processes.compile(exported(), tmp_path / "a.pt2")
    written = processes.compile(exported(), Path("b.pt2"))
    with pytest.raises(CompilerError, match=r"Error: |BadZipFile: "):
        failing.result()
    written.result()
    code = torch._inductor.aoti_load_package(str(tmp_path / "b.pt2"))
    assert torch.equal(code(torch.arange(3.0))[0], torch.tensor([0.0, 2.0, 4.0]))
    assert list(Path(processes._exported.name).glob("*.pt2")) == [], "what was handed on is cleared away"


@pytest.mark.slow
def test_two_of_which_the_first_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the system where memory runs out, say; the other goes on. Inductor names files by what it compiles: of two
    processes that compile the same, one would read what is half written, so each has a folder of its own."""
    hand_on_no_program(monkeypatch)
    folders, start = list[str](), subprocess.Popen

    def noting(*command: Any, env: dict[str, str], **how: Any) -> subprocess.Popen[str]:
        folders.append(env["TORCHINDUCTOR_CACHE_DIR"])
        return start(*command, env=env, **how)

    monkeypatch.setattr(subprocess, "Popen", noting)

    def told(processes: CompilerProcesses) -> list[bool]:
        """Whether each of two processes has answered."""
        jobs = [processes.compile(exported(), tmp_path / f"{number}.pt2") for number in range(2)]
        wait(jobs)
        return ["has ended; memory may have run out" not in str(job.exception()) for job in jobs]

    with CompilerProcesses(2) as processes:
        assert told(processes) == [True, True]
        assert len({*folders}) == len(processes._started) == 2
        assert all(folder.startswith(processes._exported.name) for folder in folders)
        processes._started[0].kill()
        assert sorted(told(processes)) == [False, True]


def test_closing_ends_what_has_begun_and_begins_nothing_more(tmp_path: Path) -> None:
    with CompilerProcesses(1) as processes:
        begun = [processes.compile(exported(), tmp_path / f"{number}.pt2") for number in range(3)]
    assert len(processes._started) == 1
    assert processes._started[0].returncode is not None
    assert all(each.cancelled() or each.exception() for each in begun)
    assert not Path(processes._exported.name).exists()
    assert list(tmp_path.iterdir()) == []
