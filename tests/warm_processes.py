"""Processes of a test's own that import nothing: each is forked from a server that has imported all they need.

Importing torch, transformers and the trainer costs a process more than most tests' work.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["eagle31_hf.cli", "eagle31_hf.training.train"])


def start(work: Callable[..., None], *arguments: Any, log: Path, **environment: str) -> BaseProcess:
    """A process that does `work`, a function of a module, on one thread of a CPU; what it says goes to `log`."""
    process = _SERVER.Process(target=_run, args=(work, arguments, log, {"CUDA_VISIBLE_DEVICES": "", **environment}))
    process.start()
    return process


def start_group(count: int, work: Callable[..., None], *arguments: Any, log: Path) -> list[BaseProcess]:
    """As many processes as `accelerate launch --num_processes` starts, told of each other as it tells them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["ACCELERATE_USE_CPU"] = "true"
    return [
        start(work, *arguments, log=log.with_suffix(f".{i}"), **shared, RANK=str(i), LOCAL_RANK=str(i))
        for i in range(count)
    ]


def finish(process: BaseProcess, timeout: float = 240) -> int | None:
    """Its exit code, once it has ended; one that takes longer is ended and has none but the signal's."""
    process.join(timeout)
    process.kill()
    process.join()
    return process.exitcode


def run_command(words: list[str]) -> None:
    from eagle31_hf.cli import main

    sys.argv = ["eagle31", *words]
    main()


def _run(work: Callable[..., None], arguments: tuple, log: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    work(*arguments)
