"""The contract: whatever the target, the loop, the draft's shape and what is asked, the text is the one that plain
`generate` writes, and torch's generator is left where plain `generate` leaves it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from agreement import COMPILED, LOOPS, NEW_TOKENS, SHAPES, TARGETS, assert_plain, free_text, prompts, stats_of, write
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.loop.pair import Pair
from eagle31_hf.stats import RoundClock
from helpers import (
    DEMO_DRAFTER,
    MODELS,
    Shown,
    assert_same_or_tie,
    assert_same_text,
    configured,
    demo_tokenizer,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    switching_policies,
    target_of,
)
from matrix import matrix

# --- everything that may be asked -------------------------------------------------------------------------------------


def one_third(row: int, ids: Tensor) -> list[int]:
    return list(range((row + len(ids)) % 3, 96, 3))


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, 96, 2))},
    "bad_words": {"bad_words_ids": [[i] for i in range(4, 40)] + [[50, 51], [60, 61, 62]]},
    "prefix_allowed_tokens": {"prefix_allowed_tokens_fn": one_third},
    "sequence_bias": {"sequence_bias": [[[i], -4.0] for i in range(20, 60)] + [[[70, 71], 3.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(10, 60)), "begin_suppress_tokens": [61, 62, 63]},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 5},
    "encoder_pair": {"encoder_repetition_penalty": 1.5},
    "forced_eos": {"forced_eos_token_id": 7},
    "several processors": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [9, 11, 13]},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "bare": {"temperature": 1.0, "top_k": 0},
    "cold": {"temperature": 0.1, "top_k": 0},
    "hot": {"temperature": 5.0, "top_k": 0},
    "top_k": {"temperature": 0.9, "top_k": 20},
    "top_p": {"temperature": 0.7, "top_k": 0, "top_p": 0.8},
    "several warpers": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "typical": {"typical_p": 0.7, "top_k": 0},
    "eta": {"eta_cutoff": 0.02, "epsilon_cutoff": 0.01, "top_k": 0},
    "penalty": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "top_k": 0},
}
SAMPLED = {name: {"do_sample": True, **setting} for name, setting in SAMPLED.items()}
SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
OTHERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "several texts of a prompt": SAMPLED["bare"] | {"num_return_sequences": 3},
    "scores": SCORES,
    "sampled scores": SCORES | SAMPLED["top_p"],
    **{f"chunks of {size}": {"prefill_chunk_size": size} for size in (1, 2, 7, 1000)},
}
SHORT: dict[str, dict[str, Any]] = {
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "max_length": {"max_new_tokens": None},
    "max_time": {"max_time": 1e-9},
}
"""Texts that end before a draft could be accepted, or may do so."""


def end_tokens(new: Tensor, at: int) -> dict[str, Any]:
    return {"eos_token_id": [int(new[0, at]), int(new[-1, (at + 5) % NEW_TOKENS])]}


def sampled_ends(_new: Tensor) -> dict[str, Any]:
    return {**SAMPLED["bare"], "eos_token_id": list(range(3, 90, 9))}


def stop_strings(new: Tensor, start: int) -> dict[str, Any]:
    texts = demo_tokenizer().batch_decode(new)
    stops = [texts[0][start : start + 4], texts[-1][start + 9 : start + 11]]
    return {"stop_strings": stops, "tokenizer": demo_tokenizer(), "max_new_tokens": 14}


class DigitSum(hf.StoppingCriteria):
    """Ends a text of one row when its last ids add up to a multiple of `divisor`."""

    def __init__(self, divisor: int):
        self.divisor = divisor

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -4:].sum(1) % self.divisor == 0


THREES, SEVENS = DigitSum(3), DigitSum(7)

ENDS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    **{f"ends at {at}": lambda new, at=at: end_tokens(new, at) for at in (0, 1, 4, 11)},
    **{f"stop strings at {at}": lambda new, at=at: stop_strings(new, at) for at in (3, 17)},
    "sampled ends": sampled_ends,
    "criterion": lambda new: {"stopping_criteria": [SEVENS]},
    "criterion, ends": lambda new: {"stopping_criteria": [THREES], "eos_token_id": int(new[0, -3])},
}
"""By the text that would go on: drafts follow it behind the end."""

FEATURES = (*PROCESSORS, *SAMPLED, *OTHERS, *SHORT, *ENDS)


def can_be_asked(name: str, feature: str, _loop: str, rows: int) -> bool:
    """The caller's code may look at all rows of a batch (tests/generate/test_callers_code.py); strings need a
    tokenizer."""
    if "criterion" in feature or feature == "prefix_allowed_tokens":
        return rows == 1
    return name == "demo-target" or "strings" not in feature


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "feature", "loop", "rows"), matrix(TARGETS, FEATURES, [*LOOPS], (1, 3), allowed=can_be_asked)
)
@pytest.mark.thorough(every=3)
def test_whatever_is_asked_the_text_is_plain(name: str, feature: str, loop: str, rows: int) -> None:
    """Drafts follow the text for a while, then go astray."""
    inputs, drafts = prompts(name, rows), dict[str, Any](oracle=rows)
    if feature in ENDS:
        new = free_text(name, rows)
        how = ENDS[feature](new)
        drafts |= {"truth": torch.cat((inputs["input_ids"], new), 1)}
    elif feature in SHORT:
        how, drafts = SHORT[feature], {}
        if feature == "max_length":
            how = {**how, "max_length": inputs["input_ids"].shape[1] + 7}
    else:
        how = {**PROCESSORS, **SAMPLED, **OTHERS}[feature]
    assert_plain(name, inputs, loop, **how, **drafts)


def test_what_is_asked_changes_the_text() -> None:
    """Else the test above would hold for a loop that forgets it."""
    changes = ({}, *PROCESSORS.values(), *SAMPLED.values())
    texts = [str(write("llama", prompts("llama", 3), **how).tolist()) for how in changes]
    texts.append(str(write("llama", prompts("llama", 3), seed=1, **SAMPLED["bare"]).tolist()))
    assert len(set(texts)) == len(texts)


# --- many prompts -----------------------------------------------------------------------------------------------------

GROUPS = (1,) * 8 + (3,) * 4 + (8,) * 5  # batch sizes: 60 prompts for each target,
DEMO_GROUPS = (1,) * 4 + (3,) * 2 + (8,) * 2  # 26 long ones for the demo target


@cache
def batches(name: str) -> list[dict[str, Tensor]]:
    groups = DEMO_GROUPS if name == "demo-target" else GROUPS
    left = prompts_for(name, sum(groups))
    return [left_padded([left.pop() for _ in range(size)]) for size in groups]


@pytest.mark.slow
@pytest.mark.contract
@pytest.mark.parametrize(("name", "loop"), [*itertools.product(TARGETS, LOOPS)])
def test_many_prompts(name: str, loop: str) -> None:
    """506 over all targets and loops: batches of 1, 3 and 8, ragged, chunked and not, right and wrong drafts."""
    sizes = set()
    for index, inputs in list(enumerate(batches(name)))[[*LOOPS].index(loop) :: len(LOOPS)]:
        rows = len(inputs["input_ids"])
        depth = index % 7 + (1 if "chain" in loop else 2)  # a tree has two levels
        settings = {"num_assistant_tokens": depth}
        chunk = 5 if index % 3 == 0 else None
        assert_plain(name, inputs, loop, oracle=index, settings=settings, prefill_chunk_size=chunk)
        sizes.add(rows)
    if loop in COMPILED:  # else all of it may have been served by eager code
        made = {(kind, rows) for kind, rows, *_ in Pair.of(drafter_of(name)).graphs.keys}
        assert made >= {(kind, rows) for kind in ("verify", "advance") for rows in sizes}


def test_oracle_reaches_every_number_of_accepted_tokens() -> None:
    """Else the tests above would not see what they are for."""
    for loop in SHAPES:
        ended = torch.zeros(5, dtype=torch.long)  # rounds that accepted 0, 1, ... 4 tokens and no more
        for seed, inputs in enumerate(batches("llama")[:8]):
            assert_plain("llama", inputs, loop, oracle=seed, settings={"num_assistant_tokens": 4})
            stats = stats_of("llama")
            reached = torch.tensor([stats.rounds, *stats.accepted_at, 0])
            ended[: len(reached) - 1] += reached[:-1] - reached[1:]
        assert ended.min() > 0, f"{loop}: {ended.tolist()}"


# --- what is drafted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loop", "rows"), [*itertools.product(SHAPES, (1, 3))])
@pytest.mark.thorough(every=4)
def test_what_is_drafted_does_not_change_the_text(loop: str, rows: int) -> None:
    """Nothing, the drafter's tokens or others, as many as dice say, anew in every round."""
    for seed in range(4):
        with switching_policies() as made:
            assert_plain("qwen3", prompts("qwen3", rows), loop, seed=seed, **SAMPLED["top_k"], max_new_tokens=40)
        assert len(made[0].kinds) > 3


