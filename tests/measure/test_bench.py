"""Methods in turns: each text is compared with plain `generate`'s, and a wrong one has no speedup."""

import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from eagle31_hf.measure import bench
from eagle31_hf.measure.bench import Bench, PeakGauge
from eagle31_hf.measure.exactness import Kind, Verdict
from eagle31_hf.measure.results import (
    PLAIN,
    PLAIN_BY_GRAPHS,
    BenchSettings,
    Method,
    Task,
    Writer,
    all_methods,
    pair_methods,
)
from eagle31_hf.measure.tables import bench_parts, conditions_line
from eagle31_hf.stats import Acceptance
from eagle31_hf.texts.prompts import Prompt
from helpers import configured, drafter_of, random_prompts, target_of, use_fixed_shapes_only

SETTINGS = BenchSettings(new_tokens=12, repeats=2)
DRAFTER = Method(Writer.DRAFTER)


def tasks(count, suites=("random",)):
    return [
        Task(Prompt(f"random/{i}", suites[i % len(suites)], "ab"[i % 2], ()), torch.tensor(ids))
        for i, ids in enumerate(random_prompts(count))
    ]


def measured(settings=SETTINGS, count=2):
    return Bench(drafter_of("llama"), tasks(count), settings).run()


@pytest.fixture(scope="module")
def measured_once():
    return measured()


def test_every_method_writes_plain_generates_text(measured_once):
    calls = measured_once.calls
    assert list(dict.fromkeys(call.method for call in calls)) == list(all_methods(by_graphs=False))
    assert len(calls) == 2 * 2 * 4
    assert {v.kind for call in calls for v in call.verdicts if call.method != PLAIN} == {Kind.SAME}
    assert {v.kind for call in calls for v in call.verdicts if call.method == PLAIN} == {Kind.REFERENCE}
    for call in calls:
        assert call.new_tokens == 12
        assert 0 < call.first_token_s < call.seconds
        if call.stats is not None:
            assert call.stats.loop == "own"
            assert len(call.gaps_s) == call.stats.passes
    without_drafts = next(call for call in calls if call.method.writer is Writer.NO_DRAFTS)
    assert without_drafts.stats.drafted == 0
    assert len(without_drafts.gaps_s) == 11


def test_no_turn_begins_after_the_minutes_are_over(monkeypatch):
    settings = replace(SETTINGS, rows=(1, 2), minutes=2.0)
    assert measured(settings).turns == 8, "there is time for all"
    clock = iter(range(0, 10_000, 25))  # seconds, a minute for each number of rows
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(clock), perf_counter=time.perf_counter))
    seen = []
    cut = Bench(drafter_of("llama"), tasks(2), settings, on_turn=lambda *counts: seen.append(counts)).run()
    assert (cut.turns, cut.of) == (6, 8)
    assert seen == [(turn, 8) for turn in range(1, 7)]
    assert all(each.speedup is not None for each in cut.methods)
    assert any("Stopped after 2 min: 6 of 8 measurements were made." in str(part) for part in bench_parts(cut))


def test_methods_take_turns_at_being_first():
    order, write = [], Bench._call

    def noted(self, method, turn):
        order.append(method.writer)
        return write(self, method, turn)

    with mock.patch.object(Bench, "_call", noted):
        measured(replace(SETTINGS, methods=(PLAIN, DRAFTER)), count=1)
    assert order == [Writer.GENERATE, Writer.DRAFTER, Writer.DRAFTER, Writer.GENERATE]


def test_sampled_rows_are_plain_generates_by_the_same_seed():
    found = measured(replace(SETTINGS, rows=(3, 1), repeats=1, temperature=1.0), count=4)
    assert {call.turn.rows for call in found.calls} == {1, 3}
    assert {v.kind for call in found.calls for v in call.verdicts if call.method != PLAIN} == {Kind.SAME}
    three = [call for call in found.calls if call.turn.rows == 3 and call.method == PLAIN]
    assert [(call.turn.kind, call.prompts) for call in three] == [
        ("a", ["random/0", "random/2", "random/0"]), ("b", ["random/1", "random/3", "random/1"]),
    ]  # fmt: skip
    texts = {call.method: call.answers for call in found.calls if call.turn.rows == 1 and call.prompts == ["random/0"]}
    assert len({str(answers) for answers in texts.values()}) == 1


def test_several_data_sets_are_the_kinds():
    found = Bench(drafter_of("llama"), tasks(4, suites=("gsm8k", "code")), replace(SETTINGS, repeats=1)).run()
    assert {call.turn.kind for call in found.calls} == {"gsm8k", "code"}


