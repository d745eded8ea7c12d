"""A process that compiles packages: `python -m eagle31_hf.compiled.package_compiler`, started by `CompilerProcesses`.

It reads a job a line, as JSON, and answers each with a line that says what went wrong, if anything did. Being a process
of its own it can be told how to compile without anybody else noticing, and leaves its caller's interpreter alone.

Arguments are pairs of further files, by number, to read jobs from and to answer on: for each pair the process forks
itself, once it has imported what compiling takes, which costs as much as two small packages.
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
from torch._inductor import config as inductor

from .packed_weights import tell_inductor


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
    known = {name: value for name, value in job.settings.items() if _is_setting(name)}
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(exported, package_path=job.package, inductor_configs=known)


def _examples(exported: torch.export.ExportedProgram) -> tuple[torch.Tensor, ...]:
    """Inputs without data: only what they look like is asked."""
    own = set(exported.graph_signature.user_inputs)
    looks = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder") if node.name in own]
    return tuple(torch.empty_strided(look.shape, look.stride(), dtype=look.dtype) for look in looks)


def _is_setting(name: str) -> bool:
    where: Any = inductor
    for part in name.split("."):
        if not hasattr(where, part):
            return False
        where = getattr(where, part)
    return True


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Do each job and answer it, until there are no more."""
    for line in jobs:
        job, failure = CompileJob(**json.loads(line)), ""
        try:
            compile_package(job)
        except Exception as error:
            failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            with suppress(OSError):
                Path(job.package).unlink()
        answers.write(json.dumps({"failure": failure}) + "\n")
        answers.flush()


def _prepare() -> None:
    """What all jobs need."""
    from torch._inductor import compile_fx, cpu_vec_isa  # noqa: F401  slow to import

    tell_inductor()
    with suppress(Exception):  # the first job tells of it
        cpu_vec_isa.pick_vec_isa()  # asks the C++ compiler what the processor can do


def main() -> None:
    """Jobs come by standard input; neither it nor standard output is for compilers."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the caller to tell of
    numbers = [os.dup(sys.stdin.fileno()), os.dup(sys.stdout.fileno()), *map(int, sys.argv[1:])]
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _prepare()
    own, *further = zip(numbers[::2], numbers[1::2], strict=True)
    for pair in further:
        if not os.fork():
            own = pair
            break
    for number in set(numbers) - set(own):
        os.close(number)  # or nobody would notice where a process ends
    with open(own[0], encoding="utf-8") as jobs, open(own[1], "w", encoding="utf-8") as answers:
        serve(jobs, answers)


if __name__ == "__main__":
    main()
