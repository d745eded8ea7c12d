"""A plan that is asked for on the command line is printed, and what is then taken stays within it."""

import json

import pytest
from typer.testing import CliRunner

from eagle31_hf.benchmark.memory_peaks import StorageMeter
from eagle31_hf.cli import app, generate

REPEATED = "What is the weather going to be like in Portland this weekend? " * 150


def test_a_packed_pair_answers_within_its_plan(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    prompt, record = tmp_path / "prompt.txt", tmp_path / "figures.json"
    prompt.write_text(REPEATED)
    peaks, write = [], generate.write

    def metered(pair, *args, **settings):
        meter = StorageMeter()
        meter.loaded(pair.target)
        meter.loaded(pair.drafter)
        peaks.append(meter.peak(lambda: write(pair, *args, **settings)))

    monkeypatch.setattr(generate, "write", metered)
    told = CliRunner().invoke(
        app,
        ["generate", "--quantization", "4bit", "--memory", "auto", "--no-compare", "--max-new-tokens", "12",
         "--prompt-file", str(prompt), "--json", str(record)],
        env={"COLUMNS": "100"},
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    assert "bnb-nf4-dq" in told.stdout
    assert told.stdout.index("fits") < told.stdout.index("assistant:")
    planned = json.loads(record.read_text())["plan"]["figures"]["peak_bytes"]
    assert 0.8 * planned < peaks[0] <= planned
