"""What was measured is kept, found again, and done without where it is not what it says."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from eagle31_hf.decoding import pair_history
from eagle31_hf.decoding.calibration import store
from eagle31_hf.decoding.calibration.calibration import Calibration, ContextSeconds
from eagle31_hf.decoding.calibration.measure import CONTEXTS, WIDTHS, measure
from eagle31_hf.decoding.pair_history import PairHistory
from eagle31_hf.errors import ConfigurationError
from helpers import CHEAP_DRAFTS, configured, drafter_of, left_padded, prompts_for, target_of, use_fixed_shapes_only


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_said", set())


def key_of(*, compiled: bool = False) -> dict:
    return store.calibration_key(drafter_of("llama"), compiled=compiled)


def test_measures_what_it_says() -> None:
    measured = measure(drafter_of("llama"))
    assert [width for width, _ in measured.contexts[0].forward_s] == list(WIDTHS)
    lengths = [each.context for each in measured.contexts]
    assert lengths == [CONTEXTS[0], 512 - max(WIDTHS)], "no longer than the target was made for"
    for each in measured.contexts:
        seconds = [s for _, s in each.forward_s]
        assert seconds == sorted(seconds)
        assert min(seconds[0], each.absorb_s, each.drafter_step_s) > 0
    assert measured.round_s >= 0


def test_measures_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)
    measured = measure(drafter_of("qwen3"), compiled=True)
    assert [width for width, _ in measured.contexts[0].forward_s] == [1, 8]
    assert measured.in_buckets
    kinds = {key.kind for key in drafter_of("qwen3").require_binding().compiled.keys}
    assert kinds >= {"verify", "absorb", "step"}


def test_the_nearest_context_counts() -> None:
    seconds = [ContextSeconds(length, ((1, float(length)),), 0.1, 0.1) for length in (64, 1024)]
    calibration = Calibration(tuple(seconds), 0.0, 0.0)
    assert [calibration.costs(length).target_s(1) for length in (0, 500, 600, 9000)] == [64.0, 64.0, 1024.0, 1024.0]


def test_is_found_again() -> None:
    assert store.load(key_of()) is None
    path = store.save(key_of(), CHEAP_DRAFTS)
    assert path is not None
    assert store.load(key_of()) == CHEAP_DRAFTS
    assert store.load(key_of(compiled=True)) is None
    assert list(path.parent.iterdir()) == [path], "nothing unfinished is left"


FOREIGN = {
    "no JSON": "{",
    "no object": "[]",
    "no key": json.dumps({"calibration": CHEAP_DRAFTS.to_dict()}),
    "another machine": json.dumps({"key": {"device": "another"}, "calibration": CHEAP_DRAFTS.to_dict()}),
    "binary": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
def test_broken_and_foreign_files_are_done_without(content: str | bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = store.calibration_file(key_of())
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with caplog.at_level(logging.WARNING):
        assert store.load(key_of()) is None
        assert store.load(key_of()) is None
    assert len(caplog.records) == 1
    assert "doctor --calibrate" in caplog.text
    store.save(key_of(), CHEAP_DRAFTS)
    assert store.load(key_of()) == CHEAP_DRAFTS, "it is renewed"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, 0.0, "soon", None])
def test_seconds_nobody_measured_are_refused(wrong: object) -> None:
    fields = json.loads(json.dumps(CHEAP_DRAFTS.to_dict()))
    fields["contexts"][0]["forward_s"][0][1] = wrong
    with pytest.raises(ConfigurationError, match="wanted"):
        Calibration.from_dict(fields)


def test_a_folder_that_takes_nothing_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert store.save(key_of(), CHEAP_DRAFTS) is None
    assert "could not be kept" in caplog.text


def test_a_pair_is_measured_once_it_has_written_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[bool] = []
    monkeypatch.setattr(pair_history, "PASSES_BEFORE_CALIBRATION", 20)
    monkeypatch.setattr(pair_history, "measure", lambda *_, compiled: measured.append(compiled) or CHEAP_DRAFTS)
    inputs = left_padded(prompts_for("llama", 1))
    settings = {"max_new_tokens": 40, "pad_token_id": 0}
    with configured(drafter_of("llama"), num_assistant_tokens_schedule="calibrated") as eagle:
        monkeypatch.setattr(eagle.require_binding(), "history", None)
        counts = []
        for sampled in (False, True, False, False):
            target_of("llama").generate(**inputs, **settings, do_sample=sampled, assistant_model=eagle)
            counts.append(len(measured))
    assert counts == [0, 0, 1, 1], "not at first, not where tokens are drawn, and once"
    assert store.load(key_of()) == CHEAP_DRAFTS, "later processes know it"


def test_measuring_that_fails_stops_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the clock jumped")

    monkeypatch.setattr(pair_history, "PASSES_BEFORE_CALIBRATION", 0)
    monkeypatch.setattr(pair_history, "measure", fail)
    history = PairHistory()
    with caplog.at_level(logging.WARNING):
        history.calibrate_if_due(drafter_of("llama"), compiled=False)
        history.calibrate_if_due(drafter_of("llama"), compiled=False)
    assert caplog.text.count("the clock jumped") == 1
