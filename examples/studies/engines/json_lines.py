"""A script in a process of its own that answers JSON lines: it loads once, then each request and each answer is a line.

Both sides need nothing but Python: workers run where eagle31_hf is another version, or not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any


class EndedError(RuntimeError):
    """A worker's process ended without an answer."""


class Worker:
    """A script that calls `answer_lines`. Use as a context manager.

    Args:
        command: Python and the script.
        settings: what it loads.
        environment: variables over this process's own.
        log: file that takes what the script and its libraries print; default: standard error.

    Raises:
        EndedError: it ended before it was ready; the message shows the end of its log.
    """

    def __init__(
        self, command: Sequence[str], settings: dict[str, Any], environment: dict[str, str], log: Path | None = None
    ):
        self._log = log
        with ExitStack() as stack:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w")) if log else None,
                env={**os.environ, **environment},
                text=True,
            )
        self.versions: dict[str, str] = self._next_answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._next_answer()

    def _next_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        if self._log is None:
            raise EndedError(f"a worker ended with code {code} before it answered; its error is above")
        last = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        raise EndedError(f"a worker ended with code {code} before it answered; the end of {self._log}:\n{last}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """It leaves when nothing more is asked."""
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def answer_lines(load: Callable[[Any], Any], answer: Callable[[Any, Any], Any], packages: Sequence[str]) -> None:
    """The script's side: load by the last argument, tell the versions of `packages`, then answer each request."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    loaded = load(json.loads(sys.argv[-1]))
    print(json.dumps({name: import_module(name).__version__ for name in packages}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(loaded, json.loads(line))), file=answers, flush=True)
