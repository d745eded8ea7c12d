"""Processes that compile packages beside this one, as many at once as there are cores: `python -m` this module.

Each compiles one package. It has threads of its own, and leaves its caller's interpreter alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
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
    """Compiles packages, for as many threads as torch uses when this is made; ends with all that has begun.

    Not `multiprocessing`: that would run a script again which has no `if __name__ == "__main__"`.

    Args:
        folder: in which packages are written, in a folder of their own that goes with this.
    """

    def __init__(self, folder: Path):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._most = min(cores, MOST_PROCESSES)
        self._threads, self._count = torch.get_num_threads(), 0
        self._folder = TemporaryDirectory(prefix="eagle31-", dir=folder.absolute(), ignore_cleanup_errors=True)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def compile(self, exported: torch.export.ExportedProgram) -> Callable[[], Path]:
        """Begin to write a package, once one of the processes is free.

        Returns:
            Waits for the package and says where it lies, or raises a `CompilerError`.

        Raises:
            OSError: there is no room to hand the program on.
        """
        self._count += 1
        package = Path(self._folder.name) / f"{self._count}.pt2"
        handed, said = package.with_suffix(".exported.pt2"), package.with_suffix(".txt")
        exported.example_inputs = None  # they may be as large as the weights, and say no more than their shapes
        torch.export.save(exported, handed)
        number = self._free_number()
        # Inductor writes files by what it compiles: two processes that compile the same would read each other's halves.
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{self._folder.name}/{number}"}
        with said.open("wb") as stderr:
            process = self._running[number] = subprocess.Popen(
                [sys.executable, "-m", compile_package.__module__, handed, package, str(self._threads)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                # `-m` looks for modules in the working folder first, which may be anybody's.
                cwd=self._folder.name,
                env=os.environ | own | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )

        def written() -> Path:
            if process.wait():
                lines = said.read_text("utf-8", "replace").strip().splitlines() if process.returncode > 0 else []
                raise CompilerError([_ENDED, *lines][-1])
            return package

        return written

    def _free_number(self) -> int:
        """Of a process that may begin: fewer run than may."""
        while True:
            for number in range(self._most):
                if number not in self._running or self._running[number].poll() is not None:
                    return number
            time.sleep(0.05)

    def __enter__(self) -> CompilerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._folder.cleanup()


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
