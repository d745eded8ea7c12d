"""Token ids as texts, one by one, as vLLM tells them beside log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT = 4
"""Tokens before one that it is decoded with: as many as a character may be spread over."""


class TokenTexts:
    """What each token of a text adds to it, special tokens by their names.

    A token is decoded together with those before it: alone, SentencePiece's tokens lose the space they begin with, and
    a token that holds a part of a character would be none. Such a part is empty, and the token that completes the
    character has all of it.

    Args:
        prompt: ids that the text goes on from.

    Attributes:
        length: characters told so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]):
        self._tokenizer, self._before = tokenizer, list(prompt[-CONTEXT:])
        self.length = 0

    def of(self, token: int) -> str:
        """The text of a token that may come next."""
        whole = self._decode([*self._before, token])
        if whole.endswith("\ufffd"):
            return ""
        return whole[len(self._decode(self._before).rstrip("\ufffd")) :]

    def add(self, token: int) -> str:
        """The text of the token that comes next."""
        text = self.of(token)
        self._before = [*self._before, token][-CONTEXT:]
        self.length += len(text)
        return text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
