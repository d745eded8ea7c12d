"""Packages that other processes write: they compute the same, and what goes wrong there is told here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from eagle31_hf.compiled.compiler_processes import CompilerError, CompilerProcesses


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
    failing = processes.compile(exported(), tmp_path / "missing" / "a.pt2", {})
    (tmp_path / "missing").write_text("a file where a folder is wanted")
    written = processes.compile(exported(), Path("b.pt2"), {"no.such.setting": 1})
    with pytest.raises(CompilerError, match="Error: "):
        failing.result()
    written.result()
    code = torch._inductor.aoti_load_package(str(tmp_path / "b.pt2"))
    assert torch.equal(code(torch.arange(3.0))[0], torch.tensor([0.0, 2.0, 4.0]))
    assert list(Path(processes._exported.name).iterdir()) == [], "what was handed on is cleared away"


def test_a_process_that_is_killed(processes: CompilerProcesses, tmp_path: Path) -> None:
    """By the system where memory runs out, say."""
    written = processes.compile(exported(), tmp_path / "a.pt2", {})
    while not processes._started:
        time.sleep(0.01)
    processes._started[0].kill()
    with pytest.raises(CompilerError, match=r"has ended \(exit status -9\)"):
        written.result()


def test_closing_ends_what_has_begun_and_begins_nothing_more(tmp_path: Path) -> None:
    with CompilerProcesses(1) as processes:
        begun = [processes.compile(exported(), tmp_path / f"{number}.pt2", {}) for number in range(3)]
        while not processes._started:
            time.sleep(0.01)
    assert len(processes._started) == 1
    assert processes._started[0].returncode is not None
    assert all(each.cancelled() or each.exception() for each in begun)
    assert not Path(processes._exported.name).exists()
    assert list(tmp_path.iterdir()) == []
