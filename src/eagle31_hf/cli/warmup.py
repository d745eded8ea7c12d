"""`eagle31 warmup`: compile a pair's graphs ahead, so that later runs are fast at once."""

from __future__ import annotations

from time import perf_counter

from ..generate.warm_up import warm_up
from ..sampling.logits_processing import sampling_options
from .options import command, make_console, option
from .pairs import PairSource, load_pair
from .progress import counting_graphs, waiting_for


@command
def warmup(
    source: PairSource,
    tokens: int = option(512, "Longest text to compile for, prompt and answer.", min=1),
    temperature: float = option(0.0, "Of later answers; 0 is greedy.", min=0.0, max=5.0),
) -> None:
    """Compile a pair's graphs for this machine, and keep them. Takes minutes, once."""
    console = make_console()
    pair = load_pair(source)
    started, how = perf_counter(), sampling_options(temperature)
    with waiting_for("looking for graphs") as say:
        made = warm_up(pair.drafter, tokens=tokens, on_compile=counting_graphs(say), **how)
    seconds = perf_counter() - started
    compiled = f"{len(made)} graphs compiled in {seconds:.0f} s; later runs load them."
    console.print(compiled if made else "All graphs were there already.")
