"""What is told while a command takes its time: moving in a terminal, elsewhere a line on stderr now and then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .options import make_console

QUIET_S = 2.0
"""A wait that is shorter leaves no line in a file."""


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
    try:
        yield tell
    finally:
        line.cancel()
