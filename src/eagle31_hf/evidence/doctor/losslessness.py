"""Is the text with the drafter the text without it, on this very machine, target and precision?

Greedy texts are compared token by token; a difference must be a tie (`exactness.judge_greedy`). Sampled text is
compared by its distribution: the first tokens after a prompt are drawn many times under a top-k so small that the exact
probability of every outcome can be had from the target itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...drafter.drafter import Eagle31Drafter
from ...stats import Acceptance
from ..bare import requested_shape
from ..calls import TIE
from ..exactness import TIE_ROUNDINGS, judge_greedy

SAMPLED_TOKENS, SAMPLED_TOP_K = 3, 3
SMALLEST_EXPECTED = 5.0
"""Outcomes expected less often are counted together (the usual rule for a chi-square test)."""


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts of one prompt part.

    Attributes:
        prompt: number of the prompt.
        at: new tokens written before they part.
        gap: largest distance of a written token's logit from the best one, over the whole text.
        rounding: the largest gap that is a tie: twice what the target's logits move there with the size of a block.
        is_tie: whether every token is the target's own choice but for that.
    """

    prompt: int
    at: int
    gap: float
    rounding: float
    is_tie: bool


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
            "differences": [asdict(one) for one in self.differences],
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
    drafted = []
    blocks = (8, requested_shape(drafter, batch_size=1).nodes)
    model.generate(**prompts[0], **wanted, assistant_model=drafter)  # what runs for the first time is slower
    for number, prompt in enumerate(prompts):
        written = []
        for way, assistant in enumerate(({}, {"assistant_model": drafter})):
            started = time.perf_counter()
            written.append(model.generate(**prompt, **wanted, **assistant)[0].cpu())
            seconds[way] += time.perf_counter() - started
        stats = drafter.stats
        assert stats is not None, "generate leaves its figures"
        drafted.append(stats)
        loops[f"{stats.loop}: {stats.reason}" if stats.reason else stats.loop] += 1
        plain, ours = written
        if not torch.equal(plain, ours):
            differences.append(_difference(model, number, prompt["input_ids"][0], (plain, ours), blocks))
        texts.append(plain)
    return GreedyComparison(
        texts=texts,
        prompt_lengths=[prompt["input_ids"].shape[1] for prompt in prompts],
        differences=differences,
        acceptance_length=Acceptance.of(drafted).length or 0.0,
        loops=dict(loops),
        plain_s=seconds[0],
        speculative_s=seconds[1],
    )


def _difference(
    model: Any, number: int, prompt: Tensor, texts: tuple[Tensor, Tensor], blocks: Sequence[int]
) -> Difference:
    """Of the plain text and ours, whole and on the CPU."""
    plain, ours = (text[len(prompt) :].tolist() for text in texts)
    found = judge_greedy(model, prompt, ours, plain, blocks=blocks)
    return Difference(number, found.position, found.logit_gap, TIE_ROUNDINGS * found.rounding, found.kind == TIE)


