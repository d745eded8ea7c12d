"""The random pair that is measured: its target counts, and its drafter is right as often as told."""

from __future__ import annotations

import pytest
import torch

from random_pair import SIZES, counted_on, counting_drafter, random_prompts, random_target

VOCABULARY = 512


@pytest.mark.parametrize("four_bit", [False, True], ids=["bf16", "nf4"])
@pytest.mark.parametrize("right", [0.5, 0.9])
def test_it_counts_and_drafts_are_right_as_often_as_told(four_bit: bool, right: float) -> None:
    if four_bit:
        pytest.importorskip("bitsandbytes")
    target = random_target("tiny", dtype=torch.bfloat16, device="cpu", four_bit=four_bit)
    drafter = counting_drafter(target, draft_vocabulary=VOCABULARY, right=right)
    drafter.generation_config.num_assistant_tokens = 1
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    prompts = random_prompts(2, 40, VOCABULARY, "cpu")
    how = {"do_sample": False, "max_new_tokens": 150}
    plain = target.generate(**prompts, **how)
    assert counted_on(plain, 40, SIZES["tiny"]["vocab_size"])
    wrong = plain.clone()
    wrong[1, 50] += 1
    assert not counted_on(wrong, 40, SIZES["tiny"]["vocab_size"])
    assert torch.equal(target.generate(**prompts, **how, assistant_model=drafter), plain)
    assert drafter.stats.loop == "own"
    assert drafter.stats.accepted / drafter.stats.drafted == pytest.approx(right, abs=0.12)


def test_chains_and_trees_are_accepted_to_their_depths() -> None:
    target = random_target("tiny", dtype=torch.float32, device="cpu")
    drafter = counting_drafter(target, draft_vocabulary=VOCABULARY, right=1.0)
    settings = drafter.generation_config
    settings.num_assistant_tokens_schedule, settings.num_assistant_tokens = "constant", 5
    prompts = random_prompts(1, 30, VOCABULARY, "cpu")
    for settings.draft_top_k in (1, 2):
        out = target.generate(**prompts, do_sample=False, max_new_tokens=61, assistant_model=drafter)
        assert counted_on(out, 30, SIZES["tiny"]["vocab_size"])
        assert drafter.stats.rounds == 10, "six tokens each behind the first"
