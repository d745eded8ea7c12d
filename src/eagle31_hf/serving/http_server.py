"""uvicorn around the application: stopped, it lets running texts end, and tells those that cannot."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from .engine import Engine

TELLING_S = 5.0
"""What connections get to be told how their text ended, once none is written any more."""


class HttpServer(uvicorn.Server):
    """See above.

    uvicorn waits for connections before it ends an application, so the engine would hear of the end only after streams
    had been torn off. Here it hears of it first.

    Args:
        app: to serve.
        engine: that writes its texts.
        grace_s: what running texts get to end in.
    """

    def __init__(self, app: FastAPI, engine: Engine, *, grace_s: float, port: int = 8000):
        config = uvicorn.Config(
            app,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(grace_s + TELLING_S) + 1,
        )
        super().__init__(config)
        self._engine, self._grace_s = engine, grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let texts end within their grace, cancel the rest, close."""
        closing = asyncio.create_task(asyncio.to_thread(self._engine.close, self._grace_s))
        await super().shutdown(sockets)
        if self.force_exit:  # asked twice: no grace is left
            await asyncio.to_thread(self._engine.close, 0.0)
        await closing
