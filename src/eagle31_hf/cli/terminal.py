"""What the command line shows: streamed text with accepted drafts coloured, tables, one-line errors."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..checkpoints.summary import CheckpointSummary
from ..decoding.calibration.bare_meter import BareCosts
from ..serving.text import IncrementalDecoder
from ..stats import SpeculationStats
from .comparison import Comparison
from .wrapped_writer import WrappedWriter

WIDTH = 100
ACCEPTED_STYLE = "green"
OWN_STYLE = ""


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
        self._writer.add(self._decoder.feed(own), OWN_STYLE)

    def end(self) -> None:
        """Write what is left and end the line."""
        self._writer.add(self._decoder.flush(), OWN_STYLE)
        self._writer.end()


def legend() -> Text:
    """What the colours of a streamed text mean."""
    return Text.assemble(
        ("drafted and accepted", ACCEPTED_STYLE), ("  ·  ", "dim"), "the target's own tokens", style="italic"
    )


def ceiling_text(costs: BareCosts, acceptance_length: float) -> Text:
    """The speedup that loops without any cost of their own would reach, and what it is made of."""
    return Text.assemble(
        "Theoretical speedup ",
        (f"{costs.ceiling(acceptance_length):.2f}×", "bold"),
        (
            f" by bare forwards: a round writes {acceptance_length:.2f} tokens in {_ms(costs.verify_s)} "
            f"({costs.verified_tokens:.3g} tokens verified) + {_ms(costs.absorb_s)} (the drafter reads what was "
            f"accepted) + {costs.further_steps:.3g} × {_ms(costs.drafter_step_s)} (further drafter steps); alone the "
            f"target takes {_ms(costs.target_step_s)} per token.",
            "dim",
        ),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def conditions_line(comparison: Comparison, machine: dict[str, Any]) -> Text:
    """What was measured where; `machine` as `describe_machine` tells it."""
    device = _count(machine["threads"], "CPU thread") if machine["device"] == "cpu" else machine["device"]
    return Text(
        f"{_count(comparison.new_tokens, 'token')} from {_count(comparison.prompts, 'prompt')}, "
        f"{device}, {machine['dtype']}; median and spread of {len(comparison.plain_tok_per_s)} interleaved rounds",
        style="dim",
    )


def comparison_table(comparison: Comparison) -> Table:
    """Plain `generate` against EAGLE."""
    stats = comparison.stats
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("tokens/s", "spread", "speedup", "acceptance length"):
        table.add_column(heading, justify="right")
    table.add_column("same text", min_width=9)
    table.add_row("plain generate", *_speed(comparison.plain_tok_per_s), "1.00×", "1.00", "")
    table.add_row(
        "EAGLE",
        *_speed(comparison.eagle_tok_per_s),
        Text(f"{comparison.speedup:.2f}×", style="bold"),
        f"{stats.acceptance_length:.2f}",
        _verdict(comparison),
    )
    return table


def _speed(rounds: tuple[float, ...]) -> tuple[str, str]:
    return f"{median(rounds):.1f}", f"{min(rounds):.0f} – {max(rounds):.0f}"


def _verdict(comparison: Comparison) -> Text:
    if comparison.same_text is None:
        return Text("sampled")
    if not comparison.same_text:
        return Text("NO", style="bold red")
    return Text("yes" if not comparison.differences else "yes, up to ties", style="green")


def comparison_notes(comparison: Comparison, dtype: str) -> list[Text]:
    """What the table cannot say: ties, sampling, a fallback."""
    notes = []
    if comparison.samples:
        notes.append("Sampling: the texts differ by chance, their distribution is the target's.")
    for found in comparison.differences:
        where = f"Prompt {found.prompt + 1} differs from its token {found.position + 1} on: "
        figures = f"logits {found.logit_gap:.3g} apart, the target's own rounding moves them by {found.rounding:.3g}"
        verdict = f"a tie in {dtype}" if found.is_tie else "not a tie"
        notes.append(f"{where}{verdict} ({figures}).")
    if comparison.stats.loop != "own":
        notes.append(f"Served by the {comparison.stats.loop} loop: {comparison.stats.reason}.")
    return [Text(note, style="dim") for note in notes]


def slower_note(comparison: Comparison, costs: BareCosts) -> Text:
    """Why drafting did not pay, and what may help."""
    length = comparison.stats.acceptance_length
    round_s = length / costs.ceiling(length) * costs.target_step_s
    cost = (
        f"a round writes {length:.2f} tokens and its bare forwards take as long as {round_s / costs.target_step_s:.2f}"
    )
    if round_s >= length * costs.target_step_s:
        why = (
            f"{cost} plain tokens, so no loop could gain here: try fewer --draft-tokens, or a drafter that fits better"
        )
    else:
        why = f"{cost} plain tokens; the rest went to the loop itself: try --acceleration compile, or a longer answer"
    return Text(f"Slower than plain: {why}.", style="yellow")


def stats_line(stats: SpeculationStats) -> Text:
    """Acceptance of one text in a line."""
    positions = " ".join(f"{value:.2f}" for value in stats.cumulative_acceptance)
    return Text(
        f"{_count(stats.new_tokens, 'token')} in {_count(stats.rounds, 'round')}, acceptance length "
        f"{stats.acceptance_length:.2f}, accepted by position [{positions}]",
        style="dim",
    )


def error_line(error: Exception) -> Text:
    """One readable line for an error of ours."""
    return Text.assemble(("error: ", "bold red"), (str(error), "red"))


# --- inspect ----------------------------------------------------------------------------------------------------------


def summary_table(summary: CheckpointSummary) -> Table:
    """What a checkpoint is."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for fact, value in _facts(summary):
        table.add_row(fact, value)
    return table


