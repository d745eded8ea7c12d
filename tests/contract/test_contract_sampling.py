"""The contract under sampling: after `torch.manual_seed`, the text is the one that plain `generate` samples, token for
token, and the generator is left where plain `generate` leaves it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import transformers as hf
from agreement import OWN, SEED, SHAPES, TARGETS, assert_loop_agrees, batch_of, greedy, plain_batch

from eagle31_hf.loop import round as rounds
from eagle31_hf.stats import PhaseClock, SpeculationStats
from helpers import (
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    prompts_for,
    seeded,
    switching_policies,
    target_of,
)
from matrix import matrix, pairwise

SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {"temperature": 1.0, "top_k": 0},
    "cold": {"temperature": 0.1, "top_k": 0},
    "hot": {"temperature": 5.0, "top_k": 0},
    "top_k": {"temperature": 0.9, "top_k": 20},
    "top_p": {"temperature": 0.7, "top_k": 0, "top_p": 0.8},
    "several": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "typical": {"typical_p": 0.7, "top_k": 0},
    "eta": {"eta_cutoff": 0.02, "epsilon_cutoff": 0.01, "top_k": 0},
    "penalty": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "top_k": 0},
}
SAMPLED = {name: {"do_sample": True} | setting for name, setting in SETTINGS.items()}


def stats_of(name: str) -> SpeculationStats:
    stats = drafter_of(name).stats
    assert stats is not None
    return stats


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting", "loop", "size"), matrix(TARGETS, [*SETTINGS], [*OWN], (1, 3)))
def test_sampled_text_is_plain_generates(name: str, setting: str, loop: str, size: int) -> None:
    """Drafts follow the text for a while, then go astray."""
    batch = batch_of(name, size, **SAMPLED[setting])
    assert assert_loop_agrees(name, batch, OWN[loop], **SAMPLED[setting]) == 0


def test_settings_and_seeds_change_the_text() -> None:
    """Else the test above would hold for a loop that forgets them."""
    texts = [batch_of("llama", 3, **setting).plain.tolist() for setting in (*SAMPLED.values(), {})]
    assert len({str(text) for text in texts}) == len(texts)
    with seeded(SEED + 1):
        other = target_of("llama").generate(
            **batch_of("llama", 3).inputs, **SAMPLED["bare"], max_new_tokens=24, pad_token_id=0
        )
    assert other.tolist() != texts[0]


@pytest.mark.contract
@pytest.mark.parametrize(("loop", "setting", "size"), pairwise([*SHAPES], ("bare", "top_p", "penalty"), (1, 3)))
def test_the_next_call_goes_on_alike(loop: str, setting: str, size: int) -> None:
    """By the drafter's own drafts, with ends within a round: generator and text are plain's."""
    inputs = left_padded(prompts_for("llama", size, seed=9))
    ends = [token for token in range(3, 90, 9) if token not in inputs["input_ids"][:, -1]]  # no prompt is over
    how = {**SAMPLED[setting], "max_new_tokens": 15, "pad_token_id": 0, "eos_token_id": ends}
    settings = {"num_assistant_tokens": 4, **SHAPES[loop]}
    assert_same_text(target_of("llama"), drafter_of("llama"), inputs, seed=3, settings=settings, **how)
    assert stats_of("llama").fallbacks == []


@pytest.mark.parametrize("shape", SHAPES)
def test_several_texts_of_one_prompt(shape: str) -> None:
    inputs = left_padded(prompts_for("llama", 2, seed=6))
    how = {**SAMPLED["bare"], "num_return_sequences": 3}
    settings = {"num_assistant_tokens": 4, **SHAPES[shape]}
    text = assert_same_text(
        target_of("llama"), drafter_of("llama"), inputs, settings=settings, **how, max_new_tokens=24, pad_token_id=0
    )
    assert len({str(row) for row in text[:3].tolist()}) == 3, "each has noise of its own"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.thorough(every=4)
def test_what_is_drafted_does_not_change_the_text(shape: str, size: int) -> None:
    """Nothing, the drafter's tokens or others, as many as dice say, anew in every round."""
    batch = batch_of("qwen3", size, **SAMPLED["top_k"], max_new_tokens=40)
    for _ in range(4):
        with switching_policies() as made:
            loop = SHAPES[shape] | {"num_assistant_tokens": 5}
            assert_loop_agrees("qwen3", batch, loop, oracle=False, **SAMPLED["top_k"], max_new_tokens=40)
        assert len(made[0].kinds) > 3


