"""`eagle31 serve`: many clients on one card, by OpenAI's API."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ..errors import ConfigurationError, count
from ..targets.fresh_drafter import trained_context
from ..texts.chats import shows_tools
from .options import command, make_console, option
from .pairs import DraftOptions, LoadedPair, PairSource, load_pair

DEFAULT_CONTEXT, DEFAULT_PREFILL_CHUNK = 4096, 256
READING_ROWS = 1
"""Beside the rows of texts being written: a prompt is read in a row of its own."""


@command
def serve(
    *,
    source: PairSource,
    drafting: DraftOptions,
    host: str = option("127.0.0.1", "Address to listen on; beyond this machine only with a key."),
    port: int = option(8000, "Port to listen on; 0 takes a free one.", min=0, max=65535),
    model_name: str | None = option(None, "Name clients ask for; default: the target's."),
    api_key: str | None = option(None, "What clients have to show.", envvar="EAGLE31_API_KEY", show_envvar=True),
    allow_origin: list[str] | None = option(
        None, "Web page that browsers may let ask (http://localhost:3000); repeatable."
    ),
    max_batch: int = option(8, "Texts written at once.", min=1),
    max_waiting: int = option(64, "Requests that may wait for a row; others are told to come back.", min=1),
    prefill_chunk: int | None = option(
        None, "Tokens of new prompts that are read between two passes of running texts.", min=16
    ),
    grace: float = option(10.0, "Seconds running texts get when the server stops.", min=0.0),
    quiet: bool = option(False, "No line for each request.", "--quiet"),
) -> None:
    """Serve OpenAI's API: chats, completions, streams, tools, JSON schemas; requests join and leave a running batch.

    Texts are the target's own, alone and beside others; in half precision up to rounding.

    A line for each request tells how it ended and what it took, never what was said.
    """
    _check_packages()
    _check_reach(host, api_key)
    _check_drafting(source, drafting)
    _check_origins(allow_origin or [])
    console = make_console()
    listening = _listen(host, port)  # before loading: a port that is taken should not cost a model
    rows = max_batch + READING_ROWS
    asked = source.context if source.memory is None else None  # of a row, where nothing is planned
    loaded = replace(source, context=None) if asked else source
    pair = load_pair(loaded, drafting, batch=rows)
    from ..serving.app import HttpServer, make_app
    from ..serving.batch import EngineSettings
    from ..serving.engine import Engine

    planned = pair.plan.settings.prefill_chunk if pair.plan is not None else DEFAULT_PREFILL_CHUNK
    chunk = min(planned, DEFAULT_PREFILL_CHUNK) if pair.drafter.device.type == "cpu" else planned
    settings = EngineSettings(
        max_rows=max_batch,
        context=_context(pair, asked),
        max_waiting=max_waiting,
        prefill_chunk=prefill_chunk or chunk,
    )
    name = model_name or Path(source.target or "eagle31-demo").name
    engine = Engine(pair.drafter, pair.tokenizer, settings)
    app = make_app(engine, model=name, api_key=api_key or None, allow_origins=allow_origin or ())
    console.print(
        f"{name}, {str(pair.target.dtype).removeprefix('torch.')}: {settings.max_rows} texts at once, "
        f"{engine.settings.context:,} tokens each, {_address(listening)}/v1 (Ctrl-C to stop)",
        soft_wrap=not console.is_terminal,
    )
    refused = "Requests with tools are refused: the template has no place for them (--chat-template)"
    read = f"Thoughts and calls are read as: {engine.form.name}"
    console.print(read if shows_tools(pair.tokenizer) else refused, style="dim")
    if engine.unfollowed:
        console.print(
            f"Not followed, of {name}'s generation config: {', '.join(engine.unfollowed)}; texts are chosen without",
            style="yellow",
        )
    for why in engine.batch.stats.fallbacks:
        console.print(f"Slower than could be: {why}", style="yellow")
    if not quiet:
        _print_requests()

    def say_stopping(running: int) -> None:
        if running:
            console.print(f"finishing {count(running, 'answer')} for at most {grace:g} s; Ctrl-C again to stop now")

    HttpServer(app, engine, grace_s=grace, on_stop=say_stopping).run(sockets=[listening])


def _check_packages() -> None:
    for name in ("fastapi", "prometheus_client", "uvicorn"):
        if find_spec(name) is None:
            raise ConfigurationError(
                f"the server needs the package {name}: pip install fastapi uvicorn prometheus-client, or install this "
                "package with its extra 'serve'"
            )


def _print_requests() -> None:
    """A line for each, to standard error."""
    from ..serving.app import logger

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _check_reach(host: str, api_key: str | None) -> None:
    """Beyond this machine only with a key."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local and not api_key:
        raise ConfigurationError(
            f"--host {host} can be reached from other machines; give a key that clients have to show (--api-key, or "
            f"EAGLE31_API_KEY in the environment), or listen on 127.0.0.1"
        )


def _check_drafting(source: PairSource, drafting: DraftOptions) -> None:
    """The running batch drafts chains; what else is asked for is not silently left out."""
    if refused := drafting.for_trees + ["--acceleration compile"] * (source.acceleration == "compile"):
        raise ConfigurationError(
            f"serve cannot do {', '.join(refused)}: texts that join and leave a running batch are drafted as chains; "
            "leave it out (--draft-tokens sets a chain's length), or use it with generate and chat"
        )


def _check_origins(origins: list[str]) -> None:
    """Browsers send scheme, host and port, and nothing else is ever equal to that."""
    for origin in origins:
        if not re.fullmatch(r"https?://[^/*\s]+", origin):
            raise ConfigurationError(
                f"got --allow-origin {origin!r}; wanted scheme, host and port of a page, as http://localhost:3000"
            )


def _listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on; they wait until the server is up."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host} port {port} ({error.strerror}); give another --port, 0 for a free one, or an "
            "address of this machine as --host"
        ) from error


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _context(pair: LoadedPair, asked: int | None) -> int:
    """Most tokens of a text: as planned, as asked, as trained, in this order."""
    if pair.plan is not None:
        return pair.plan.settings.context
    trained = trained_context(pair.target.config)
    if asked and trained and asked > trained:
        raise ConfigurationError(f"got --context {asked}, but {pair.name} was made for texts of {trained} tokens")
    return asked or min(DEFAULT_CONTEXT, trained or DEFAULT_CONTEXT)
