"""Whether a greedy answer is plain decoding's: equal, or different only where the target's own rounding decides.

The proof looks at every written token, not at the first that differs: behind it two texts part, and each has to be
the target's own choice given itself. The whole answer is read in one forward; where a written token is not the best
one there, the same place is computed in other block sizes, and the distance of the two logits must be within twice
what those sizes move them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..target.cache_argument import CACHE_ARGUMENT
from .calls import DIFFERENT, SAME, TIE, Verdict

TIE_ROUNDINGS = 2
"""A tie is a gap of at most so many times what the size of a block moves the logits."""
MOST_TIES = 16
"""Places of one answer that are looked at; one with more is called different."""


@torch.no_grad()
def judge_greedy(
    model: Any, prompt: Tensor, answer: Sequence[int], reference: Sequence[int], *, blocks: Sequence[int]
) -> Verdict:
    """What a greedy answer is against plain decoding's.

    Args:
        model: the target.
        prompt: `(T,)` ids without padding.
        answer, reference: new tokens, up to and with their end.
        blocks: sizes in which the target computed them, beside one token at a time.
    """
    if list(answer) == list(reference):
        return Verdict(SAME)
    position = next((i for i, (a, r) in enumerate(zip(answer, reference, strict=False)) if a != r), None)
    if position is None:  # one is the other's beginning: it ended where the target does not end
        return Verdict(DIFFERENT, min(len(answer), len(reference)), float("inf"), 0.0)
    text = torch.cat((prompt, torch.tensor(list(answer), device=prompt.device)))
    whole = model(input_ids=text[None, :-1]).logits[0, len(prompt) - 1 :].float()  # (n, V)
    written = torch.tensor(list(answer), device=whole.device)
    gaps = whole.amax(-1) - whole.gather(1, written[:, None]).squeeze(1)  # (n,)
    doubtful = sorted({position, *gaps.nonzero().flatten().tolist()})
    if len(doubtful) > MOST_TIES:
        return Verdict(DIFFERENT, position, float(gaps.max()), 0.0)
    found = []
    for place in doubtful:
        rounding = _rounding(model, text[: len(prompt) + place], whole[place], blocks)
        gap = float(gaps[place])
        if place == position:  # the plain text's token, too, has to be as good
            gap = max(gap, float((whole[place].amax() - whole[place, reference[place]]).abs()))
        found.append((gap, rounding))
    is_tie = all(gap <= TIE_ROUNDINGS * rounding for gap, rounding in found)
    gap, rounding = max(found, key=lambda pair: pair[0] - TIE_ROUNDINGS * pair[1])
    return Verdict(TIE if is_tie else DIFFERENT, position, gap, rounding)


def _rounding(model: Any, prefix: Tensor, whole: Tensor, blocks: Sequence[int]) -> float:
    """How far logits `(V,)` after `prefix` `(t,)` move with the size of the last block."""
    moved = 0.0
    for block in {1, *(min(block, len(prefix) - 1) for block in blocks)}:
        cache = DynamicCache(config=model.config.get_text_config())
        grown: dict[str, Any] = {CACHE_ARGUMENT: cache, "use_cache": True}
        model(input_ids=prefix[None, :-block], **grown, logits_to_keep=1)
        last = model(input_ids=prefix[None, -block:], **grown).logits[0, -1].float()
        moved = max(moved, (last - whole).abs().max().item())
    return moved
