"""The study that compares two versions of the code: what it measures, and that it sees another text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import two_commits

ROOT = Path(__file__).parents[1]


class Told:
    """A version that writes what it is told, in so many seconds."""

    def __init__(self, text: list[int], seconds: float):
        self.text, self.seconds, self.asked = text, seconds, []

    def ask(self, **request):
        self.asked.append((request["prompt"], request["seed"]))
        return {"tokens": self.text, "seconds": self.seconds}


OPTIONS = two_commits.argparse.Namespace(turns=3, tokens=4, prompts=2)


def test_speeds_ratio_and_spread_are_over_turns() -> None:
    before, after = Told([1, 2, 3, 4], 2.0), Told([1, 2, 3, 4], 1.0)
    found = two_commits.measure("eager", 0.0, [before, after], OPTIONS)
    assert (found["tok_per_s"], found["ratio"], found["ratio_spread"]) == ([2.0, 4.0], 2.0, [2.0, 2.0])
    assert found["spread"] == [[2.0, 2.0], [4.0, 4.0]]
    assert found["different_texts"] == 0
    assert before.asked == after.asked
    assert len(before.asked) == 4 * 2, "the first writing warms up"


def test_every_text_that_differs_is_counted() -> None:
    found = two_commits.measure("eager", 1.0, [Told([1, 2], 1.0), Told([1, 3], 1.0)], OPTIONS)
    assert found["different_texts"] == 4 * 2


def test_a_version_that_is_neither_folder_nor_commit_is_named() -> None:
    with pytest.raises(SystemExit, match=r"^got 'no-such-commit', which is no folder .* and no commit"):
        two_commits.main(["no-such-commit", "."])


@pytest.mark.slow
def test_two_folders_write_the_same_texts(tmp_path: Path) -> None:
    """Each by its own sources: the second is a link elsewhere."""
    other = tmp_path / "other"
    (other / "src").mkdir(parents=True)
    (other / "src" / "eagle31_hf").symlink_to(ROOT / "src" / "eagle31_hf")
    record = tmp_path / "found.json"
    told = ["--accelerations", "eager", "--turns", "1", "--tokens", "8", "--prompts", "1", "--json", str(record)]
    assert two_commits.main([str(ROOT), str(other), *told]) == 0
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["versions"] == [str(ROOT), str(other)]
    assert [method["method"] for method in found["methods"]] == ["eager greedy", "eager temperature 1"]
    assert all(method["different_texts"] == 0 and min(method["tok_per_s"]) > 0 for method in found["methods"])
