"""A command in a pseudo-terminal, and the longest silence between two of its writes."""

from __future__ import annotations

import os
import pty
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psutil

LOOK_S = 0.1
MOST_S = 600.0
"""A command that has not ended by then hangs, and is killed."""


@dataclass
class Watched:
    """What a command wrote into a terminal, and its longest silence.

    Attributes:
        silence_cpu_s: most processor seconds that it and its children took between two writes.
        silence_s: most seconds that passed.
        before: the end of what was on the screen at the longest silence.
    """

    output: str = ""
    code: int | None = None
    silence_cpu_s: float = 0.0
    silence_s: float = 0.0
    before: str = ""
    gaps: list[tuple[float, float, str]] = field(default_factory=list)


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
    seen, left, looked_from, output = Watched(), list(answers), 0, b""
    started = wrote_at = time.monotonic()
    used = used_at_write = 0.0
    while True:
        try:
            has_written = bool(select.select([screen], [], [], LOOK_S)[0])
            used = max(used, _processor_seconds(process))
            piece = os.read(screen, 65536) if has_written else b""
        except OSError:  # the terminal is closed
            break
        if has_written and not piece:
            break
        now = time.monotonic()
        if now - started > MOST_S:
            os.kill(process, signal.SIGKILL)
        if piece:
            seen.gaps.append((used - used_at_write, now - wrote_at, output[-60:].decode(errors="replace")))
            wrote_at, used_at_write = now, used
            output += piece
        if left and left[0][0].encode() in output[looked_from:]:
            looked_from, reply = len(output), left.pop(0)[1]
            if isinstance(reply, str):
                os.write(screen, reply.encode())
            else:
                reply(process, output.decode(errors="replace"))
    seen.gaps.append((used - used_at_write, time.monotonic() - wrote_at, output[-60:].decode(errors="replace")))
    _, status = os.waitpid(process, 0)
    os.close(screen)
    seen.output, seen.code = output.decode(errors="replace"), os.waitstatus_to_exitcode(status)
    seen.silence_cpu_s, _, seen.before = max(seen.gaps)
    seen.silence_s = max(gap[1] for gap in seen.gaps)
    return seen


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
