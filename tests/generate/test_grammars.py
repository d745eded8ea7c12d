"""Grammars of other libraries keep their promise with a drafter: the text parses, and it is plain's.

xgrammar and llguidance each constrain `generate` by a logits processor that follows the text token by token.
The targets are random; what they write is whatever the grammar leaves them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from helpers import (
    GROUPED,
    assert_same_text,
    demo_tokenizer,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
    use_fixed_shapes_only,
)

LIBRARIES = ("xgrammar", "llguidance")
CHAIN: dict[str, Any] = {"num_assistant_tokens": 5}
TREE: dict[str, Any] = {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 15}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "ages": {"type": "array", "items": {"enum": [7, 18, 42]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
LONG: dict[str, Any] = {"max_new_tokens": 48, "top_k": None}
"""A text by this schema has fewer tokens."""


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)


@cache
def target() -> Any:
    size = len(demo_tokenizer())
    sizes = {"vocab_size": size, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes["eos_token_id"] = demo_tokenizer().eos_token_id
    return random_target(hf.LlamaConfig(**{**GROUPED, **sizes}), seed=3)


@cache
def drafter() -> Eagle31Drafter:
    """Random, and it knows half of the vocabulary."""
    return random_drafter(target(), aux_layers=[0, 1, 2], draft_vocab_size=2048)


def prompts(rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    return left_padded(random_prompts(rows, len(demo_tokenizer()), seed=seed))


class LLGuidance(hf.LogitsProcessor):
    """As llguidance's documentation has it, and it says how it is copied; the library ships no processor."""

    def __init__(self, matcher: Any):
        self.matcher, self.is_first = matcher, True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        import llguidance.torch as of_torch

        assert len(input_ids) == 1, "a matcher follows one text"
        if not self.is_first:
            self.matcher.consume_token(int(input_ids[0, -1]))
        self.is_first = False
        bits = of_torch.allocate_token_bitmask(1, scores.shape[-1])
        of_torch.fill_next_token_bitmask(self.matcher, bits, 0)
        of_torch.apply_token_bitmask_inplace(scores, bits)
        return scores

    def fork_for_drafts(self) -> LLGuidance:
        forked = LLGuidance(self.matcher.deep_copy())
        forked.is_first = self.is_first
        return forked


def of_xgrammar() -> Callable[[], Any]:
    xgrammar = pytest.importorskip("xgrammar")
    size = len(demo_tokenizer())
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(demo_tokenizer(), vocab_size=size))
    grammar = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)


def of_llguidance() -> Callable[[], Any]:
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer

    tokenizer, matcher = from_tokenizer(demo_tokenizer(), n_vocab=len(demo_tokenizer())), llguidance.LLMatcher
    grammar = matcher.grammar_from_json_schema(json.dumps({"x-guidance": {"whitespace_flexible": False}, **SCHEMA}))
    return lambda: LLGuidance(matcher(tokenizer, grammar))


@cache
def processors(library: str) -> Callable[[], Any]:
    """Makes a fresh processor for every text."""
    return {"xgrammar": of_xgrammar, "llguidance": of_llguidance}[library]()


def assert_json_is_plains(library: str, seed: int, **how: Any) -> int:
    """A text that parses, and is plain's. Returns how many drafts were accepted."""
    make, inputs = processors(library), prompts(seed=seed)
    text = assert_same_text(
        target(), drafter(), inputs, seed=seed, fresh=lambda: {"logits_processor": [make()]}, **{**LONG, **how}
    )
    new = text[0, inputs["input_ids"].shape[1] :]
    value = json.loads(demo_tokenizer().decode(new, skip_special_tokens=True))
    assert list(value) == SCHEMA["required"]
    assert value["name"].isalpha()
    assert 2 <= len(value["name"]) <= 7
    assert set(value["ages"]) <= {7, 18, 42}
    assert 1 <= len(value["ages"]) <= 2
    return drafter().stats.accepted  # type: ignore[union-attr]


