"""Targets with a few more tokens than their drafter knows: an added pad token, a vocabulary padded to blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from eagle31_hf import Eagle31Drafter, plan_memory
from eagle31_hf.config import MOST_ADDED_TOKENS, Eagle31Config
from eagle31_hf.drafter.replay import rows_of_ids
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.errors import IncompatibleTargetError, MemoryPlanError
from eagle31_hf.loop.choosing import RoundBatch
from helpers import (
    CONFIGS,
    VOCABULARY,
    RoundWrapper,
    assert_same_text,
    configured,
    left_padded,
    random_drafter,
    random_target,
    seeded,
    use_fixed_shapes_only,
    wrapped_rounds,
)

SHAPES: dict[str, dict[str, Any]] = {
    "all its own": {"own_embedding": True},
    "its own, some ids": {"own_embedding": True, "draft_vocab_size": 40},
    "all shared": {"own_lm_head": False},
    "rows of the head shared": {"own_lm_head": False, "draft_vocab_size": 40},
    "its own embedding, the whole head shared": {"own_embedding": True, "own_lm_head": False},
}


def pair(more: int, shape: dict[str, Any], stated: bool = True) -> tuple[Any, Eagle31Drafter]:
    """A target that got `more` tokens after its drafter was made; `stated`: its config says so."""
    target = random_target(CONFIGS["llama"](), seed=3)
    drafter = random_drafter(target, aux_layers=[1, 2, 4], **shape)
    target.resize_token_embeddings(VOCABULARY + more, mean_resizing=False)
    with seeded(4), torch.no_grad():
        for module in (target.get_input_embeddings(), target.lm_head):
            module.weight[VOCABULARY:].normal_(0.0, 0.3)
    if not stated:
        target.config.vocab_size = VOCABULARY
    return target, drafter.attach(target)


class Watching(RoundWrapper):
    """Remembers what is drafted."""

    def __init__(self, inner: Any, seen: set[int]):
        super().__init__(inner)
        self.seen = seen

    def draft(self, batch: RoundBatch) -> DraftTree:
        tree = self.inner.draft(batch)
        self.seen |= set(tree.tokens[:, 1:].flatten().tolist())
        return tree


def prompts(more: int) -> dict[str, torch.Tensor]:
    """Two rows with added tokens in them and at their ends."""
    last = VOCABULARY + more - 1
    return left_padded([torch.tensor([5, 9, last, 11, 40, last]), torch.tensor([last, 33, 8])])


WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"},
    "tree": {"draft_top_k": 3, "draft_tree_size": 10},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("more", "stated"), [(1, True), (64, False)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.thorough(every=6)
def test_the_text_is_the_targets_and_no_added_token_is_drafted(shape: str, more: int, stated: bool, way: str) -> None:
    target, drafter = pair(more, SHAPES[shape], stated)
    inputs = prompts(more)
    favoured = {(VOCABULARY + more - 1,): 2.0}  # some of the answer is added tokens
    kwargs = {"max_new_tokens": 20, "do_sample": False, "sequence_bias": favoured}
    drafted: set[int] = set()
    with configured(drafter, **WAYS[way]), wrapped_rounds(lambda inner: Watching(inner, drafted)):
        plain = assert_same_text(target, drafter, inputs, **kwargs)
        target.generate(**inputs, **kwargs | {"do_sample": True}, assistant_model=drafter)
    assert (plain[:, inputs["input_ids"].shape[1] :] >= VOCABULARY).any(), "the test tests nothing"
    assert drafted
    assert max(drafted) < VOCABULARY


@pytest.mark.parametrize("shape", ["all its own", "all shared", "rows of the head shared"])
def test_graphs_write_it_too(shape: str, monkeypatch) -> None:
    target, drafter = pair(3, SHAPES[shape])
    inputs = {name: value[:1] for name, value in prompts(3).items()}
    kwargs = {"max_new_tokens": 20, "do_sample": False, "sequence_bias": {(VOCABULARY + 2,): 2.0}}
    use_fixed_shapes_only(monkeypatch)
    for way in ({}, {"draft_top_k": 3, "draft_tree_size": 10}):
        assert_same_text(target, drafter, inputs, settings={"acceleration": "compile", **way}, **kwargs)


class OnlyAdded:
    """A grammar whose second token is an added one, and whose others are not."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape[-1] == VOCABULARY + 3, "drafts and texts are scored over the target's vocabulary"
        added = torch.arange(scores.shape[-1]) >= VOCABULARY
        return scores.masked_fill(added == (ids.shape[1] % 4 != 0), -torch.inf)

    def fork_for_drafts(self) -> OnlyAdded:
        return self


