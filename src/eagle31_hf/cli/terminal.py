"""What the command line shows: streamed text with accepted drafts coloured, and lines about it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ..errors import count
from ..measure.results import BenchResult

ACCEPTED_STYLE = "green"


class StreamedText:
    """Text on a console as it comes, which the terminal wraps.

    Args:
        console: where to write.
        label: written before the text, with its first piece: what is logged until then has lines of its own.

    Attributes:
        written: all of it, to be printed again.
    """

    def __init__(self, console: Console, label: str = ""):
        self._console, self._label = console, label
        self.written = Text()

    def add(self, text: str, style: str = "") -> None:
        """Write on."""
        if text:
            piece = Text.assemble((self._label, "dim"), (text, style))
            self._console.print(piece, end="", soft_wrap=True)
            self.written.append_text(piece)
            self._label = ""

    def end(self) -> None:
        """End the line."""
        self._console.print()


def legend() -> Text:
    """What the colours of a streamed text mean."""
    return Text.assemble(
        ("drafted and accepted", ACCEPTED_STYLE), ("  ·  ", "dim"), "the target's own tokens", style="italic"
    )


def conditions_line(result: BenchResult, origin: dict[str, Any]) -> Text:
    """What was measured where."""
    temperature = result.settings.temperature
    sampling = f"temperature {temperature:g}" if temperature else "greedy"
    repeats = len({call.turn.repeat for call in result.calls})  # fewer than planned where time ran out
    written = "one repeat" if repeats == 1 else f"medians and spreads of {repeats} repeats"
    device = count(origin["threads"], "CPU thread") if origin["device"] == "cpu" else origin["device"]
    return Text(
        f"{count(result.num_prompts, 'prompt')}, up to {result.settings.new_tokens} tokens each, {sampling}, {device} "
        f"({origin['processor']}), {origin['dtype']}; {written}",
        style="dim",
    )