@pytest.mark.parametrize("acceleration", ["eager", "compile"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("library", LIBRARIES)
def test_json_is_plains(library: str, do_sample: bool, shape: dict[str, Any], acceleration: str) -> None:
    """By drafts that are right for a while, and by chains of a random drafter's own: what is accepted of those is the
    grammar's doing, which they are drawn inside."""
    how: dict[str, Any] = {"settings": shape | {"acceleration": acceleration}, "do_sample": do_sample}
    for seed in range(3):
        assert_json_is_plains(library, seed, oracle=seed, **how)
    if shape is CHAIN:
        accepted = [assert_json_is_plains(library, seed, **how) for seed in range(3)]
        assert sum(accepted) >= 3 * 5, "every text has tokens that alone may come"


class Alphabet:
    """A `prefix_allowed_tokens_fn` without state, that says so: every second token is given."""

    def __call__(self, row: int, ids: Tensor) -> list[int]:
        return [3000] if len(ids) % 2 else list(range(3000, 8000, 3))

    def fork_for_drafts(self) -> Alphabet:
        return self


def test_a_function_that_says_how_it_is_copied_is_drafted_for() -> None:
    accepted, how = [], {"top_k": None}
    for function in (Alphabet(), lambda row, ids: Alphabet()(row, ids)):
        given = {"settings": CHAIN, "prefix_allowed_tokens_fn": function}
        assert_same_text(target(), drafter(), prompts(seed=4), **given, **how)
        accepted.append(drafter().stats.accepted)  # type: ignore[union-attr]
    assert accepted[0] >= 4 > accepted[1]


class Breaking(hf.LogitsProcessor):
    """Another's processor, which counts its copies: one that cannot be made, or that breaks when it is asked."""

    def __init__(self, inner: Any, *, copies: int = 10**6, calls: int = 10**6):
        self.inner, self.copies, self.calls = inner, copies, calls

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.inner(input_ids, scores)

    def fork_for_drafts(self) -> Any:
        self.copies -= 1
        if self.copies < 0:
            raise RuntimeError("no more copies\nof it")
        forked = self.inner.fork_for_drafts()

        def call(input_ids: Tensor, scores: Tensor) -> Tensor:
            self.calls -= 1
            if self.calls < 0:
                raise torch.OutOfMemoryError("its own")
            return forked(input_ids, scores)

        return call


@pytest.mark.parametrize("limit", [{"copies": 3}, {"calls": 13}, {"copies": 0}])
@pytest.mark.parametrize("acceleration", ["eager", "compile"])
def test_a_copy_that_breaks_ends_drafting_inside_and_nothing_else(limit: dict[str, int], acceleration: str) -> None:
    made: list[Breaking] = []

    def fresh() -> dict[str, Any]:
        made.append(Breaking(processors("llguidance")(), **limit))
        return {"logits_processor": [made[-1]]}

    settings = CHAIN | {"acceleration": acceleration}
    assert_same_text(target(), drafter(), prompts(), settings=settings, fresh=fresh, **LONG)
    stats: Any = drafter().stats
    (reason,) = [why for why in stats.fallbacks if "grammar" in why]
    assert "a copy of Breaking raised" in reason
    assert "of it" not in reason, "one line"
    assert min(made[-1].copies, made[-1].calls) == -1, "it is not tried again"
    assert not stats.memory_steps
    assert (stats.accepted > 0) == (limit != {"copies": 0})


def test_a_batch_under_one_grammar_is_plains() -> None:
    """Such a processor keeps one state for all rows, which must not part: plain decoding serves it, and says why."""
    make, why = processors("xgrammar"), "LogitsProcessor may keep one state"
    inputs = prompts(3, seed=2)
    assert_same_text(
        target(), drafter(), inputs, loop="plain", why=why, fresh=lambda: {"logits_processor": [make()]}, **LONG
    )