@pytest.mark.parametrize("schedule", ["planned", "pid", "constant"])
@pytest.mark.parametrize("family", ["demo-target", "llama"], ids=["right", "never right"])
def test_schedules_do_not_change_the_text(schedule: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that do not pay rest, and rounds are timed."""
    monkeypatch.setattr(PhaseClock, "now", staticmethod(time.perf_counter))
    how = {**SAMPLED["cold"], "max_new_tokens": 90}
    batch = batch_of(family, 1, **how)
    eager = {"acceleration": "eager"} if schedule == "pid" else {}  # graphs draft one length, and say so
    loop = SHAPES["chain"] | eager | {"num_assistant_tokens_schedule": schedule}
    assert assert_loop_agrees(family, batch, loop, oracle=False, **how) == 0
    if family == "llama":
        assert stats_of(family).skipped_rounds > 8


def test_drafts_from_the_text_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    real = rounds.given_chain
    monkeypatch.setattr(rounds, "given_chain", lambda *args: given.append(args) or real(*args))
    inputs = left_padded([[3, 5, 1, 9, 3, 5, 1, 9, 3, 5, 1]])
    how = {**SAMPLED["cold"], "max_new_tokens": 60}
    batch = plain_batch("llama", inputs, **how)
    loop = SHAPES["chain"] | {"num_assistant_tokens_schedule": "planned"}
    assert assert_loop_agrees("llama", batch, loop, oracle=False, **how) == 0
    assert len(given) > 3


@pytest.mark.parametrize("setting", ["bare", "top_p"])
@pytest.mark.thorough(every=4)
def test_drafts_by_the_targets_noise_are_accepted(setting: str) -> None:
    """More of them than of arg-max drafts, which know nothing of the noise; and trees of 16 nodes above chains."""
    lengths = {}
    shapes = {"chain": {}, "tree": {"draft_top_k": 3, "draft_tree_size": 16}}
    for name, how in (("chain", {}), ("tree", {}), ("arg-max", {})):
        rounds = tokens = 0
        with pytest.MonkeyPatch.context() as patch:
            if name == "arg-max":
                patch.setattr("eagle31_hf.drafter.propose.perturbed", lambda scores, _noise: scores)
            fields = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant", "speculation_loop": "own"}
            with configured(drafter_of("demo-target"), **fields, **shapes.get(name, {})) as drafter:
                for prompt in prompts_for("demo-target", 8, seed=2):
                    greedy("demo-target", left_padded([prompt]), **SAMPLED[setting], **how, assistant_model=drafter)
                    rounds, tokens = (
                        rounds + stats_of("demo-target").rounds,
                        tokens + stats_of("demo-target").new_tokens,
                    )
        lengths[name] = tokens / rounds
    assert lengths["tree"] > lengths["chain"] > 1.05 * lengths["arg-max"], lengths


def test_random_numbers_that_a_streamer_takes_are_told() -> None:
    """What processors and criteria take is followed (tests/generate/test_callers_code.py)."""

    class Rolling(hf.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            torch.rand(1)

        def end(self) -> None:
            pass

    inputs = left_padded(prompts_for("llama", 1))
    with configured(drafter_of("llama"), num_assistant_tokens=4, speculation_loop="own") as drafter:
        greedy("llama", inputs, **SAMPLED["bare"], assistant_model=drafter, streamer=Rolling())
    assert "random numbers" in stats_of("llama").fallbacks[-1]


def test_noise_that_is_unknown_goes_to_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle31_hf.generate.routes.why_noise_is_unknown", lambda device: f"dice of {device}")
    batch = batch_of("llama", 1, **SAMPLED["bare"])
    ours = greedy("llama", batch.inputs, **SAMPLED["bare"], assistant_model=drafter_of("llama"))
    assert torch.equal(ours, batch.plain)
    assert (stats_of("llama").loop, stats_of("llama").reason) == ("plain", "dice of cpu")


def test_scores_that_are_no_numbers_are_an_error() -> None:
    class Forbidding(hf.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, float("-inf"))

    with (
        configured(drafter_of("llama"), speculation_loop="own") as drafter,
        pytest.raises(ValueError, match="no numbers"),
    ):
        greedy(
            "llama",
            left_padded(prompts_for("llama", 1)),
            **SAMPLED["bare"],
            assistant_model=drafter,
            logits_processor=[Forbidding()],
        )
