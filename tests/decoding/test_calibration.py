"""What was measured is kept, found again, and done without where it is not what it says."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagle31_hf.decoding.calibration import measure as measuring
from eagle31_hf.decoding.calibration import store, unasked
from eagle31_hf.decoding.calibration.calibration import Calibration, ContextSeconds
from eagle31_hf.decoding.calibration.measure import CONTEXTS, PIECES, WIDTHS, measure, measure_by_pieces, measure_graphs
from eagle31_hf.decoding.calibration.unasked import calibrate
from eagle31_hf.decoding.decoder import SpeculativeDecoder
from eagle31_hf.decoding.pair import Pair
from eagle31_hf.decoding.pair_history import PairHistory
from eagle31_hf.errors import ConfigurationError
from helpers import (
    CHEAP_DRAFTS,
    configured,
    drafter_of,
    left_padded,
    prompts_for,
    seeded,
    target_of,
    use_fixed_shapes_only,
)


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
    assert lengths == [CONTEXTS[0], 512 - measuring._most_written()], "no longer than the target was made for"
    for each in measured.contexts:
        seconds = [s for _, s in each.forward_s]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        assert min(each.absorb_s, each.drafter_step_s) >= 0
    assert measured.round_s == measured.plain_round_s == 0.0, "all is in the rounds"


def test_eager_rounds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn is not timed, and a chain that has to read what others wrote is not what chains take."""
    made: list[tuple[str, int]] = []
    first_s = 0.5  # of a draft's first token, and a tenth of a second of each other; of a forward, a hundredth a token

    def step(decoder: SpeculativeDecoder) -> float:
        plan = decoder.request.policy.next_draft(None)
        kind = "rest" if plan.skips else "looked up" if plan.tokens else "chain"
        made.append((kind, plan.shape.nodes))
        decoder.step()
        seconds = 1.0 + 0.01 * plan.shape.nodes
        if kind == "chain":
            seconds += first_s + 0.1 * (plan.shape.depth - 1) + 7.0 * (made[-2][0] == "rest")
        return seconds + 50.0 * (len(made) <= len(measuring._eager_rounds()))

    monkeypatch.setattr(measuring, "_timed_step", step)
    (behind, further) = measure(drafter_of("llama")).contexts
    assert dict(behind.forward_s) == pytest.approx({width: 1.0 + 0.01 * width for width in WIDTHS})
    assert (behind.absorb_s, behind.drafter_step_s) == pytest.approx((first_s, 0.1))
    assert further.drafter_step_s == pytest.approx(0.1)
    widths = [("looked up", width) for width in reversed(WIDTHS[1:])]
    turn = [*widths, ("rest", 1), ("chain", 8), ("chain", 8), ("chain", 2)]
    assert made == turn * (measuring.TURNS + 1) * 2


def test_disturbed_rounds_make_nothing_cheaper_than_less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else ran during the narrow rounds, or all but the drafter's."""

    def step(decoder: SpeculativeDecoder) -> float:
        plan = decoder.request.policy.next_draft(None)
        decoder.step()
        return 0.5 if plan.tokens is None and not plan.skips else 3.0 - 0.01 * plan.shape.nodes

    monkeypatch.setattr(measuring, "_timed_step", step)
    table = measure(drafter_of("llama")).costs(64).rounds(12)
    assert len({*table.lookup_s, *table.speculative_s}) == 1


