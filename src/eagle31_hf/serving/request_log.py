"""One line for each request: who asked what, how it ended, what it took. Never what was said."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import quote

from fastapi import Request

from .api_errors import ApiError
from .requests import TextUsage

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


def _who(request: Request) -> str:
    host = request.client.host if request.client else "?"
    return f"{host} {request.method} {quote(request.url.path)}"
