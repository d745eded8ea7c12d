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
    configured,
    demo_tokenizer,
    left_padded,
    oracle_drafts,
    random_drafter,
    random_prompts,
    random_target,
    seeded,
    use_fixed_shapes_only,
)

LIBRARIES = ("xgrammar", "llguidance")
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 5},
    "tree": {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 15},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "ages": {"type": "array", "items": {"enum": [7, 18, 42]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
WORDS = "yes|no|not yet|maybe"  # 5 texts of few tokens each, written in several ways
LONGEST = 48  # tokens; a text by this schema has fewer


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
    return random_drafter(target(), aux_layers=[0, 1, 2], draft_vocab_size=2048)


# --- the three libraries ----------------------------------------------------------------------------------------------


class LLGuidance(hf.LogitsProcessor):
    """As llguidance's documentation has it; the library ships no processor for transformers."""

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


class ForkedLLGuidance(LLGuidance):
    """The same, and it says how it is copied."""

    def fork_for_drafts(self) -> LLGuidance:
        forked = LLGuidance(self.matcher.deep_copy())
        forked.is_first = self.is_first
        return forked


def of_xgrammar(schema: dict[str, Any] | None, words: str) -> Callable[[], Any]:
    xgrammar = pytest.importorskip("xgrammar")
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(demo_tokenizer(), vocab_size=len(demo_tokenizer()))
    )
    if schema is None:
        grammar = compiler.compile_regex(words)
    else:
        grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
    return lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)


def of_llguidance(schema: dict[str, Any] | None, words: str) -> Callable[[], Any]:
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer

    tokenizer, matcher = from_tokenizer(demo_tokenizer(), n_vocab=len(demo_tokenizer())), llguidance.LLMatcher
    if schema is None:
        grammar = matcher.grammar_from_regex(words)
    else:
        grammar = matcher.grammar_from_json_schema(json.dumps({"x-guidance": {"whitespace_flexible": False}, **schema}))
    return lambda: ForkedLLGuidance(matcher(tokenizer, grammar))


@cache
def processors(library: str, *, is_json: bool) -> Callable[[], Any]:
    """Makes a fresh processor for every text."""
    make = {"xgrammar": of_xgrammar, "llguidance": of_llguidance}[library]
    return make(SCHEMA if is_json else None, WORDS)


def write(inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": LONGEST, "do_sample": False, "pad_token_id": 0, "top_k": None} | kwargs
    return target().generate(**inputs, **kwargs)


def text_of(written: Tensor, inputs: dict[str, Tensor]) -> str:
    return demo_tokenizer().decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def assert_parses(text: str) -> None:
    value = json.loads(text)
    assert list(value) == SCHEMA["required"]
    assert value["name"].isalpha()
    assert 2 <= len(value["name"]) <= 7
    assert set(value["ages"]) <= {7, 18, 42}
    assert 1 <= len(value["ages"]) <= 2


# --- texts ------------------------------------------------------------------------------------------------------------


@cache
def plain_texts(library: str, count: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Prompts, and what plain decoding writes of them under the grammar."""
    make = processors(library, is_json=True)
    inputs = [left_padded([prompt]) for prompt in random_prompts(count, len(demo_tokenizer()), seed=9)]
    return [(each, write(each, logits_processor=[make()])) for each in inputs]


def assert_texts_are_plains(library: str, *shapes: dict[str, Any], count: int) -> None:
    """Greedy text equals plain's, sampled text parses; drafts of these shapes in turns are tried, and some accepted."""
    make, accepted, texts = processors(library, is_json=True), [0] * len(shapes), set()
    for seed, (inputs, plain) in enumerate(plain_texts(library, count)):
        assert_parses(text_of(plain, inputs))
        length, turn = inputs["input_ids"].shape[1], seed % len(shapes)
        with configured(drafter(), **shapes[turn]) as eagle, oracle_drafts(plain, length, seed=seed), seeded(seed):
            ours = write(inputs, logits_processor=[make()], assistant_model=eagle)
            assert eagle.stats is not None
            accepted[turn] += eagle.stats.accepted
            sampled = write(inputs, logits_processor=[make()], assistant_model=eagle, do_sample=True)
        assert eagle.stats.loop == "own", eagle.stats.reason
        assert torch.equal(ours, plain)
        assert_parses(text_of(sampled, inputs))
        texts |= {text_of(plain, inputs), text_of(sampled, inputs)}
    assert min(accepted) > count / len(shapes), "or nothing is tested"
    assert len(texts) > count / 2, "or the grammar leaves no choice"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_json_is_plains(library: str, shape: str) -> None:
    assert_texts_are_plains(library, SHAPES[shape], count=3)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.thorough
def test_json_of_many_prompts_is_plains(library: str) -> None:
    """Some fifty for all libraries together."""
    assert_texts_are_plains(library, SHAPES["chain"], SHAPES["tree"], count=17)


@pytest.mark.parametrize("library", LIBRARIES)
def test_json_by_graphs_is_plains(library: str) -> None:
    assert_texts_are_plains(library, SHAPES["tree"] | {"acceleration": "compile"}, count=3)


@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"acceleration": "compile"}])
@pytest.mark.parametrize("library", LIBRARIES)
def test_drafts_are_drawn_inside_the_grammar(library: str, how: dict[str, Any]) -> None:
    """The drafter is random and knows half of the vocabulary: what is accepted is the grammar's doing."""
    make, accepted = processors(library, is_json=True), 0
    with configured(drafter(), **SHAPES["chain"], acceleration=how.get("acceleration", "eager")) as eagle:
        for seed, (inputs, plain) in enumerate(plain_texts(library, 3)):
            with seeded(seed):
                ours = write(
                    inputs, logits_processor=[make()], assistant_model=eagle, do_sample=how.get("do_sample", False)
                )
            assert eagle.stats is not None
            accepted += eagle.stats.accepted
            assert_parses(text_of(ours, inputs))
            assert how.get("do_sample") or torch.equal(ours, plain)
    assert accepted >= 3 * 5, "every text has tokens that alone may come"