def test_measures_whole_rounds_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph is made that `generate` would not make."""
    use_fixed_shapes_only(monkeypatch)
    eagle = drafter_of("qwen3")
    with configured(eagle, acceleration="compile"):
        target_of("qwen3").generate(**left_padded(prompts_for("qwen3", 1)), assistant_model=eagle, max_new_tokens=40)
        kinds = {key.kind for key in Pair.of(eagle).graphs.keys}
        measured = measure_graphs(eagle)
    assert {key.kind for key in Pair.of(eagle).graphs.keys} == kinds
    (behind,) = measured.contexts
    assert [width for width, _ in behind.forward_s] == [1, 8]
    assert measured.in_buckets
    table = measured.costs(64).rounds(7)
    assert table.plain_s <= table.lookup_s[7] <= table.speculative_s[7]


def test_rounds_of_graphs_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(_texts, kinds) -> list[float]:
        assert [[plan.shape.depth for plan in kind.plans] for kind in kinds] == [[7], [0], [7], [7, 7]]
        return [3.0, 1.0, 1.25, resumed_s]

    monkeypatch.setattr(measuring.TextsToTime, "seconds", seconds)
    resumed_s = 4.5
    table = measure_graphs(drafter_of("llama")).costs(4096).rounds(7)
    assert (table.plain_s, table.lookup_s[3], table.lookup_s[7], table.speculative_s[7]) == (1.0, 1.25, 1.25, 3.0)
    assert table.resume_s == 1.5
    resumed_s = 2.9  # disturbed: to resume takes no less than to go on
    assert measure_graphs(drafter_of("llama")).contexts[0].resume_s == 0.0


def test_timed_rounds_are_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain behind a lookup, say: its seconds count, and the lookup's do not."""
    seconds_of = {"chain": 4.0, "rest": 1.0, "looked up": 2.0}
    made: list[str] = []

    def step(decoder: SpeculativeDecoder) -> float:
        plan = decoder.request.policy.next_draft(None)
        made.append("rest" if plan.skips else "looked up" if plan.tokens else "chain")
        decoder.step()
        return seconds_of[made[-1]]

    monkeypatch.setattr(measuring, "_timed_step", step)
    eagle = drafter_of("llama")
    with torch.no_grad():
        found = measuring.TextsToTime(eagle, 16).seconds(measuring._graph_rounds(eagle, sampled=False))
    assert found == [4.0, 1.0, 2.0, 4.0]
    turn = ["chain"] * 3 + ["rest"] * 10 + ["looked up"] + ["looked up", "chain"]
    assert made == turn * measuring.TURNS


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
    **{
        f"{name} of {value!r:.9}": json.dumps({"key": "KEY", "calibration": CHEAP_DRAFTS.to_dict() | {name: value}})
        for name, value in [("round_s", 10**400), ("round_s", 1.7e308), ("plain_round_s", float("inf"))]
    },
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
def test_broken_and_foreign_files_are_done_without(content: str | bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = store.calibration_file(key_of())
    path.parent.mkdir(parents=True)
    if isinstance(content, str):
        content = content.replace('"KEY"', json.dumps(key_of())).encode()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert store.load(key_of()) is None
        assert store.load(key_of()) is None
    assert len(caplog.records) == 1
    assert "doctor --calibrate" in caplog.text
    store.save(key_of(), CHEAP_DRAFTS)
    assert store.load(key_of()) == CHEAP_DRAFTS, "it is renewed"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, 0.0, 5e-324, 1.7e308, 10**400, "soon", None])
def test_seconds_nobody_measured_are_refused(wrong: object) -> None:
    fields = json.loads(json.dumps(CHEAP_DRAFTS.to_dict()))
    fields["contexts"][0]["forward_s"][0][1] = wrong
    with pytest.raises(ConfigurationError, match="wanted"):
        Calibration.from_dict(fields)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1, 10**30, "many"])
@pytest.mark.parametrize("what", ["context", "width"])
def test_sizes_that_no_text_has_are_refused(what: str, wrong: object) -> None:
    fields = json.loads(json.dumps(CHEAP_DRAFTS.to_dict()))
    last = fields["contexts"][-1]
    if what == "context":
        last["context"] = wrong
    else:
        last["forward_s"][-1][0] = wrong
    with pytest.raises(ConfigurationError, match="wanted"):
        Calibration.from_dict(fields)


def test_a_folder_that_takes_nothing_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert store.save(key_of(), CHEAP_DRAFTS) is None
    assert "could not be kept" in caplog.text


def by_pieces(measured: list[str], pieces: int = PIECES):
    """Stands in for measuring: notes each piece."""

    def stand_in(_drafter, *, compiled):
        assert not compiled
        for number in range(1, pieces):
            measured.append(f"piece {number}")
            yield
        measured.append("last piece")
        return CHEAP_DRAFTS

    return stand_in


