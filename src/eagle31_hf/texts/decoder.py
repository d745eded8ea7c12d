"""Token ids as text, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

PROMPT_TAIL = 64
"""Tokens of a prompt that are decoded with the first of its text: enough that one of them is no special token."""

LONGEST_CHARACTER = 4
"""Tokens that a character may be spread over: a byte each."""


class IncrementalDecoder:
    """Token by token to text, never showing half a character.

    A byte-level token may end inside a UTF-8 character; such bytes wait for the rest. Text is decoded together with the
    piece before it, because some tokenizers (SentencePiece) write a word's leading space only after another word.

    Args:
        prompt: ids that the text goes on from, so that its first word has its leading space, and a character that the
            prompt begins is completed; empty where it stands by itself.
        marks: special tokens that are shown all the same.

    Attributes:
        length: characters that `feed` has given out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        marks: frozenset[int] = frozenset(),
    ):
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens and not marks
        self._hidden = frozenset[int]()
        if skip_special_tokens and marks:
            added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
            self._hidden = frozenset(added | set(tokenizer.all_special_ids)) - marks
        tail = list(prompt[-PROMPT_TAIL:])
        whole = len(tail) - self._unfinished(tail)
        self._context, self._waiting = tail[:whole], tail[whole:]  # given out already; not yet
        self._begun = self._decode(tail)[len(self._decode(self._context)) :]  # as the prompt shows its last part
        self.length = 0

    def feed(self, token: int) -> str:
        """Text that `token` completes; empty if it ends inside a character, all of which the token that ends it has."""
        text = self.peek(token)
        self._waiting.append(token)
        if text:
            self._context, self._waiting, self._begun = self._waiting, [], ""
            self.length += len(text)
        return text

    def peek(self, token: int) -> str:
        """What `feed` would return; nothing is changed."""
        text = self._new_text([*self._waiting, token])
        return "" if text.endswith("\ufffd") else text

    def flush(self) -> str:
        """What is left, broken characters included."""
        text = self._new_text(self._waiting)
        self._context, self._waiting, self._begun = [], [], ""
        return text

    def _new_text(self, waiting: list[int]) -> str:
        text = self._decode([*self._context, *waiting])[len(self._decode(self._context)) :]
        return text.removeprefix(self._begun)  # which is still there if the text does not complete the character

    def _unfinished(self, ids: list[int]) -> int:
        """How many last ones begin a character that is not whole yet."""
        counts = range(min(LONGEST_CHARACTER, len(ids) + 1))
        return next((n for n in counts if not self._decode(ids[: len(ids) - n]).endswith("\ufffd")), 0)

    def _decode(self, ids: list[int]) -> str:
        shown = [token for token in ids if token not in self._hidden] if self._hidden else ids
        return str(self._tokenizer.decode(shown, skip_special_tokens=self._skips, clean_up_tokenization_spaces=False))


class RoundStreamer(BaseStreamer):
    """A `generate` streamer that tells which text was drafted and accepted.

    Each round arrives as one block: the last id is the target's own token, those before it were drafted and accepted.
    (A text that ends inside a draft has a drafted end-of-sequence token there, which is not shown.)

    Args:
        decoder: of the answer.
        on_text: takes each token's text, empty where it completes none, and whether it was drafted.
    """

    def __init__(self, decoder: IncrementalDecoder, on_text: Callable[[str, bool], None]):
        self._decoder, self._on_text, self._prompt_seen = decoder, on_text, False

    def put(self, value: Tensor) -> None:
        """Take the prompt (first call, not shown) or one round's tokens, `(n,)` or `(1, n)`."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        *accepted, own = value.reshape(-1).tolist()
        for token in accepted:
            self._on_text(self._decoder.feed(token), True)
        self._on_text(self._decoder.feed(own), False)

    def end(self) -> None:
        """Give what is left."""
        self._on_text(self._decoder.flush(), False)
