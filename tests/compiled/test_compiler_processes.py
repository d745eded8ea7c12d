"""Packages that other processes write: they compute the same, and what goes wrong there is told here."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eagle31_hf.compiled.compiler_processes import CompilerError, CompilerProcesses
from eagle31_hf.compiled.packages import SETTINGS


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (2 * x,)


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Doubling(), (torch.ones(3),))


@pytest.fixture
def processes() -> Iterator[CompilerProcesses]:
    with CompilerProcesses(1) as started:
        yield started


@pytest.mark.slow
def test_what_fails_is_told_and_the_next_package_is_written(
    processes: CompilerProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('modules of a working folder are not imported')")
    failing = processes.compile(exported(), tmp_path / "missing" / "a.pt2", SETTINGS)
    (tmp_path / "missing").write_text("a file where a folder is wanted")
    written = processes.compile(exported(), Path("b.pt2"), {**SETTINGS, "no.such.setting": 1})
    with pytest.raises(CompilerError, match="Error: "):
        failing.result()
    written.result()
    code = torch._inductor.aoti_load_package(str(tmp_path / "b.pt2"))
    assert torch.equal(code(torch.arange(3.0))[0], torch.tensor([0.0, 2.0, 4.0]))
    assert list(Path(processes._exported.name).glob("*.pt2")) == [], "what was handed on is cleared away"


def test_a_process_that_is_killed(processes: CompilerProcesses, tmp_path: Path) -> None:
    """By the system where memory runs out, say."""
    written = processes.compile(exported(), tmp_path / "a.pt2", SETTINGS)
    while not processes._started:
        time.sleep(0.01)
    processes._started[0].kill()
    with pytest.raises(CompilerError, match="has ended; memory may have run out"):
        written.result()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each process is started for itself")
def test_two_of_which_the_first_is_killed(tmp_path: Path) -> None:
    """The other goes on: it was forked and is nobody's child any more."""
    with CompilerProcesses(2) as processes:
        first = processes.compile(exported(), tmp_path / "0.pt2", SETTINGS)
        second = processes.compile(exported(), tmp_path / "1.pt2", SETTINGS)
        wait([first, second])
        assert first.exception() is None
        assert second.exception() is None
        assert len(processes._started) == 1
        processes._started[0].kill()
        later = [processes.compile(exported(), tmp_path / f"{number}.pt2", SETTINGS) for number in (2, 3)]
        wait(later)
        lost = [each.exception() for each in later if each.exception()]
    assert lost
    assert all("has ended" in str(each) for each in lost)
    assert len(list(tmp_path.iterdir())) == 2 + len(later) - len(lost)


def test_closing_ends_what_has_begun_and_begins_nothing_more(tmp_path: Path) -> None:
    with CompilerProcesses(1) as processes:
        begun = [processes.compile(exported(), tmp_path / f"{number}.pt2", SETTINGS) for number in range(3)]
        while not processes._started:
            time.sleep(0.01)
    assert len(processes._started) == 1
    assert processes._started[0].returncode is not None
    assert all(each.cancelled() or each.exception() for each in begun)
    assert not Path(processes._exported.name).exists()
    assert list(tmp_path.iterdir()) == []
