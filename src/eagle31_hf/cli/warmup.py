"""`eagle31 warmup`: compile a pair's graphs ahead, so that later runs are fast at once."""

from __future__ import annotations

from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console

from ..compiled.graph_makers import GraphKey
from ..decoding.calibration.calibration import Calibration
from ..decoding.default_length import default_length
from ..decoding.pair import Pair
from ..generation.warm_up import warm_up
from ..measure.origin import origin
from ..target.served_processing import sampling_options
from .option_groups import expand_options
from .options import JsonOption, TracebackOption, count, make_console, readable_errors, write_json
from .pairs import LoadedPair, PairSource, load_pair
from .progress import waiting_for


@expand_options
@readable_errors
def warmup(
    source: PairSource,
    tokens: Annotated[int, typer.Option(min=1, help="Longest text to compile for, prompt and answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of later answers; 0 is greedy.")] = 0.0,
    json_path: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Compile a pair's graphs for this machine, time rounds by them, and keep both. Takes minutes, once."""
    console = make_console()
    pair = load_pair(source, may_lack_drafter=True)
    started, kinds = perf_counter(), list[str]()
    with waiting_for("looking for graphs") as say:

        def tell(key: GraphKey) -> None:
            kinds.append(key.kind)
            say(f"compiling {count(len(kinds), 'graph')}: {', '.join(dict.fromkeys(kinds))}")

        made = warm_up(pair.drafter, tokens=tokens, on_compile=tell, **sampling_options(temperature))
    seconds = perf_counter() - started
    measured = Pair.of(pair.drafter).history.calibration(pair.drafter, compiled=True)
    calibration = None if measured is None else measured.to_dict()
    record = {"graphs": [repr(key) for key in made], "seconds": seconds, "calibration": calibration}
    write_json(json_path, {**origin(), "target": pair.name, **record})
    if made:
        console.print(f"{len(made)} graphs compiled in {seconds:.0f} s; later runs load them.")
    else:
        console.print("All graphs were there already.")
    if measured is not None:  # of a target alone whose drafts are not looked up nothing is
        _print_rounds(console, pair, measured, sampled=temperature > 0)


def _print_rounds(console: Console, pair: LoadedPair, measured: Calibration, *, sampled: bool) -> None:
    drafts = default_length(pair.drafter, batch_size=1, sampled=sampled, compiled=True).depth
    rounds = measured.costs(0).rounds(drafts)
    console.print(
        f"A round by them takes {1e3 * rounds.speculative_s[drafts]:.1f} ms with {drafts} draft tokens and "
        f"{1e3 * rounds.plain_s:.1f} without: drafts pay from {rounds.break_even_tokens(drafts):.2f} tokens a round on."
    )
