"""The door to `generate`: nothing stays broken behind it, calls that are none of ours are left alone, and what a call
reports. `Eagle31CandidateGenerator` in transformers' own assisted loop."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf import Eagle31CandidateGenerator, Eagle31Drafter, SpeculationStats
from eagle31_hf.demo import drafter_path
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.generate import hooks
from eagle31_hf.stats import DraftEvent, RoundClock
from helpers import (
    CONFIGS,
    Shown,
    assert_same_text,
    configured,
    drafter_of,
    held_out_prompts,
    left_padded,
    one,
    oracle_drafts,
    prompts_for,
    random_target,
    stats_of,
    target_of,
    write,
)

# --- errors leave everything usable -----------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("where", ["first token", "third block", "forward"])
def test_interrupted_generation_leaves_everything_usable(where: str, error: type[BaseException]) -> None:
    drafter, calls = drafter_of("gemma3"), itertools.count(1)

    def interrupt(*_: Any) -> None:
        if where == "forward" and next(calls) == 4:
            raise error

    handle = target_of("gemma3").model.layers[2].register_forward_pre_hook(interrupt)
    shown = Shown(error, {"first token": 1, "third block": 3}.get(where, 100))
    with pytest.raises(error):
        write("gemma3", one(), assistant_model=drafter, streamer=shown)
    handle.remove()
    assert not drafter.binding.taps.are_open
    assert not any(drafter.binding.taps._caught.values())
    assert_same_text(target_of("gemma3"), drafter, one())


# --- others are left alone --------------------------------------------------------------------------------------------


@pytest.mark.contract
def test_other_ways_to_generate_are_untouched() -> None:
    plain = write("llama", one())
    assert torch.equal(write("llama", one(), prompt_lookup_num_tokens=3), plain)
    assistant = random_target(CONFIGS["llama"](), seed=4)
    assert torch.equal(write("llama", one(), assistant_model=assistant), plain)
    with pytest.raises(ValueError, match="num_return_sequences"):
        write("llama", one(), assistant_model=assistant, do_sample=True, num_return_sequences=2)


def test_installing_twice_wraps_once() -> None:
    wrapped = hf.GenerationMixin.generate, hf.GenerationMixin._sample
    hooks.install()
    assert (hf.GenerationMixin.generate, hf.GenerationMixin._sample) == wrapped


def test_generate_leaves_its_arguments_alone() -> None:
    config = hf.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    before = config.to_dict()
    inputs = left_padded(prompts_for("llama", 3))
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    target_of("llama").generate(**inputs, generation_config=config, assistant_model=drafter_of("llama"))
    assert config.to_dict() == before
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)
    assert target_of("llama").generation_config.num_assistant_tokens in (None, 20)


# --- the demo drafter -------------------------------------------------------------------------------------------------

FIGURES = {
    ("embedded", "gsm8k"): (4.431, (0.87, 0.77, 0.69, 0.63, 0.59)),
    ("embedded", "sgd"): (3.928, (0.90, 0.75, 0.68, 0.57, 0.46)),
    ("embedded", "taskmaster"): (4.217, (0.86, 0.80, 0.78, 0.71, 0.67)),
    ("shared", "sgd"): (3.777, (0.86, 0.72, 0.63, 0.53, 0.43)),  # where the two differ most
}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "name"), FIGURES)
@pytest.mark.thorough(every=4)
def test_demo_drafters_reach_the_figures_of_their_cards(which: str, name: str) -> None:
    """75 prompts, greedy, a chain of 5, fp32, at most 128 new tokens, end at EOS; in batches of like length."""
    ours = drafter_of("demo-target")
    if which == "embedded":
        ours = Eagle31Drafter.from_pretrained(drafter_path(), target=target_of("demo-target"))
    prompts = sorted(held_out_prompts(name), key=len)
    rounds = accepted = 0
    per_position = torch.zeros(2, 5)
    fixed = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    with configured(ours, **fixed, speculation_loop="own") as drafter:
        for start in range(0, 75, 15):
            inputs = left_padded(prompts[start : start + 15])
            write("demo-target", inputs, assistant_model=drafter, max_new_tokens=128)
            stats = drafter.stats
            assert stats is not None
            rounds, accepted = rounds + stats.rounds, accepted + stats.accepted
            per_position += torch.tensor([stats.accepted_at, stats.drafted_at])
    length, positions = FIGURES[which, name]
    assert (accepted + rounds) / rounds == pytest.approx(length, rel=0.01)
    assert (per_position[0] / per_position[1]).tolist() == pytest.approx(positions, abs=0.02)


# --- what a call reports ----------------------------------------------------------------------------------------------


def test_stats_tell_what_happened() -> None:
    inputs = one()
    plain = write("llama", inputs)
    settings = {"num_assistant_tokens": 4}
    with configured(drafter_of("llama"), **settings) as drafter, oracle_drafts(plain, inputs["input_ids"].shape[1]):
        out = write("llama", inputs, assistant_model=drafter, return_dict_in_generate=True)
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
    plain = write("llama", inputs, max_new_tokens=40)
    truth = plain.clone()  # rows meet a wrong draft each, so they drift apart
    truth[range(rows), length + 2 + 3 * torch.arange(rows)] = 95
    for end in (*({"max_new_tokens": tokens} for tokens in (5, 17, 30)), {"eos_token_id": int(plain[0, length + 11])}):
        with configured(drafter_of("llama"), num_assistant_tokens=4) as drafter, oracle_drafts(truth, length, right=4):
            write("llama", inputs, assistant_model=drafter, **{"max_new_tokens": 40, **end})
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


@pytest.mark.parametrize("length", [2, 20])
def test_the_first_token_waits_for_the_prompt_alone(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter pairs it with the prompt's last position when it drafts; behind the last token it never does."""
    read, passes = DraftSession.read, list[int]()

    def counted(session: DraftSession, tokens: Tensor, *others: Any) -> Any:
        passes.append(tokens.shape[1])
        return read(session, tokens, *others)

    class AtFirst(Shown):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.blocks) == 2:  # the prompt comes first
                shown.extend(passes)

    monkeypatch.setattr(DraftSession, "read", counted)
    inputs, shown = one(), list[int]()
    write("llama", inputs, assistant_model=drafter_of("llama"), max_new_tokens=length, streamer=AtFirst())
    assert shown == [inputs["input_ids"].shape[1] - 1]
    assert (len(passes) > 1) == (length > 2)


