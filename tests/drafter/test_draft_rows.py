"""Heads inside targets draft from the first rows of the LM head where that is most of what a step costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafter import draft_rows
from eagle31_hf.drafter.draft_rows import follows_merges
from eagle31_hf.errors import ConfigurationError
from helpers import assert_same_text
from mtp_targets import target_with_head

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokenizer_file(folder: Path, kind: str = "BPE", shuffled: bool = False, added: int = 0) -> Path:
    """A tokenizer that knows all letters and pairs of them, in the order of its merges unless they are shuffled."""
    pairs = [(a, b) for a in LETTERS for b in LETTERS]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    words = [a + b for a, b in pairs]
    ids = [words[i] for i in order] if shuffled else words
    vocabulary = {word: number for number, word in enumerate([*LETTERS, *ids, *(f"added{i}" for i in range(added))])}
    model: dict[str, Any] = {"type": kind, "vocab": vocabulary, "merges": [f"{a} {b}" for a, b in pairs]}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"model": model}))
    return path


def test_tokenizers_whose_ids_follow_merges_are_known(tmp_path):
    assert follows_merges(tokenizer_file(tmp_path))
    for other in ({"kind": "Unigram"}, {"shuffled": True}, {"added": 2000}):
        assert not follows_merges(tokenizer_file(tmp_path, **other)), other
    (tmp_path / "tokenizer.json").write_text("[1, 2]")
    assert not follows_merges(tmp_path / "tokenizer.json")
    assert not follows_merges(tmp_path / "none.json")


@pytest.fixture
def large_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_rows, "SMALLEST_CUT", 512)


def test_a_large_vocabulary_is_cut_and_nothing_is_copied(tmp_path, large_vocabulary):
    tokenizer_file(tmp_path)
    target = target_with_head("qwen3_5_text", tmp_path, vocab_size=1024)
    drafter = Eagle31Drafter.from_pretrained(tmp_path, target=target)
    assert drafter.config.draft_vocab_size == 256
    (rows,) = drafter.head_weights
    assert rows.shape == (256, 64)
    assert rows.data_ptr() == target.lm_head.weight.data_ptr()


@pytest.mark.parametrize("reason", ["no tokenizer", "small", "another order"])
def test_all_rows_are_kept_where_cutting_is_not_known_to_pay(tmp_path, monkeypatch, reason):
    monkeypatch.setattr(draft_rows, "SMALLEST_CUT", 2048 if reason == "small" else 512)
    if reason != "no tokenizer":
        tokenizer_file(tmp_path, shuffled=reason == "another order")
    target = target_with_head("qwen3_5_text", tmp_path, vocab_size=1024)
    assert Eagle31Drafter.from_pretrained(tmp_path, target=target).config.draft_vocab_size == 1024


def test_rows_that_are_asked_for_draft_the_same_text(tmp_path):
    target = target_with_head("qwen3_5_text", tmp_path, vocab_size=1024)
    ids = torch.arange(20, 28)[None]
    for size in (1, 100, 1024):
        drafter = Eagle31Drafter.from_pretrained(tmp_path, target=target, draft_vocab_size=size)
        assert drafter.config.draft_vocab_size == size
        settings = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
        assert_same_text(target, drafter, ids, settings=settings, max_new_tokens=24, do_sample=False)
        assert drafter.stats.drafted > 0
    drafter.detach()
    for size in (0, 1025):
        with pytest.raises(ConfigurationError, match="wanted 1 to 1024"):
            Eagle31Drafter.from_pretrained(tmp_path, draft_vocab_size=size)


def test_rows_are_kept_when_the_head_is_saved(tmp_path):
    target_with_head("qwen3_5_text", tmp_path / "target", vocab_size=1024)
    Eagle31Drafter.from_pretrained(tmp_path / "target", draft_vocab_size=100).save_pretrained(tmp_path / "head")
    assert Eagle31Drafter.from_pretrained(tmp_path / "head").draft_ids.tolist() == list(range(100))
    with pytest.raises(ConfigurationError, match="saved with 100 draft rows"):
        Eagle31Drafter.from_pretrained(tmp_path / "head", draft_vocab_size=50)


def test_an_eagle_drafter_has_a_vocabulary_of_its_own():
    from eagle31_hf.demo import drafter_path

    with pytest.raises(ConfigurationError, match="draft vocabulary is its own"):
        Eagle31Drafter.from_pretrained(drafter_path(), draft_vocab_size=100)
