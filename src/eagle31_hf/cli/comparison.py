"""Plain `generate` against EAGLE on the same prompts, interleaved in one process, and the ceiling to expect.

Both take turns prompt by prompt, so that whatever else the machine does falls on both; what counts are medians over
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..benchmark import bare as benchmark_bare
from ..benchmark.bare import drafted_depths, wished_shape
from ..benchmark.records import add_up
from ..decoding.calibration.bare_meter import BareCosts, BareMeter, now
from ..stats import SpeculationStats
from .pairs import DecodingWishes, Pair, write

TIMED_ROUNDS = 5


@dataclass(frozen=True)
class Difference:
    """The first token in which an EAGLE text left the plain one.

    `is_tie`: at that place the two tokens' logits lie closer (`logit_gap`) than the target's own logits move when the
    same text is computed in other block sizes (`rounding`), so the arg-max there is decided by rounding.
    """

    prompt: int
    position: int
    logit_gap: float
    rounding: float

    @property
    def is_tie(self) -> bool:
        return self.logit_gap <= 2 * self.rounding


@dataclass(frozen=True)
class Comparison:
    """One measurement. Speeds are tokens per second of each round over all prompts; `stats` sums all timed rounds."""

    plain_tok_per_s: tuple[float, ...]
    eagle_tok_per_s: tuple[float, ...]
    new_tokens: int
    prompts: int
    samples: bool
    differences: tuple[Difference, ...]
    stats: SpeculationStats

    @property
    def speedup(self) -> float:
        """Ratio of the medians."""
        return median(self.eagle_tok_per_s) / median(self.plain_tok_per_s)

    @property
    def same_text(self) -> bool | None:
        """Whether greedy texts are equal up to arg-max ties; `None` when sampling, where only the distribution is."""
        return None if self.samples else all(difference.is_tie for difference in self.differences)

    def to_dict(self) -> dict[str, Any]:
        """Everything measured, as JSON-ready values."""
        return {
            "plain_tok_per_s": list(self.plain_tok_per_s),
            "eagle_tok_per_s": list(self.eagle_tok_per_s),
            "median_plain_tok_per_s": median(self.plain_tok_per_s),
            "median_eagle_tok_per_s": median(self.eagle_tok_per_s),
            "speedup": self.speedup,
            "new_tokens": self.new_tokens,
            "prompts": self.prompts,
            "same_text": self.same_text,
            "differences": [{**asdict(d), "is_tie": d.is_tie} for d in self.differences],
            "stats": self.stats.to_dict(),
        }


def warm_up(pair: Pair, inputs: Sequence[dict[str, Tensor]], wishes: DecodingWishes) -> SpeculationStats:
    """Write every prompt once with the drafter, untimed; tells the acceptance to expect."""
    seen = []
    for prompt in inputs:
        write(pair, prompt, wishes, with_drafter=True)
        seen.append(_stats_of(pair))
    return add_up(seen)


def compare(
    pair: Pair,
    inputs: Sequence[dict[str, Tensor]],
    wishes: DecodingWishes,
    *,
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> Comparison:
    """Time `rounds` passes over the prompts, each prompt once without and once with the drafter.

    Args:
        inputs: one `generate` input per prompt, batch 1.
        on_round: called after each round (progress).
    """
    speeds: dict[bool, list[float]] = {False: [], True: []}
    seen: list[SpeculationStats] = []
    texts: dict[bool, list[Tensor]] = {}
    device = pair.drafter.require_binding().head_device
    for turn in range(rounds):
        seconds, tokens = {False: 0.0, True: 0.0}, {False: 0, True: 0}
        texts = {False: [], True: []}
        for prompt in inputs:
            for with_drafter in (False, True) if turn % 2 == 0 else (True, False):
                started = now(device)
                text = write(pair, prompt, wishes, with_drafter=with_drafter)
                seconds[with_drafter] += now(device) - started
                tokens[with_drafter] += len(text)
                texts[with_drafter].append(text)
                if with_drafter:
                    seen.append(_stats_of(pair))
        for mode, measured in speeds.items():
            measured.append(tokens[mode] / seconds[mode])
        on_round()
    return Comparison(
        plain_tok_per_s=tuple(speeds[False]),
        eagle_tok_per_s=tuple(speeds[True]),
        new_tokens=sum(len(text) for text in texts[True]),
        prompts=len(inputs),
        samples=wishes.samples,
        differences=() if wishes.samples else _differences(pair, inputs, texts[False], texts[True]),
        stats=add_up(seen),
    )


def _stats_of(pair: Pair) -> SpeculationStats:
    assert pair.drafter.stats is not None, "generate with our drafter leaves stats"
    return pair.drafter.stats


# --- equal texts ------------------------------------------------------------------------------------------------------


def _differences(
    pair: Pair, inputs: Sequence[dict[str, Tensor]], plain: Sequence[Tensor], eagle: Sequence[Tensor]
) -> tuple[Difference, ...]:
    found = []
    for index, (prompt, ours, theirs) in enumerate(zip(inputs, eagle, plain, strict=True)):
        if torch.equal(ours, theirs):
            continue
        shared = min(len(ours), len(theirs))
        unequal = (ours[:shared] != theirs[:shared]).nonzero()
        position = int(unequal[0]) if len(unequal) else shared
        gap, rounding = float("inf"), 0.0
        if position < shared:
            prefix = torch.cat((prompt["input_ids"][0], theirs[:position]))[None]
            gap, rounding = _gap_and_rounding(pair, prefix, int(ours[position]), int(theirs[position]))
        found.append(Difference(index, position, gap, rounding))
    return tuple(found)


@torch.no_grad()
def _gap_and_rounding(pair: Pair, prefix: Tensor, ours: int, theirs: int) -> tuple[float, float]:
    """Distance of two tokens' logits after `prefix` `(1, T)`; how far logits move with the size of the last block."""
    whole = pair.target(input_ids=prefix).logits[0, -1].float()
    rounding = 0.0
    for block in {1, min(wished_shape(pair.drafter, batch_size=1).nodes, prefix.shape[1] - 1)}:
        cache = DynamicCache(config=pair.target.config.get_text_config())
        pair.target(input_ids=prefix[:, :-block], past_key_values=cache, use_cache=True)
        last = pair.target(input_ids=prefix[:, -block:], past_key_values=cache, use_cache=True).logits[0, -1].float()
        rounding = max(rounding, (last - whole).abs().max().item())
    return (whole[ours] - whole[theirs]).abs().item(), rounding


# --- ceiling ----------------------------------------------------------------------------------------------------------


def measure_bare_costs(pair: Pair, prompt: dict[str, Tensor]) -> BareCosts:
    """Time the forwards a round is made of, after `prompt` has been read, for drafts as long as the last call's."""
    doubted = pair.drafter.generation_config.num_assistant_tokens is None
    depths = drafted_depths(pair.drafter.stats) if doubted else None
    return BareMeter(pair.drafter, prompt["input_ids"], wished_shape(pair.drafter, batch_size=1)).measure(depths)


def describe_machine(pair: Pair) -> dict[str, Any]:
    """What a figure depends on beside the models."""
    return benchmark_bare.describe_machine(pair.drafter.require_binding())
