"""What the command line shows: streamed text with accepted drafts coloured, tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..evidence.calls import DIFFERENT, SAME, SAMPLED, TIE, Verdict
from ..evidence.run_tables import ceiling_text, number_text, speedup_text
from ..evidence.summary import MethodSummary, RunSummary
from ..evidence.tables import DataTable
from ..serving.text import IncrementalDecoder
from ..stats import SpeculationStats
from .options import WIDTH, count
from .wrapped_writer import WrappedWriter

ACCEPTED_STYLE = "green"


class AcceptanceStreamer(BaseStreamer):
    """A `generate` streamer that colours tokens which were drafted and accepted.

    Each round arrives as one 1-D block: the last id is the target's own token, those before it were drafted and
    accepted. (A text that ends inside a draft has a drafted end-of-sequence token there, which is not shown.)

    Args:
        tokenizer: the target's.
        console: where to write; lines are wrapped at words to its width.
        label: written before the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console, label: str = ""):
        self._decoder = IncrementalDecoder(tokenizer)
        self._prompt_seen = False
        self._writer = WrappedWriter(console, WIDTH, label)

    def put(self, value: Tensor) -> None:
        """Take the prompt (first call, not shown) or one round's tokens, `(n,)` or `(1, n)`."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        *accepted, own = value.reshape(-1).tolist()
        for token in accepted:
            self._writer.add(self._decoder.feed(token), ACCEPTED_STYLE)
        self._writer.add(self._decoder.feed(own))

    def end(self) -> None:
        """Write what is left and end the line."""
        self._writer.add(self._decoder.flush())
        self._writer.end()


def legend() -> Text:
    """What the colours of a streamed text mean."""
    return Text.assemble(
        ("drafted and accepted", ACCEPTED_STYLE), ("  ·  ", "dim"), "the target's own tokens", style="italic"
    )


def conditions_line(summary: RunSummary) -> Text:
    """What was measured where."""
    place, settings = summary.run["machine"], summary.run["settings"]
    device = count(place["threads"], "CPU thread") if place["device"] == "cpu" else place["device"]
    return Text(
        f"{count(len(summary.run['prompts']), 'prompt')}, up to {settings['new_tokens']} tokens each, {device} "
        f"({place['processor']}), {summary.run['pair']['dtype']}; medians and spreads of {settings['repeats']} "
        "interleaved repeats",
        style="dim",
    )


def pair_table(summary: RunSummary) -> Table:
    """Plain decoding and EAGLE, both without and with graphs, and how fast a loop that costs nothing would be."""
    rows = tuple(
        (
            shown_name(method.method),
            f"{method.tok_per_s.median:.1f}",
            f"{method.tok_per_s.low:.0f}–{method.tok_per_s.high:.0f}",
            speedup_text(method),
            ceiling_text(method),
            number_text(method.acceptance_length if method.drafts else None, ".2f"),
            _verdict(method),
        )
        for method in summary.methods
    )
    headings = ("", "tokens/s", "spread", "speedup", "ceiling", "accepts", "same text")
    return DataTable("", headings, rows).filled().on_terminal()


def shown_name(method: str) -> str:
    """What users call a method: our drafter's, whatever it drafts, is EAGLE."""
    kind, *compiled = method.removesuffix(" loop").split(" ")
    return " ".join(("EAGLE", *compiled)) if kind in ("chain", "tree", "stock") else method


def _verdict(method: MethodSummary) -> str:
    found = method.verdicts
    if found[DIFFERENT]:
        return "NO"
    if found[SAMPLED]:
        return "another draw"
    return "yes, up to ties" if found[TIE] else "yes" if found[SAME] else ""


def pair_notes(summary: RunSummary) -> list[Text]:
    """What the table cannot say: ties, sampling, a fallback, why drafts did not pay."""
    notes, dtype = [], summary.run["pair"]["dtype"]
    if any(method.verdicts[SAMPLED] for method in summary.methods):
        notes.append("Another draw: transformers' own modes sample by other numbers, from the same distribution.")
    for method in summary.methods:
        for prompt, found in _differences(method).items():
            figures = (
                f"logits {found.logit_gap:.3g} apart, the target's own rounding moves them by {found.rounding:.3g}"
            )
            verdict = f"a tie in {dtype}" if found.kind == TIE else "not a tie"
            where = f"{shown_name(method.method)}, {prompt}, differs from its token {found.position + 1} on"
            notes.append(f"{where}: {verdict} ({figures}).")
        reasons = {call.served_by for call in method.calls} - {"", "own"}
        notes += [f"{shown_name(method.method)} was served by the {reason} loop." for reason in sorted(reasons)]
        if method.drafts and method.speedup is not None and method.speedup.median < 1:
            notes.append(_why_slower(method))
    return [Text(note, style="dim") for note in notes]


def _differences(method: MethodSummary) -> dict[str, Verdict]:
    return {
        prompt: verdict
        for call in method.calls
        for prompt, verdict in zip(call.prompts, call.verdicts, strict=True)
        if verdict.kind in (TIE, DIFFERENT)
    }


def _why_slower(method: MethodSummary) -> str:
    if method.ceiling is not None and method.ceiling >= 1:
        return f"Slower than plain though bare forwards allow {method.ceiling:.2f}×: the rest went to the loop itself."
    return "Slower than plain, and no loop could gain here: try fewer --draft-tokens, or a drafter that fits better."


def stats_line(stats: SpeculationStats) -> Text:
    """Acceptance of one text in a line."""
    positions = " ".join(f"{value:.2f}" for value in stats.cumulative_acceptance)
    return Text(
        f"{count(stats.new_tokens, 'token')} in {count(stats.rounds, 'round')}, acceptance length "
        f"{stats.acceptance_length:.2f}, accepted by position [{positions}]",
        style="dim",
    )
