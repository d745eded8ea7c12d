"""README and docs quote only figures that stand in a record. Which one: docs/figures.toml."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
figures = importlib.util.module_from_spec(spec)
sys.modules["figures"] = figures
spec.loader.exec_module(figures)

RECORDS = sorted((ROOT / "docs" / "records").glob("*.json"))


PAGES = pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_recorded(page):
    text = page.read_text(encoding="utf-8")
    return figures.without_figures(text, figures.figures_of(text, figures.entries_of(page)))


@PAGES
def test_figures_are_those_of_their_records(page):
    for figure in figures.figures_of(page.read_text(encoding="utf-8"), figures.entries_of(page)):
        assert figure.shown == figure.as_recorded(), f"{figure.source}; see `make figures`"


@PAGES
def test_figures_from_before_records_are_those_of_the_day_or_card_they_name(page):
    found = figures.unmarked_figures(page, without_recorded(page))
    without = [(one.figure, one.unit, list(one.sources)) for one in found if not one.has_source()]
    assert not without, f"no record behind {without}; name one in docs/figures.toml, or write a definition as `code`"


def test_the_readmes_tables_hold_only_figures_with_records():
    assert figures.unmarked_in_tables(without_recorded(ROOT / "README.md")) == []


def test_every_page_that_is_spoken_of_is_looked_at():
    said = figures.tomllib.loads((ROOT / "docs" / "figures.toml").read_text(encoding="utf-8"))
    assert said.keys() - {"days"} <= {page.relative_to(ROOT).as_posix() for page in figures.PAGES}


def test_no_place_in_a_record_stands_on_a_page():
    pages = [
        ROOT / "README.md",
        *(path for room in ("docs", "model_cards", "examples") for path in (ROOT / room).rglob("*.md")),
    ]
    titled = {page.name for page in pages if figures.TITLED.search(page.read_text(encoding="utf-8"))}
    assert not titled, "readers see such titles; docs/figures.toml is where they go"
    assert figures.TITLED.search('[2.69×](docs/records/r.json "rows[0].speed")')
    assert not figures.TITLED.search("[record](docs/records/r.json)")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_records_say_how_they_were_made(record):
    facts = json.loads(record.read_text(encoding="utf-8"))
    assert {"command", "written", "commit", "torch", "transformers", "python", "processor"} <= facts.keys()
    assert re.fullmatch(r"[0-9a-f]{12}\+?", facts["commit"]), "made from no checkout"
    assert facts["commit"].endswith("+") == bool(facts.get("changes")), "what had changed is not told"


@pytest.fixture
def records(tmp_path):
    rows = [{"name": "chain", "size": 1, "speed": 2.694}, {"name": "chain", "size": 4, "speed": 1.0}]
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows, "share": 0.917, "less": -0.5}))
    return tmp_path


def looked_up(records, text, *entries):
    return figures.figures_of(text, [figures.Entry(line, tuple(sources)) for line, *sources in entries], records)


def test_a_figure_is_looked_up(records):
    text = "It is 2.70× as fast, and 9.99× is nobody's.\n"
    (figure,) = looked_up(records, text, ("is {}× as", "r.json rows[name=chain,size=1].speed"))
    assert (figure.shown, figure.as_recorded()) == ("2.70", "2.69")
    assert figures.without_figures(text, [figure]) == "It is ·× as fast, and 9.99× is nobody's.\n"


@pytest.mark.parametrize(
    ("text", "place", "recorded"),
    [
        ("is 2.7× as", "rows[0].speed", "2.7"),
        ("is 91 % of", "share", "92"),
        ("is −0.40 now", "less", "−0.50"),
        ("is +0.40 now", "share", "+0.92"),
        ("is 900 ms or", "share", "917"),
        ("is 9 rows", "rows.count", "2"),
    ],
)
def test_figures_take_digits_and_unit_from_the_page(records, text, place, recorded):
    (figure,) = looked_up(records, text, ("is {}", f"r.json {place}"))
    assert figure.as_recorded() == recorded


def test_lines_that_stand_twice_are_taken_in_their_order(records):
    text = "| a | 2.69 |\n\n| a | 1.00 |\n"
    first, second = ("| a | {} |", "r.json rows[0].speed"), ("| a | {} |", "r.json rows[1].speed")
    assert [figure.shown == figure.as_recorded() for figure in looked_up(records, text, first, second)] == [True, True]
    assert [figure.shown == figure.as_recorded() for figure in looked_up(records, text, second, first)] == [
        False,
        False,
    ]


@pytest.mark.parametrize("text", ["nothing", "is 1 so, is 2 so"])
def test_a_line_stands_as_often_as_it_has_entries(records, text):
    with pytest.raises(figures.FigureError, match="wanted 1"):
        looked_up(records, text, ("is {} so", "r.json share"))


def test_each_number_has_one_source(records):
    with pytest.raises(figures.FigureError, match="one for each"):
        looked_up(records, "from 1 to 2", ("from {} to {}", "r.json share"))


def test_a_link_to_a_page_is_not_enough_in_a_readmes_table(records):
    text = "| 2.69× | 2.70× | [3.1 %](card.md) | Llama 3.1 8B | `1.5` | 128k |\n"
    found = looked_up(records, text, ("| {}× | 2.70", "r.json rows[0].speed"))
    assert figures.unmarked_in_tables(figures.without_figures(text, found)) == ["2.70", "3.1"]


@pytest.mark.parametrize(
    "place", ["rows[name=tree].speed", "rows[name=chain].speed", "rows[9].speed", "nothing", "rows"]
)
def test_a_place_that_is_not_in_the_record_is_named(records, place):
    (figure,) = looked_up(records, "is 2.69×", ("is {}×", f"r.json {place}"))
    with pytest.raises(figures.FigureError, match="is not at"):
        figure.value()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("It writes 2.69× as fast.", ["2.69"]),
        ("| chain | 66.5 | 3 |", ["66.5"]),
        ("costs −1.7 % and 12 ms", ["−1.7", "12"]),
        ("Llama 3.1 8B, torch 2.13.0, arXiv 2605.09992, `1.10`", []),
        ("at most 16 rows of 1.5 GiB", []),
    ],
)
def test_what_counts_as_a_figure(tmp_path, line, found):
    text = figures.without_figures(f"# Title\n\n{line}\n\n```\n3.33×\n```\n", [])
    assert [unmarked.figure for unmarked in figures.unmarked_figures(tmp_path / "page.md", text)] == found


@pytest.mark.parametrize(
    ("figure", "unit", "text", "stands"),
    [
        ("12", "ms", "It took 12 ms.", True),
        ("12", "ms", "In 12 runs it took 13 ms.", False),
        ("2.69", "×", "between 2.69 and 2.83×", True),
        ("2.69", "×", "| chain | 2.69 | 5 |", True),
        ("2.69", "×", "2.69 GB", False),
        ("2.6", "", "2.69", False),
        ("2.69", "", "it was 2.69.", True),
    ],
)
def test_a_number_counts_with_its_unit(figure, unit, text, stands):
    assert figures.Unmarked(figure, unit, {}).stands_in(text) == stands


def test_sources_are_those_of_the_line_before_those_of_the_section(tmp_path):
    (tmp_path / "model_cards").mkdir()
    (tmp_path / "model_cards" / "b.md").write_text("3.00×")
    text = "# One\n\n5.72× on 2026-11-23\n\n3.00×\n\n[b](model_cards/b.md)\n\n# Two\n\n4.00× on 1999-01-01\n"
    found = list(figures.unmarked_figures(tmp_path / "page.md", text))
    named = {one.figure: list(one.sources) for one in found}
    assert named == {"5.72": ["2026-11-23"], "3.00": ["2026-11-23", "b.md"], "4.00": []}
    assert [one.has_source() for one in found] == [True, True, False]


@pytest.mark.slow
def test_the_table_of_what_fits_is_what_the_planner_says():
    """docs/memory.md's table of contexts, its head and remarks in brackets aside."""
    from home_lab import home_lab_table

    def rows(text):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
        return [[re.sub(r" \(.*\)", "", cell) for cell in row] for row in cells[2:]]

    def thousands(tokens):
        return "no" if tokens < 1024 else f"{tokens // 1024}k"

    planned = [[target, *map(thousands, found.values())] for target, found in home_lab_table().items()]
    section = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8").partition("## What fits on one card")[2]
    assert rows(section.partition("\n## ")[0]) == planned


