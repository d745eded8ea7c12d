"""Is the text with the drafter the text without it, on this very machine, target and precision?

Greedy texts are compared token by token; a difference must be a tie, two logits within what the precision can tell
apart. Sampled text is compared by its distribution: the first tokens after a prompt are drawn many times under a top-k
so small that the exact probability of every outcome can be had from the target itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..drafter.drafter import Eagle31Drafter

TIE_ROUNDINGS = 4.0
"""A tie is a gap of at most so many units in the last place of the larger logit, in the target's precision."""

SAMPLED_TOKENS, SAMPLED_TOP_K = 3, 3
SMALLEST_EXPECTED = 5.0
"""Outcomes expected less often are counted together (the usual rule for a chi-square test)."""


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts of one prompt part.

    Attributes:
        prompt: number of the prompt.
        at: new tokens written before they part.
        gap: difference of the two tokens' logits, by the target over the shared text.
        rounding: the largest gap that is a tie in the target's precision.
    """

    prompt: int
    at: int
    gap: float
    rounding: float

    @property
    def is_tie(self) -> bool:
        return self.gap <= self.rounding


@dataclass(frozen=True)
class GreedyComparison:
    """Plain and speculative greedy text over the same prompts, in turns.

    Attributes:
        texts: `(T,)` whole texts that plain decoding wrote.
        prompt_lengths: of them.
        differences: where the drafter's text differs.
        acceptance_length: mean tokens per verification.
        loops: which loops served the prompts, with their reasons.
        plain_s, speculative_s: seconds in all.
    """

    texts: list[Tensor]
    prompt_lengths: list[int]
    differences: list[Difference]
    acceptance_length: float
    loops: dict[str, int]
    plain_s: float
    speculative_s: float

    @property
    def is_exact(self) -> bool:
        return all(difference.is_tie for difference in self.differences)

    @property
    def speedup(self) -> float:
        return self.plain_s / self.speculative_s if self.speculative_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the texts."""
        return {
            "prompts": len(self.texts),
            "differences": [{**asdict(one), "is_tie": one.is_tie} for one in self.differences],
            "is_exact": self.is_exact,
            "acceptance_length": self.acceptance_length,
            "loops": self.loops,
            "plain_s": self.plain_s,
            "speculative_s": self.speculative_s,
            "speedup": self.speedup,
        }


def compare_greedy(
    drafter: Eagle31Drafter, prompts: Sequence[dict[str, Tensor]], *, new_tokens: int
) -> GreedyComparison:
    """Write every prompt with and without the drafter.

    Args:
        prompts: `input_ids` and `attention_mask`, `(1, L)` each, on the target's device.
    """
    model: Any = drafter.require_binding().model
    wanted = {"do_sample": False, "max_new_tokens": new_tokens, "num_beams": 1}
    texts, differences, loops = [], [], Counter[str]()
    seconds = [0.0, 0.0]
    accepted = rounds = 0
    model.generate(**prompts[0], **wanted, assistant_model=drafter)  # what runs for the first time is slower
    for number, prompt in enumerate(prompts):
        written = []
        for way, assistant in enumerate(({}, {"assistant_model": drafter})):
            started = time.perf_counter()
            written.append(model.generate(**prompt, **wanted, **assistant)[0].cpu())
            seconds[way] += time.perf_counter() - started
        stats = drafter.stats
        assert stats is not None, "generate leaves its figures"
        accepted, rounds = accepted + stats.accepted, rounds + stats.rounds
        loops[f"{stats.loop}: {stats.reason}" if stats.reason else stats.loop] += 1
        plain, ours = written
        if not torch.equal(plain, ours):
            differences.append(_difference(model, number, plain, ours, prompt["input_ids"].shape[1]))
        texts.append(plain)
    return GreedyComparison(
        texts=texts,
        prompt_lengths=[prompt["input_ids"].shape[1] for prompt in prompts],
        differences=differences,
        acceptance_length=(accepted + rounds) / rounds if rounds else 0.0,
        loops=dict(loops),
        plain_s=seconds[0],
        speculative_s=seconds[1],
    )


