"""`eagle31 bench loop` on the command line."""

import json

import pytest
from small_loops import SPEC
from typer.testing import CliRunner

from eagle31_hf.cli import app
from eagle31_hf.measure.suite import BenchmarkRun


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_bench_loop_prints_the_ceiling_first_and_json_last(tmp_path):
    path = tmp_path / "figures.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is the weather in Portland?"}\n{"question": "How many apples?"}\n')
    out = run("loop", "--prompts", prompts, "--limit", 1, "--new-tokens", 6, "--batch", 1, "--repeats", 1, "--dtype",
              "fp32", "--json", path).stdout  # fmt: skip
    assert out.index("Theoretical ceiling") < out.index("plain generate") < out.index("round/bare")
    last = json.loads(out.splitlines()[-1])
    assert last == json.loads(path.read_text())
    assert (last["prompts"], last["dtype"], last["bench"]) == (1, "float32", "loop")
    assert {"command", "written", "commit", "eagle31_hf", "torch", "transformers", "processor"} <= last.keys()
    assert all(r["equal_texts"] == 1 for r in last["records"])


def test_bench_loop_on_a_random_target():
    out = run("loop", "--synthetic", SPEC, "--acceptance", "1.0", "--limit", 2, "--new-tokens", 15, "--batch", "1,2",
              "--repeats", 1, "--draft-tokens", 6, "--tree-size", 9).stdout  # fmt: skip
    assert "the text means nothing" in " ".join(out.split())
    records = json.loads(out.splitlines()[-1])["records"]
    assert [r["name"] for r in records] == ["plain generate", "chain", "tree"] * 2
    assert {r["acceptance_length"] for r in records} == {1.0, 7.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loop", "--prompts", "nowhere.jsonl"], "cannot be read"),
        (["loop", "--synthetic", "llama"], "is any of"),
        (["loop", "--synthetic", "llama-8b", "--target", "x"], "--synthetic makes"),
        (["loop", "--synthetic", SPEC, "--acceptance", "2"], "probability"),
        (["loop", "--acceptance", "0.5"], "pass --synthetic"),
        (["loop", "--four-bit"], "for random targets"),
        (["loop", "--synthetic", SPEC, "--device", "mps"], "no mps"),
    ],
)
def test_bad_input_is_one_line_before_any_work(arguments, message):
    result = run(*arguments, code=1)
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    "arguments", [["--batch", "1,x"], ["--batch", "0"], ["--dtype", "int8"], ["--acceptance", "a"]]
)
def test_malformed_options_are_usage_errors(arguments):
    run("loop", *arguments, code=2)


def test_a_run_that_is_stopped_says_what_it_keeps_and_how_it_goes_on(tmp_path, monkeypatch):
    def stopped(_run, _done):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(BenchmarkRun, "measure", stopped)
    command = ["bench", "run", "--limit", "3", "--repeats", "2", "--out", str(tmp_path / "run.jsonl")]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "100"})
    assert result.exit_code != 0
    assert "run.jsonl keeps 0 of 6 turns; the same command with --resume goes on" in " ".join(result.stderr.split())
