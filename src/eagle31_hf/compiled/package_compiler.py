"""A process that compiles packages: `python -m eagle31_hf.compiled.package_compiler`, started by `CompilerProcesses`.

It reads a job a line, as JSON, and answers each with a line that says what went wrong, if anything did. Being a process
of its own it can be told how to compile without anybody else noticing, and leaves its caller's interpreter alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from functools import cache
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


def _read_templates_once() -> None:
    """Inductor's templates of products are compiled by jinja at each use, which takes a quarter of a graph's time."""
    from torch._inductor.codegen.common import KernelTemplate  # slow to import

    read = getattr(KernelTemplate, "_template_from_string", None)
    if read is not None:
        KernelTemplate._template_from_string = staticmethod(cache(read))  # type: ignore[method-assign]


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Do each job and answer it, until there are no more."""
    tell_inductor()
    _read_templates_once()
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


def main() -> None:
    """Jobs come by standard input; what compilers print must not get among the answers."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is for the caller to tell of
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
