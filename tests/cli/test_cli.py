"""The command line: what `demo`, `generate` and `plan` print and write down."""

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pictures
import pytest
import torch
from command_line import DRAFTER, PROMPT, TARGET, run

from eagle31_hf.cli import generate, pairs
from eagle31_hf.cli.app import LazyCommand
from eagle31_hf.cli.options import WIDTH
from eagle31_hf.cli.pairs import DraftOptions, PairSource, load_pair
from eagle31_hf.loop.pair import draft_shape
from eagle31_hf.stats import Acceptance, SpeculationStats
from eagle31_hf.targets.devices import quick_dtype
from helpers import configured, drafter_of, use_fixed_shapes_only

# --- commands ---------------------------------------------------------------------------------------------------------


def test_version():
    assert run("--version").stdout.startswith("eagle31-hf ")


@pytest.mark.slow
@pytest.mark.thorough
def test_demo_writes_first_and_then_measures_four_methods_in_one_run(tmp_path, monkeypatch):
    use_fixed_shapes_only(monkeypatch)  # real graphs take minutes; what they compute is tested elsewhere
    monkeypatch.setattr(generate, "REPEATS", 1)
    out = run("demo", "--json", tmp_path / "demo.json").stdout
    assert out.index("Bella Luna") < out.index("Compiling") < out.index("same text")
    lines = [line for line in out.splitlines() if not line.startswith("assistant: ")]  # which a terminal wraps
    assert max(map(len, lines)) <= WIDTH
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["dtype"] == str(quick_dtype(torch.bfloat16, "cpu")).removeprefix("torch.")
    assert record["same_text"] is True
    methods = {method["method"]: method for method in record["methods"]}
    assert list(methods) == ["plain generate", "without drafts, by graphs", "drafter", "drafter, by graphs"]
    for name in ("drafter", "drafter, by graphs"):
        assert methods[name]["tokens_per_pass"] > 3
        assert methods[name]["new_tokens"] == methods["plain generate"]["new_tokens"] > 100


