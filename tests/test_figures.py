"""Tables and pictures of README and of pages hold what plans and records say. Which record: docs/figures.toml."""

import json
import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import figures
import pictures
import pytest
from transformers import LlamaConfig

from eagle31_hf.measure.plots import plot_card
from eagle31_hf.memory import plan_memory
from eagle31_hf.memory.cards import MIB
from eagle31_hf.memory.drafter_facts import read_drafter
from eagle31_hf.memory.known_targets import known_targets
from eagle31_hf.memory.ledger import drafter_quantization
from eagle31_hf.memory.plan import part_bytes
from eagle31_hf.memory.target_facts import read_target

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "docs" / "records").glob("*"))
LINKED = re.compile(r"records/([\w.-]+\.jsonl?)\)")


@pytest.mark.parametrize("page", figures.all_entries(), ids=lambda page: page.name)
def test_figures_are_those_of_their_records(page):
    for figure in figures.figures_of(page.read_text(encoding="utf-8"), figures.all_entries()[page]):
        assert figure.shown == figure.as_recorded(), f"{figure.source}; see `make figures`"


def test_records_are_few_and_pages_name_those_that_are_there():
    assert len(RECORDS) <= 8
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in LINKED.findall(page.read_text("utf-8"))}
    assert named <= {record.name for record in RECORDS}


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_records_say_how_they_were_made(record):
    facts = json.loads(record.read_text(encoding="utf-8"))
    assert {"command", "written", "commit", "torch", "transformers", "python", "processor"} <= facts.keys()
    assert re.fullmatch(r"[0-9a-f]{12}\+?", facts["commit"]), "made from no checkout"


@pytest.fixture
def records(tmp_path):
    rows = [{"name": "chain", "size": 1, "speed": 2.694}, {"name": "chain", "size": 4, "speed": 1.0}]
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows, "share": 0.917, "less": -0.5}))
    return tmp_path


def looked_up(records, text, *entries):
    return figures.figures_of(text, [figures.Entry(line, tuple(sources)) for line, *sources in entries], records)


@pytest.mark.parametrize(
    ("text", "place", "recorded"),
    [
        ("is 2.70× as", "rows[name=chain,size=1].speed", "2.69"),
        ("is 2.7× as", "rows[0].speed", "2.7"),
        ("is 91 % of", "share", "92"),
        ("is −0.40 now", "less", "−0.50"),
        ("is +0.40 now", "share", "+0.92"),
        ("is 900 ms or", "share", "917"),
        ("is 9 rows", "rows.count", "2"),
    ],
)
def test_figures_take_digits_and_unit_from_the_page(records, text, place, recorded):
    (figure,) = looked_up(records, f"{text}, and 9.99× is nobody's.", ("is {}", f"r.json {place}"))
    assert figure.as_recorded() == recorded


def test_lines_that_stand_twice_are_taken_in_their_order(records):
    text = "| a | 2.69 |\n\n| a | 1.00 |\n"
    entries = [("| a | {} |", f"r.json rows[{row}].speed") for row in (0, 1)]
    assert all(figure.shown == figure.as_recorded() for figure in looked_up(records, text, *entries))
    assert not any(figure.shown == figure.as_recorded() for figure in looked_up(records, text, *reversed(entries)))


@pytest.mark.parametrize(
    ("text", "line", "place", "problem"),
    [
        ("nothing", "is {} so", "share", "wanted 1"),
        ("is 1 so, is 2 so", "is {} so", "share", "wanted 1"),
        ("from 1 to 2", "from {} to {}", "share", "one for each"),
        *(("is 2.69×", "is {}×", place, "is not at")
          for place in ("rows[name=tree].speed", "rows[name=chain].speed", "rows[9].speed", "nothing", "rows")),
    ],
)  # fmt: skip
def test_what_cannot_be_looked_up_is_named(records, text, line, place, problem):
    with pytest.raises(figures.FigureError, match=problem):
        [figure.value() for figure in looked_up(records, text, (line, f"r.json {place}"))]


def longest_of(target: str, card: str, scheme: str) -> dict[str, int]:
    """As `eagle31 plan` prints it, by how keys and values are stored."""
    return dict(plan_memory(known_targets()[target], quantization=scheme, card=card, context=1024).longest_by_cache)


@pytest.mark.slow
def test_the_table_of_what_fits_is_what_the_planner_says():
    """docs/memory.md's table of the longest contexts, its head and remarks in brackets aside."""

    def rows(text):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
        return [[re.sub(r" \(.*\)", "", cell) for cell in row] for row in cells[2:]]

    def longest(target, card, scheme):
        tokens = longest_of(target, card, scheme).get("full", 0)
        tokens = min(tokens, known_targets()[target].max_position_embeddings)
        return "no" if tokens < 1024 else f"{tokens // 1024}k"

    columns = list(product(("RTX 4090", "RTX A6000"), ("bf16", "bnb-int8", "bnb-nf4-dq")))
    planned = [[target, *(longest(target, *column) for column in columns)] for target in known_targets()]
    section = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").partition("## What fits on one card")[2]
    assert rows(section.partition("\n## ")[0]) == planned


@pytest.mark.slow
def test_the_table_of_8_bit_caches_is_what_the_planner_says():
    """Whatever the target was trained for."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+), (bf16|int8|nf4) \| (RTX \w+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
    assert len(rows) == 6
    schemes = {"bf16": "bf16", "int8": "bnb-int8", "nf4": "bnb-nf4-dq"}
    for target, weights, card, *shown in rows:
        tokens = longest_of(target, card, schemes[weights]).values()
        assert shown == [f"{each:,}" for each in tokens], (target, weights, card)


def test_the_table_of_packed_drafters_is_what_the_planner_says():
    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                         num_hidden_layers=32, vocab_size=128256)  # fmt: skip
    target = read_target(config, "bf16")
    drafter, page = read_drafter(None, target), (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for name, precision in (("bf16", "full"), ("int8", "int8"), ("nf4, double quantisation", "nf4")):
        packing = drafter_quantization(target, precision)
        weights, head = drafter.weight_bytes(packing), drafter.head_bytes(packing)
        sizes = " | ".join(f"{size / MIB:.0f} MiB" for size in (weights, head, weights + head))
        assert f"| {name} | {sizes} |" in page


# --- pictures, which docs/pictures.py draws ---------------------------------------------------------------------------

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