@dataclass(frozen=True)
class SamplingComparison:
    """Sampled openings against their exact probabilities.

    Attributes:
        samples: texts drawn with the drafter.
        outcomes: kinds of openings (`Openings`).
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
    openings = exact_openings(model, prompt["input_ids"])
    drawn: list[list[int]] = []
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
            drawn += out[:, length:].tolist()
    stats = drafter.stats
    return openings.test(drawn, stats.loop if stats else "")


OTHER = -1
"""Ends the kind of an opening that left the two likeliest tokens."""

LONGER_BY = 5
"""Tokens behind a prefix when its logits are computed a second time, in a forward of another shape."""


@dataclass
class Openings:
    """What a text may begin with, and how often.

    At each step there are three kinds of token: the two likeliest, and all others, after which an opening is followed
    no further. In 16 bits the third and fourth token may change places between a forward of one token and one of
    several, which would make single openings impossible; these kinds keep their probabilities.

    Attributes:
        probs: of each kind, tokens or `OTHER` at its end.
        moved: by how much a forward of another shape, which is as right, moves that probability.
        allowed: for each beginning, the tokens that top-k keeps, ties with the last of them included.
    """

    probs: dict[tuple[int, ...], float]
    moved: dict[tuple[int, ...], float]
    allowed: dict[tuple[int, ...], set[int]]

    def kind_of(self, opening: Sequence[int]) -> tuple[int, ...] | None:
        """`None` if the target cannot write it."""
        begun: tuple[int, ...] = ()
        for token in opening:
            if token not in self.allowed[begun]:
                return None
            longer = (*begun, token)
            if longer not in self.allowed and longer not in self.probs:
                return (*begun, OTHER)
            begun = longer
        return begun

    def test(self, drawn: Sequence[Sequence[int]], loop: str = "") -> SamplingComparison:
        """Chi-square of drawn openings; a cell's deviation counts as far as rounding does not explain it."""
        kinds = Counter(self.kind_of(opening) for opening in drawn)
        samples, impossible = len(drawn), kinds.pop(None, 0)
        common = sorted(kind for kind, prob in self.probs.items() if prob * samples >= SMALLEST_EXPECTED)
        rare = sorted(self.probs.keys() - set(common))
        statistic, cells = 0.0, 0
        for group in [*([kind] for kind in common), rare]:
            wanted, moved = (sum(of[kind] for kind in group) * samples for of in (self.probs, self.moved))
            if wanted > 0:
                seen = sum(kinds[kind] for kind in group)
                statistic += max(0.0, abs(seen - wanted) - moved) ** 2 / wanted
                cells += 1
        degrees = max(1, cells - 1)
        p_value = float(torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2.0)))
        return SamplingComparison(samples, len(self.probs), impossible, statistic, degrees, p_value, loop)


@torch.no_grad()
def exact_openings(model: Any, prompt_ids: Tensor) -> Openings:
    """Probability of every kind of opening of `SAMPLED_TOKENS` tokens under top-k and temperature 1."""
    found = Openings({}, {}, {})
    begun: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 1.0)}  # by a forward of either shape
    for step in range(SAMPLED_TOKENS):
        prefixes = torch.tensor(list(begun), dtype=prompt_ids.dtype, device=prompt_ids.device).view(len(begun), step)
        ids = torch.cat((prompt_ids.expand(len(begun), -1), prefixes), dim=1)
        longer = torch.cat((ids, ids[:, -1:].expand(-1, LONGER_BY)), dim=1)
        shapes = [model(ids).logits[:, -1].float(), model(longer).logits[:, ids.shape[1] - 1].float()]
        warped = [_top_k(logits).cpu() for logits in shapes]
        grown = {}
        for row, (prefix, before) in enumerate(begun.items()):
            of_row = [probs[row] for probs in warped]
            likeliest = of_row[0].topk(2).indices.tolist()
            rounding = TIE_ROUNDINGS * float((shapes[0][row] - shapes[1][row]).abs().max())
            found.allowed[prefix] = {token for logits in shapes for token in _kept(logits[row], rounding)}
            branches = {token: tuple(float(probs[token]) for probs in of_row) for token in likeliest}
            branches[OTHER] = tuple(max(0.0, 1 - float(probs[likeliest].sum())) for probs in of_row)
            for token, here in branches.items():
                kind, both = (*prefix, token), (before[0] * here[0], before[1] * here[1])
                if token == OTHER or step + 1 == SAMPLED_TOKENS:
                    found.probs[kind], found.moved[kind] = sum(both) / 2, abs(both[0] - both[1])
                else:
                    grown[kind] = both
        begun = grown
    return found


def _kept(logits: Tensor, rounding: float) -> list[int]:
    """Tokens that rounding may put among the `SAMPLED_TOP_K` best of `(V,)`."""
    last = float(logits.topk(SAMPLED_TOP_K).values[-1])
    return (logits >= last - rounding).nonzero().flatten().tolist()


def _top_k(logits: Tensor) -> Tensor:
    """Probabilities `(n, V)` of the `SAMPLED_TOP_K` best; what ties with the last of them stays, as in `generate`."""
    last = logits.topk(SAMPLED_TOP_K, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < last, -torch.inf).softmax(-1)
