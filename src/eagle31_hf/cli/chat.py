"""`eagle31 chat`: a conversation in the terminal."""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..errors import ConfigurationError, Eagle31Error, removal
from ..loop.kept_graphs import kept_packages
from ..loop.pair import Pair
from ..serving.session import Answer, ChatSession, Piece
from .options import ACCEPTED_STYLE, StreamedText, command, error_line, make_console, option, plain_table
from .pairs import DraftOptions, PairSource, load_pair
from .progress import waiting_for

HISTORY = "chat_history"
PROMPT, LABEL = "you › ", "  ‹ "
THOUGHT_STYLE = "dim italic"


@command
def chat(
    *,
    source: PairSource,
    drafting: DraftOptions,
    system: str | None = option(None, "System prompt."),
    temperature: float = option(0.0, "0 is greedy.", min=0.0, max=5.0),
    max_new_tokens: int = option(512, "Longest answer.", min=1),
    colour: bool = option(True, "Colour tokens that were drafted and accepted.", "--colour/--no-colour"),
    thoughts: bool = option(False, "Show what a thinking model thinks."),
) -> None:
    """Chat with a pair: answers stream, history is not read twice, /help lists the commands."""
    console = make_console()
    read = _reader(console)
    pair = load_pair(source, drafting)
    begin = partial(ChatSession, pair.target, pair.drafter, pair.tokenizer, system=system, temperature=temperature)
    if kept_packages(Pair.of(pair.drafter)) is not None:
        # They are read from disk as a text meets them, which would halt the first answer.
        with waiting_for("loading graphs"), torch.random.fork_rng():
            begin(max_new_tokens=8).ask("Hello!")
    session = begin(max_new_tokens=max_new_tokens, context=None if pair.plan is None else pair.plan.settings.context)
    console.print(f"{pair.described}; /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
    Chat(console, session, partial(_AnswerView, console, colour=colour, thoughts=thoughts)).run(read)


class Chat:
    """Commands and answers of one session on a console.

    Args:
        session: the conversation.
        view: makes what shows an answer.
    """

    def __init__(self, console: Console, session: ChatSession, view: Callable[[], _AnswerView]):
        self.console, self.session, self.view = console, session, view

    def run(self, read: Callable[[], str]) -> None:
        """Until `read`, or the command to leave, raises `EOFError`."""
        with suppress(EOFError):
            while True:
                try:
                    line = read().strip()
                except KeyboardInterrupt:  # an empty line instead of the one being typed
                    continue
                try:
                    self.take(line)
                except Eagle31Error as error:
                    self.console.print(error_line(error))

    def take(self, line: str) -> None:
        """One line: a command, or something to answer."""
        if not line:
            return
        if not line.startswith("/"):
            self._show(lambda on_piece: self.session.ask(line, on_piece))
            return
        name, _, rest = line.partition(" ")
        found = [name] if name in CHAT_COMMANDS else [each for each in CHAT_COMMANDS if each.startswith(name)]
        if removed := removal(f"chat {name}"):
            raise ConfigurationError(removed)
        if len(found) != 1:
            near = found or difflib.get_close_matches(name, CHAT_COMMANDS, n=1) or CHAT_COMMANDS
            raise ConfigurationError(f"got {name}; wanted {'' if len(near) == 1 else 'one of '}{', '.join(near)}")
        CHAT_COMMANDS[found[0]](self, rest.strip())

    # --- answers -----------------------------------------------------------------------------------------------------

    def _show(self, answer: Callable[[Callable[[Piece], None]], Answer]) -> None:
        shown = self.view()
        with _interrupt_stops(self.session):
            try:
                told = answer(shown.add)
            finally:
                shown.end()
        self.console.print(Padding(answer_line(told), (0, 0, 1, len(LABEL))))

    # --- commands ----------------------------------------------------------------------------------------------------

    def help(self, _rest: str) -> None:
        """this list"""
        rows = ((name, method.__doc__ or "") for name, method in CHAT_COMMANDS.items())
        self.console.print(Padding(plain_table(rows), (0, 2)))

    def system(self, rest: str) -> None:
        """TEXT: set the system prompt (nothing: show it); the conversation goes on under it"""
        if rest:
            self.session.system = rest
        self.console.print(self.session.system or "no system prompt", style="dim", markup=False)

    def reset(self, _rest: str) -> None:
        """begin anew; the system prompt stays"""
        self.session.reset()

    def undo(self, _rest: str) -> None:
        """take the last message and its answer back"""
        self.console.print(f"taken back: {self.session.undo()}", style="dim", markup=False)

    def retry(self, _rest: str) -> None:
        """answer the last message anew (another text only above temperature 0)"""
        self._show(self.session.retry)

    def stats(self, _rest: str) -> None:
        """figures of the last answer"""
        if not self.session.answers:
            raise ConfigurationError("nothing has been answered yet")
        self.console.print(str(self.session.answers[-1].stats), style="dim", markup=False)

    def temperature(self, rest: str) -> None:
        """NUMBER: 0 is greedy (nothing: show it)"""
        if rest:
            try:
                self.session.set_temperature(float(rest))
            except ValueError as error:
                raise ConfigurationError(f"got temperature {rest!r}; wanted a number from 0 (greedy) to 5") from error
        self.console.print(f"temperature {self.session.temperature:g}", style="dim")

    def quit(self, _rest: str) -> None:
        """leave"""
        raise EOFError


NAMES = "help system reset undo retry stats temperature quit"
CHAT_COMMANDS: dict[str, Callable[[Chat, str], None]] = {f"/{name}": getattr(Chat, name) for name in NAMES.split()}


class _AnswerView:
    """An answer as it appears; thoughts folded to a line that counts their words."""

    def __init__(self, console: Console, *, colour: bool, thoughts: bool):
        self._console, self._colour, self._thoughts = console, colour, thoughts
        self._writer: StreamedText | None = None
        self._shows_thought = False  # what the writer shows
        self._folded, self._status = 0, console.status("reading")  # words thought and not shown
        self._status.start()

    def add(self, piece: Piece) -> None:
        if piece.thought and not self._thoughts:
            if self._writer is not None:
                self.end()
            self._folded += len(piece.text.split())
            self._status.update(Text(f"thinking … {self._folded} words", style=THOUGHT_STYLE))
            self._status.start()
            return
        text = piece.text
        if self._writer is None or self._shows_thought != piece.thought:
            text = text.lstrip("\n")
            if not text:
                return
            self.end()
            self._writer, self._shows_thought = StreamedText(self._console, LABEL), piece.thought
        accepted = ACCEPTED_STYLE if self._colour and piece.drafted else ""
        self._writer.add(text, THOUGHT_STYLE if piece.thought else accepted)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.end()
            self._writer = None
        self._status.stop()
        if self._folded:
            self._console.print(f"{LABEL}thought {self._folded} words (--thoughts shows them)", style=THOUGHT_STYLE)
            self._folded = 0


ENDS = {"stop": "", "length": ", cut off (--max-new-tokens, or the context is full)"}
"""Why an answer ended."""


def answer_line(answer: Answer) -> Text:
    """What an answer took, in a line."""
    stats = answer.stats
    parts = [
        f"{stats.new_tokens} tokens" + ENDS.get(answer.finish, f" ({answer.finish})"),
        f"{answer.tok_per_s:.0f} tokens/s",
        f"first after {answer.first_token_s * 1e3:.0f} ms",
    ]
    if stats.loop == "plain":
        parts.append(f"plain decoding: {stats.reason}")
    else:
        parts.append(f"{stats.acceptance_length:.2f} tokens a pass")
        parts.append(f"read {stats.prefilled_tokens} of {answer.prompt_tokens}")
    return Text(" · ".join(parts), style="dim")


@contextmanager
def _interrupt_stops(session: ChatSession) -> Iterator[None]:
    """Ctrl-C ends the answer; a second one, should that hang, the program."""

    def stop(_signal: int, _frame: Any) -> None:
        session.stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _reader(console: Console) -> Callable[[], str]:
    """Lines with history and editing in a terminal; where input is a file or a pipe plain ones, which are shown."""
    if not sys.stdin.isatty():
        return lambda: _piped_line(console)
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError as error:
        raise ConfigurationError(
            "chat needs the package prompt_toolkit: pip install prompt_toolkit, or install this package with its extra "
            "'chat'"
        ) from error
    folder = Path(typer.get_app_dir("eagle31"))
    folder.mkdir(parents=True, exist_ok=True)
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: Any = PromptSession(
        history=FileHistory(str(folder / HISTORY)),
        completer=WordCompleter([*CHAT_COMMANDS], sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
    )
    return lambda: str(session.prompt(PROMPT))


def _piped_line(console: Console) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    if line.strip():
        console.print(f"{PROMPT}{line.strip()}", markup=False)
    return line
