"""Processes that compile packages beside this one, a core each: `python -m` this module.

One reads a job a line, as JSON, and answers each with a line that says what went wrong, if anything did. It has
threads of its own, and leaves its caller's interpreter alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import TextIO

import torch

from ...errors import named_line
from .packed_weights import PACKED_LINEAR
from .torch_internals import lower_packed_linear, write_package

MOST_PROCESSES = 4
"""Each takes about 0.8 GB for a graph of the embedded pair."""


class CompilerError(RuntimeError):
    """A package could not be compiled; its text says why."""


class CompilerProcesses:
    """Starts processes once there is work; closing it ends them.

    Not `multiprocessing`: that would run a script again which has no `if __name__ == "__main__"`.

    Packages are for as many threads as torch uses when the pool is made.

    Args:
        most: processes.
    """

    def __init__(self, most: int):
        self.threads, self._most, self._count = torch.get_num_threads(), most, 0
        self._exported = TemporaryDirectory(prefix="eagle31-")
        self._asking = ThreadPoolExecutor(most, thread_name_prefix="compiling")  # each waits for a process
        self._started: list[subprocess.Popen[str]] = []
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()

    @classmethod
    def one_a_core(cls) -> CompilerProcesses:
        """As many as this process may use cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls(min(cores, MOST_PROCESSES))

    def compile(self, exported: torch.export.ExportedProgram, package: Path) -> Future[None]:
        """Begin to write a package.

        Returns:
            Done when it is written, or a `CompilerError`.

        Raises:
            OSError: there is no room to hand the program on, or no process can be started.
        """
        while len(self._started) < self._most:
            self._started.append(self._start())
            self._idle.put(self._started[-1])
        self._count += 1
        handed = Path(self._exported.name) / f"{self._count}.pt2"
        exported.example_inputs = None  # they may be as large as the weights, and say no more than their shapes
        torch.export.save(exported, handed)
        return self._asking.submit(self._compile, handed, package.absolute())

    def _compile(self, exported: Path, package: Path) -> None:
        try:
            answer = self._ask(json.dumps([str(exported), str(package), self.threads]))
        finally:
            exported.unlink(missing_ok=True)
        if not answer:
            raise CompilerError("the process that compiled has ended; memory may have run out")
        if failure := json.loads(answer):
            raise CompilerError(failure)

    def _ask(self, job: str) -> str:
        """The answer of a process; empty if it has ended."""
        process = self._idle.get()
        assert process.stdin is not None, "opened as pipes"
        assert process.stdout is not None, "opened as pipes"
        try:
            print(job, file=process.stdin, flush=True)
            return process.stdout.readline()
        except OSError:
            return ""
        finally:
            self._idle.put(process)

    def _start(self) -> subprocess.Popen[str]:
        # Inductor writes files by what it compiles: two processes that compile the same would read each other's halves.
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{self._exported.name}/{len(self._started)}"}
        return subprocess.Popen(
            [sys.executable, "-m", compile_package.__module__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            # `-m` looks for modules in the working folder first, which may be anybody's.
            cwd=self._exported.name,
            env=os.environ | own | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            start_new_session=True,  # a group, to be ended together
        )

    def close(self) -> None:
        """End all processes, whatever they are at."""
        for process in self._started:
            _end(process)
        self._asking.shutdown(cancel_futures=True)
        for process in self._started:
            with suppress(OSError), process:  # waits; what was not sent has nobody to go to
                pass
        self._exported.cleanup()

    def __enter__(self) -> CompilerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(process: subprocess.Popen[str]) -> None:
    """And the compilers that it has started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


# --- one of them ------------------------------------------------------------------------------------------------------


def compile_package(exported: Path, package: Path, threads: int) -> None:
    """Write a package of the exported program in a file, to run on so many threads, which its code has built in.

    Raises:
        Exception: whatever a compiler stumbles over.
    """
    torch.set_num_threads(threads)
    program = torch.export.load(exported)
    program.example_inputs = _examples(program), {}
    with torch.no_grad():
        write_package(program, package)


def _examples(exported: torch.export.ExportedProgram) -> tuple[torch.Tensor, ...]:
    """Inputs without data: only what they look like is asked."""
    own = set(exported.graph_signature.user_inputs)
    looks = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder") if node.name in own]
    return tuple(torch.empty_strided(look.shape, look.stride(), dtype=look.dtype) for look in looks)


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Do each job and answer it, until there are no more."""
    for line in jobs:
        exported, package, threads = json.loads(line)
        failure = ""
        try:
            compile_package(Path(exported), Path(package), threads)
        except Exception as error:
            failure = named_line(error)
            with suppress(OSError):
                Path(package).unlink()
        answers.write(json.dumps(failure) + "\n")
        answers.flush()


def main() -> None:
    """Jobs come by standard input; neither it nor standard output is for compilers."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the caller to tell of
    own = os.dup(sys.stdin.fileno()), os.dup(sys.stdout.fileno())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lower_packed_linear(PACKED_LINEAR)
    with open(own[0], encoding="utf-8") as jobs, open(own[1], "w", encoding="utf-8") as answers:
        serve(jobs, answers)


if __name__ == "__main__":
    main()
