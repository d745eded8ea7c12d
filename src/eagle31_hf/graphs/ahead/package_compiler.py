"""A process that compiles packages, started by `CompilerProcesses`: `python -m` this module.

It reads a job a line, as JSON, and answers each with a line that says what went wrong, if anything did. Being a process
of its own it can be told how to compile without anybody else noticing, and leaves its caller's interpreter alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from ...errors import named_line
from .packed_weights import PACKED_LINEAR
from .torch_internals import lower_packed_linear, write_package


class CompileJob(NamedTuple):
    """What to compile.

    Attributes:
        exported: file of the exported program.
        package: file to write.
        settings: of inductor; those that this version does not know are left out.
        threads: that the code is to run on, which it has built in.
    """

    exported: str
    package: str
    settings: dict[str, Any]
    threads: int


def compile_package(job: CompileJob) -> None:
    """Write a job's package.

    Raises:
        Exception: whatever a compiler stumbles over.
    """
    torch.set_num_threads(job.threads)
    exported = torch.export.load(job.exported)
    exported.example_inputs = _examples(exported), {}
    with torch.no_grad():
        write_package(exported, Path(job.package), job.settings)


def _examples(exported: torch.export.ExportedProgram) -> tuple[torch.Tensor, ...]:
    """Inputs without data: only what they look like is asked."""
    own = set(exported.graph_signature.user_inputs)
    looks = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder") if node.name in own]
    return tuple(torch.empty_strided(look.shape, look.stride(), dtype=look.dtype) for look in looks)


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Do each job and answer it, until there are no more."""
    for line in jobs:
        job, failure = CompileJob(**json.loads(line)), ""
        try:
            compile_package(job)
        except Exception as error:
            failure = named_line(error)
            with suppress(OSError):
                Path(job.package).unlink()
        answers.write(json.dumps({"failure": failure}) + "\n")
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
