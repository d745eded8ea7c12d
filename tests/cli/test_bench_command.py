"""`eagle31 bench` on the command line."""

import json
from unittest import mock

from command_line import DRAFTER, TARGET, run

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cli import bench as command
from eagle31_hf.cli import generate
from eagle31_hf.drafter.assistant import NoDrafter
from eagle31_hf.measure.bench import Bench
from eagle31_hf.measure.exactness import Kind, Verdict
from eagle31_hf.measure.results import Writer

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
        return command.replace(call, verdicts=(Verdict(kind, 3, 0.5, 0.01),))

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
