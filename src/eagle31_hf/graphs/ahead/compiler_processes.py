"""Processes that compile packages beside this one, as many at once as there are cores: `python -m` this module.

Each compiles one package. It has threads of its own, and leaves its caller's interpreter alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ...errors import named_line
from .packed_weights import PACKED_LINEAR
from .torch_internals import lower_packed_linear, write_package

MOST_PROCESSES = 4
"""Each takes about 0.8 GB for a graph of the embedded pair."""


_ENDED = "the process that compiled has ended; memory may have run out"


class CompilerError(RuntimeError):
    """A package could not be compiled; its text says why."""


class CompilerProcesses:
    """Compiles packages, for as many threads as torch uses when this is made; closing it ends what has begun.

    Not `multiprocessing`: that would run a script again which has no `if __name__ == "__main__"`.

    Args:
        most: processes at once; default: as many as this process may use cores, up to `MOST_PROCESSES`.
    """

    def __init__(self, most: int | None = None):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads, self._count = torch.get_num_threads(), 0
        self._folder = TemporaryDirectory(prefix="eagle31-")
        # Each thread waits for a process.
        self._waiting = ThreadPoolExecutor(most or min(cores, MOST_PROCESSES), thread_name_prefix="compiling")
        self._running: set[subprocess.Popen[str]] = set()
        self._starting = threading.Lock()
        self._is_closed = False

    def compile(self, exported: torch.export.ExportedProgram, package: Path) -> Future[None]:
        """Begin to write a package.

        Returns:
            Done when it is written, or a `CompilerError`.

        Raises:
            OSError: there is no room to hand the program on.
        """
        self._count += 1
        handed = Path(self._folder.name) / f"{self._count}.pt2"
        exported.example_inputs = None  # they may be as large as the weights, and say no more than their shapes
        torch.export.save(exported, handed)
        return self._waiting.submit(self._compile, handed, package.absolute())

    def _compile(self, exported: Path, package: Path) -> None:
        with self._starting:
            if self._is_closed:
                raise CompilerError("compiling was interrupted")
            process = self._start(str(exported), str(package))
            self._running.add(process)
        _, said = process.communicate()
        self._running.discard(process)
        exported.unlink(missing_ok=True)
        if process.returncode:
            package.unlink(missing_ok=True)
            lines = said.strip().splitlines() if process.returncode > 0 else []
            raise CompilerError([_ENDED, *lines][-1])

    def _start(self, *job: str) -> subprocess.Popen[str]:
        # Inductor writes files by what it compiles: two processes that compile the same would read each other's halves.
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{self._folder.name}/{threading.current_thread().name}"}
        return subprocess.Popen(
            [sys.executable, "-m", compile_package.__module__, *job, str(self._threads)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            # `-m` looks for modules in the working folder first, which may be anybody's.
            cwd=self._folder.name,
            env=os.environ | own | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            start_new_session=True,  # a group, to be ended together
        )

    def close(self) -> None:
        """End all processes, whatever they are at."""
        with self._starting:
            self._is_closed = True
            for process in [*self._running]:
                _end(process)
        self._waiting.shutdown(cancel_futures=True)
        self._folder.cleanup()

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


def compile_package(exported: str, package: str, threads: str) -> None:
    """Write a package of the exported program in a file, to run on so many threads, which its code has built in.

    Raises:
        Exception: whatever a compiler stumbles over.
    """
    torch.set_num_threads(int(threads))
    lower_packed_linear(PACKED_LINEAR)
    program = torch.export.load(exported)
    program.example_inputs = _examples(program), {}
    with torch.no_grad():
        write_package(program, Path(package))


def _examples(exported: torch.export.ExportedProgram) -> tuple[torch.Tensor, ...]:
    """Inputs without data: only what they look like is asked."""
    own = set(exported.graph_signature.user_inputs)
    looks = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder") if node.name in own]
    return tuple(torch.empty_strided(look.shape, look.stride(), dtype=look.dtype) for look in looks)


if __name__ == "__main__":
    try:
        compile_package(*sys.argv[1:])
    except Exception as failure:
        sys.exit(named_line(failure))  # the last line of what is said