class Alphabet:
    """A `prefix_allowed_tokens_fn` without state, that says so: of each row's tokens every second one is given."""

    def __call__(self, row: int, ids: Tensor) -> list[int]:
        return [3000 + row] if len(ids) % 2 else list(range(3000, 8000, 3))

    def fork_for_drafts(self) -> Alphabet:
        return self


@pytest.mark.parametrize("rows", [1, 3])
def test_a_function_that_says_how_it_is_copied_is_drafted_for(rows: int) -> None:
    inputs = left_padded(random_prompts(rows, len(demo_tokenizer()), seed=4))
    how = {"prefix_allowed_tokens_fn": Alphabet(), "max_new_tokens": 16}
    plain, accepted = write(inputs, **how), []
    for function in (how["prefix_allowed_tokens_fn"], lambda row, ids: Alphabet()(row, ids)):
        with configured(drafter(), **SHAPES["chain"]) as eagle:
            ours = write(inputs, **how | {"prefix_allowed_tokens_fn": function}, assistant_model=eagle)
        assert torch.equal(ours, plain)
        assert eagle.stats is not None
        accepted.append(eagle.stats.accepted)
    assert accepted[0] >= rows * 4 > accepted[1]


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
    inputs, plain = plain_texts("llguidance", 3)[0]
    breaking = Breaking(processors("llguidance", is_json=True)(), **limit)
    with configured(drafter(), **SHAPES["chain"], acceleration=acceleration) as eagle:
        ours = write(inputs, logits_processor=[breaking], assistant_model=eagle)
    assert torch.equal(ours, plain)
    assert eagle.stats is not None
    assert eagle.stats.loop == "own"
    (reason,) = [why for why in eagle.stats.fallbacks if "grammar" in why]
    assert "a copy of Breaking raised" in reason
    assert "of it" not in reason, "one line"
    assert min(breaking.copies, breaking.calls) == -1, "it is not tried again"
    assert not eagle.stats.memory_steps
    assert (eagle.stats.accepted > 0) == (limit != {"copies": 0})


def test_a_batch_under_one_grammar_is_plains() -> None:
    """Such a processor keeps one state for all rows, which must not part: plain decoding serves it, and says why."""
    make, inputs = processors("xgrammar", is_json=True), left_padded(random_prompts(3, len(demo_tokenizer()), seed=2))
    plain, processor = write(inputs, logits_processor=[make()]), make()
    ours = write(inputs, logits_processor=[processor], assistant_model=drafter())
    assert torch.equal(ours, plain)
    assert drafter().stats is not None
    assert drafter().stats.loop == "plain"
    assert type(processor).__name__ in drafter().stats.reason


# --- sampled texts ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_sampled_texts_under_a_grammar_are_plains(library: str) -> None:
    """Under the same seed, by chains and by trees; drafts follow plain's text, so that some are accepted."""
    make, inputs = processors(library, is_json=False), left_padded([[5, 6, 7]])
    texts, accepted = set(), 0
    for seed in range(20):
        with seeded(seed):
            plain = write(inputs, logits_processor=[make()], do_sample=True)
        with configured(drafter(), **SHAPES[("chain", "tree")[seed % 2]]) as eagle, seeded(seed):
            ours = write(inputs, logits_processor=[make()], assistant_model=eagle, do_sample=True)
        assert torch.equal(ours, plain)
        texts.add(str(plain.tolist()))
        accepted += eagle.stats.accepted  # type: ignore[union-attr]
    assert len(texts) > 3
    assert accepted > 0, "or nothing is tested"