def coloured_share(drawn):
    """Of the letters of the answers in a picture of the demo, how many were drafted and accepted."""
    colours = dict(re.findall(r"\.([\w-]+) { fill: (#\w+)", drawn))
    texts = [text for text in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text") if text.text]
    (legend,) = [text for text in texts if "drafted" in text.text]
    own, accepted = (
        sum(len(text.text) for text in texts if colours.get(text.get("class")) == colour)
        for colour in ("#c5c8c6", colours[legend.get("class")])
    )
    return accepted / (own + accepted)


def test_the_demos_answers_are_drawn_with_their_colours():
    out = run("demo", "--no-compare").stdout
    assert "same text" not in out
    drawn = pictures.demo()
    shown = (Path(__file__).parents[2] / "docs" / "images" / "demo.svg").read_text()  # README begins with it
    answer = next(line for line in out.splitlines() if line.startswith("assistant: "))
    assert set(answer.split()) <= set("".join(ElementTree.fromstring(drawn).itertext()).split())
    for picture in (drawn, shown):
        assert 0.5 < coloured_share(picture) < 0.95, "most is drafted, and each pass writes a token of its own"
        assert "url(" not in picture.replace("url(#", ""), "it loads nothing"


def test_the_demo_keeps_graphs_that_drafts_by_default_use():
    drafter = load_pair(PairSource(), DraftOptions()).drafter
    default = draft_shape(drafter, rows=1, sampled=False, by_graphs=True)
    assert default.depth == generate.DEMO_DRAFT_TOKENS


def test_generate_compares_any_pair(tmp_path):
    path = tmp_path / "figures.json"
    out = run("generate", TARGET, DRAFTER, "--prompt", PROMPT, "--dtype", "float32",
              "--draft-tokens", 3, "--max-new-tokens", 12, "--json", path).stdout  # fmt: skip
    assert "yes" in out
    record = json.loads(path.read_text())
    assert (record["target"], record["dtype"], record["device"]) == (TARGET, "float32", "cpu")
    assert record["same_text"] is True
    plain, eagle = record["methods"]
    assert (plain["answers"], eagle["answers"]) == ({"reference": 3}, {"same": 3})
    assert plain["new_tokens"] == eagle["new_tokens"] == generate.REPEATS * 12
    assert 1 <= len(eagle["accepted_at"]) <= 3, "as many as are expected to pay"


def test_generate_without_comparison_samples_a_tree(tmp_path):
    path = tmp_path / "figures.json"
    out = run("generate", "--prompt", PROMPT, "--no-compare", "--temperature", 0.8, "--tree-width", 2, "--draft-tokens",
              3, "--tree-size", 6, "--max-new-tokens", 8, "--json", path).stdout  # fmt: skip
    assert "drafted and accepted" in out
    assert "plain generate" not in out
    stats = json.loads(path.read_text())["stats"]
    assert stats["new_tokens"] <= 8
    assert stats["drafted"] <= 5 * stats["rounds"]


@pytest.mark.parametrize("planned", [(), ("--memory", "auto", "--context", 256)], ids=["as it is", "planned"])
def test_generate_writes_the_same_text_without_a_drafter(tmp_path, planned):
    path = tmp_path / "figures.json"
    asked = ("generate", "--target", TARGET, "--dtype", "float32", "--prompt", PROMPT, "--max-new-tokens", 24)
    out = run(*asked, *planned, "--drafter", "none", "--json", path).stdout
    answer = next(line for line in out.splitlines() if line.startswith("assistant: "))
    assert answer in run(*asked, "--drafter", DRAFTER, "--no-compare").stdout.splitlines()
    record = json.loads(path.read_text())
    assert record["stats"]["loop"] == "own"
    assert not planned or record["plan"]["settings"]["draft_tokens"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_generate_on_a_gpu(tmp_path):
    run("generate", "--prompt", PROMPT, "--device", "cuda", "--json", tmp_path / "figures.json")
    assert json.loads((tmp_path / "figures.json").read_text())["same_text"] is True


# --- figures ----------------------------------------------------------------------------------------------------------


def test_acceptance_of_several_calls_adds_up():
    one, two = SpeculationStats(), SpeculationStats()
    one.record_round(depth=1, nodes=1, accepted=[1])
    two.record_round(depth=2, nodes=2, accepted=[0])
    total = Acceptance.of([one, two])
    assert total == Acceptance(2, 3, 1, [2, 1], [1, 0])
    assert total.acceptance_length == 1.5


def test_plan_says_what_fits_and_leaves_with_1_where_it_does_not(tmp_path):
    figures = tmp_path / "plan.json"
    result = run("plan", TARGET, "--card", "RTX 3060", "--context", "1024", "--json", figures)
    assert all(part in result.output for part in ("working memory", "left free", "longest with graphs"))
    assert "elements * 2" not in result.output
    words = shlex.split(next(line for line in result.output.splitlines() if line.startswith("eagle31 ")))
    assert words[:2] == ["eagle31", "chat"]
    command = LazyCommand(name="chat", callback=None).load()
    options = command.make_context("chat", words[2:]).params  # reads the words as the command does, and starts nothing
    assert (options["pair"], options["memory"], options["context"]) == ([TARGET, "DRAFTER"], "auto", 1024)
    assert json.loads(figures.read_text())["settings"]["context"] == 1024
    run("plan", TARGET, "--card", "1GiB", "--context", "2000000", code=1)


def test_plan_takes_sizes_as_people_write_them(tmp_path):
    figures = tmp_path / "plan.json"
    asked = ("plan", TARGET, "--card", "12GB", "--context", "32k", "--quantization", "4bit", "--json", figures)
    assert "elements * 2" in run(*asked, "--formulas").output
    plan = json.loads(figures.read_text())
    assert plan["settings"]["context"] == 32 * 1024
    assert plan["card"]["total_bytes"] == 12 * 2**30
    assert plan["target"]["quantization"]["method"] == "bnb-nf4"


def test_the_schedule_asked_for_reaches_the_drafter():
    with configured(drafter_of("llama"), num_assistant_tokens_schedule="constant") as eagle:
        pairs.DraftOptions(schedule="pid").apply_to(eagle)
        assert eagle.generation_config.num_assistant_tokens_schedule == "pid"