def test_a_grammar_sees_the_targets_vocabulary() -> None:
    target, drafter = pair(3, SHAPES["all its own"])
    inputs = {name: value[:1] for name, value in prompts(3).items()}
    grammar = LogitsProcessorList([OnlyAdded()])
    assert_same_text(target, drafter, inputs, max_new_tokens=16, do_sample=False, logits_processor=grammar)
    assert not drafter.stats.fallbacks


def test_added_tokens_have_the_targets_rows() -> None:
    for shape in SHAPES.values():
        target, drafter = pair(3, shape)
        ids = torch.arange(VOCABULARY - 2, VOCABULARY + 3)[None]
        rows, theirs = drafter.embed(ids), target.get_input_embeddings()(ids)
        assert torch.equal(rows[:, 2:], theirs[:, 2:])
        if drafter.embed_tokens is not None:
            assert torch.equal(rows[:, :2], drafter.embed_tokens(ids[:, :2]))
        logits = drafter.draft_logits(torch.randn(1, 2, 64))
        assert logits.shape[-1] == drafter.config.draft_vocab_size
        row_of = rows_of_ids(drafter)
        assert row_of.shape == (VOCABULARY + 3,)
        assert (row_of[VOCABULARY:] == -1).all()


def test_a_drafter_of_another_width_knows_nothing_of_added_tokens() -> None:
    _, drafter = pair(3, {"own_embedding": True, "hidden_size": 32, "target_hidden_size": 64, "head_dim": 8})
    rows = drafter.embed(torch.arange(VOCABULARY - 1, VOCABULARY + 2)[None])
    assert rows[0, 0].any()
    assert not rows[0, 1:].any()


def test_alone_again_it_is_as_it_was() -> None:
    _, drafter = pair(3, SHAPES["all its own"])
    assert drafter.draft_ids is not None
    drafter.detach()
    assert drafter.draft_ids is None
    assert drafter.vocabulary == VOCABULARY


@pytest.mark.parametrize(("rows", "fits"), [(-1, False), (0, True), (MOST_ADDED_TOKENS, True), (513, False)])
def test_how_many_tokens_may_be_added(rows: int, fits: bool) -> None:
    target = random_target(CONFIGS["llama"](), seed=3)
    drafter = random_drafter(target, aux_layers=[1, 2, 4], own_embedding=True)
    target.resize_token_embeddings(VOCABULARY + rows, mean_resizing=False)
    if fits:
        drafter.attach(target)
        assert plan_memory(target.config, card="RTX 4090", drafter=drafter, context=64)
        return
    with pytest.raises(IncompatibleTargetError, match=r"vocabulary of 96 tokens, but the target has .* up to 512"):
        drafter.attach(target)
    with pytest.raises(MemoryPlanError, match="96 tokens"):
        plan_memory(target.config, card="RTX 4090", drafter=drafter, context=64)


def test_a_head_smaller_than_its_config_is_named() -> None:
    target = random_target(CONFIGS["llama"](), seed=3)
    target.config.vocab_size = VOCABULARY + 2
    with pytest.raises(IncompatibleTargetError, match=r"resize_token_embeddings"):
        Eagle31Drafter(Eagle31Config(hidden_size=64, vocab_size=VOCABULARY + 2, num_attention_heads=4)).attach(target)
