"""Records on disk: whole turns, files that break off, runs that are taken up again."""

import json
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.measure.calls import CallRecord, Drafting, TextPart, Verdict
from eagle31_hf.measure.provenance import checkout_of
from eagle31_hf.measure.record_file import RecordFileError, RecordWriter, differences, read_records
from eagle31_hf.stats import variation, windows

RUN = {"command": "eagle31 bench run", "settings": {"repeats": 2, "seed": 0}, "commit": "abc"}
CALL = CallRecord(
    turn="0", method="chain", temperature=0.0, seed=3, batch_size=1, repeat=0, prompts=["a/1"], suite="a", category="x",
    prompt_tokens=9, new_tokens=16, seconds=0.5, first_token_s=0.1, texts=["d1"], window_s=[0.2], blocks=[3, 1],
    thinking=TextPart(1, 3), answering=TextPart(1, 1),
    drafting=Drafting(2, 8, 3, [2, 2], [2, 1], [1, 1], 0.1, 0.1, 0.2, 0.1, 2), peak_bytes=5,
    verdicts=[Verdict("tie", 3, 0.5, 0.4)],
)  # fmt: skip


def turn(name):
    return [replace(CALL, turn=name, method=method) for method in ("plain generate", "chain")]


def written(path, turns):
    writer = RecordWriter(path, RUN, resume=True)
    writer.write([{"kind": "left-out", "method": "early exit", "reason": "because"}])
    for name in turns:
        writer.write_turn(turn(name))
    writer.close()
    return path


def test_what_is_written_is_read(tmp_path):
    records = read_records(written(tmp_path / "r.jsonl", ["0", "1"]))
    assert records.calls == turn("0") + turn("1")
    assert records.turns == ["0", "1"]
    assert (records.cut_at, records.left_out) == (0, {"early exit": "because"})
    assert records.run["settings"] == RUN["settings"]


def test_a_file_cut_anywhere_is_read_up_to_the_cut_and_says_so(tmp_path):
    whole = written(tmp_path / "whole.jsonl", ["0", "1"]).read_bytes()
    first = whole.index(b"\n") + 1
    path = tmp_path / "cut.jsonl"
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        records = read_records(path)
        kept = whole[: records.whole_bytes]
        assert whole.startswith(kept)
        assert [call.turn for call in records.calls] == [name for name in records.turns for _ in range(2)]
        at_an_end = length == records.whole_bytes
        assert bool(records.cut_at) != at_an_end, length


@given(length=st.integers(0, 4000))
def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been(tmp_path_factory, length):
    folder = tmp_path_factory.mktemp("runs")
    whole = written(folder / "whole.jsonl", ["0", "1", "2"])
    stopped = folder / "stopped.jsonl"
    stopped.write_bytes(whole.read_bytes()[:length])
    writer = RecordWriter(stopped, RUN, resume=True)
    done = [] if writer.done is None else writer.done.turns
    for name in ("0", "1", "2"):
        if name not in done:
            writer.write_turn(turn(name))
    writer.close()
    assert read_records(stopped).calls == read_records(whole).calls
    assert not read_records(stopped).cut_at


def test_a_damaged_line_ends_the_file(tmp_path):
    path = written(tmp_path / "r.jsonl", ["0", "1"])
    lines = path.read_text().splitlines(keepends=True)
    lines[-3] = lines[-3].replace('"method"', "")
    path.write_text("".join(lines))
    records = read_records(path)
    assert records.turns == ["0"]
    assert (records.cut_at, records.why_cut) == (len(lines) - 2, "the line is no JSON object")
    lines[-3] = json.dumps({"kind": "call", "turn": "1"}) + "\n"
    path.write_text("".join(lines))
    assert "no record" in read_records(path).why_cut


def test_a_run_is_gone_on_with_only_where_it_is_the_same(tmp_path):
    path = written(tmp_path / "r.jsonl", ["0"])
    with pytest.raises(RecordFileError, match="--resume"):
        RecordWriter(path, RUN, resume=False)
    with pytest.raises(RecordFileError, match=r"another run .* settings.seed: 0, 1"):
        RecordWriter(path, {**RUN, "settings": {"repeats": 2, "seed": 1}}, resume=True)
    RecordWriter(path, {**RUN, "commit": "other"}, resume=True).close()
    assert read_records(path).notes_of("resumed")[0]["commit"] == "other"


@pytest.mark.parametrize("content", ["", "nonsense\n", '{"kind": "call"}\n', '{"kind": "run", "format": 99}\n'])
def test_files_that_are_no_records(tmp_path, content):
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(RecordFileError):
        read_records(path)
    with pytest.raises(RecordFileError, match="cannot be read"):
        read_records(tmp_path / "nowhere.jsonl")


def test_differences_are_named_with_their_place():
    assert differences({"a": {"b": 1, "c": (1,)}, "d": 1}, {"a": {"b": 2, "c": [1]}}) == ["a.b: 1, 2", "d: 1, null"]
    assert differences({"a": 1}, {"a": 2}, ignored=("a",)) == []


# --- when tokens come -------------------------------------------------------------------------------------------------


def test_windows_share_a_block_among_its_tokens():
    assert windows([(1.0, 1), (2.0, 4), (4.0, 4)], size=2) == pytest.approx([0.5, 0.5, 1.0, 1.0])
    assert windows([(1.0, 1), (2.0, 1)], size=2) == []
    assert windows([]) == []


@given(st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 12)), min_size=1, max_size=40))
def test_windows_add_up_to_the_time_of_their_tokens(steps):
    arrivals, at = [(0.0, 1)], 0.0
    for seconds, count in steps:
        at += seconds
        arrivals.append((at, count))
    found = windows(arrivals, size=1)
    assert len(found) == sum(count for _, count in steps)
    assert sum(found) == pytest.approx(at)


def test_variation_of_equal_values_is_none():
    assert variation([2.0, 2.0]) == 0
    assert variation([1.0, 3.0]) == pytest.approx(0.5)
    assert variation([1.0]) is None


def test_records_tell_the_commit_and_what_has_changed_since(tmp_path):
    package = tmp_path / "src" / "package"
    (package / "benchmark").mkdir(parents=True)
    (package / "benchmark" / "provenance.py").write_text("x = 1\n")
    (package / "other.py").write_text("y = 1\n")
    assert checkout_of(package / "benchmark") == ("", [])
    for arguments in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "c"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    commit, changes = checkout_of(package / "benchmark")
    assert len(commit) == 12
    assert changes == []
    (tmp_path / "notes.txt").write_text("not of the package")
    assert checkout_of(package / "benchmark") == (commit, [])
    (package / "other.py").write_text("y = 2\n")
    assert checkout_of(package / "benchmark") == (f"{commit}+", ["src/package/other.py"])
