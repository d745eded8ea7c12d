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
        label: written before the text.
    """

    def __init__(self, console: Console, width: int, label: str = ""):
        self._console, self._width = console, min(width, console.width)
        self._word = Text()
        self._gap = ""  # spaces before it, dropped where a line ends
        self._column = len(label)
        if label:
            console.print(label, end="", style="dim", markup=False)

    def add(self, text: str, style: str = "") -> None:
        """Write on."""
        for run in re.findall(r"\S+|\s", text):
            if run.isspace():
                self._write_word()
                self._write_space(run)
            else:
                self._word.append(run, style)

    def end(self) -> None:
        """Write what is left and end the line."""
        self._write_word()
        self._console.print()

    def _write_word(self) -> None:
        if not self._word:
            return
        if self._column and self._column + len(self._gap) + self._word.cell_len > self._width:
            self._break_line()
        self._console.print(self._gap, self._word, sep="", end="", soft_wrap=True)
        self._column += len(self._gap) + self._word.cell_len
        self._word, self._gap = Text(), ""

    def _write_space(self, space: str) -> None:
        if space == "\n":
            self._break_line()
        else:
            self._gap += " "

    def _break_line(self) -> None:
        self._console.print()
        self._column, self._gap = 0, ""
