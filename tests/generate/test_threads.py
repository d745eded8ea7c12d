"""Threads that share one target and one drafter, as a web server's do, write what they would write one by one."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf.errors import NotAttachedError
from eagle31_hf.stats import LastStats, SpeculationStats
from helpers import (
    Shown,
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    random_drafter,
    random_prompts,
    side_by_side,
    target_of,
    use_fixed_shapes_only,
    write,
)

TREE: dict[str, Any] = {"draft_top_k": 2, "draft_tree_size": 11}


class OnPurpose(Exception):
    """Raised by a streamer."""


@pytest.mark.slow
@pytest.mark.parametrize("acceleration", ["eager", "compile"])
@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.thorough(every=4)
def test_texts_are_those_of_one_call_after_the_other(
    shape: dict[str, Any], acceleration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fixed_shapes_only(monkeypatch)
    prompts = random_prompts(67, seed=8)  # of many lengths, alone and in batches, for texts of many lengths
    rows = [left_padded([prompts.pop() for _ in range(1 + index % 3)]) for index in range(32)]
    work = [(inputs, 2 + 3 * (index % 4)) for index, inputs in enumerate(rows)]
    alone = [write("llama", inputs, max_new_tokens=length) for inputs, length in work]

    def call(index: int) -> Tensor | None:
        inputs, length = work[index]
        if index % 5 == 4:  # its forwards pass the same hooks
            return write("llama", inputs, max_new_tokens=length)
        raises = {"streamer": Shown(OnPurpose, 1 + index % 3)} if index % 9 == 0 else {}
        how = {"assistant_model": drafter, "return_dict_in_generate": True, **raises}
        try:
            out = write("llama", inputs, max_new_tokens=length, **how)
        except OnPurpose:
            return None
        assert out.speculation_stats is drafter.stats, "the thread's own"
        assert out.speculation_stats.new_tokens == length * len(inputs["input_ids"])
        return out.sequences

    settings = {"num_assistant_tokens": 4, "acceleration": acceleration, **shape}
    with configured(drafter_of("llama"), **settings) as drafter:
        texts = side_by_side(call, len(work))
    assert None in texts
    assert all(text is None or torch.equal(text, plain) for text, plain in zip(texts, alone, strict=True))
    assert not any(drafter.binding.taps._caught.values())


def test_stats_are_the_threads_own() -> None:
    last = LastStats()
    assert last.get() is None
    here, there = SpeculationStats(), SpeculationStats()
    with ThreadPoolExecutor(1) as other:
        other.submit(last.set, there).result()
        assert last.get() is there, "this thread has made no call"
        last.set(here)
        assert last.get() is here
        assert other.submit(last.get).result() is there
    twin = pickle.loads(pickle.dumps(last))
    assert twin.get() == here


def test_a_copied_drafter_leaves_the_target_behind() -> None:
    drafter = drafter_of("llama")
    ours = sum(tensor.nbytes for tensor in drafter.state_dict().values())
    assert len(pickle.dumps(drafter)) < 2 * ours
    for twin in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert not twin.is_attached
        twin.attach(target_of("llama"))
        assert_same_text(target_of("llama"), twin, left_padded(random_prompts(1)))
        twin.detach()
    sharing = random_drafter(target_of("llama"), aux_layers=[1, 2, 4], own_lm_head=False, draft_vocab_size=40)
    with pytest.raises(NotAttachedError):  # its rows of the target's head stay behind, too
        copy.deepcopy(sharing).draft_logits(torch.zeros(1, 1, 64))
    sharing.detach()
