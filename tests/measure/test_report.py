"""The page made of records: what it says, and how it looks in a browser to people who see, and to those who do not."""

import os
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from test_summary import RUN, SPEEDS, call, records
from typer.testing import CliRunner

from eagle31_hf.cli import app
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.measure.calls import TextPart, Verdict
from eagle31_hf.measure.doctor.drift import plot_drift
from eagle31_hf.measure.record_file import RecordWriter
from eagle31_hf.measure.report.content import make_page
from eagle31_hf.measure.report.render import to_html

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                  "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
LEDGER = {
    "kind": "ledger",
    "terms": [{"name": "target weights", "bytes": 4 * 10**8}, {"name": "cache", "bytes": 10**7}],
}


def measured():
    """Four methods, two settings, six prompts, thinking, a ledger and a method that was left out."""
    greedy = [call(method, prompt, repeat) for repeat in range(2) for prompt in range(6) for method in SPEEDS]
    thought = [replace(c, thinking=TextPart(5, 12)) if c.drafting else c for c in greedy]
    drawn = [replace(c, temperature=1.0, verdicts=[Verdict("sampled")]) for c in greedy]
    left_out = {"kind": "left-out", "method": "early exit", "reason": "a <reason> & more"}
    return replace(records([*thought, *drawn], name="pair.jsonl"), notes=[LEDGER, left_out])


@pytest.fixture(scope="module")
def page():
    return make_page([measured(), records([call(m, p) for p in range(2) for m in SPEEDS], name="b.jsonl")], title="T")


@pytest.fixture(scope="module")
def html(page):
    return to_html(page)


def test_every_plot_has_words_and_figures(page):
    plots = [plot for section in page.sections for part in section.parts for plot in part.plots]
    assert [plot.title for plot in page.sections[0].parts[0].plots] == [
        "Speedup by category", "Acceptance by position", "Where a round's time goes", "Tokens per second over the text",
        "Memory",
    ]  # fmt: skip
    assert len({plot.name for plot in plots}) == len(plots)
    for plot in plots:
        assert plot.svg.lstrip().startswith("<?xml")
        assert len(plot.words) > 40
        assert all(len(row) == len(plot.table.headings) for row in plot.table.rows)


def test_the_page_says_the_result_first(page):
    part = page.sections[0].parts[0]
    assert part.words == ("Fastest: chain compiled, 8.00 times plain generate (2.00 by compiling, 4.00 by drafts).")
    speeds = {row[0]: dict(zip(part.tables[0].headings, row, strict=True)) for row in part.tables[0].rows}
    assert speeds["chain"]["speedup"] == "3.00×"
    shares = {row[0]: dict(zip(part.tables[1].headings, row, strict=True)) for row in part.tables[1].rows}
    assert shares["chain compiled"]["by drafts"] == "4.00×"
    assert "J per token" not in part.tables[2].headings, "nobody told of energy"
    assert part.tables[3].rows[0] == ("chain", "2.40", "3.90")


def test_wrong_answers_are_said_before_anything(page):
    wrong = [replace(c, verdicts=[Verdict("different")]) if c.method == "chain" else c
             for c in measured().calls if not c.method.endswith("compiled")]  # fmt: skip
    part = make_page([replace(measured(), calls=wrong)], title="T").sections[0].parts[0]
    assert part.words == "No speedup is told of chain: answers were not the target's own."
    assert part.tables[0].rows[1][:3] == ("chain", "30.0", "refused")


class Reader(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.seen = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def all(self, tag):
        return [attributes for name, attributes in self.seen if name == tag]


def test_the_page_needs_nothing_beside_it(html):
    reader = Reader(html)
    assert not reader.all("script")
    assert not reader.all("link")
    assert all(image["src"].startswith("data:image/svg+xml;base64,") for image in reader.all("img"))
    assert all(link["href"].startswith("#") for link in reader.all("a"))
    assert "&lt;reason&gt; &amp; more" in html
    ids = [attributes["id"] for _, attributes in reader.seen if "id" in attributes]
    assert len(set(ids)) == len(ids)


def test_the_same_records_make_the_same_page(page, html):
    assert to_html(make_page([measured()], title="T")) == to_html(make_page([measured()], title="T"))


def file_of(path, made):
    writer = RecordWriter(path, {**RUN, "command": "eagle31 bench run"}, resume=False)
    writer.write(made.notes)
    turns = {}
    for each in made.calls:
        turns.setdefault(each.turn, []).append(each)
    for calls in turns.values():
        writer.write_turn(calls)
    writer.close()
    return path


def test_the_command_writes_a_page_and_markdown(tmp_path):
    source = file_of(tmp_path / "run.jsonl", measured())
    with source.open("a") as file:
        file.write('{"kind": "call", "tur')
    arguments = ["report", str(source), "--out", str(tmp_path / "r.html"), "--markdown", str(tmp_path / "r.md")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert "breaks off in line" in (tmp_path / "r.html").read_text()
    text = (tmp_path / "r.md").read_text()
    pictures = re.findall(r"!\[(.+?)\]\((.+?)\)", text)
    assert len(pictures) == 10
    assert all((tmp_path / place).read_text().lstrip().startswith("<?xml") for _, place in pictures)
    assert "a &lt;reason> & more" in text or "a <reason> & more" in text
    assert "| chain | 30.0 | 3.00× |" in text


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nowhere.jsonl"], "cannot be read"), (["--out", "page.pdf"], "ends in .html or .md")]
)
def test_bad_input(tmp_path, arguments, message):
    source = [] if "nowhere.jsonl" in arguments else [str(file_of(tmp_path / "run.jsonl", measured()))]
    result = CliRunner().invoke(app, ["report", *source, *arguments])
    assert result.exit_code == 1
    assert message in result.stderr


def test_plots_without_matplotlib_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (lambda: make_page([measured()], title="T"), lambda: plot_drift([], tmp_path / "drift.png")):
        with pytest.raises(ConfigurationError, match="pip install matplotlib"):
            draw()


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    # Asked for by name: on a busy machine a browser takes minutes to start, and says so by a time-out.
    if CHROMIUM is None or not os.environ.get("EAGLE31_BROWSER"):
        pytest.skip("needs Chromium (apt-get install chromium) and EAGLE31_BROWSER=1")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs axe-playwright-python")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield opened
        opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [375, 1100])
def test_plots_are_shown_and_nothing_is_wider_than_the_screen(browser, html, tmp_path, width):
    path = tmp_path / "page.html"
    path.write_text(html)
    shown = browser.new_page(viewport={"width": width, "height": 800})
    asked = []
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(path.as_uri())
    sizes = shown.evaluate("[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width])")
    assert len(sizes) == html.count("<img ")
    assert all(natural > 0 and wide > 200 for natural, wide in sizes)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert {url for url in asked if not url.startswith("data:")} == {path.as_uri()}


@pytest.mark.slow
def test_the_page_passes_an_accessibility_check(browser, html, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    path = tmp_path / "page.html"
    path.write_text(html.replace("<details>", "<details open>"))
    shown = browser.new_page()
    shown.goto(path.as_uri())
    found = axe.Axe().run(shown)
    assert not found.response["violations"], found.generate_report()
    assert len(found.response["passes"]) > 15, "something was looked at"
    shown.evaluate("document.querySelector('img').removeAttribute('alt')")
    assert axe.Axe().run(shown).response["violations"], "and something would be found"