@pytest.fixture
def soon_due(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A pair without history of which a piece is measured after each twenty rounds. Lists them."""
    measured: list[str] = []
    monkeypatch.setattr(unasked, "PASSES_BEFORE_PIECE", 20)
    monkeypatch.setattr(unasked, "measure_by_pieces", by_pieces(measured))
    monkeypatch.setattr(Pair.of(drafter_of("llama")), "history", PairHistory())
    return measured


def write(*, sampled: bool = False, seed: int = 0) -> Tensor:
    inputs = left_padded(prompts_for("llama", 1))
    settings = {"max_new_tokens": 40, "pad_token_id": 0, "do_sample": sampled}
    with seeded(seed):
        return target_of("llama").generate(**inputs, **settings, assistant_model=drafter_of("llama"))


def test_a_pair_is_measured_piece_by_piece_once_it_has_written_enough(soon_due: list[str]) -> None:
    counts = []
    for sampled in (False, True, False, False):
        write(sampled=sampled)
        counts.append(len(soon_due))
    assert counts == [1, 2, 2, 2], "a piece after each call that was long enough, and once"
    assert store.load(key_of()) == CHEAP_DRAFTS, "later processes know it"


def test_short_texts_are_never_kept_waiting(soon_due: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unasked, "PASSES_BEFORE_PIECE", 8192 // PIECES)
    for _ in range(3):
        write()
    assert soon_due == []
    with configured(drafter_of("llama"), num_assistant_tokens_schedule="constant"):
        monkeypatch.setattr(unasked, "PASSES_BEFORE_PIECE", 1)
        write()
    assert soon_due == [], "nor is measured what nobody would use"


def test_a_calibration_changes_no_text(monkeypatch: pytest.MonkeyPatch, soon_due: list[str]) -> None:
    """Sampled or not, a text that begins after it is written by other drafts, and is the same."""
    monkeypatch.setattr(unasked, "PASSES_BEFORE_PIECE", 1000)
    monkeypatch.setattr(unasked, "measure", lambda *_: CHEAP_DRAFTS)
    eagle, history = drafter_of("llama"), Pair.of(drafter_of("llama")).history
    before = [write(sampled=sampled, seed=5) for sampled in (True, False)]
    assert history.calibration(eagle, compiled=False) is None
    calibrate(eagle, compiled=False)
    assert history.calibration(eagle, compiled=False) == CHEAP_DRAFTS
    for sampled, text in zip((True, False), before, strict=True):
        assert torch.equal(write(sampled=sampled, seed=5), text)


def test_measuring_that_fails_stops_nothing(
    soon_due: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_drafter: object, *, compiled: bool) -> Generator[None, None, None]:
        raise RuntimeError("the clock jumped")
        yield

    monkeypatch.setattr(unasked, "measure_by_pieces", fail)
    with caplog.at_level(logging.WARNING):
        texts = [write() for _ in range(3)]
    assert caplog.text.count("the clock jumped") == 1
    assert torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("step_s", [0.0, -3600.0, float("nan")], ids=["stands still", "jumps back", "is broken"])
@pytest.mark.thorough(every=3)
def test_a_clock_that_jumps_makes_no_calibration(
    step_s: float, soon_due: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it shows is refused as no seconds can be that, and the text goes on."""
    ticks = itertools.count()
    monkeypatch.setattr(measuring, "now", lambda _device: next(ticks) * step_s)
    monkeypatch.setattr(unasked, "measure_by_pieces", measure_by_pieces)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            write()
    assert "could not be calibrated" in caplog.text
    assert store.load(key_of()) is None


def test_a_text_of_no_tokens_is_learnt_nothing_from(soon_due: list[str]) -> None:
    inputs = left_padded(prompts_for("llama", 1))
    eagle = drafter_of("llama")
    out = target_of("llama").generate(**inputs, max_new_tokens=1, pad_token_id=0, assistant_model=eagle)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 1
    history = Pair.of(eagle).history
    assert (history.passes, history.prior) == (0, None)
