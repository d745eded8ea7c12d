"""What is told while a command takes its time: moving in a terminal, elsewhere a line on stderr now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from .options import make_console

QUIET_S = 2.0
"""A wait that is shorter leaves no line in a file."""

LINE_EVERY_S = 20.0
"""Between two lines about one measurement in a file."""


@contextmanager
def waiting_for(what: str) -> Iterator[Callable[[str], None]]:
    """While open, stderr says what is waited for; what is yielded says that it is something else now.

    In a terminal the line goes when it is left.
    """
    console = make_console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return

    def tell(what: str) -> None:
        console.print(f"{what} ...", markup=False)

    line = threading.Timer(QUIET_S, tell, (what,))
    line.daemon = True
    line.start()

    def tell_instead(what: str) -> None:
        line.cancel()
        tell(what)

    try:
        yield tell_instead
    finally:
        line.cancel()


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[float], None]]:
    """While open, a bar says how much is measured. What is yielded moves it on by shares of 1.

    It is to be called between measurements: drawing while one runs would slow it.
    """
    if not console.is_terminal:
        yield _lines_now_and_then()
        return
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=1.0)

        def advance(share: float) -> None:
            progress.advance(task, share)
            progress.refresh()

        yield advance


def _lines_now_and_then() -> Callable[[float], None]:
    console, told_at, done = make_console(stderr=True), time.monotonic(), 0.0

    def advance(share: float) -> None:
        nonlocal told_at, done
        done += share
        if time.monotonic() - told_at >= LINE_EVERY_S:
            told_at = time.monotonic()
            console.print(f"measuring: {done:.0%}", markup=False)

    return advance
