"""Pictures on the pages show what plans and records say. How they are drawn: docs/pictures.py."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pictures
import pytest
from transformers import LlamaConfig

from eagle31_hf.measure.plots import plot_card
from eagle31_hf.memory import plan_memory
from eagle31_hf.memory.plan import part_bytes

ROOT = Path(__file__).parents[1]
PICTURES = pytest.mark.parametrize("name", pictures.PICTURES)
LINE = 14.0
"""Pixels of a line of letters."""


@pytest.mark.slow
@PICTURES
def test_a_picture_is_as_it_is_drawn_now(name: str) -> None:
    drawn = pictures.PICTURES[name]()
    assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == drawn, "see `make figures`"


@PICTURES
def test_a_picture_is_shown_with_words(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    words = [found for page in pages for found in re.findall(rf"!\[(.+)\]\(\S*images/{re.escape(name)}\)", page)]
    assert words
    assert all(len(each) > 40 for each in words)


@PICTURES
def test_words_in_a_picture_lie_within_it_and_not_on_each_other(name: str) -> None:
    root = ElementTree.fromstring((ROOT / "docs" / "images" / name).read_text(encoding="utf-8"))
    _, _, width, height = (float(side) for side in root.attrib["viewBox"].split())
    boxes = []
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y, long = (
            float(text.attrib["x"]),
            float(text.attrib["y"]),
            pictures.LETTER * len(text.text or "") * int(text.attrib.get("font-size", pictures.SIZE)) / pictures.SIZE,
        )
        start = x - {"start": 0.0, "middle": long / 2, "end": long}[text.attrib["text-anchor"]]
        boxes.append((start, y - 0.8 * LINE, start + long, y + 0.2 * LINE, text.text))
    for left, top, right, bottom, words in boxes:
        assert left >= 0, words
        assert right <= width, words
        assert top >= 0, words
        assert bottom <= height, words
    for place, one in enumerate(boxes):
        for other in boxes[place + 1 :]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one[4], other[4])


def test_shares_make_a_whole_card_and_are_drawn(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    plan = plan_memory(config, card="RTX 4090", context=512)
    shares = part_bytes(plan)
    assert sum(shares.values()) == plan.card.total_bytes
    assert all(shares.values())
    graphs = sum(term.num_bytes for term in plan.ledger if term.name == "recordings")
    assert shares["graphs"] == graphs
    plot_card(plan, tmp_path / "card.png")
    assert (tmp_path / "card.png").read_bytes().startswith(b"\x89PNG")
