"""What a call reports: counts of drafts, times of tokens and rounds."""

from __future__ import annotations

import json
import re

import pytest
import torch
from greedy_calls import greedy, one, stats_of

from eagle31_hf import SpeculationStats
from eagle31_hf.stats import DraftEvent, RoundClock
from helpers import configured, drafter_of, left_padded, oracle_drafts, prompts_for


def test_stats_tell_what_happened() -> None:
    inputs = one()
    plain = greedy("llama", inputs)
    settings = {"num_assistant_tokens": 4}
    with configured(drafter_of("llama"), **settings) as drafter, oracle_drafts(plain, inputs["input_ids"].shape[1]):
        out = greedy("llama", inputs, assistant_model=drafter, return_dict_in_generate=True)
    stats = stats_of()
    assert out.speculation_stats is stats
    assert (stats.loop, stats.reason) == ("own", "")
    assert stats.new_tokens == 16
    assert 0 < stats.accepted < stats.drafted
    assert len(stats.drafted_at) == len(stats.accepted_at) == 4
    assert sum(stats.accepted_at) == stats.accepted
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
    assert all(0 <= rate <= 1 for rate in stats.cumulative_acceptance)
    assert json.loads(json.dumps(stats.to_dict()))["accepted"] == stats.accepted
    said = f"{15 / stats.rounds:.2f} tokens a pass (16 tokens, 15 of them in {stats.rounds} passes)\ndrafter: "
    assert str(stats).startswith(said)


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_counted_is_what_was_written(rows: int) -> None:
    """Drafts go on behind the ends of texts, by their length and by a token: there they count for nothing."""
    inputs = left_padded(prompts_for("llama", rows))
    length = inputs["input_ids"].shape[1]
    plain = greedy("llama", inputs, max_new_tokens=40)
    truth = plain.clone()  # rows meet a wrong draft each, so they drift apart
    truth[range(rows), length + 2 + 3 * torch.arange(rows)] = 95
    for end in (*({"max_new_tokens": tokens} for tokens in (5, 17, 30)), {"eos_token_id": int(plain[0, length + 11])}):
        with configured(drafter_of("llama"), num_assistant_tokens=4) as drafter, oracle_drafts(truth, length, right=4):
            greedy("llama", inputs, assistant_model=drafter, **{"max_new_tokens": 40, **end})
        stats = stats_of()
        assert stats.new_tokens == rows + stats.by_passes
        assert stats.acceptance_length == (stats.new_tokens - rows) / stats.rounds
        assert 0 <= sum(stats.accepted_at) - stats.accepted <= rows, "a text's last token is its pass's own"
        assert sum(stats.drafted_at) - sum(stats.accepted_at) <= 4 * rows, "more than the wrong drafts was refused"


def test_record_round_counts_by_hand() -> None:
    stats = SpeculationStats()
    assert stats.acceptance_length == 0.0
    stats.record_round(depth=2, nodes=2, accepted=[2, 0])
    stats.record_round(depth=3, nodes=7, accepted=[1])
    stats.record_round(depth=0, nodes=0, accepted=[0])
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 11, 3)
    assert stats.drafted_at == [3, 3, 1]
    assert stats.accepted_at == [2, 1, 0]
    assert stats.acceptance_length == 7 / 4
    assert stats.cumulative_acceptance == [2 / 3, 1 / 3, 0.0]


def test_what_memory_took_back_and_was_written_again_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 100.5, 101.5, 102.5, 103.5])
    monkeypatch.setattr("eagle31_hf.stats.time.perf_counter", lambda: next(now))
    stats = SpeculationStats()
    assert stats.first_token_s is None
    clock = RoundClock(stats)
    for total in (1, 9, 13, 11, 17):
        clock.note_tokens(total)
    assert stats.arrivals == [(0.5, 1), (1.5, 8), (2.5, 4), (3.5, 4)]
    assert stats.first_token_s == 0.5
    assert stats.to_dict()["first_token_s"] == 0.5


@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_has_its_time_in_the_figures_of_its_call(rows: int) -> None:
    inputs, drafter, before = left_padded(prompts_for("llama", rows)), drafter_of("llama"), None
    for length in (20, 5):
        greedy("llama", inputs, assistant_model=drafter, max_new_tokens=length)
        stats = stats_of()
        assert stats is not before
        assert stats.new_tokens == rows * length == sum(count for _, count in stats.arrivals)
        assert stats.rounds >= rows
        assert stats.arrivals == sorted(stats.arrivals)
        assert len(stats.arrivals) == stats.passes + 1
        before = stats


def test_a_round_that_makes_a_graph_has_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """To load one takes many times as long as a round: planners rested after it."""
    now = iter(range(100))
    monkeypatch.setattr(RoundClock, "now", staticmethod(lambda: float(next(now))))
    clock, seconds = RoundClock(SpeculationStats()), []
    for graphs in (0, 2, 2, 3, 3):  # the fourth is made behind the third round's wait, which the fourth's seconds show
        clock.begin_round()
        clock.note_wait(graphs)
        clock.end_round()
        seconds.append(clock.round_s)
    assert seconds == [1.0, 0.0, 2.0, 0.0, 2.0]


def test_printed_they_are_three_lines() -> None:
    stats = SpeculationStats(new_tokens=9)
    stats.record_round(depth=3, nodes=3, accepted=[2])
    stats.record_round(depth=2, nodes=2, accepted=[2])
    stats.record_round(depth=4, nodes=4, accepted=[1], looked_up=True)
    assert str(stats).splitlines() == [
        "2.67 tokens a pass (9 tokens, 8 of them in 3 passes)",
        "drafter: 4 of 5 tokens accepted (of those tried at each position 1.00 1.00 0.00); "
        "looked up in the text: 1 of 4 tokens accepted (of those tried at each position 1.00 0.00 0.00 0.00)",
        "drafting did not rest",
    ]
    stats.record_round(depth=0, nodes=0, accepted=[0, 0])
    stats.skipped_rounds, stats.cache_type, stats.new_tokens = 1, "int8", 12
    stats.memory_steps["workspaces freed"] = 2
    first, _, last = str(stats).splitlines()
    assert first == "2.00 tokens a pass and row (12 tokens, 10 of them in 5 passes of a row, over int8 keys and values)"
    rest, memory = last.split("; ")
    assert rest == "1 of 4 passes drafted nothing: to see how fast the target is without drafts"
    assert memory == "memory ran out: workspaces freed 2x"
    stats.events.append(DraftEvent(5, "rest", "nothing was accepted"))
    assert "passes drafted nothing: nothing was accepted;" in str(stats)


def test_plain_decoding_is_said_with_its_reason() -> None:
    stats = SpeculationStats(loop="plain", reason="asked for", new_tokens=7)
    assert str(stats) == "written by plain decoding, 1 token a pass: asked for"


@pytest.mark.parametrize("schedule", ["planned", "constant"])
def test_why_drafting_rested_is_said_in_words(schedule: str) -> None:
    """An untrained drafter is wrong throughout."""
    settings = {"num_assistant_tokens_schedule": schedule, "num_assistant_tokens": 4}
    with configured(drafter_of("llama"), **settings) as drafter:
        greedy("llama", one(), assistant_model=drafter, max_new_tokens=40)
    said = str(stats_of()).splitlines()[-1]
    wanted = "nothing was accepted in 8 rounds in a row, nor in a trial since" if schedule == "constant" else "estimate"
    assert re.search(rf"passes drafted nothing: .*{wanted}", said)
