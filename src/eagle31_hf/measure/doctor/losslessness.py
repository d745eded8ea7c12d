"""Is the text with the drafter the text without it, on this very machine, target and precision?

Texts are compared token by token, greedy ones and ones that are sampled under the same seed; a difference must be a tie
(`exactness.judge`).
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
from ...target.served_processing import processing_of, sampling_options
from ..calls import TIE, served_by
from ..exactness import TIE_ROUNDINGS, SampledBy, judge
from ..methods import requested_shape


@dataclass(frozen=True)
class Difference:
    """Where two texts of one prompt part.

    Attributes:
        prompt: number of the prompt.
        at: new tokens written before they part.
        gap: largest distance of a written token's logit (or perturbed score, of a sampled one) from the best one, over
            the whole text.
        rounding: the largest gap that is a tie: twice what the target's logits move there with the size of a block.
        is_tie: whether every token is the target's own choice but for that.
    """

    prompt: int
    at: int
    gap: float
    rounding: float
    is_tie: bool


@dataclass(frozen=True)
class TextComparison:
    """Plain and speculative text over the same prompts, in turns.

    Attributes:
        texts: `(T,)` whole texts that plain decoding wrote.
        loops: which loops served the prompts, with their reasons.
        plain_s, speculative_s: seconds in all.
    """

    texts: list[Tensor]
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
        names = ("is_exact", "acceptance_length", "loops", "plain_s", "speculative_s", "speedup")
        figures = {name: getattr(self, name) for name in names}
        return {"prompts": len(self.texts), "differences": [asdict(one) for one in self.differences], **figures}


def compare_texts(
    drafter: Eagle31Drafter, prompts: Sequence[dict[str, Tensor]], *, new_tokens: int, temperature: float = 0.0
) -> TextComparison:
    """Write every prompt with and without the drafter.

    Args:
        prompts: `input_ids` and `attention_mask`, `(1, L)` each, on the target's device.
        temperature: 0 is greedy; else both texts of a prompt are sampled by one seed, from the whole vocabulary.
    """
    model: Any = drafter.binding.model
    how = sampling_options(temperature) | ({"top_k": 0, "top_p": 1.0} if temperature else {})
    warping = processing_of(model, **how).draft_warping if temperature else None
    wanted = {**how, "max_new_tokens": new_tokens, "num_beams": 1}
    texts, differences, loops = [], [], Counter[str]()
    seconds = [0.0, 0.0]
    drafted = []
    blocks = (8, requested_shape(drafter, batch_size=1).nodes)
    with torch.random.fork_rng():
        model.generate(**prompts[0], **wanted, assistant_model=drafter)  # what runs for the first time is slower
    for number, prompt in enumerate(prompts):
        written = []
        for way, assistant in enumerate(({}, {"assistant_model": drafter})):
            with torch.random.fork_rng():
                torch.manual_seed(number)
                started = time.perf_counter()
                written.append(model.generate(**prompt, **wanted, **assistant)[0].cpu())
                seconds[way] += time.perf_counter() - started
        stats = drafter.stats
        assert stats is not None, "generate leaves its figures"
        drafted.append(stats)
        loops[served_by(stats)] += 1
        plain, ours = written
        if not torch.equal(plain, ours):
            sampled = None if warping is None else SampledBy(number, 0, 1, warping)
            ids = prompt["input_ids"][0]
            answers = [text[len(ids) :].tolist() for text in (ours, plain)]
            found = judge(model, ids, *answers, blocks=blocks, sampled=sampled)
            tie = TIE_ROUNDINGS * found.rounding
            differences.append(Difference(number, found.position, found.logit_gap, tie, found.kind == TIE))
        texts.append(plain)
    return TextComparison(
        texts=texts,
        differences=differences,
        acceptance_length=Acceptance.of(drafted).acceptance_length,
        loops=dict(loops),
        plain_s=seconds[0],
        speculative_s=seconds[1],
    )