@pytest.mark.slow
def test_the_table_of_8_bit_caches_is_what_the_planner_says():
    from home_lab import CACHED, cache_table

    page = (ROOT / "docs" / "kv_cache.md").read_text(encoding="utf-8")
    for (target, weights, card), (full, packed) in zip(CACHED, cache_table(), strict=True):
        assert f"| {target}, {weights} | {card} | {full:,} | {packed:,} |" in page


def test_the_table_of_packed_drafters_is_what_the_planner_says():
    from transformers import LlamaConfig

    from eagle31_hf.memory.cards import MIB
    from eagle31_hf.memory.drafter_facts import read_drafter
    from eagle31_hf.memory.ledger import drafter_quantization
    from eagle31_hf.memory.target_facts import read_target

    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                         num_hidden_layers=32, vocab_size=128256)  # fmt: skip
    target = read_target(config, "bf16")
    drafter, page = read_drafter(None, target), (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    for name, precision in (("bf16", "full"), ("int8", "int8"), ("nf4, double quantisation", "nf4")):
        packing = drafter_quantization(target, precision)
        weights, head = drafter.weight_bytes(packing), drafter.head_bytes(packing)
        sizes = " | ".join(f"{size / MIB:.0f} MiB" for size in (weights, head, weights + head))
        assert f"| {name} | {sizes} |" in page
