"""What of a round grows with the context, and what a round allocates.

    python growth.py --contexts 512,2048 --json growth.json

A round's attention must grow with the context; nothing else should. The target is a small random one, so that what is
not attention is not hidden behind it; drafts are accepted by lot.

What is not attention is timed in rounds whose attention kernels are left out. Subtracting the kernels' own time would
charge the rest with what they do to the processor's caches: after 32k tokens of keys and values the weights of the next
layer come from main memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text
from storages import count_storages
from torch import Tensor
from torch.nn import functional as F

from eagle31_hf.cli.bench import conditions_text
from eagle31_hf.cli.bench_run import finish, list_of
from eagle31_hf.cli.options import JsonOption, TracebackOption, make_console, readable_errors
from eagle31_hf.cli.pairs import DeviceName, DTypeName, device_named
from eagle31_hf.cli.progress import progress_bar
from eagle31_hf.decoding.decoder import SpeculativeDecoder
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.generation_config import FIXED_DEPTH
from eagle31_hf.measure.provenance import describe_device
from eagle31_hf.measure.synthetic import SyntheticRequest, random_target, synthetic_decoder, target_config
from eagle31_hf.measure.tables import make_table
from eagle31_hf.target.device_clock import now
from eagle31_hf.target.precision import SHORT_NAMES
from eagle31_hf.trees.shape import DraftShape

CONTEXTS = (512, 2048, 8192, 32768)
WHOLE = "positive whole numbers, e.g. 512,2048"
# As many key/value heads as query heads: copies for grouped heads are attention's, but lie outside its kernel.
SMALL_TARGET = "hidden=256,layers=4,heads=4,kv=4,intermediate=512,vocab=2048"
ACCEPTANCE = (0.8,)
PREFILL_CHUNK = 512
WARM_UP_ROUNDS = 3  # buffers and masks get their size, and the last length's keys make way for weights
TURN = 6  # rounds of a length before the next one's turn
COUNTED_ROUNDS = 5


@dataclass(frozen=True)
class GrowthRecord:
    """Rounds after one length of context.

    Attributes:
        round_s: median seconds of a round.
        attention_s: median seconds of the attention kernels in a round, timed where they run.
        other_s: median seconds of a round without attention kernels.
        round_bytes: most bytes alive at once that were born within one round.
        kept_bytes: most bytes born since the first counted round that were alive between two rounds.
    """

    context: int
    round_s: float
    attention_s: float
    other_s: float
    round_bytes: int
    kept_bytes: int

    @property
    def allocates_steadily(self) -> bool:
        """Nothing larger than one round's own tensors stays."""
        return self.kept_bytes <= self.round_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "allocates_steadily": self.allocates_steadily}


def small_drafter(dtype: torch.dtype, device: str) -> Eagle31Drafter:
    """A random drafter on a small random target."""
    target = random_target(target_config(SMALL_TARGET), dtype=dtype, device=device)
    return Eagle31Drafter.from_target(target).eval()


def check_growth(contexts: Sequence[int], rounds: int) -> None:
    """Raise a `ConfigurationError` unless these can be measured."""
    if not contexts or min(contexts) < 2 or rounds < 1:
        raise ConfigurationError(
            f"got contexts {list(contexts)} and {rounds} rounds; wanted 2 tokens and 1 round at least"
        )


@torch.no_grad()
def measure_growth(
    drafter: Eagle31Drafter,
    shape: DraftShape,
    contexts: Sequence[int] = CONTEXTS,
    *,
    rounds: int = 30,
    on_context: Callable[[], None] = lambda: None,
) -> list[GrowthRecord]:
    """Time `rounds` rounds after random text of each length, the lengths taking turns.

    Args:
        drafter, shape: what drafts what.
        contexts: tokens of each.
        rounds: of each length, with attention and as many without.
        on_context: called when a text has been read.

    Raises:
        ConfigurationError: no contexts, or one of fewer than 2 tokens; fewer than one round.
    """
    check_growth(contexts, rounds)
    turns = [min(TURN, rounds - done) for done in range(0, rounds, TURN)]
    steps = 2 * sum(WARM_UP_ROUNDS + count for count in turns) + COUNTED_ROUNDS
    binding, meters = drafter.binding, []
    with binding.capturing(), binding.masked_attention():
        for context in contexts:
            decoder = _after(drafter, shape, context, new_tokens=(steps + 1) * (shape.depth + 1))
            meters.append(_ContextMeter(context, decoder))
            on_context()
        for count in turns:
            for meter in meters:
                meter.take_turn(count)
        return [meter.record() for meter in meters]


class _ContextMeter:
    """Rounds after one length of context, a few at a time: a machine that gets slower does so for all lengths."""

    def __init__(self, context: int, decoder: SpeculativeDecoder):
        self.context, self.decoder = context, decoder
        self.timed: list[TimedRound] = []
        self.others: list[TimedRound] = []  # without attention

    def take_turn(self, count: int) -> None:
        device = self.decoder.binding.head_device
        self.timed += _timed_rounds(self.decoder, AttentionClock(device), count)
        self.others += _timed_rounds(self.decoder, AttentionClock(device, absent=True), count)

    def record(self) -> GrowthRecord:
        allocated = count_storages(self.decoder.step, COUNTED_ROUNDS)
        return GrowthRecord(
            context=self.context,
            round_s=median(each.round_s for each in self.timed),
            attention_s=median(each.attention_s for each in self.timed),
            other_s=median(each.round_s for each in self.others),
            round_bytes=allocated.round_bytes,
            kept_bytes=allocated.kept_bytes,
        )


