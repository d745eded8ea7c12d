"""A command in a pseudo-terminal, and the longest silence between two of its writes."""

from __future__ import annotations

import os
import pty
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import psutil

LOOK_S = 0.1
MOST_S = 600.0
"""A command that has not ended by then hangs, and is killed."""


@dataclass
class Watched:
    """What a command wrote into a terminal, and its longest silence.

    Attributes:
        silence_cpu_s: most processor seconds that it and its children took between two writes.
        before: the end of what was on the screen then.
    """

    output: str
    code: int
    silence_cpu_s: float
    before: str


def watch(
    command: Sequence[str],
    *,
    answers: Sequence[tuple[str, str | Callable[[int, str], None]]] = (),
    env: Mapping[str, str] = {},
) -> Watched:
    """Run a command in a terminal of 100 columns.

    Args:
        answers: what is typed, or called with the process id and the output, when a text appears; each waits for its
            own after the one before.
    """
    process, screen = pty.fork()
    if process == 0:
        # One thread: its processor seconds pass no faster than the clock's.
        os.environ.update({"COLUMNS": "100", "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **env})
        try:
            os.execv(command[0], list(command))
        finally:  # it could not be started, and this is still the test's own process
            os._exit(127)
    left, looked_from, output, started = list(answers), 0, b"", time.monotonic()
    used = used_at_write = 0.0
    silences: list[tuple[float, bytes]] = []
    while True:
        try:
            has_written = bool(select.select([screen], [], [], LOOK_S)[0])
            used = max(used, _processor_seconds(process))
            piece = os.read(screen, 65536) if has_written else b""
        except OSError:  # the terminal is closed
            break
        if has_written and not piece:
            break
        if time.monotonic() - started > MOST_S:
            os.kill(process, signal.SIGKILL)
        if piece:
            silences.append((used - used_at_write, output[-60:]))
            used_at_write = used
            output += piece
        if left and left[0][0].encode() in output[looked_from:]:
            looked_from, reply = len(output), left.pop(0)[1]
            if isinstance(reply, str):
                os.write(screen, reply.encode())
            else:
                reply(process, output.decode(errors="replace"))
    longest, before = max([*silences, (used - used_at_write, output[-60:])])
    _, status = os.waitpid(process, 0)
    os.close(screen)
    shown, last = output.decode(errors="replace"), before.decode(errors="replace")
    return Watched(shown, os.waitstatus_to_exitcode(status), longest, last)


def _processor_seconds(process: int) -> float:
    """Of a process and of all below it, living and ended."""
    total = 0.0
    try:
        above = psutil.Process(process)
        for each in (above, *above.children(recursive=True)):
            total += sum(each.cpu_times()[:4])
    except psutil.Error:
        return 0.0
    return total
