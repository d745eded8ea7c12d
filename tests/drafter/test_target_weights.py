"""A drafter that holds copies of its target's embedding and head drafts what it drafted when it shared them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import Checkpoint, read_checkpoint
from eagle31_hf.demo import drafter_path, target_path
from eagle31_hf.drafter.drafter import copy_from_target


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32)


def sharing(rows: int | None) -> Checkpoint:
    """The embedded drafter without a head of its own: the target's, or `rows` of it."""
    checkpoint = read_checkpoint(drafter_path(), dtype=torch.float32)
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    config.own_lm_head = False
    del tensors["lm_head.weight"]
    if rows is None:
        config.draft_vocab_size = config.vocab_size
        del tensors["d2t"]
    return Checkpoint(config, tensors)


@pytest.mark.parametrize("rows", [None, 4096])
def test_copies_answer_as_what_was_shared(target, rows):
    shared = sharing(rows)
    copied = copy_from_target(shared, target, {"embedding", "head"})
    assert copied.config.own_embedding
    assert copied.config.own_lm_head
    assert not shared.config.own_embedding, "the one it was made from stays as it was"
    before, after = (Eagle31Drafter.from_checkpoint(it).attach(target) for it in (shared, copied))
    ids, hidden = torch.arange(0, 800, 7)[None], torch.randn(1, 5, shared.config.hidden_size)
    assert torch.equal(before.embed(ids), after.embed(ids))
    assert torch.equal(before.draft_logits(hidden), after.draft_logits(hidden))


def test_only_the_parts_asked_for_are_copied(target):
    copied = copy_from_target(sharing(4096), target, {"head"})
    assert copied.config.own_lm_head
    assert "embed_tokens.weight" not in copied.tensors