def _facts(summary: CheckpointSummary) -> list[tuple[str, str | Text]]:
    c = summary.config
    heads = f"{c.num_attention_heads} heads ({c.num_key_value_heads} key/value) of {c.head_dim}"
    norms = {
        "none": "as they are",
        "per_slot": "each normed (fc_norm)",
        "concatenated": "normed together (norm_before_fc)",
    }
    stored_ids = "; ".join(f"{ids} at {where}" for where, ids in summary.aux_layers_as_stored.items())
    layers = f"hs {c.aux_layers}" + (f", stored as {stored_ids}" if stored_ids else "")
    assert c.draft_vocab_size is not None, "filled in when the configuration is made"
    reduced = c.draft_vocab_size < c.vocab_size
    return [
        ("checkpoint", summary.source),
        ("method", summary.method),
        ("layout", summary.format),
        ("known from", summary.format_title),
        ("weights", f"{summary.parameters:,} parameters, {summary.dtype}, {summary.stored_bytes / 1e6:,.1f} MB"),
        ("network", f"{_count(c.num_hidden_layers, 'layer')}, hidden {c.hidden_size}, {heads}, "
                    f"MLP {c.intermediate_size}{', query/key norms' if c.qk_norm else ''}"),
        ("target", f"hidden {c.target_hidden_size}, vocabulary {c.vocab_size:,}"),
        ("draft vocabulary", f"{c.draft_vocab_size:,} of {c.vocab_size:,}" if reduced else "the target's"),
        ("aux states", f"{c.num_aux_hidden_states}, {norms[c.aux_norm]}"),
        ("aux layers", layers if c.aux_layers else "not stated: hs 2, L/2, L-3 of the target"),
        ("feedback", "post-norm (norm_output)" if c.norm_output else "pre-norm"),
        ("embedding", "its own" if c.own_embedding else "the target's"),
        ("LM head", "its own" if c.own_lm_head else "the target's"),
        *((verdict.engine, _engine(verdict)) for verdict in summary.engines),
        *(("note", Text(note, style="yellow")) for note in summary.notes),
    ]  # fmt: skip


def _engine(verdict: Any) -> Text:
    told = Text("reads it", style="green") if verdict.reads else Text("does not read it", style="yellow")
    details = [*verdict.reasons, *(f"needs {need}" for need in verdict.needs)]
    return told.append(": " + "; ".join(details), style="default") if details else told


def tensor_table(summary: CheckpointSummary) -> Table:
    """Stored names and shapes."""
    table = Table("tensor", "shape", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, shape in summary.tensors.items():
        table.add_row(name, " × ".join(map(str, shape)))
    return table
