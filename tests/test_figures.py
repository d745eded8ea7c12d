"""README and docs quote only figures that stand in a record. How figures are marked: docs/figures.py."""

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


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_their_records(page):
    for figure in figures.marked_figures(page):
        assert figure.shown == figure.as_recorded(), f"{figure.place} of {figure.record.name}; see `make figures`"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_figures_from_before_records_stand_in_the_history_they_link_to(page):
    without = []
    for unmarked in figures.unmarked_figures(page):
        if not any(unmarked.stands_in(source.read_text(encoding="utf-8")) for source in unmarked.sources):
            without.append((unmarked.figure, unmarked.unit, [source.name for source in unmarked.sources]))
    assert not without, f"no record behind {without}; link one, or write a definition as `code`"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_records_say_how_they_were_made(record):
    facts = json.loads(record.read_text(encoding="utf-8"))
    assert {"command", "written", "commit", "torch", "transformers", "python", "processor"} <= facts.keys()
    assert re.fullmatch(r"[0-9a-f]{12}\+?", facts["commit"]), "made from no checkout"
    assert facts["commit"].endswith("+") == bool(facts.get("changes")), "what had changed is not told"


@pytest.fixture
def page(tmp_path):
    """A page with one marked figure, and its record."""
    (tmp_path / "records").mkdir()
    rows = [{"name": "chain", "size": 1, "speed": 2.694}, {"name": "chain", "size": 4, "speed": 1.0}]
    (tmp_path / "records" / "r.json").write_text(json.dumps({"rows": rows, "share": 0.917, "less": -0.5}))
    page = tmp_path / "page.md"
    page.write_text('It is [2.69×](records/r.json "rows[name=chain,size=1].speed") as fast.\n')
    return page


def test_a_marked_figure_is_looked_up(page):
    (figure,) = figures.marked_figures(page)
    assert figure.as_recorded() == "2.69×"
    assert not list(figures.unmarked_figures(page))


@pytest.mark.parametrize(
    ("shown", "place", "recorded"),
    [
        ("2.7×", "rows[0].speed", "2.7×"),
        ("91 %", "share", "92 %"),
        ("−0.40", "less", "−0.50"),
        ("900 ms", "share", "917 ms"),
    ],
)
def test_figures_take_digits_and_unit_from_the_page(page, shown, place, recorded):
    page.write_text(f'[{shown}](records/r.json "{place}")')
    (figure,) = figures.marked_figures(page)
    assert figure.as_recorded() == recorded


@pytest.mark.parametrize(("place", "recorded"), [("of", "an Apple"), ("rows.count", "2"), ("rows[1].name", "chain")])
def test_words_and_counts_are_looked_up_too(page, place, recorded):
    record = page.parent / "records" / "r.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "of": "an Apple"}))
    page.write_text(f'[9](records/r.json "{place}")')
    (figure,) = figures.marked_figures(page)
    assert figure.as_recorded() == recorded


def test_a_link_to_a_page_is_not_enough_in_a_readmes_table(page):
    page.write_text(
        '| [2.69×](records/r.json "rows[0].speed") | 2.70× | [3.1 %](history/a.md) | Llama 3.1 8B | `1.5` | 128k |\n'
    )
    assert figures.unmarked_in_tables(page) == ["2.70", "3.1"]


@pytest.mark.parametrize(
    "place", ["rows[name=tree].speed", "rows[name=chain].speed", "rows[9].speed", "nothing", "rows"]
)
def test_a_place_that_is_not_in_the_record_is_named(page, place):
    page.write_text(f'[2.69×](records/r.json "{place}")')
    (figure,) = figures.marked_figures(page)
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
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{line}\n\n```\n3.33×\n```\n")
    assert [unmarked.figure for unmarked in figures.unmarked_figures(page)] == found


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
    assert figures.Unmarked(figure, unit, []).stands_in(text) == stands


def test_sources_are_those_of_the_line_before_those_of_the_section(tmp_path):
    (tmp_path / "history").mkdir()
    page = tmp_path / "page.md"
    page.write_text("# One\n\n2.00× [a](history/a.md)\n\n3.00×\n\n[b](history/b.md)\n\n# Two\n\n4.00×\n")
    found = {one.figure: [source.name for source in one.sources] for one in figures.unmarked_figures(page)}
    assert found == {"2.00": ["a.md"], "3.00": ["a.md", "b.md"], "4.00": []}


@pytest.mark.slow
def test_the_table_of_what_fits_is_what_the_planner_says():
    """The README's table of contexts, its head and remarks in brackets aside."""
    from eagle31_hf.memory.report import home_lab_markdown, home_lab_table

    def rows(text):
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
        return [[re.sub(r" \(.*\)", "", cell) for cell in row] for row in cells[2:]]

    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What fits on one card")[2]
    assert rows(section.partition("\n## ")[0]) == rows(home_lab_markdown(home_lab_table()))
