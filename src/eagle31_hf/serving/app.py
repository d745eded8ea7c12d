"""The HTTP side: routes of OpenAI's API, streams, errors in its shape, clients that go away, a line a request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn
from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from ..errors import ConfigurationError, Eagle31Error, UnsupportedGenerationError
from .answers import AnswerWriter, timings_of, writer_of
from .api import Translator
from .api_errors import ApiError, ShuttingDownError
from .bodies import AnyBody, ChatBody, CompletionBody, parse, parse_json
from .engine import Engine
from .metrics import ServerMetrics
from .rows import ServedText
from .text import Event, Request, Usage

NAMING_HEADERS = "X-Ignored-Fields", "X-Unfollowed-Settings"
MAX_BODY_BYTES = 8 * 2**20
MOST_NAMED, MOST_REMEMBERED = 64, 1000
"""Ignored fields that a header or a line names, and that a server remembers having named."""

TELLING_S = 5
"""What connections get to be told how their text ended, once none is written any more."""

logger = logging.getLogger("eagle31_hf.requests")


class HttpServer(uvicorn.Server):
    """uvicorn around the application: stopped, it lets running texts end, and tells those that cannot.

    Until they have, it listens on: what is asked meanwhile is told that the server stops. A second signal leaves
    running texts no time, a third waits for no connection either.

    Args:
        grace_s: what running texts get to end in.
        on_stop: told how many texts have not ended when the server is first asked to stop.
    """

    def __init__(
        self,
        app: FastAPI,
        engine: Engine,
        *,
        grace_s: float,
        port: int = 8000,
        on_stop: Callable[[int], None] = lambda running: None,
    ):
        config = uvicorn.Config(app, port=port, lifespan="off", log_level="warning", access_log=False)
        config.timeout_graceful_shutdown = TELLING_S
        super().__init__(config)
        self._engine, self._grace_s, self._on_stop = engine, grace_s, on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's own it keeps no signals to raise them again: a server that has stopped is no error."""
        if self.should_exit:
            self.force_exit = self._engine.deadline == 0.0
            self._engine.deadline = 0.0
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let texts end within their grace, cancel the rest, stop listening, close."""
        self._on_stop(len(self._engine.scheduler.texts))
        await asyncio.to_thread(self._engine.close, self._grace_s)
        await super().shutdown(sockets)


def make_app(engine: Engine, *, model: str, api_key: str | None = None, allow_origins: Sequence[str] = ()) -> FastAPI:
    """The ASGI application.

    Args:
        model: the name clients ask for.
        api_key: what they have to show; `None`: nothing.
        allow_origins: web pages (`http://localhost:3000`) that a browser may let ask.
    """
    app = FastAPI(title="eagle31", openapi_url=None)
    server = _Server(engine, model, api_key)
    app.add_api_route("/health", server.health, methods=["GET"], response_model=None)
    for method, path, handler in (
        ("POST", "/v1/chat/completions", server.chat),
        ("POST", "/v1/completions", server.complete),
        ("GET", "/v1/models", server.models),
        ("GET", "/v1/models/{name:path}", server.model),
        ("GET", "/metrics", server.metrics),
    ):
        key = [Depends(server.check_key)]
        app.add_api_route(path, handler, methods=[method], response_model=None, dependencies=key)
    if allow_origins:
        may: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": NAMING_HEADERS}
        app.add_middleware(CORSMiddleware, allow_origins=allow_origins, **may)
    for kind in (Eagle31Error, HTTPException, Exception):
        app.add_exception_handler(kind, _as_response)
    return app


class _Server:
    """The handlers."""

    def __init__(self, engine: Engine, name: str, api_key: str | None):
        self.engine, self.name, self.api_key = engine, name, api_key
        self.translator = Translator(engine)
        self.figures = ServerMetrics(engine)
        self.started, self._named = int(time.time()), set[str]()

    async def health(self) -> Response:
        """200 while texts are taken, 503 from then on."""
        engine, alive = self.engine, self.engine.is_alive
        state = {"status": "ok" if alive else "shutting down", "model": self.name}
        figures = {"running": engine.scheduler.running, "waiting": len(engine.scheduler.waiting)}
        return JSONResponse(state | figures, status_code=200 if alive else 503)

    async def metrics(self) -> Response:
        return Response(self.figures.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "eagle31",
            "max_model_len": self.engine.settings.context,
            "target": self.engine.drafter.binding.model.name_or_path,
            "drafter": getattr(self.engine.drafter, "name_or_path", None),
        }

    # --- chats and completions -------------------------------------------------------------------------------------

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, ChatBody)

    async def complete(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, CompletionBody)

    async def _answer(self, request: HttpRequest, kind: type[AnyBody]) -> Response:
        body = parse(kind, parse_json(await self._body(request)))
        self._check_model(body.model or self.name)
        # Templates, grammars and tokenizing take a while: not on the loop that feeds every stream.
        texts = await asyncio.to_thread(self.translator.texts_of, body)
        writer = writer_of(self.name, self.engine.tokenizer, self.engine.form, body, texts)
        headers, run = self._headers(body), _Run(self, request, texts, writer)
        if body.stream:
            pieces = run.stream(include_usage=bool(body.stream_options.include_usage))
            return StreamingResponse(pieces, media_type="text/event-stream", headers=headers)
        return Response(_json(await run.whole()), media_type="application/json", headers=headers)

    def _headers(self, body: AnyBody) -> dict[str, str]:
        """Names of what did not change the answer: fields of the request, settings of the target."""
        ignored = [_printable(name) for name in self.translator.ignored(body)]
        new = [name for name in ignored if name not in self._named]
        if new and len(self._named) < MOST_REMEMBERED:
            self._named.update(new)
            logger.info("not read, and so ignored, in requests: %s", ", ".join(new[:MOST_NAMED]))
        named = zip(NAMING_HEADERS, (ignored, self.engine.unfollowed), strict=True)
        return {header: ", ".join(names[:MOST_NAMED]) for header, names in named if names}

    # --- checks ----------------------------------------------------------------------------------------------------

    async def check_key(self, request: HttpRequest) -> None:
        if self.api_key is None:
            return
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), self.api_key.encode()):
            what = "no API key" if not shown else "another API key than this server's"
            message, headers = f"got {what}; send it as 'Authorization: Bearer KEY'", {"WWW-Authenticate": "Bearer"}
            raise ApiError(message, status=401, code="invalid_api_key", headers=headers)

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"the model {name!r} is not served here; {self.name!r} is"
            raise ApiError(message, status=404, code="model_not_found", param="model")

    async def _body(self, request: HttpRequest) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also what keeps web pages of others from asking without the browser's leave
            message = f"the content type is {kind or 'not given'}; wanted application/json"
            raise ApiError(message, status=415, code="unsupported_media_type")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(f"the body is larger than {MAX_BODY_BYTES:,} bytes", status=413, code="body_too_large")
        return body


class _Run:
    """One answer on its way through the engine, where all its texts are lined up, or none."""

    def __init__(self, server: _Server, request: HttpRequest, texts: Sequence[Request], writer: AnswerWriter):
        self._figures, self._engine, self._request, self._writer = server.figures, server.engine, request, writer
        self._finishes: list[str | None] = [None] * len(texts)
        self._running: list[ServedText] = []
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._started = self._first = time.perf_counter()
        self._last: list[float | None] = [None] * len(texts)
        loop = asyncio.get_running_loop()

        def tell(index: int, event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed, and its clients are gone
                loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        room = self._engine.settings.max_rows + self._engine.settings.max_waiting
        if len(texts) > room:
            raise ApiError(f"got {len(texts)} texts; wanted at most {room} in a request to this server")
        try:
            for index, text in enumerate(texts):
                self._running.append(self._engine.submit(text, partial(tell, index)))
        except Eagle31Error:
            self._cancel()
            raise

    async def stream(self, *, include_usage: bool) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        try:
            for piece in self._writer.opening():
                yield _sse(piece)
            async for pieces in self._pieces():
                if all(self._finishes) and not include_usage:
                    pieces[-1] |= {"timings": self._timings}
                for piece in pieces:
                    yield _sse(piece)
            if include_usage:
                yield _sse(self._writer.usage(self._usages) | {"timings": self._timings})
        except ApiError as error:
            yield _sse(error.body)
        finally:
            self._end()
        yield "data: [DONE]\n\n"

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece, unless the client goes away."""
        written, gone = asyncio.ensure_future(self._collect()), asyncio.ensure_future(self._request.receive())
        try:
            await asyncio.wait({written, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                raise ApiError("the client has gone", status=499, code="cancelled")
            await written
        finally:
            written.cancel()
            gone.cancel()
            self._end()
        return self._writer.whole(self._usages) | {"timings": self._timings}

    async def _collect(self) -> None:
        async for pieces in self._pieces():
            self._writer.add(pieces)

    async def _pieces(self) -> AsyncIterator[list[dict[str, Any]]]:
        """What each event adds to a stream, until all texts have ended."""
        while None in self._finishes:
            index, event = await self._events.get()
            self._finishes[index] = event.finish
            if event.tokens or event.finish:
                self._observe(index)
            if event.finish == "shutdown":
                raise ShuttingDownError(event.error)
            if event.error:
                raise ApiError(event.error, status=500, code="engine_error")
            if event.prompt_logprobs is None:
                yield self._writer.pieces(index, event)
            else:  # a whole prompt takes a while
                yield await asyncio.to_thread(self._writer.pieces, index, event)

    def _observe(self, index: int) -> None:
        now, last = time.perf_counter(), self._last[index]
        (self._figures.first_token_s if last is None else self._figures.gap_s).observe(now - (last or self._started))
        if not any(self._last):
            self._first = now
        self._last[index] = now

    @property
    def _usages(self) -> list[Usage]:
        return [running.usage for running in self._running]

    @property
    def _timings(self) -> dict[str, Any]:
        last = max((at for at in self._last if at), default=self._first)
        return timings_of(self._usages, self._first - self._started, last - self._first)

    def _cancel(self) -> None:
        for running in self._running:
            self._engine.cancel(running)

    def _end(self) -> None:
        """The answer is told, or its client has gone: what has not ended need not go on.

        The log has who asked what, how it ended, what it took; never what was said.
        """
        self._cancel()
        self._request.state.is_logged = True
        seconds, usage = time.perf_counter() - self._started, Usage.of_answer(self._usages)
        ended, written = dict.fromkeys(finish or "cancelled" for finish in self._finishes), usage.completion_tokens
        speed = f" ({written / seconds:.1f}/s)" if seconds > 0 else ""
        passes = f", {usage.accepted / usage.rounds + 1:.2f} a pass" if usage.rounds else ""
        logger.info(
            "%s %s: %d prompt tokens (%d held already), %d written in %.2f s%s%s",
            _who(self._request), ", ".join(ended), usage.prompt_tokens, usage.cached_tokens, written, seconds, speed,
            passes,
        )  # fmt: skip


def _who(request: HttpRequest) -> str:
    host = request.client.host if request.client else "?"
    return f"{host} {request.method} {quote(request.url.path)}"


def _printable(name: str) -> str:
    """A client's name for a field, as a header or a line can hold it."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "?" for c in name[:64])


def _sse(piece: dict[str, Any]) -> str:
    return f"data: {_json(piece)}\n\n"


def _json(piece: dict[str, Any]) -> str:
    return to_json(piece, inf_nan_mode="null").decode()


async def _as_response(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        served = "; served are /v1/chat/completions, /v1/completions and /v1/models" if error.status_code == 404 else ""
        error = ApiError(f"{request.method} {request.url.path}: {error.detail}{served}", status=error.status_code)
    elif isinstance(error, (ConfigurationError, UnsupportedGenerationError)):
        error = ApiError(str(error))
    elif not isinstance(error, ApiError):
        error = ApiError(f"{type(error).__name__}: {error}", status=500, code="internal_error")
    if not getattr(request.state, "is_logged", False):  # the message may quote the body, so it is not told
        at = f" at {ascii(error.param)[:60]}" if error.param else ""
        logger.info("%s %d %s%s", _who(request), error.status, error.code or "error", at)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)
