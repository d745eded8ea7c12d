"""One line for each request: who asked what, how it ended, what it took. Never what was said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import quote

from fastapi import Request

from .api_errors import ApiError
from .requests import TextUsage

MOST_NAMED, MOST_REMEMBERED = 64, 1000
"""Fields that a header or a line names, and that a server remembers having named."""

logger = logging.getLogger("eagle31_hf.requests")


def log_answer(request: Request, finishes: Sequence[str | None], usages: Sequence[TextUsage], seconds: float) -> None:
    """Of texts that were written.

    Args:
        finishes: how each ended; `None` for one whose client went away.
        usages: of each.
        seconds: since the request came.
    """
    request.state.is_logged = True
    ended = ", ".join(dict.fromkeys(finish or "cancelled" for finish in finishes))
    written = sum(usage.completion_tokens for usage in usages)
    rounds = sum(usage.rounds for usage in usages)
    prompt, cached = max(u.prompt_tokens for u in usages), max(u.cached_tokens for u in usages)
    speed = f" ({written / seconds:.1f}/s)" if seconds > 0 else ""
    passes = f", {written / rounds:.2f} a pass" if rounds else ""
    logger.info(
        "%s %s: %d prompt tokens (%d held already), %d written in %.2f s%s%s",
        _who(request), ended, prompt, cached, written, seconds, speed, passes,
    )  # fmt: skip


def log_error(request: Request, error: ApiError) -> None:
    """Of a request that got an error instead; its message may quote the body, so it is not told."""
    if getattr(request.state, "is_logged", False):
        return
    at = f" at {ascii(error.param)[:60]}" if error.param else ""
    logger.info("%s %d %s%s", _who(request), error.status, error.code or "error", at)


class IgnoredFields:
    """Fields of requests that are not read: each is named once."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def log(self, names: Sequence[str]) -> None:
        """Name those that have not been."""
        new = [name for name in map(printable, names) if name not in self._named]
        if new and len(self._named) < MOST_REMEMBERED:
            self._named.update(new)
            logger.info("not read, and so ignored, in requests: %s", ", ".join(new[:MOST_NAMED]))


def printable(name: str) -> str:
    """A client's name for a field, as a header or a line can hold it."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "?" for c in name[:64])


def _who(request: Request) -> str:
    host = request.client.host if request.client else "?"
    return f"{host} {request.method} {quote(request.url.path)}"