@dataclass(frozen=True)
class TimedRound:
    """Seconds of a round, and of the attention kernels in it."""

    round_s: float
    attention_s: float


def _timed_rounds(decoder: SpeculativeDecoder, clock: AttentionClock, rounds: int) -> list[TimedRound]:
    timed = []
    with clock.running():
        for _ in range(WARM_UP_ROUNDS + rounds):
            clock.seconds = 0.0
            started = now(clock.device)
            decoder.step()
            timed.append(TimedRound(now(clock.device) - started, clock.seconds))
    return timed[WARM_UP_ROUNDS:]


def _after(drafter: Eagle31Drafter, shape: DraftShape, context: int, new_tokens: int) -> SpeculativeDecoder:
    device = drafter.binding.input_device
    dice = torch.Generator().manual_seed(context)
    ids = torch.randint(drafter.config.vocab_size, (1, context), generator=dice).to(device)
    request = SyntheticRequest(new_tokens, shape, ACCEPTANCE, prefill_chunk=PREFILL_CHUNK)
    decoding = request.to_decoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    decoder = synthetic_decoder(drafter, decoding, acceptance=ACCEPTANCE, seed=0)
    decoder.prefill()
    return decoder


class AttentionClock:
    """Adds up the seconds of attention kernels, target's and drafter's, and how often they were called.

    They are timed where they run: called again alone they would find their keys and values in the processor's cache.
    The function itself is exchanged for the time being, since a torch function mode would slow everything else.

    Args:
        device: where they run.
        absent: put zeros in their place, which takes no look at keys and values.
    """

    def __init__(self, device: torch.device, *, absent: bool = False):
        self.seconds, self.calls = 0.0, 0
        self.device, self.absent = device, absent

    @contextmanager
    def running(self) -> Iterator[None]:
        kernel = F.scaled_dot_product_attention

        def timed(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            started = now(self.device)
            out = torch.zeros_like(query) if self.absent else kernel(query, *args, **kwargs)
            self.seconds += now(self.device) - started
            self.calls += 1
            return out

        F.scaled_dot_product_attention = timed
        try:
            yield
        finally:
            F.scaled_dot_product_attention = kernel


# --- telling ---


def growth_table(records: Sequence[GrowthRecord]) -> Table:
    """Rounds after longer and longer contexts; growth is against the first."""
    headings = ("round", "attention", "other", "growth", "allocates, MB", "keeps, MB")
    table = make_table("A round after longer and longer contexts, in ms", ("context",), headings)
    for record in records:
        kept = Text(_mb(record.kept_bytes), style="" if record.allocates_steadily else "bold red")
        table.add_row(
            f"{record.context:,}",
            _ms(record.round_s),
            _ms(record.attention_s),
            _ms(record.other_s),
            f"{growth(records[0], record):+.0%}",
            _mb(record.round_bytes),
            kept,
        )
    return table


def growth(first: GrowthRecord, record: GrowthRecord) -> float:
    """By which share the part of a round that is not attention is longer than after the first context."""
    return record.other_s / first.other_s - 1


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f}"


@readable_errors
def main(
    *,
    contexts: Annotated[str, typer.Option(callback=list_of(int, WHOLE, at_least=1), help="Lengths of context.")] = (
        ",".join(map(str, CONTEXTS))
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds timed after each context.")] = 30,
    tree_width: Annotated[int, typer.Option(min=1, help="Children per draft token; 1 drafts a chain.")] = 1,
    tree_size: Annotated[int, typer.Option(min=3, help="Tokens verified per round with a tree.")] = 24,
    dtype: Annotated[DTypeName, typer.Option(help="Precision.")] = "fp32",
    device: Annotated[DeviceName, typer.Option(help="Where to run.")] = "auto",
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """What of a round grows with the context, and what it allocates, on a small random target."""
    lengths = [int(part) for part in contexts.split(",")]
    check_growth(lengths, rounds)
    precision = torch.float32 if dtype in ("auto", "stored") else getattr(torch, SHORT_NAMES.get(dtype, dtype))
    drafter = small_drafter(precision, device_named(device))
    size = tree_size if tree_width > 1 else 0
    shape = DraftShape(depth=FIXED_DEPTH, top_k=tree_width, size=size)
    out = make_console()
    with progress_bar(out) as advance:
        records = measure_growth(
            drafter, shape, lengths, rounds=rounds, on_context=lambda: advance(1 / len(lengths))
        )  # fmt: skip
    binding = drafter.binding
    machine = describe_device(binding.head_device, binding.model.dtype)
    out.print(conditions_text("small random target", machine))
    out.print(growth_table(records))
    rows = [{**each.to_dict(), "growth": growth(records[0], each)} for each in records]
    finish(json_path, {"bench": "growth", **machine, "tree_width": tree_width, "records": rows})


if __name__ == "__main__":
    typer.run(main)
