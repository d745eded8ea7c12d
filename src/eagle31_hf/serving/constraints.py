"""What keeps tokens from being written beside penalties: a grammar, a least length, words that are not wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation import logits_process as stock

from .grammar import GrammarProcessor
from .requests import TextRequest


def constraints_of(
    request: TextRequest, end_ids: frozenset[int], eos_ids: frozenset[int]
) -> list[stock.LogitsProcessor]:
    """Processors of one text.

    Args:
        end_ids: tokens that end it.
        eos_ids: tokens that end the target's texts, which a grammar allows where it is satisfied.
    """
    found: list[stock.LogitsProcessor] = []
    length = len(request.prompt)
    if request.grammar is not None:
        found.append(GrammarProcessor(request.grammar, length, eos_ids))
    if request.allowed_tokens:
        found.append(OnlyTokens(request.allowed_tokens))
    if request.bad_words:
        found.append(stock.NoBadWordsLogitsProcessor([list(word) for word in request.bad_words]))
    if request.min_new_tokens and end_ids:
        found.append(stock.MinNewTokensLengthLogitsProcessor(length, request.min_new_tokens, sorted(end_ids)))
    return found


class OnlyTokens(stock.LogitsProcessor):
    """Forbids all tokens but these."""

    def __init__(self, ids: Sequence[int]):
        self.ids = list(ids)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Processed scores `(B, V)`."""
        kept = torch.full_like(scores, float("-inf"))
        kept[:, self.ids] = scores[:, self.ids]
        return kept

    def fork_for_drafts(self) -> OnlyTokens:
        return self  # keeps no state


def spellings(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> Iterator[tuple[int, ...]]:
    """Token ids of words as they may be written: at a text's beginning, and after a space."""
    for word in words:
        bare, spaced = (
            tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in (word.lstrip(), f" {word.lstrip()}")
        )
        yield from {ids for ids in (bare, spaced) if ids}
