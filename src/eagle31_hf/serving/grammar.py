"""Texts that keep to a grammar: a JSON schema, a regular expression, a choice of functions to call. Uses llguidance."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation import logits_process as stock

from ..errors import ConfigurationError, removal

WHITE_SPACE = {"whitespace_pattern": r"[ \n]{0,12}"}
"""Between the parts of JSON: enough for any indentation, and not so much that a text is nothing else."""


def with_white_space(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, told how much white space its texts may have."""
    return {"x-guidance": WHITE_SPACE, **schema}


SEEN_AT_ONCE = 32
"""Last tokens of a thought in which its end is looked for: more than a round and a mark have."""


@dataclass(frozen=True)
class OpenThought:
    """A thought that the prompt has begun, behind which a grammar holds.

    Attributes:
        mark: ends the thought.
        ids: its tokens, which are written after `longest` others where the thought does not end by itself.
    """

    decode: Callable[[list[int]], str]
    mark: str
    ids: tuple[int, ...]
    longest: int

    @classmethod
    def ended_by(cls, tokenizer: PreTrainedTokenizerBase, mark: str, longest: int) -> OpenThought:
        """The mark, and a blank line as templates write it."""
        ids = tokenizer(f"\n{mark}\n\n", add_special_tokens=False)["input_ids"]
        return cls(lambda tokens: str(tokenizer.decode(tokens)), mark, tuple(ids), longest)

    def length(self, written: Sequence[int]) -> int | None:
        """Tokens up to its end, the mark's included; `None` while it goes on. To be asked after every few tokens."""
        before = max(0, len(written) - SEEN_AT_ONCE)
        tail = list(written[before:])
        if self.mark not in self.decode(tail):
            return None
        ends = (n for n in range(1, len(tail) + 1) if self.mark in self.decode(tail[:n]))
        return before + next(ends)

    def forced(self, written: Sequence[int]) -> int | None:
        """The next token, where the thought has been long enough."""
        done = len(written) - self.longest
        return self.ids[done] if 0 <= done < len(self.ids) else None


@dataclass(frozen=True)
class Grammar:
    """A compiled constraint: the tokenizer it was made for, llguidance's description of it, and what comes before."""

    tokenizer: Any
    description: str
    vocabulary: int
    thought: OpenThought | None = None


class GrammarCompiler:
    """Makes grammars for one fast tokenizer and `vocabulary` scores, which are at least as many as it has tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_ids: frozenset[int]):
        self._tokenizer: Any = tokenizer
        self._vocabulary, self._eos_ids = vocabulary, sorted(eos_ids)

    def compile(self, kind: str, value: Any) -> Grammar:
        """Texts that are JSON by a schema (`"json"`), that a regular expression matches from end to end (`"regex"`),
        that are one of several (`"choice"`), or by a grammar in Lark's notation (`"grammar"`, in which `%json {...}`
        stands for a JSON schema).
        """
        matcher, tokenizer = _llguidance().LLMatcher, self._llguidance_tokenizer
        try:
            if kind == "json":
                description = matcher.grammar_from_json_schema(json.dumps(with_white_space(value)))
            elif kind == "regex":
                description = matcher.grammar_from_regex(value)
            elif kind == "choice":
                choices = " | ".join(json.dumps(text) for text in value)
                description = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
            else:
                description = matcher.grammar_from_lark(value)
            problem = matcher.validate_grammar(description, tokenizer)
        except Exception as error:  # whatever a client's text leads a parser to
            problem = str(error) or type(error).__name__
        if problem and kind == "grammar" and "::=" in value:
            problem = removal("structured_outputs.grammar in GBNF")
        if problem:
            what = {"json": "JSON schema", "regex": "regular expression"}.get(kind, "grammar")
            raise ConfigurationError(f"this {what} cannot be followed: {' '.join(problem.split())}")
        return Grammar(tokenizer, description, self._vocabulary)

    @cached_property
    def _llguidance_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._eos_ids or None)


@lru_cache
def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigurationError(
            "texts by a JSON schema and forced function calls need the package llguidance: pip install llguidance"
        ) from error
    return llguidance


class GrammarProcessor(stock.LogitsProcessor):
    """Forbids what a grammar does not allow next, for one text.

    It follows the text it is shown: tokens it has not seen yet are added, and if another text is shown than before (a
    draft was not taken) it goes back to where the two part.

    Args:
        prompt_length: tokens before the text begins.
        eos_ids: tokens that end a text; allowed where the grammar is satisfied.
    """

    def __init__(self, grammar: Grammar, prompt_length: int, eos_ids: frozenset[int]):
        self._matcher = _llguidance().LLMatcher(grammar.tokenizer, grammar.description)
        self._prompt_length, self._eos_ids = prompt_length, sorted(eos_ids)
        self._vocabulary = grammar.vocabulary
        self._seen: list[int] = []
        self._thought = grammar.thought
        self._thought_length: int | None = None if grammar.thought else 0
        self._bits = torch.full((1, (grammar.vocabulary + 31) // 32), -1, dtype=torch.int32)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Scores `(1, V)` after `input_ids` `(1, t)`, `-inf` where the grammar has no place for a token."""
        written = input_ids[0, self._prompt_length :].tolist()
        begin = self._begin(written)
        if begin is None:
            allowed = self._allowed_in_thought(written)
        else:
            self._follow(written[begin:])
            allowed = self._allowed()
        allowed = allowed.to(scores.device)
        return scores.masked_fill(~allowed[: scores.shape[-1]], float("-inf"))

    def fork_for_drafts(self) -> GrammarProcessor:
        """One in the same state, to be shown drafts."""
        forked = copy.copy(self)
        forked._matcher, forked._bits = self._matcher.deep_copy(), self._bits.clone()
        return forked

    def _begin(self, written: list[int]) -> int | None:
        """Tokens before the grammar holds; `None` where the thought has not ended."""
        if self._thought is None:
            return 0
        if self._thought_length is not None and self._thought_length > len(written):
            self._thought_length = None  # another text than before
        if self._thought_length is None:
            self._thought_length = self._thought.length(written)
        return self._thought_length

    def _allowed_in_thought(self, written: list[int]) -> Tensor:
        assert self._thought is not None
        forced = self._thought.forced(written)
        allowed = torch.full((self._vocabulary,), forced is None)
        if forced is None:
            allowed[self._eos_ids] = False
        else:
            allowed[forced] = True
        return allowed

    def _follow(self, written: Sequence[int]) -> None:
        shared = 0
        while shared < min(len(written), len(self._seen)) and written[shared] == self._seen[shared]:
            shared += 1
        if shared < len(self._seen):
            self._matcher.rollback(len(self._seen) - shared)
        for token in written[shared:]:
            self._matcher.consume_token(token)
        self._seen = list(written)

    def _allowed(self) -> Tensor:
        """Which of the `V` tokens may come next, on the CPU."""
        if self._matcher.is_error() or self._matcher.is_stopped():
            allowed = torch.zeros(self._vocabulary, dtype=torch.bool)
            # Too large to be followed: better no text than one that does not keep to it.
            allowed[self._eos_ids] = not self._matcher.is_error()
            return allowed
        import llguidance.torch as of_torch

        of_torch.fill_next_token_bitmask(self._matcher, self._bits, 0)
        bits = (self._bits[0, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.flatten()[: self._vocabulary].bool()
        if self._matcher.is_accepting():
            allowed[self._eos_ids] = True
        return allowed
