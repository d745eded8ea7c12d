"""Engines that live in an environment of their own (`make engines`), each in a process that answers JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, TextIO

from eagle31_hf.errors import Eagle31Error

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parents[2] / ".engines"
INSTALL = "make engines"


class EngineNotInstalledError(Eagle31Error, ImportError):
    """Another engine is asked for, and its environment is not there."""


class EngineFailedError(Eagle31Error, RuntimeError):
    """An engine's process ended without an answer."""


def engine_python() -> Path:
    """The Python that can import the other engines.

    Raises:
        EngineNotInstalledError: the environment has not been made.
    """
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / ".installed").exists() or not python.exists():
        raise EngineNotInstalledError(
            f"the other engines are not installed: {ENVIRONMENT} is missing or not complete; run `{INSTALL}` in "
            f"{ENVIRONMENT.parent}"
        )
    return python


def engine_environment() -> dict[str, str]:
    """Variables for an engine: offline, no statistics sent, and every core of this process, not all but one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(cores),
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default one core is kept for the front end: half of two
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


class EngineProcess:
    """One worker of this folder, loaded once and asked many times. Use as a context manager.

    Args:
        worker: file name of the worker.
        settings: what it loads.
        log: file that takes what the engine prints.

    Raises:
        EngineNotInstalledError: there is no environment to run it in.
        EngineFailedError: it ended before it was ready; the message shows the end of its log.
    """

    def __init__(self, worker: str, settings: dict[str, Any], log: Path):
        python = engine_python()
        self._log = log
        reader, writer = os.pipe()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), str(HERE / worker), str(writer), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                env=engine_environment(),
                text=True,
            )
        os.close(writer)
        self._answers: TextIO = os.fdopen(reader)
        self.facts = self._next_answer()
        """What the worker said when it was ready: `versions` and `load_s`."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer to one request."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._next_answer()

    def _next_answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            code = self._process.wait()
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise EngineFailedError(f"the engine ended with code {code}; the end of {self._log}:\n{last}")
        return json.loads(line)

    def close(self) -> None:
        """End the worker: it leaves when nothing more is asked."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._answers.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
