"""Texts that keep to a grammar: a JSON schema, a regular expression, a choice of functions to call. Uses llguidance."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation import logits_process as stock

from ..errors import ConfigurationError, first_line, removal

WHITE_SPACE = {"whitespace_pattern": r"[ \n]{0,12}"}
"""Between the parts of JSON: enough for any indentation, and not so much that a text is nothing else."""

LETTERS_ONLY = '%llguidance {"no_forcing": true}\n'
"""Else llguidance offers an added token where a text has its letters, and refuses it when it has been chosen."""

SEEN_AT_ONCE = 32
"""Last tokens of a thought in which its end is looked for: more than a round and a mark have."""


def with_white_space(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, told how much white space its texts may have."""
    return {"x-guidance": WHITE_SPACE, **schema}


class LarkText:
    """Writes texts in Lark's notation, added tokens in them by their ids: to llguidance they are no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._ids = tokenizer.get_added_vocab()
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def __call__(self, text: str) -> str:
        parts = filter(None, self._added.split(text))
        return " ".join(f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts)

    def before_token(self, text: str) -> str:
        """What stands before its first added token."""
        return self._added.split(text)[0]


class OpenThought:
    """A thought that the prompt has begun, behind which a grammar holds.

    Args:
        mark: ends the thought. It is written, with a blank line as templates have it, after `longest` tokens where the
            thought does not end by itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mark: str, longest: int):
        self._tokenizer, self._mark, self._longest = tokenizer, mark, longest
        self._ids: list[int] = tokenizer(f"\n{mark}\n\n", add_special_tokens=False)["input_ids"]

    def length(self, written: Sequence[int]) -> int | None:
        """Tokens up to its end, the mark's included; `None` while it goes on. To be asked after every few tokens."""
        before = max(0, len(written) - SEEN_AT_ONCE)
        tail = list(written[before:])
        if self._mark not in self._tokenizer.decode(tail):
            return None
        ends = (n for n in range(1, len(tail) + 1) if self._mark in self._tokenizer.decode(tail[:n]))
        return before + next(ends)

    def forced(self, written: Sequence[int]) -> int | None:
        """The next token, where the thought has been long enough."""
        done = len(written) - self._longest
        return self._ids[done] if 0 <= done < len(self._ids) else None


@dataclass(frozen=True)
class Grammar:
    """A compiled constraint.

    Attributes:
        matcher: llguidance's, before the first token.
        vocabulary: scores of a token.
        eos_ids: tokens that end a text; allowed where the grammar is satisfied.
        thought: what comes before.
    """

    matcher: Any
    vocabulary: int
    eos_ids: list[int]
    thought: OpenThought | None = None


class GrammarCompiler:
    """Makes grammars for one fast tokenizer and `vocabulary` scores, which are at least as many as it has tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos_ids: frozenset[int]):
        self._tokenizer: Any = tokenizer
        self._vocabulary, self._eos_ids = vocabulary, sorted(eos_ids)
        self._lark_text = LarkText(tokenizer)

    def compile(self, kind: str, value: Any) -> Grammar:
        """Texts that are JSON by a schema (`"json"`), that a regular expression matches from end to end (`"regex"`),
        that are one of several (`"choice"`), or by a grammar in Lark's notation (`"grammar"`, in which `%json {...}`
        stands for a JSON schema).
        """
        made = _llguidance().LLMatcher
        try:
            if kind == "json":
                lark = f"start: %json {json.dumps(with_white_space(value))}"
            elif kind == "regex":
                lark = json.loads(made.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
            elif kind == "choice":
                lark = f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, value))}"
            else:
                lark = value
            if self._lark_text.before_token(str(value)) != str(value):
                lark = LETTERS_ONLY + lark
            matcher = made(self._llguidance_tokenizer, made.grammar_from_lark(lark))
            problem = matcher.get_error()
        except Exception as error:  # whatever a client's text leads a parser to
            problem = first_line(error)
        if problem and kind == "grammar" and "::=" in value:
            problem = removal("structured_outputs.grammar in GBNF")
        if problem:  # behind it stands the whole grammar
            what = {"json": "JSON schema", "regex": "regular expression"}.get(kind, "grammar")
            reason = problem.splitlines()[0].rpartition("failed to compile JSON schema: ")[2]
            raise ConfigurationError(f"this {what} cannot be followed: {reason}")
        return Grammar(matcher, self._vocabulary, self._eos_ids)

    @cached_property
    def _llguidance_tokenizer(self) -> Any:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._eos_ids or None)


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
    draft was not taken) it begins anew.

    Args:
        prompt_length: tokens before the text begins.
    """

    def __init__(self, grammar: Grammar, prompt_length: int):
        self._grammar, self._prompt_length = grammar, prompt_length
        self._matcher = grammar.matcher.deep_copy()
        self._seen: list[int] = []
        self._thought_length: int | None = None if grammar.thought else 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Scores `(1, V)` after `input_ids` `(1, t)`, `-inf` where the grammar has no place for a token."""
        written = input_ids[0, self._prompt_length :].tolist()
        if self._is_thought(written):
            allowed = self._allowed_in_thought(written)
        else:
            self._follow(written[self._thought_length :])
            allowed = self._allowed()
        return scores.masked_fill(~allowed[: scores.shape[-1]].to(scores.device), float("-inf"))

    def fork_for_drafts(self) -> GrammarProcessor:
        """One in the same state, to be shown drafts."""
        forked = copy.copy(self)
        forked._matcher = self._matcher.deep_copy()
        return forked

    def _is_thought(self, written: list[int]) -> bool:
        """Whether the thought goes on, behind which the grammar holds."""
        thought = self._grammar.thought
        if thought is not None and (self._thought_length is None or self._thought_length > len(written)):
            self._thought_length = thought.length(written)  # anew for another text than before
        return self._thought_length is None

    def _allowed_in_thought(self, written: list[int]) -> Tensor:
        assert self._grammar.thought is not None, "there is one"
        forced = self._grammar.thought.forced(written)
        allowed = torch.full((self._grammar.vocabulary,), forced is None)
        if forced is None:
            allowed[self._grammar.eos_ids] = False
        else:
            allowed[forced] = True
        return allowed

    def _follow(self, written: list[int]) -> None:
        if written[: len(self._seen)] != self._seen:
            self._matcher, self._seen = self._grammar.matcher.deep_copy(), []
        for token in written[len(self._seen) :]:
            self._matcher.consume_token(token)
        self._seen = written

    def _allowed(self) -> Tensor:
        """Which of the `V` tokens may come next, on the CPU."""
        matcher, eos_ids = self._matcher, self._grammar.eos_ids
        if matcher.is_error() or matcher.is_stopped():
            allowed = torch.zeros(self._grammar.vocabulary, dtype=torch.bool)
            # Too large to be followed: better no text than one that does not keep to it.
            allowed[eos_ids] = not matcher.is_error()
            return allowed
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8).bool()
        if matcher.is_accepting():
            allowed[eos_ids] = True
        return allowed
