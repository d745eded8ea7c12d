"""The contract for scores and logits that `generate` returns; streams and several texts are compared beside texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import NEW_TOKENS, SHAPES, batch_of, greedy

from helpers import assert_same_text, configured, drafter_of, left_padded, oracle_drafts, prompts_for, target_of


@pytest.mark.contract
@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 0.7, "top_p": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loop", SHAPES)
def test_scores_and_logits(loop: str, size: int, how: dict[str, Any]) -> None:
    kwargs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": False, **how}
    kwargs |= {"repetition_penalty": 1.3, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    for name in ("llama", "gemma3"):
        inputs = left_padded(prompts_for(name, size, seed=17))
        assert_same_text(target_of(name), drafter_of(name), inputs, oracle=0, settings=SHAPES[loop], **kwargs)


@pytest.mark.contract
@pytest.mark.parametrize("loop", SHAPES)
def test_scores_of_rows_that_end_early(loop: str) -> None:
    free = batch_of("llama", 3)
    kwargs = {"eos_token_id": int(free.plain[2, -15]), "return_dict_in_generate": True, "output_logits": True}
    plain = greedy("llama", free.inputs, **kwargs)
    with (
        configured(drafter_of("llama"), num_assistant_tokens=6, **SHAPES[loop]) as drafter,
        oracle_drafts(free.plain, free.prompt_length, right=6),
    ):
        ours = greedy("llama", free.inputs, assistant_model=drafter, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.logits) == len(plain.logits)
    new = plain.sequences[:, free.prompt_length :]
    for row in range(3):
        ends = (new[row] == kwargs["eos_token_id"]).nonzero()
        written = int(ends[0]) + 1 if len(ends) else new.shape[1]
        for step in range(written):
            torch.testing.assert_close(ours.logits[step][row], plain.logits[step][row], atol=1e-4, rtol=1e-4)
        assert not any(bool(step[row].any()) for step in ours.logits[written:]), "nothing was written there"
