"""The study that trains a small hybrid target, with next to nothing trained."""

from __future__ import annotations

import json
from pathlib import Path

import small_hybrid
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter


def test_its_target_takes_a_drafter(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "It is four."}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"id": str(i), "conversations": turns}) for i in range(40)))
    small_hybrid.main([str(chats), "--out", str(tmp_path / "hybrid"), "--target-minutes", "0.001", "--layers", "4"])
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid")
    ids = AutoTokenizer.from_pretrained(tmp_path / "hybrid")("Two and two", return_tensors="pt")["input_ids"]
    drafter = Eagle31Drafter.from_target(target).eval()
    how = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(ids, **how, assistant_model=drafter), target.generate(ids, **how))
    assert drafter.stats.loop == "own"
