"""Token by token to text: characters that are whole, stop strings that may span tokens, ends."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from .requests import TextRequest

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
        self._hidden = special_ids(tokenizer) - marks if skip_special_tokens and marks else frozenset()
        tail = list(prompt[-PROMPT_TAIL:])
        whole = len(tail) - self._unfinished(tail)
        self._context, self._waiting = tail[:whole], tail[whole:]  # given out already; not yet
        self._begun = self._decode(tail)[len(self._decode(self._context)) :]  # as the prompt shows its last part

    def feed(self, token: int) -> str:
        """Text that `token` completes; empty if it completes none."""
        text = self.peek(token)
        self._waiting.append(token)
        if text:
            self._context, self._waiting, self._begun = self._waiting, [], ""
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


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that `skip_special_tokens` leaves out."""
    added = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
    return frozenset(added | set(tokenizer.all_special_ids))


class StopScanner:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    Args:
        keeps: the stop string itself is let through, too.
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False):
        self._stops, self._keeps = [stop for stop in stops if stop], keeps
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What can be shown now."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        ends = [(at, len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            at, length = min(ends)
            shown, self._held = self._held[: at + length * self._keeps], ""
            return shown
        keep = max(begun_at_end(self._held, stop) for stop in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    @property
    def pending(self) -> str:
        """What is held back."""
        return self._held

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def begun_at_end(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TextWriter:
    """One text as it grows: which of a round's tokens belong to it, what can be shown, and why it ends.

    Args:
        tokenizer: the target's.
        request: the text that was asked for; of it, how it ends and how it is shown.
        end_ids: tokens after which it ends; empty to write on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, request: TextRequest, end_ids: frozenset[int]):
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._request, self._end_ids = request, end_ids
        self._decoder = IncrementalDecoder(
            tokenizer,
            prompt=request.prompt,
            skip_special_tokens=request.skip_special_tokens,
            marks=request.marks,
        )
        self._scanner = StopScanner(request.stop, keeps=request.keep_stop)

    @property
    def remaining(self) -> int:
        """Tokens it may still get."""
        return 0 if self.finish else self._request.max_new_tokens - len(self.tokens)

    def append(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Add tokens up to where the text ends. Returns how many were added, and the text that can be shown."""
        shown, added = "", 0
        for token in tokens:
            if self.finish is not None:
                break
            self.tokens.append(token)
            added += 1
            shown += self._append(token)
        if self.finish is not None and not self._scanner.found:
            shown += self._scan(self._decoder.flush())
            if self._scanner.found:
                self.finish = "stop"
            else:
                shown += self._scanner.flush()
        return added, shown

    def _append(self, token: int) -> str:
        """Add one; the text that can be shown."""
        ends = token in self._end_ids and self._may_end
        shown = "" if ends and not self._request.keep_stop else self._scan(self._decoder.feed(token))
        if ends or self._scanner.found:
            self.finish = "stop"
        elif len(self.tokens) >= self._request.max_new_tokens:
            self.finish = "length"
        return shown

    def _scan(self, text: str) -> str:
        """Text that may be shown; before the text may end, no stop string is looked for."""
        return self._scanner.feed(text) if self._may_end else text

    @property
    def _may_end(self) -> bool:
        return len(self.tokens) > (self._request.min_new_tokens or 0)


class TokenTexts:
    """What each token of a text adds to it, special tokens by their names, as vLLM tells it beside log-probabilities.

    A token is decoded together with those before it: alone, SentencePiece's tokens lose the space they begin with, and
    a token that holds a part of a character would be none. Such a part is empty, and the token that completes the
    character has all of it.

    Args:
        prompt: ids that the text goes on from.

    Attributes:
        length: characters told so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]):
        self._decoder = IncrementalDecoder(tokenizer, prompt=prompt, skip_special_tokens=False)
        self.length = 0

    def of(self, token: int) -> str:
        """The text of a token that may come next."""
        return self._decoder.peek(token)

    def add(self, token: int) -> str:
        """The text of the token that comes next."""
        text = self._decoder.feed(token)
        self.length += len(text)
        return text
