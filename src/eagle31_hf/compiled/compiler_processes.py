"""Processes that compile packages beside this one, a core each (`package_compiler`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .package_compiler import CompileJob

MOST_PROCESSES = 4
"""Each takes about 0.8 GB for a graph of the embedded pair."""


class CompilerError(RuntimeError):
    """A package could not be compiled; its text says why."""


class CompilerProcesses:
    """Starts as many processes as there is work for; closing it ends them.

    Not `multiprocessing`: that would run a script again which has no `if __name__ == "__main__"`.

    Args:
        most: processes.
    """

    def __init__(self, most: int):
        self._exported = TemporaryDirectory(prefix="eagle31-")
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="compiling")  # each waits for a process of its own
        self._own = threading.local()
        self._started: list[subprocess.Popen[str]] = []
        self._count, self._is_closed = 0, False

    @classmethod
    def one_a_core(cls) -> CompilerProcesses:
        """As many as this process may use cores."""
        return cls(min(_cores(), MOST_PROCESSES))

    def compile(self, exported: torch.export.ExportedProgram, package: Path, settings: dict[str, Any]) -> Future[None]:
        """Begin to write a package.

        Returns:
            Done when it is written, or a `CompilerError`.

        Raises:
            OSError: there is no room to hand the program on.
        """
        self._count += 1
        handed = Path(self._exported.name) / f"{self._count}.pt2"
        exported.example_inputs = None  # they may be as large as the weights, and say no more than their shapes
        torch.export.save(exported, handed)
        job = CompileJob(str(handed), str(package.absolute()), settings, torch.get_num_threads())
        return self._threads.submit(self._compile, job)

    def _compile(self, job: CompileJob) -> None:
        process = self._process()
        assert process.stdin is not None, "opened as pipes"
        assert process.stdout is not None, "opened as pipes"
        try:
            process.stdin.write(json.dumps(job._asdict()) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        Path(job.exported).unlink(missing_ok=True)
        if not answer:
            raise CompilerError(f"the process that compiled has ended (exit status {process.wait()})")
        if failure := json.loads(answer)["failure"]:
            raise CompilerError(failure)

    def _process(self) -> subprocess.Popen[str]:
        """That of the calling thread; it lives until the pool is closed."""
        if not hasattr(self._own, "process"):
            self._own.process = subprocess.Popen(
                [sys.executable, "-m", CompileJob.__module__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                # `-m` looks for modules in the working folder first, which may be anybody's.
                cwd=self._exported.name,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )
            self._started.append(self._own.process)
            if self._is_closed:
                self._own.process.kill()
        return self._own.process

    def close(self) -> None:
        """End all processes, whatever they are at."""
        self._is_closed = True
        for process in self._started:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.communicate()
        self._exported.cleanup()

    def __enter__(self) -> CompilerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