@torch.no_grad()
def _difference(model: Any, number: int, plain: Tensor, ours: Tensor, prompt_length: int) -> Difference:
    width = min(len(plain), len(ours))
    parted = (plain[:width] != ours[:width]).nonzero()
    if not len(parted):  # one of them went on where the other ended: no rounding does that
        return Difference(number, width - prompt_length, float("inf"), 0.0)
    at = int(parted[0])
    logits = model(plain[None, :at].to(model.device)).logits[0, -1].float()
    first, second = float(logits[plain[at]]), float(logits[ours[at]])
    if model.dtype == torch.float32:
        rounding = 1e-5 * float(logits.max() - logits.min())
    else:
        rounding = TIE_ROUNDINGS * torch.finfo(model.dtype).eps * max(1.0, abs(first), abs(second))
    return Difference(number, at - prompt_length, abs(first - second), rounding)


@dataclass(frozen=True)
class SamplingComparison:
    """Sampled openings against their exact probabilities.

    Attributes:
        samples: texts drawn with the drafter.
        outcomes: different openings that are possible.
        impossible: drawn openings that the target alone cannot write.
        chi_square: the statistic; `degrees` its degrees of freedom.
        p_value: chance of so large a statistic if the distributions are equal.
        loop: which loop served it.
    """

    samples: int
    outcomes: int
    impossible: int
    chi_square: float
    degrees: int
    p_value: float
    loop: str

    @property
    def is_exact(self) -> bool:
        """No sign against it: one honest run in a thousand would be called wrong."""
        return self.impossible == 0 and self.p_value > 1e-3


def compare_sampling(
    drafter: Eagle31Drafter, prompt: dict[str, Tensor], *, samples: int = 600, batch: int = 50, seed: int = 0
) -> SamplingComparison:
    """Draw the first tokens after `prompt` many times and test their distribution."""
    model: Any = drafter.require_binding().model
    warping = {"do_sample": True, "temperature": 1.0, "top_k": SAMPLED_TOP_K, "top_p": 1.0, "num_beams": 1}
    length = prompt["input_ids"].shape[1]
    expected = _exact_openings(model, prompt["input_ids"])
    drawn = Counter[tuple[int, ...]]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(-(-samples // batch)):
            out = model.generate(
                **prompt,
                **warping,
                max_new_tokens=SAMPLED_TOKENS,
                min_new_tokens=None,
                eos_token_id=-1,  # texts of one length can be enumerated
                num_return_sequences=batch,
                assistant_model=drafter,
            )
            drawn.update(tuple(row) for row in out[:, length:].tolist())
    stats = drafter.stats
    return _chi_square(drawn, expected, stats.loop if stats else "")


@torch.no_grad()
def _exact_openings(model: Any, prompt_ids: Tensor) -> dict[tuple[int, ...], float]:
    """Probability of every opening of `SAMPLED_TOKENS` tokens under top-k and temperature 1."""
    openings: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(SAMPLED_TOKENS):
        prefixes = list(openings)
        ids = torch.cat(
            [
                torch.cat((prompt_ids, prompt_ids.new_tensor([prefix])), 1) if prefix else prompt_ids
                for prefix in prefixes
            ]
        )
        best = model(ids).logits[:, -1].float().topk(SAMPLED_TOP_K, dim=-1)
        probs = best.values.softmax(-1)
        longer = {}
        for row, prefix in enumerate(prefixes):
            for token, prob in zip(best.indices[row].tolist(), probs[row].tolist(), strict=True):
                longer[(*prefix, token)] = openings[prefix] * prob
        openings = longer
    return openings


def _chi_square(
    drawn: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], loop: str
) -> SamplingComparison:
    samples = sum(drawn.values())
    impossible = sum(count for opening, count in drawn.items() if opening not in expected)
    common = {opening for opening, prob in expected.items() if prob * samples >= SMALLEST_EXPECTED}
    cells = [(drawn[opening], expected[opening] * samples) for opening in sorted(common)]
    rare = [opening for opening in expected if opening not in common]
    rare_expected = sum(expected[opening] for opening in rare) * samples
    if rare_expected > 0:
        cells.append((sum(drawn[opening] for opening in rare), rare_expected))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    degrees = max(1, len(cells) - 1)
    p_value = float(torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2.0)))
    return SamplingComparison(samples, len(expected), impossible, statistic, degrees, p_value, loop)
