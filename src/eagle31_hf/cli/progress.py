"""What a command shows while it works: a moving line in a terminal, elsewhere a line on stderr now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import count
from .options import make_console

if TYPE_CHECKING:
    from ..graphs.steps import GraphKey

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
        line.cancel()
        console.print(f"{what} ...", markup=False)

    line = threading.Timer(QUIET_S, tell, (what,))
    line.daemon = True
    line.start()
    try:
        yield tell
    finally:
        line.cancel()


def counting_graphs(say: Callable[[str], object]) -> Callable[[GraphKey], None]:
    """What is told of each graph that is compiled: it says how many there are by now, and of what kinds."""
    kinds: list[str] = []

    def tell(key: GraphKey) -> None:
        kinds.append(key.kind)
        say(f"compiling {count(len(kinds), 'graph')}: {', '.join(dict.fromkeys(kinds))}")

    return tell


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """While open, a bar says how much is measured. What is yielded takes what, how many are done, and of how many.

    The bar is drawn once a second, so that its clock moves during a long measurement and slows none.
    """
    # What is left is not told: most measurements are bounded by time, and end before all is done.
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(" of "), TimeElapsedColumn()
    log, logged_at = make_console(stderr=True), time.monotonic()

    def advance(what: str, done: int, of: int) -> None:
        nonlocal logged_at
        progress.update(task, description=what, completed=done, total=of)
        if not console.is_terminal and time.monotonic() - logged_at >= LINE_EVERY_S:
            logged_at = time.monotonic()
            log.print(f"{what}: {done} of {of}", markup=False)

    with Progress(
        *columns, console=console, transient=True, refresh_per_second=1, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("warming up", total=None)
        yield advance
