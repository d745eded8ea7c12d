"""The study that trains a small target with a head of its own, with next to nothing trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_mtp


@pytest.mark.slow
def test_its_passes_are_those_of_the_slow_reference(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "It is four."}]
    chats, kept = tmp_path / "chats.jsonl", tmp_path / "record.json"
    chats.write_text("\n".join(json.dumps({"id": str(i), "conversations": turns}) for i in range(80)))
    options = ["--out", tmp_path / "small", "--minutes", 0.02, "--head-minutes", 0.02, "--prompts", 1,
               "--new-tokens", 12, "--drafts", 1, 3, "--json", kept]  # fmt: skip
    for draft_vocab in (None, 2048):
        rows = [] if draft_vocab is None else ["--draft-vocab", draft_vocab]
        small_mtp.main([str(each) for each in (chats, "--held-out", chats, *options, *rows)])
        record = json.loads(kept.read_text())
        assert record["draft_rows"] == (draft_vocab or 8192)
        assert all(each["equal_texts"] == 1 for each in record["by_drafts"])
        assert record["reference"]["same_pass_by_pass"] == record["reference"]["of"] == 1
