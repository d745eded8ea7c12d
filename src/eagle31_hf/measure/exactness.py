"""Whether an answer is plain decoding's: equal, or different only where the target's own rounding decides.

The proof looks at every written token, not at the first that differs: behind it two texts part, and each has to be
the target's own choice given itself. The whole answer is read in one forward; where a written token is not the best
one there, the answer is read again in the block sizes it was written in, and the distance of the two logits must be
within twice what those sizes move them. Of a sampled answer the best token is that of the scores perturbed by the noise
of each position (`sampling.draw`), which is the same for plain decoding under the same seed. Which tokens top-k or
top-p leave out is decided by rounding, too: those at the edge count in the favour of what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..cache.stock import CACHE_ARGUMENT
from ..sampling.draw import PositionNoise, perturbed
from ..sampling.logits_processing import DraftWarping

TIE_ROUNDINGS = 2
"""A tie is a gap of at most so many times what the size of a block moves the logits."""
MOST_TIES = 16
"""Places of one answer that are looked at; one with more is called different."""


class Kind(str, Enum):
    """What an answer is against plain decoding's."""

    REFERENCE = "reference"  # it is plain decoding's own
    SAME = "same"
    TIE = "tie"  # other tokens, where the target's own rounding decides
    DIFFERENT = "different"


@dataclass(frozen=True)
class Verdict:
    """What one answer is against plain decoding's.

    Attributes:
        position: first token that differs, counted from 0; -1 if none does.
        logit_gap, rounding: the largest distance of a written token's logit from the best one in units of the logits,
            and how far the target's own logits move there with the size of the block they are computed in.
    """

    kind: Kind
    position: int = -1
    logit_gap: float = 0.0
    rounding: float = 0.0


@dataclass(frozen=True)
class SampledBy:
    """How one row of a `generate` call was sampled.

    Attributes:
        seed: of torch's generator when the call began.
        row, rows: which of how many.
        warping: the processors, which look at scores alone.
    """

    seed: int
    row: int
    rows: int
    warping: DraftWarping

    def scores(self, logits: Tensor, start: int = 0) -> Tensor:
        """Scores whose arg-max is the token that was sampled, `(n, V)` from the new position `start` on."""
        generator = torch.Generator(logits.device).manual_seed(self.seed)
        noise = PositionNoise(self.rows, logits.shape[-1], logits.device, generator)
        return perturbed(self.warping(logits), noise.window([self.row], [start], len(logits))[0])

    def gap(self, logits: Tensor, scores: Tensor, place: int, token: int, distance: float) -> float:
        """How far the score of a token is from the best one.

        Args:
            logits, scores: of a new position, `(V,)` each.
            place: of that position.
            distance: by which the logits of any two tokens may move; what top-k and top-p keep moves with them.
        """
        own = scores[token]
        if own == -torch.inf:  # kept, perhaps, if all above it were lower
            own = self.scores(torch.where(logits > logits[token], logits - distance, logits)[None], place)[0, token]
            if own == -torch.inf:
                return float("inf")
        better = (scores > own).nonzero().flatten()
        for other in better[scores[better].argsort(descending=True)].tolist():
            lower = logits.clone()
            lower[other] -= distance
            if bool(self.warping(lower[None])[0, other].isfinite()):  # it is kept in any case
                return float(scores[other] - own)
        return 0.0


@torch.no_grad()
def judge(
    model: Any,
    prompt: Tensor,
    answer: Sequence[int],
    reference: Sequence[int],
    *,
    blocks: Sequence[int],
    sampled: SampledBy | None = None,
) -> Verdict:
    """What an answer is against plain decoding's.

    Args:
        model: the target.
        prompt: `(T,)` ids without padding.
        answer, reference: new tokens, up to and with their end.
        blocks: sizes in which the target computed them, beside one token at a time.
        sampled: how both were sampled; `None`: they are greedy.
    """
    if list(answer) == list(reference):
        return Verdict(Kind.SAME)
    position = next((i for i, (a, r) in enumerate(zip(answer, reference, strict=False)) if a != r), None)
    if position is None:  # one is the other's beginning: it ended where the target does not end
        return Verdict(Kind.DIFFERENT, min(len(answer), len(reference)), float("inf"), 0.0)
    text = torch.cat((prompt, torch.tensor(list(answer), device=prompt.device)))
    whole = model(input_ids=text[None, :-1]).logits[0, len(prompt) - 1 :].float()  # (n, V)
    written = torch.tensor(list(answer), device=whole.device)
    scores = whole if sampled is None else sampled.scores(whole)
    gaps = scores.amax(-1) - scores.gather(1, written[:, None]).squeeze(1)  # (n,)
    doubtful = sorted({position, *gaps.nonzero().flatten().tolist()})
    if len(doubtful) > MOST_TIES:
        return Verdict(Kind.DIFFERENT, position, float(gaps.max()), 0.0)
    logits = whole[doubtful]
    moved = rounded = [0.0] * len(doubtful)  # logits, and the scores that sampling makes of them
    for block in {1, *blocks}:
        again = _in_blocks(model, text[:-1], len(prompt) - 1, block)[doubtful].float()
        moved = [*map(max, moved, _distances(logits, again))]
        both = (logits, again) if sampled is None else (sampled.warping(logits), sampled.warping(again))
        rounded = [*map(max, rounded, _distances(*both))]
    found = []
    for number, place in enumerate(doubtful):
        # Where texts part the plain one's token, too, has to be as good.
        tokens = [answer[place], reference[place]] if place == position else [answer[place]]
        if sampled is None:
            gap = float(scores[place].amax() - scores[place, tokens].amin())
        else:
            at = logits[number], scores[place], place
            gap = max(sampled.gap(*at, token, TIE_ROUNDINGS * moved[number]) for token in tokens)
        found.append((gap, rounded[number]))
    gap, rounding = max(found, key=lambda pair: pair[0] - TIE_ROUNDINGS * pair[1])  # the least like a tie
    return Verdict(Kind.TIE if gap <= TIE_ROUNDINGS * rounding else Kind.DIFFERENT, position, gap, rounding)


def _in_blocks(model: Any, text: Tensor, start: int, block: int) -> Tensor:
    """Logits `(t, V)` after `text[start:]` `(t,)`, read in blocks of this size: keys and values of what was written
    before are rounded as they are while a text is written."""
    kept: dict[str, Any] = {CACHE_ARGUMENT: DynamicCache(config=model.config.get_text_config()), "use_cache": True}
    if start:
        model(input_ids=text[None, :start], **kept, logits_to_keep=1)
    return torch.cat([model(input_ids=ids[None], **kept).logits[0] for ids in text[start:].split(block)])


def _distances(one: Tensor, other: Tensor) -> list[float]:
    """How far logits or scores `(n, V)` are from others, by row."""
    both = one.isfinite() & other.isfinite()  # what top-k leaves out has no score
    distances: list[float] = (one - other).abs().masked_fill(~both, 0.0).amax(-1).tolist()
    return distances