def test_answers_end_where_the_target_ends(monkeypatch, measured_once):
    answer = measured_once.calls[0].answers[0]
    end = next(token for place, token in enumerate(answer) if place > 2 and token not in answer[:place])
    monkeypatch.setattr(target_of("llama").generation_config, "eos_token_id", end)
    short = measured(replace(SETTINGS, repeats=1, methods=(PLAIN, DRAFTER)))
    answers = [call.answers[0] for call in short.calls if call.prompts == ["random/0"]]
    assert answers == [answer[: answer.index(end) + 1]] * 2


def test_graphs_stand_beside_eager_passes(monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    found = measured(replace(SETTINGS, repeats=1, methods=pair_methods(by_graphs=True)), count=1)
    assert [call.method for call in found.calls] == [PLAIN, PLAIN_BY_GRAPHS, DRAFTER, Method(Writer.DRAFTER, True)]
    plain, alone, _, by_graphs = found.methods
    assert (plain.tokens_per_pass, alone.tokens_per_pass) == (None, 1.0)
    assert set(alone.verdicts) == set(by_graphs.verdicts) == {Kind.SAME}
    assert not found.left_out


def test_where_no_graphs_can_be_kept_their_methods_are_left_out_by_name():
    with configured(drafter_of("llama"), cache_type="int8"):
        found = measured(replace(SETTINGS, repeats=1, methods=pair_methods(by_graphs=True)), count=1)
    assert [call.method for call in found.calls] == [PLAIN, DRAFTER]
    assert set(found.left_out) == {"without drafts, by graphs", "drafter, by graphs"}
    assert all("8 bits" in why for why in found.left_out.values())


def test_settings_of_the_drafter_are_its_own_again(measured_once):
    assert drafter_of("llama").generation_config.acceleration == "auto"


# --- what calls say ---------------------------------------------------------------------------------------------------


def with_wrong_token(place):
    write = Bench._write

    def wrong(self, method, batch, streamer):
        tokens, stats = write(self, method, batch, streamer)
        if method == DRAFTER:
            tokens = tokens.clone()
            tokens[0, place] = (tokens[0, place] + 1) % 96
        return tokens, stats

    return mock.patch.object(Bench, "_write", wrong)


def test_a_wrong_answer_forbids_the_speedup():
    with with_wrong_token(4):
        result = measured(replace(SETTINGS, methods=(PLAIN, DRAFTER)), count=1)
    plain, eagle = result.methods
    assert plain.speedup.median == 1.0
    assert (eagle.speedup, eagle.verdicts[Kind.DIFFERENT], result.is_exact) == (None, 2, False)
    assert eagle.answers_of(Kind.DIFFERENT)["random/0"].position == 4
    assert eagle.refusal.endswith(": 2 of 2 answers")
    assert "drafter: another text, and not by a tie, in random/0 from token 5 on" in shown(result)
    assert "refused" in shown(result)


def shown(result, price=None, width=100):
    from io import StringIO

    from rich.console import Console

    console = Console(width=width, file=StringIO(), record=True)
    for part in bench_parts(result, price):
        console.print(part, soft_wrap=not hasattr(part, "columns"))
    return console.export_text()


def timed(measured, seconds):
    """The same calls with these seconds for each method and repeat."""
    calls = [replace(call, seconds=seconds[call.method][call.turn.repeat], peak_bytes=None) for call in measured.calls]
    return replace(measured, calls=calls)


def test_speeds_are_medians_over_repeats_and_ratios_are_formed_within_them():
    found = measured(replace(SETTINGS, methods=(PLAIN, DRAFTER), repeats=3), count=1)
    result = timed(found, {PLAIN: [2.0, 4.0, 2.0], DRAFTER: [1.0, 1.0, 2.0]})
    plain, eagle = result.methods
    assert plain.tokens_per_s.median == 12 / 2.0
    assert (eagle.tokens_per_s.low, eagle.tokens_per_s.high) == (6.0, 12.0)
    assert (eagle.speedup.low, eagle.speedup.median, eagle.speedup.high) == (1.0, 2.0, 4.0)
    assert eagle.price_per_million(3600.0) == pytest.approx(1e6 / 12)
    assert eagle.bytes_over_plain is None


def test_figures_are_json_and_in_the_tables(measured_once):
    result = measured_once
    told = json.loads(json.dumps(result.to_dict(0.5)))
    eagle = told["methods"][-1]
    assert set(eagle["by_kind"]) == {"a", "b"}
    assert set(eagle["gap_s"]) == {"p50", "p95", "p99"}
    assert eagle["price_per_million"] > 0
    assert 0 <= eagle["accepted_at"][0] <= 1
    text = shown(result, 0.5)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in shown(result, 0.5, width=80), "a narrow terminal shows every figure"
    assert text.index("same text") < text.index("tokens/s") < text.index("until the first token") < text.index("per 1M")
    assert next(line for line in lines if line.startswith("drafter ")).split()[1] == "yes"
    calls = [replace(call, peak_bytes=3 * 2**29 + call.method.drafts * 2**24) for call in result.calls]
    assert re.search(r"drafter .* 1\.52 GiB +\+16 MiB", shown(replace(result, calls=calls))), "as plans count"


def test_ties_and_steps_down_are_noted(measured_once):
    tie = replace(measured_once.calls[-1], verdicts=(Verdict(Kind.TIE, 3, 0.01, 0.02),))
    stats = replace(tie.stats, loop="plain", reason="not today", fallbacks=["steps stay eager"])
    text = shown(replace(measured_once, calls=[*measured_once.calls, replace(tie, stats=stats)]))
    assert "up to ties" in text
    assert "1 text differs by a tie, two tokens equally likely within rounding" in text
    assert "served by plain: not today" in text
    assert "served by steps stay eager" in text
    wrong = replace(tie, verdicts=(Verdict(Kind.DIFFERENT, 2, 1.0, 0.0),))
    told = replace(measured_once, calls=[*measured_once.calls, wrong]).to_dict()["methods"][-1]
    (evidence,) = json.loads(json.dumps(told))["differences"]
    assert (evidence["kind"], evidence["first_different"], evidence["seed"]) == ("different", 2, wrong.turn.seed)
    assert evidence["answer"] == wrong.answers[0]
    assert len(evidence["plain"]) > 2
    ended = replace(tie, verdicts=(Verdict(Kind.DIFFERENT, 2, float("inf"), 0.0),))  # before plain's text
    json.dumps(replace(measured_once, calls=[*measured_once.calls, ended]).to_dict(), allow_nan=False)
    text = shown(replace(measured_once, calls=[*measured_once.calls, wrong, tie]))
    assert "another text, and not by a tie" in text, "an error is not hidden by a tie"


def test_slower_drafts_come_with_what_may_help(measured_once):
    """A drafter that is useless on any machine is not made useful by graphs."""
    found = {}
    for length in (1.1, 2.5):
        slow = {method: [1.0 + method.drafts] * 2 for method in all_methods(by_graphs=False)}
        accepted = Acceptance(rounds=10, accepted=round(10 * length) - 10)
        with mock.patch("eagle31_hf.measure.results.Acceptance.of", lambda _, accepted=accepted: accepted):
            text = shown(timed(measured_once, slow))
        found[length] = next(line for line in text.splitlines() if line.startswith("drafter: slower"))
        assert "lookups: slower than plain; try graphs (eagle31 warmup) or fewer --draft-tokens." in text
    assert found[1.1].endswith("1.10 tokens a pass are too few: train a drafter (eagle31 train).")
    assert found[2.5] == "drafter: slower than plain; try graphs (eagle31 warmup) or fewer --draft-tokens."


def test_the_repeats_named_are_those_that_were_written(measured_once):
    """Of the planned ones as many as there was time for."""
    origin = {"device": "cpu", "threads": 2, "processor": "some", "dtype": "float32"}
    for written, words in ((1, "float32; one repeat"), (2, "medians and spreads of 2 repeats")):
        calls = [
            replace(call, turn=replace(call.turn, repeat=repeat))
            for repeat in range(written)
            for call in measured_once.calls
        ]
        cut = replace(measured_once, calls=calls, settings=replace(measured_once.settings, repeats=3))
        assert conditions_line(cut, origin).plain.endswith(words)


def test_the_peak_is_that_of_the_call(monkeypatch, tmp_path):
    gauge = PeakGauge(torch.device("cpu"))
    torch.ones(64 * 2**20).sum()  # 256 MiB, given back
    gauge.reset()
    if (low := gauge.read()) is None:
        pytest.skip("this kernel does not let the peak be reset")
    held = torch.ones(32 * 2**20)  # 128 MiB
    assert 100 * 2**20 < gauge.read() - low < 250 * 2**20
    del held
    monkeypatch.setattr(bench, "CLEAR_REFS", tmp_path / "no" / "clear_refs")
    gauge.reset()
    assert gauge.read() is None
