"""The study of a small hybrid, from texts to a record, with next to nothing trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_hybrid


@pytest.mark.slow
@pytest.mark.thorough
def test_the_study_runs(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "It is four."}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(json.dumps({"id": str(i), "conversations": turns}) for i in range(40)))
    told = tmp_path / "record.json"
    arguments = [str(chats), "--held-out", str(chats), "--out", str(tmp_path / "hybrid"), "--json", str(told),
                 "--target-minutes", "0.001", "--drafter-steps", "1", "--max-rows", "8", "--layers", "4",
                 "--limit", "1", "--new-tokens", "12", "--repeats", "1"]  # fmt: skip
    small_hybrid.main(arguments)
    record = json.loads(told.read_text())
    chain = record["chain"]
    assert chain["equal_texts"] == chain["texts"] == 1
    assert chain["of_ceiling"] == pytest.approx(chain["speedup"] / chain["ceiling"])
    assert [row["way"] for row in record["ways"]] == ["plain", "default", "random drafter"]
    assert all(row["equal_texts"] == row["texts"] for row in record["ways"])
    assert record["trained"]["target"]["steps"] >= 1
