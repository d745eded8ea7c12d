"""The command line: what `demo`, `generate`, `plan` and `bench` print and write down, and plans that are kept to."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from xml.etree import ElementTree

import pictures
import pytest
import torch
from command_line import DRAFTER, PROMPT, TARGET, run

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cli import bench, generate, pairs
from eagle31_hf.cli.app import LazyCommand
from eagle31_hf.cli.options import WIDTH
from eagle31_hf.cli.pairs import DraftOptions, PairSource, load_pair, make_plan
from eagle31_hf.drafter import loading
from eagle31_hf.drafter.assistant import NoDrafter
from eagle31_hf.drafting.shape import USUAL_TREE
from eagle31_hf.errors import MemoryPlanError
from eagle31_hf.loop.pair import draft_shape
from eagle31_hf.measure.bench import Bench
from eagle31_hf.measure.exactness import Kind, Verdict
from eagle31_hf.measure.results import Writer
from eagle31_hf.memory import cards
from eagle31_hf.memory.apply_plan import apply_plan
from eagle31_hf.memory.cards import Card
from eagle31_hf.settings import Eagle31GenerationConfig
from eagle31_hf.stats import Acceptance, SpeculationStats
from eagle31_hf.targets.devices import quick_dtype
from helpers import configured, drafter_of, use_fixed_shapes_only
from peak_runs import StorageMeter

# --- commands ---------------------------------------------------------------------------------------------------------


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


# --- bench ------------------------------------------------------------------------------------------------------------

SHORT = ("--limit", 2, "--max-new-tokens", 6, "--repeats", 1, "--dtype", "fp32")


def test_it_says_first_whether_the_text_is_the_same_and_writes_every_figure(tmp_path):
    path = tmp_path / "figures.json"
    out = run("bench", TARGET, DRAFTER, *SHORT, "--batch", "1,2", "--price-per-hour", 0.5, "--json", path,
              "--plot", tmp_path / "speed.png").stdout  # fmt: skip
    assert max(map(len, out.splitlines())) <= 100
    assert "the same text as plain generate: 18 of 18" in out.splitlines()
    for heading in ("greedy, 1 row", "greedy, 2 rows", "same text", "per 1M", "kind"):
        assert heading in out
    record = json.loads(path.read_text())
    assert {"command", "written", "commit", "eagle31_hf", "torch", "transformers", "processor"} <= record.keys()
    assert (record["target"], record["drafter"], record["device"], record["dtype"]) == (
        TARGET, DRAFTER, "cpu", "float32",
    )  # fmt: skip
    assert (record["prompts"], record["same_text"]) == (2, True)
    names = ["plain generate", "without drafts", "lookups", "drafter"]
    assert [(each["rows"], each["method"]) for each in record["methods"]] == [
        (n, name) for n in (1, 2) for name in names
    ]
    assert record["methods"][3]["answers"] == {"same": 2}
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_are_read_from_files_and_a_pair_may_lack_a_drafter(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is the weather in Portland?"}\n{"question": "How many apples?"}\n')
    path = tmp_path / "figures.json"
    run("bench", "--drafter", "none", "--prompts", prompts, *SHORT, "--temperature", 1, "--json", path)
    record = json.loads(path.read_text())
    assert [each["method"] for each in record["methods"]] == ["plain generate", "without drafts", "lookups"]
    assert record["settings"]["temperature"] == 1.0


def test_missing_graphs_are_compiled_first_and_what_has_none_is_left_out(monkeypatch):
    compiled = []
    monkeypatch.setattr(generate, "warm_up", lambda assistant, **how: compiled.append((type(assistant), how["tokens"])))
    out = run("bench", TARGET, DRAFTER, *SHORT, "--acceleration", "compile").stdout
    (first, tokens), *others = compiled
    assert (first, others) == (Eagle31Drafter, [(NoDrafter, tokens)])
    assert tokens > 6
    assert " ".join(out.split()).count("no graphs are kept for such a text") == 3


def test_a_wrong_text_leaves_with_1_and_no_speedup(tmp_path):
    path = tmp_path / "figures.json"

    def judge(self, call, plain):
        kind = Kind.DIFFERENT if call.method.writer is Writer.DRAFTER else Kind.SAME
        return bench.replace(call, verdicts=(Verdict(kind, 3, 0.5, 0.01),))

    with mock.patch.object(Bench, "_judge", judge):
        out = run("bench", *SHORT, "--json", path, code=1).stdout
    assert "refused" in out
    assert "not by a tie, in embedded/1 from token 4 on" in " ".join(out.split())
    record = json.loads(path.read_text())
    assert (record["same_text"], record["methods"][-1]["speedup"]) == (False, None)


def test_ctrl_c_shows_what_was_measured_until_then(tmp_path):
    measure, path = Bench._measure, tmp_path / "figures.json"

    def stopped(self, turn, methods):
        if turn.rows == 2:
            raise KeyboardInterrupt
        return measure(self, turn, methods)

    with mock.patch.object(Bench, "_measure", stopped):
        out = run("bench", *SHORT, "--batch", "1,2", "--json", path, "--plot", tmp_path / "speed.png", code=130).stdout
    assert "Stopped by Ctrl-C: 2 of 4 measurements were made." in out
    assert "spread" not in out, "of one repeat"
    assert json.loads(path.read_text())["turns"] == [2, 4]


# --- a plan that is asked for is printed, and what is then taken stays within it --------------------------------------


def test_a_packed_pair_answers_within_its_plan(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    prompt, record = tmp_path / "prompt.txt", tmp_path / "figures.json"
    prompt.write_text(f"{PROMPT} " * 150)
    peaks, stream = [], generate._stream

    def metered(console, pair, *args):
        meter = StorageMeter()
        meter.loaded(pair.target)
        meter.loaded(pair.drafter)
        peaks.append(meter.peak(lambda: stream(console, pair, *args)))

    monkeypatch.setattr(generate, "_stream", metered)
    told = run("generate", "--quantization", "4bit", "--memory", "auto", "--no-compare", "--max-new-tokens", 12,
               "--prompt-file", prompt, "--json", record)  # fmt: skip
    assert "bnb-nf4-dq" in told.stdout
    assert told.stdout.index("fits") < told.stdout.index("assistant:")
    planned = json.loads(record.read_text())["plan"]["figures"]["peak_bytes"]
    assert 0.8 * planned < peaks[0] <= planned


@pytest.mark.parametrize("quick", [torch.bfloat16, torch.float32])
def test_a_plan_counts_weights_as_this_machine_loads_them(quick, monkeypatch):
    """Stored in bfloat16; a processor that has no arithmetic for it loads twice the bytes."""
    monkeypatch.setattr(loading, "quick_dtype", lambda stored, device: quick)
    pair = load_pair(PairSource(memory="auto", context=256), DraftOptions(), batch=1)
    weights = sum(term.num_bytes for term in pair.plan.ledger if "weights" in term.name or "head" in term.name)
    held = {p.data_ptr(): p.nbytes for model in (pair.target, pair.drafter) for p in model.parameters()}
    assert pair.target.dtype is quick
    assert 0.98 * sum(held.values()) < weights


@pytest.mark.parametrize(
    "asked",
    [
        {"tree_width": 1}, {"tree_width": 3}, {"tree_width": 3, "draft_tokens": 2}, {"tree_width": 4, "tree_size": 9},
    ],
)  # fmt: skip
def test_a_plan_knows_the_tree_that_is_asked_for(asked):
    """By its width alone, too: what is then drafted is what would be without a plan."""
    drafting, shapes = DraftOptions(**asked), []
    plan = make_plan(PairSource(memory="auto", card=["RTX A6000"]), drafting, batch=1)
    for planned in (None, plan):
        settings = Eagle31GenerationConfig()
        if planned is not None:
            apply_plan(planned, settings)
        drafting.apply_to(SimpleNamespace(generation_config=settings, check_settings=settings.check))
        shapes.append(settings.draft_shape(device_type="cuda", rows=1, by_graphs=USUAL_TREE))
    alone, drafted = shapes
    assert drafted == alone
    assert drafted == plan.settings.shape if drafted.is_tree else drafted.nodes <= plan.settings.shape.nodes


@pytest.mark.parametrize("drafter", [None, "none"])
def test_a_plan_for_a_larger_card_is_refused_before_anything_is_loaded(drafter, monkeypatch):
    monkeypatch.setattr(pairs, "load_target", None)
    monkeypatch.setattr(pairs, "measure_card", lambda _device: Card("a small machine", "cpu", 2**25, 2**25))
    with pytest.raises(MemoryPlanError, match="a small machine has"):
        load_pair(PairSource(drafter=drafter, memory="auto", card=["999 GiB"]))


def test_a_plan_is_for_the_device_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(cards, "best_kind", lambda: "cuda")  # a machine with a card
    assert make_plan(PairSource(memory="auto", device="cpu"), DraftOptions(), batch=1).card.kind == "cpu"
