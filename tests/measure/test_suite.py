"""`eagle31 bench run` on small targets: what is written down, what is refused, and that a stopped run loses nothing."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch
from typer.testing import CliRunner

from eagle31_hf.cli import app
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.measure import gauges
from eagle31_hf.measure.calls import SAME, ThinkMarks, split_rounds
from eagle31_hf.measure.gauges import EnergyGauge, PeakGauge, RaplPackage
from eagle31_hf.measure.record_file import read_records
from eagle31_hf.measure.run_settings import RunSettings
from eagle31_hf.measure.suite import BenchmarkRun, Task
from eagle31_hf.texts.prompts import Prompt
from helpers import drafter_of, random_prompts, target_of

SETTINGS = RunSettings(new_tokens=12, repeats=2, depth=3)


def tasks(count):
    return [
        Task(Prompt(f"random/{i}", "random", "ab"[i % 2], ()), torch.tensor(ids))
        for i, ids in enumerate(random_prompts(count))
    ]


def measured(settings=SETTINGS, count=2, **kwargs):
    run = BenchmarkRun(drafter_of("llama"), tasks(count), settings, **kwargs)
    return [call for turn in run.measure() for call in turn]


@pytest.fixture(scope="module")
def calls():
    return measured()


def what_does_not_hang_on_time(call):
    return (call.turn, call.method, call.seed, call.texts, call.new_tokens, call.verdicts, call.prompts, call.blocks,
            call.drafting and (call.drafting.rounds, call.drafting.accepted_at))  # fmt: skip


def test_every_answer_is_checked_against_plain_decodings(calls):
    by_method = {call.method: call for call in calls}
    assert list(by_method) == [
        "plain generate",
        "prompt lookup",
        "early exit",
        "stock loop",
        "own lookup",
        "chain",
        "tree",
    ]
    assert len(calls) == 2 * 2 * len(by_method)
    kinds = {verdict.kind for call in calls for verdict in call.verdicts if call.method != "plain generate"}
    assert kinds == {SAME}
    assert all(call.new_tokens == 12 for call in calls)
    for name in ("stock loop", "chain", "tree"):
        call = by_method[name]
        assert sum(call.blocks) == 11, "all tokens but the prompt's own came in rounds"
        assert len(call.blocks) == call.drafting.rounds
        assert (call.thinking.rounds, call.answering.rounds) == (0, call.drafting.rounds)
    assert by_method["plain generate"].target_passes == 12
    assert all(0 < call.first_token_s < call.seconds for call in calls)


def test_methods_take_turns_at_being_first(monkeypatch):
    order = []
    original = BenchmarkRun._call
    monkeypatch.setattr(
        BenchmarkRun, "_call", lambda self, method, *rest: order.append(method.name) or original(self, method, *rest)
    )
    measured(replace(SETTINGS, methods=("plain generate", "chain"), repeats=2), count=1)
    assert order == ["plain generate", "chain", "chain", "plain generate"]


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(calls):
    settings = replace(SETTINGS, temperatures=(0.0, 1.0), methods=("plain generate", "chain"))
    whole = measured(settings)
    run = BenchmarkRun(drafter_of("llama"), tasks(2), settings)
    begun = list(islice(run.measure(), 3))  # and then it is killed
    again = BenchmarkRun(drafter_of("llama"), tasks(2), settings)
    rest = list(again.measure(frozenset(turn[0].turn for turn in begun)))
    resumed = [call for turn in begun + rest for call in turn]
    assert [*map(what_does_not_hang_on_time, resumed)] == [*map(what_does_not_hang_on_time, whole)]


def test_batches_hold_several_rows_and_stock_modes_stay_out():
    found = measured(replace(SETTINGS, batch_sizes=(3,), repeats=1, temperatures=(1.0,)), count=4)
    assert {call.method for call in found} == {"plain generate", "own lookup", "chain", "tree"}
    assert [len(call.prompts) for call in found] == [3] * 8, "the last batch is filled up"
    assert found[0].category == "mixed"
    assert {verdict.kind for call in found if call.method != "plain generate" for verdict in call.verdicts} == {SAME}


def test_answers_end_where_the_target_ends(monkeypatch):
    plain = measured(replace(SETTINGS, repeats=1, methods=("plain generate", "chain")), count=1)
    ids = (
        target_of("llama")
        .generate(torch.tensor([random_prompts(1)[0]]), max_new_tokens=12, do_sample=False, repetition_penalty=1.0)[
            0, -12:
        ]
        .tolist()
    )
    end = next(token for place, token in enumerate(ids) if place > 2 and token not in ids[:place])
    monkeypatch.setattr(target_of("llama").generation_config, "eos_token_id", end)
    short = measured(replace(SETTINGS, repeats=1, methods=("plain generate", "chain")), count=1)
    assert {call.new_tokens for call in short} == {ids.index(end) + 1}
    whole = measured(replace(SETTINGS, repeats=1, methods=("plain generate", "chain"), ignore_eos=True), count=1)
    assert [call.texts for call in whole] == [call.texts for call in plain]


def test_modes_that_fail_are_left_out_by_name(monkeypatch):
    generate = type(target_of("qwen2")).generate

    def failing(self, *args, **kwargs):
        if kwargs.get("prompt_lookup_num_tokens"):
            raise RuntimeError("not today\nat all")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target_of("qwen2")), "generate", failing)
    notes = []
    run = BenchmarkRun(drafter_of("qwen2"), tasks(1), replace(SETTINGS, repeats=1), note=notes.append)
    assert "prompt lookup" not in {call.method for turn in run.measure() for call in turn}
    assert {"kind": "left-out", "method": "prompt lookup", "reason": "RuntimeError: not today"} in notes
    assert {note["method"] for note in notes if note["kind"] == "warm-up"} >= {"plain generate", "chain"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"methods": ("chain",)}, "lack 'plain generate'"), ({"repeats": 0}, "repeats"), ({"temperatures": ()}, "temper"),
     ({"temperatures": (-1.0,)}, "temperature is -1"), ({"batch_sizes": (0,)}, "batch size"),
     ({"methods": ("plain generate", "magic")}, "no method is called 'magic'.*--compile")],
)  # fmt: skip
def test_settings_that_make_no_sense(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        measured(replace(SETTINGS, **wrong))
    with pytest.raises(ConfigurationError, match="no prompts"):
        BenchmarkRun(drafter_of("llama"), [], SETTINGS)


# --- inside and outside <think> ---------------------------------------------------------------------------------------

MARKS = ThinkMarks(open=90, close=91)


@pytest.mark.parametrize(
    ("prompt", "answer", "blocks", "inside", "outside"),
    [
        ([1], [90, 5, 6, 91, 7, 8], [2, 1, 2], (2, 3), (1, 2)),
        ([1, 90], [5, 6, 91, 7, 8], [1, 1, 2], (2, 2), (1, 2)),  # the template has opened it
        ([90, 91], [5, 6, 7], [2], (0, 0), (1, 2)),
        ([1], [5, 6, 7], [1, 1], (0, 0), (2, 2)),
    ],
)
def test_rounds_are_told_apart_by_where_they_begin(prompt, answer, blocks, inside, outside):
    thinking, answering = split_rounds(blocks, answer, prompt, MARKS)
    assert (thinking.rounds, thinking.tokens) == inside
    assert (answering.rounds, answering.tokens) == outside
    assert split_rounds(blocks, answer, prompt, None)[0].rounds == 0


def test_marks_are_tokens_of_their_own():
    class Tokenizer:
        def __init__(self, lengths):
            self.lengths = lengths

        def encode(self, text, add_special_tokens):
            return list(range(self.lengths[text]))

    assert ThinkMarks.of(Tokenizer({"<think>": 1, "</think>": 1})) == ThinkMarks(0, 0)
    assert ThinkMarks.of(Tokenizer({"<think>": 3, "</think>": 1})) is None


# --- memory and energy ------------------------------------------------------------------------------------------------


def test_the_peak_is_that_of_the_call():
    gauge = PeakGauge(torch.device("cpu"))
    if not gauge.source:
        pytest.skip("this kernel does not let the peak be reset")
    torch.ones(64 * 2**20).sum()  # 256 MiB, given back
    gauge.reset()
    low = gauge.read()
    held = torch.ones(32 * 2**20)  # 128 MiB
    assert 100 * 2**20 < gauge.read() - low < 250 * 2**20
    del held


def test_energy_counters_that_begin_anew_go_on(tmp_path):
    for name, start in (("intel-rapl:0", 900), ("intel-rapl:1", 100), ("intel-rapl:0:0", 5)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "energy_uj").write_text(str(start * 10**6))
        (folder / "max_energy_range_uj").write_text(str(1000 * 10**6))
    gauge = EnergyGauge(torch.device("cpu"), rapl=tmp_path)
    assert gauge.source == "RAPL, processor packages"
    assert gauge.read() == pytest.approx(1000.0), "packages, not their parts"
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text(str(50 * 10**6))
    assert gauge.read() == pytest.approx(1150.0)
    assert RaplPackage(tmp_path / "intel-rapl:1").joules() == pytest.approx(100.0)


def test_machines_that_do_not_tell(tmp_path, monkeypatch):
    assert EnergyGauge(torch.device("cpu"), rapl=tmp_path).read() is None
    monkeypatch.setattr(gauges, "CLEAR_REFS", tmp_path / "no" / "clear_refs")
    gauge = PeakGauge(torch.device("cpu"))
    gauge.reset()
    assert (gauge.source, gauge.read()) == ("", None)


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", "run", *map(str, arguments)], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def record_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    folder = path.parent
    out = command("--out", path, "--limit", 2, "--new-tokens", 10, "--repeats", 2, "--dtype", "fp32", "--methods",
                  "plain generate,chain", "--price-per-hour", 0.5, "--csv", folder / "a.csv", "--profile", folder,
                  "--json", folder / "figures.json").stdout  # fmt: skip
    return path, out


def test_the_command_measures_writes_and_shows(record_file):
    path, out = record_file
    assert all(word in out for word in ("greedy, batch 1", "4 of 4 same", "Medusa", "per 1M"))
    last = json.loads(out.splitlines()[-1])
    assert last == json.loads((path.parent / "figures.json").read_text())
    records = read_records(path)
    assert records.run["pair"]["target"]["name"] == "embedded target"
    assert records.run["pair"]["target"]["revision"].startswith("sha256:")
    assert records.run["prompts"] == ["embedded/1", "embedded/2"]
    assert len(records.turns) == 4
    header, *rows = (path.parent / "a.csv").read_text().splitlines()
    assert header.startswith(
        "subset,num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length,acceptance_at_pos_0,"
    )
    assert [row.split(",")[0] for row in rows] == ["bookings", "sums"]
    profile = json.loads((path.parent / "speculation_profile.json").read_text())
    assert profile["methods"][0]["answers"] == {"same": 4}
    assert profile["drafter"]["revision"] == records.run["pair"]["drafter"]["revision"]


def test_a_place_that_cannot_be_written_is_told_before_a_model_is_loaded(record_file, tmp_path):
    path, _ = record_file
    nowhere = ("--target", "no/such-model", "--drafter", "none-of-it")
    assert "is there already" in command("--out", path, *nowhere, code=1).stderr
    assert "there is no folder" in command("--out", tmp_path / "no" / "run.jsonl", *nowhere, code=1).stderr


def test_a_stopped_command_goes_on(record_file, tmp_path):
    path, _ = record_file
    stopped = tmp_path / "run.jsonl"
    content = path.read_bytes()
    stopped.write_bytes(content[: len(content) * 2 // 3])
    options = ("--out", stopped, "--limit", 2, "--new-tokens", 10, "--repeats", 2, "--dtype", "fp32", "--methods",
               "plain generate,chain", "--price-per-hour", 0.5)  # fmt: skip
    assert "is there already" in command(*options, code=1).stderr
    assert "broke off in line" in command(*options, "--resume").stdout
    whole, again = read_records(path), read_records(stopped)
    assert [*map(what_does_not_hang_on_time, again.calls)] == [*map(what_does_not_hang_on_time, whole.calls)]
    assert "of another run" in command(*options, "--resume", "--seed", 1, code=1).stderr


KILLED = """
import json, os, signal
from eagle31_hf.measure.record_file import RecordWriter
from eagle31_hf.cli import app