@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_has_its_time_in_the_figures_of_its_call(rows: int) -> None:
    inputs, drafter, before = left_padded(prompts_for("llama", rows)), drafter_of("llama"), None
    for length in (20, 5):
        write("llama", inputs, assistant_model=drafter, max_new_tokens=length)
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


def test_printed_they_are_three_lines_or_say_why_there_were_no_drafts() -> None:
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
    plain = SpeculationStats(loop="plain", reason="asked for", new_tokens=7)
    assert str(plain) == "written by plain decoding, 1 token a pass: asked for"


@pytest.mark.parametrize("schedule", ["planned", "constant"])
def test_why_drafting_rested_is_said_in_words(schedule: str) -> None:
    """An untrained drafter is wrong throughout."""
    settings = {"num_assistant_tokens_schedule": schedule, "num_assistant_tokens": 4}
    with configured(drafter_of("llama"), **settings) as drafter:
        write("llama", one(), assistant_model=drafter, max_new_tokens=40)
    said = str(stats_of()).splitlines()[-1]
    wanted = "nothing was accepted in 8 rounds in a row, nor in a trial since" if schedule == "constant" else "estimate"
    assert re.search(rf"passes drafted nothing: .*{wanted}", said)


# --- transformers' own assisted loop ----------------------------------------------------------------------------------


def by_transformers(name: str, monkeypatch: pytest.MonkeyPatch, inputs: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """A text by transformers' loop, and the figures of its drafts."""
    drafter, stats = drafter_of(name), SpeculationStats()

    def generator(self: Any, generation_config: Any, **given: Any) -> Eagle31CandidateGenerator:
        return Eagle31CandidateGenerator(drafter, generation_config, given["logits_processor"], stats)

    with monkeypatch.context() as patched, drafter.binding.capturing():
        patched.setattr(hf.GenerationMixin, "_get_candidate_generator", generator)
        return write(name, inputs, prompt_lookup_num_tokens=1, **kwargs), stats  # any way to draft leads there


@pytest.mark.contract
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "demo-target"])
@pytest.mark.parametrize("how", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}])
def test_the_text_is_plains(name: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = 0
    for seed, depth in enumerate((1, 3, 6)):
        inputs = left_padded(prompts_for(name, 1, seed=seed))
        plain = write(name, inputs, max_new_tokens=24, **how)
        with configured(drafter_of(name), num_assistant_tokens=depth):
            ours, stats = by_transformers(name, monkeypatch, inputs, max_new_tokens=24, **how)
        assert torch.equal(ours, plain)
        assert stats.new_tokens == 24
        assert stats.drafted > 0
        accepted += stats.accepted
    assert name != "demo-target" or accepted > 10, "a trained drafter is often right"


@pytest.mark.contract
def test_it_ends_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = left_padded(prompts_for("demo-target", 1))
    free = write("demo-target", inputs, max_new_tokens=24)
    ends = {"max_new_tokens": 24, "eos_token_id": int(free[0, -9])}
    plain = write("demo-target", inputs, **ends)
    ours, _ = by_transformers("demo-target", monkeypatch, inputs, **ends)
    assert torch.equal(ours, plain)


@pytest.mark.contract
def test_a_drafter_of_nan_drafts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, inputs = drafter_of("llama"), left_padded(prompts_for("llama", 1))
    sound = drafter.draft_logits
    monkeypatch.setattr(drafter, "draft_logits", lambda *given: torch.full_like(sound(*given), float("nan")))
    ours, stats = by_transformers("llama", monkeypatch, inputs)
    assert torch.equal(ours, write("llama", inputs))
    assert stats.drafted == 0
