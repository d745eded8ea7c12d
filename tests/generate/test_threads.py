"""Threads that share one target and one drafter, as a web server's do, write what they would write one by one."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf.stats import LastStats, SpeculationStats
from helpers import (
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    random_prompts,
    target_of,
    use_fixed_shapes_only,
)

THREADS = 8
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "dynamic": {"draft_top_k": 2, "draft_tree_size": 11},
    "chain compiled": {"acceleration": "compile"},
    "dynamic compiled": {"draft_top_k": 2, "draft_tree_size": 11, "acceleration": "compile"},
}


class OnPurpose(Exception):
    """Raised by a streamer."""


class Raising:
    """A streamer that gives up after some blocks."""

    def __init__(self, after: int):
        self.left = after

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise OnPurpose

    def end(self) -> None: ...


def write(inputs: dict[str, Tensor], length: int, **kwargs: Any) -> Any:
    return target_of("llama").generate(**inputs, max_new_tokens=length, do_sample=False, pad_token_id=0, **kwargs)


def tasks(count: int, largest_batch: int) -> list[tuple[dict[str, Tensor], int]]:
    """Prompts of many lengths, alone and in batches, with texts of many lengths."""
    prompts = random_prompts(2 * count + largest_batch, seed=8)
    return [
        (left_padded([prompts.pop() for _ in range(1 + index % largest_batch)]), 2 + 3 * (index % 4))
        for index in range(count)
    ]


def side_by_side(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of the calls, made by `THREADS` threads that begin together."""
    together = threading.Barrier(THREADS)

    def begin(share: list[tuple[int, Callable[[], Any]]]) -> list[tuple[int, Any]]:
        together.wait()
        return [(index, call()) for index, call in share]

    shares = [list(enumerate(calls))[start::THREADS] for start in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        done = [pair for share in pool.map(begin, shares) for pair in share]
    return [result for _, result in sorted(done, key=lambda pair: pair[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "each"), [("chain", 8), ("dynamic", 3), ("chain compiled", 3), ("dynamic compiled", 3)]
)
@pytest.mark.thorough(every=4)
def test_texts_are_those_of_one_call_after_the_other(shape: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)
    work = tasks(THREADS * each, 3)
    alone = [write(inputs, length) for inputs, length in work]

    def call(index: int) -> Tensor | str:
        inputs, length = work[index]
        raises = {"streamer": Raising(1 + index % 3)} if index % 10 == 9 and len(inputs["input_ids"]) == 1 else {}
        try:
            out = write(inputs, length, assistant_model=drafter, return_dict_in_generate=True, **raises)
        except OnPurpose:
            return "raised on purpose"
        assert out.speculation_stats is drafter.stats, "the thread's own"
        assert out.speculation_stats.new_tokens == length * len(inputs["input_ids"])
        return out.sequences

    with configured(drafter_of("llama"), num_assistant_tokens=4, **SHAPES[shape]) as drafter:
        texts = side_by_side([lambda index=index: call(index) for index in range(len(work))])  # type: ignore[misc]
    raised = [text for text in texts if isinstance(text, str)]
    assert raised
    for text, plain in zip(texts, alone, strict=True):
        assert isinstance(text, str) or torch.equal(text, plain)
    assert drafter.binding.taps.are_empty


def test_plain_calls_beside_ours_do_not_disturb_the_drafts() -> None:
    """Their forwards pass the same hooks."""
    inputs, done = left_padded(prompts_for("llama", 1)), threading.Event()
    plain = write(inputs, 24)

    def keep_generating() -> int:
        count = 0
        while not done.is_set():
            write(left_padded(random_prompts(3, seed=count)), 5)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool, configured(drafter_of("llama"), num_assistant_tokens=4) as drafter:
        beside = pool.submit(keep_generating)
        for seed in range(6):
            with oracle_drafts(plain, inputs["input_ids"].shape[1], seed=seed):
                assert torch.equal(write(inputs, 24, assistant_model=drafter), plain)
        done.set()
        assert beside.result() > 0


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
        inputs = left_padded(prompts_for("llama", 1))
        assert torch.equal(write(inputs, 8, assistant_model=twin), write(inputs, 8))
        twin.detach()