def write_half_and_die(writer, calls):
    text = "".join(json.dumps(call.to_dict()) + "\\n" for call in calls)
    os.write(writer._file.fileno(), text[: len(text) // 2].encode())
    os.kill(os.getpid(), signal.SIGKILL)

whole = RecordWriter.write_turn
RecordWriter.write_turn = lambda writer, calls: (write_half_and_die if calls[0].repeat else whole)(writer, calls)
app()
"""


@pytest.mark.thorough
def test_a_process_killed_while_it_writes_is_gone_on_with(record_file, tmp_path):
    """A real one, by a signal it cannot catch, when half of its third turn is on the disk."""
    options = ("--out", str(tmp_path / "run.jsonl"), "--limit", "2", "--new-tokens", "10", "--repeats", "2", "--dtype",
               "fp32", "--methods", "plain generate,chain", "--price-per-hour", "0.5")  # fmt: skip
    killed = subprocess.run([sys.executable, "-c", KILLED, "bench", "run", *options], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert "going on behind turn 2 of 4" in command(*options, "--resume").stdout
    whole, again = read_records(record_file[0]), read_records(tmp_path / "run.jsonl")
    assert not again.cut_at
    assert [*map(what_does_not_hang_on_time, again.calls)] == [*map(what_does_not_hang_on_time, whole.calls)]


def test_the_command_compares_two_runs(record_file, tmp_path):
    path, _ = record_file
    out = command("--compare", path, path).stdout
    assert "acceptance" in out
    same = json.loads(out.splitlines()[-1])["differences"][0]
    assert (same["verdict"], same["ratio"]) == ("noise", 1.0)
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"', 1))
    assert "--allow pair.dtype" in " ".join(command("--compare", path, other, code=1).stderr.split())
    assert "differ in pair.dtype" in command("--compare", path, other, "--allow", "pair.dtype").stdout


def test_it_needs_a_file():
    assert "--out" in command(code=1).stderr