@pytest.mark.parametrize("schedule", ["planned", "pid", "constant"])
@pytest.mark.parametrize("name", ["demo-target", "llama"], ids=["right", "never right"])
def test_schedules_do_not_change_the_text(schedule: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that do not pay rest, and rounds are timed."""
    monkeypatch.setattr(RoundClock, "now", staticmethod(time.perf_counter))
    settings = {"num_assistant_tokens_schedule": schedule}
    if schedule == "pid":  # graphs draft one length, and say so
        settings["acceleration"] = "eager"
    assert_plain(name, prompts(name, 1), "chain", settings=settings, **SAMPLED["cold"], max_new_tokens=90)
    assert name == "demo-target" or stats_of(name).skipped_rounds > 8


@pytest.mark.parametrize("setting", ["bare", "top_p"])
@pytest.mark.thorough(every=4)
def test_drafts_by_the_targets_noise_are_accepted(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than of arg-max drafts, which know nothing of the noise; and trees of 16 nodes above chains."""
    lengths = {}
    shapes: dict[str, dict[str, Any]] = {"tree": {"draft_top_k": 3, "draft_tree_size": 16}, "chain": {}, "arg-max": {}}
    for shape, fields in shapes.items():
        if shape == "arg-max":
            monkeypatch.setattr("eagle31_hf.drafter.propose.perturbed", lambda scores, _noise: scores)
        rounds = tokens = 0
        settings = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant", **fields}
        with configured(drafter_of("demo-target"), **settings) as drafter:
            for prompt in prompts_for("demo-target", 8, seed=2):
                write("demo-target", left_padded([prompt]), **SAMPLED[setting], assistant_model=drafter)
                rounds += stats_of("demo-target").rounds
                tokens += stats_of("demo-target").new_tokens
        lengths[shape] = tokens / rounds
    assert lengths["tree"] > lengths["chain"] > 1.05 * lengths["arg-max"], lengths


# --- noise and scores that cannot be followed -------------------------------------------------------------------------


def test_random_numbers_that_a_streamer_takes_are_told() -> None:
    """What processors and criteria take is followed (tests/generate/test_callers_code.py)."""

    class Rolling(Shown):
        def put(self, value: Tensor) -> None:
            torch.rand(1)

    write("llama", prompts("llama", 1), **SAMPLED["bare"], assistant_model=drafter_of("llama"), streamer=Rolling())
    assert "random numbers" in stats_of("llama").fallbacks[-1]


def test_noise_that_is_unknown_goes_to_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle31_hf.generate.routes.why_noise_is_unknown", lambda device: f"dice of {device}")
    how = {"loop": "plain", "why": "dice of cpu", **SAMPLED["bare"]}
    assert_same_text(target_of("llama"), drafter_of("llama"), prompts("llama", 1), **how)


def test_scores_that_are_no_numbers_are_an_error() -> None:
    def forbid(_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, float("-inf"))

    how = {**SAMPLED["bare"], "logits_processor": [forbid]}
    with pytest.raises(ValueError, match="no numbers"):
        write("llama", prompts("llama", 1), **how, assistant_model=drafter_of("llama"))


@pytest.mark.contract
@pytest.mark.parametrize("loop", SHAPES)
def test_scores_of_rows_that_end_early(loop: str) -> None:
    inputs, new = prompts("llama", 3), free_text("llama", 3)
    end, truth = int(new[2, -15]), torch.cat((inputs["input_ids"], new), 1)
    how = {"eos_token_id": end, "return_dict_in_generate": True, "output_logits": True}
    plain = write("llama", inputs, **how)
    length = inputs["input_ids"].shape[1]
    with configured(drafter_of("llama"), **LOOPS[loop]) as drafter, oracle_drafts(truth, length, right=5):
        ours = write("llama", inputs, assistant_model=drafter, **how)
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.logits) == len(plain.logits)
    for row, tokens in enumerate(plain.sequences[:, length:].tolist()):
        written = tokens.index(end) + 1 if end in tokens else len(tokens)
        for step in range(written):
            torch.testing.assert_close(ours.logits[step][row], plain.logits[step][row], atol=1e-4, rtol=1e-4)
        assert not any(bool(step[row].any()) for step in ours.logits[written:]), "nothing was written there"


# --- bf16 -------------------------------------------------------------------------------------------------------------


@cache
def bf16_pair() -> Eagle31Drafter:
    target = hf.AutoModelForCausalLM.from_pretrained(MODELS / "demo-target", dtype=torch.bfloat16).eval()
    return Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)


@cache
def bf16_texts() -> list[tuple[dict[str, Any], Tensor]]:
    """Six prompts, and what the target alone writes after them; a machine without bf16 arithmetic takes long for it."""
    call: dict[str, Any] = {"do_sample": False, "max_new_tokens": 32}
    calls = [left_padded([prompt]) | call for prompt in prompts_for("demo-target", 6)]
    return [(call, bf16_pair().binding.model.generate(**call)) for call in calls]


@pytest.mark.slow
@pytest.mark.parametrize("loop", SHAPES)
def test_bf16_differs_only_in_ties(loop: str) -> None:
    target, ties = bf16_pair().binding.model, 0
    with configured(bf16_pair(), **SHAPES[loop]) as drafter:
        for call, plain in bf16_texts():
            ties += assert_same_or_tie(target, call, plain, target.generate(**call, assistant_model=drafter))
    assert ties < len(bf16_texts()) // 2, "most texts have no tie at all"
