"""Processes that compile packages beside this one, a core each (`package_compiler`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import torch

from .package_compiler import CompileJob

MOST_PROCESSES = 4
"""Each takes about 0.8 GB for a graph of the embedded pair."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of a process before it forks: the others would not be there afterwards. Each job says how many it wants."""


class CompilerError(RuntimeError):
    """A package could not be compiled; its text says why."""


class CompilerProcesses:
    """Starts processes where there is work; closing it ends them.

    Not `multiprocessing`: that would run a script again which has no `if __name__ == "__main__"`.

    Packages are for as many threads as torch uses when the pool is made.

    Args:
        most: processes.
    """

    def __init__(self, most: int):
        self.most, self.threads = most, torch.get_num_threads()
        self._exported = TemporaryDirectory(prefix="eagle31-")
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="compiling")  # each talks to a process of its own
        self._own = threading.local()
        self._starting = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []
        self._connections: list[_Connection] = []
        self._idle: list[_Connection] = []
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
        job = CompileJob(str(handed), str(package.absolute()), settings, self.threads)
        return self._threads.submit(self._compile, job)

    def _compile(self, job: CompileJob) -> None:
        try:
            answer = self._connection().ask(json.dumps(job._asdict()))
        finally:
            Path(job.exported).unlink(missing_ok=True)
        if not answer:
            raise CompilerError("the process that compiled has ended; memory may have run out")
        if failure := json.loads(answer)["failure"]:
            raise CompilerError(failure)

    def _connection(self) -> _Connection:
        """To the process of the calling thread, which lives until the pool is closed."""
        if not hasattr(self._own, "connection"):
            with self._starting:
                if not self._idle:
                    self._start()
                self._own.connection = self._idle.pop()
        return self._own.connection

    def _start(self) -> None:
        """Start a process, which forks itself as often as is wanted where that is safe."""
        further = [_Connection.opened() for _ in range(self.most - 1 if sys.platform == "linux" else 0)]
        theirs = [number for _, numbers in further for number in numbers]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", CompileJob.__module__, *map(str, theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # `-m` looks for modules in the working folder first, which may be anybody's.
                cwd=self._exported.name,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))} | ONE_THREAD,
                pass_fds=theirs,
                start_new_session=True,  # a group, to be ended together
            )
        finally:
            for number in theirs:
                os.close(number)
        assert process.stdin is not None, "opened as pipes"
        assert process.stdout is not None, "opened as pipes"
        self._started.append(process)
        opened = [_Connection(process.stdin, process.stdout), *(each for each, _ in further)]
        self._connections += opened
        self._idle += opened
        if self._is_closed:
            _end(process)

    def close(self) -> None:
        """End all processes, whatever they are at."""
        with self._starting:
            self._is_closed = True
            for process in self._started:
                _end(process)
        self._threads.shutdown(cancel_futures=True)
        for process in self._started:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._exported.cleanup()

    def __enter__(self) -> CompilerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Connection(NamedTuple):
    """The way to one process: jobs go there line by line, answers come back."""

    jobs: IO[bytes]
    answers: IO[bytes]

    @classmethod
    def opened(cls) -> tuple[_Connection, tuple[int, int]]:
        """A new one, and the numbers of its other end."""
        job_reader, job_writer = os.pipe()
        answer_reader, answer_writer = os.pipe()
        return cls(open(job_writer, "wb"), open(answer_reader, "rb")), (job_reader, answer_writer)

    def ask(self, job: str) -> bytes:
        """Its answer; empty if there is nobody any more."""
        try:
            self.jobs.write(job.encode() + b"\n")
            self.jobs.flush()
            return self.answers.readline()
        except OSError:
            return b""

    def close(self) -> None:
        for end in self:
            with suppress(OSError):  # what was not sent has nobody to go to
                end.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """And all that it has forked."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
