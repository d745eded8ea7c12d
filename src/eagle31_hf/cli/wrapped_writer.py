"""Text written to a terminal as it comes, wrapped at words, in several styles."""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text


class WrappedWriter:
    """Writes pieces of text; a word is held back until it is complete, so that it can go to the next line.

    Args:
        console: where to write.
        width: most columns, if the console has more.
        label: written before the text, with its first word: what is logged until then has lines of its own.
        indent: of all lines but the first.
    """

    def __init__(self, console: Console, width: int, label: str = "", indent: int = 0):
        self._console, self._width = console, min(width, console.width)
        self._word = Text()
        self._gap = ""  # spaces before it, dropped where a line ends
        self._start, self._indent, self._column = label, indent, len(label)

    def add(self, text: str, style: str = "") -> None:
        """Write on."""
        for run in re.findall(r"\S+|\s", text):
            if not run.isspace():
                self._word.append(run, style)
                continue
            self._write_word()
            if run == "\n":
                self._break_line()
            else:
                self._gap += " "

    def end(self) -> None:
        """Write what is left and end the line."""
        self._write_word()
        self._break_line()

    def _write_word(self) -> None:
        if not self._word:
            return
        if self._column > self._indent and self._column + len(self._gap) + self._word.cell_len > self._width:
            self._break_line()
        self._write_start()
        self._console.print(self._gap, self._word, sep="", end="", soft_wrap=True)
        self._column += len(self._gap) + self._word.cell_len
        self._word, self._gap = Text(), ""

    def _write_start(self) -> None:
        """What a line begins with, before its first word."""
        if self._start:
            self._console.print(self._start, end="", style="dim", markup=False)
            self._start = ""

    def _break_line(self) -> None:
        if self._start.strip():
            self._write_start()
        self._console.print()
        self._start, self._column, self._gap = " " * self._indent, self._indent, ""
