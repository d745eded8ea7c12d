"""Steps by graphs make way for the eager ones where graphs cannot be made, and go when weights change."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_pairs import CHAIN, NARROW, pair_of, write

from eagle31_hf.graphs import captured, graphs
from eagle31_hf.loop.pair import Pair
from helpers import random_prompts


def test_nothing_is_compiled_by_itself() -> None:
    drafter = pair_of("llama")
    assert drafter.generation_config.acceleration == "auto"
    drafter.binding.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, assistant_model=drafter)
    assert Pair.of(drafter).graphs is None


def failing(failure: BaseException) -> Callable:
    def make_nothing(*args: Any, **kwargs: Any) -> Any:
        raise failure

    return make_nothing


def test_a_failing_maker_leaves_the_text_as_it_is_and_says_why(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(captured.CapturesSteps, "make", failing(RuntimeError("no room here\nat line 7")))
    drafter = pair_of("llama")
    with caplog.at_level(logging.WARNING, logger="eagle31_hf.graphs.graphs"):
        for _ in range(3):
            plain, ours = write(drafter, random_prompts(1), **CHAIN)
            assert torch.equal(plain, ours)
            (reason,) = drafter.stats.fallbacks
            assert "no room here" in reason
            assert "\n" not in reason
    assert len(caplog.records) == 1
    assert Pair.of(drafter).graphs.keys == []


@pytest.mark.parametrize("fields", [CHAIN, NARROW], ids=["chain", "tree"])
def test_a_target_with_a_hook_stays_eager(fields: dict[str, Any], uncompiled: None) -> None:
    """A graph would not run it again."""
    calls: list[int] = []
    drafter = pair_of("llama", layers=3)
    drafter.binding.model.register_forward_hook(lambda *_: calls.append(1))
    plain, ours = write(drafter, random_prompts(3), **fields)
    assert torch.equal(plain, ours)
    assert calls
    assert not Pair.of(drafter).graphs.keys


def test_a_target_on_several_devices_stays_eager(uncompiled: None) -> None:
    drafter = pair_of("llama")
    drafter.binding.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    plain, ours = write(drafter, random_prompts(1), **CHAIN)
    assert torch.equal(plain, ours)
    assert not Pair.of(drafter).graphs.keys


def test_an_interrupt_while_compiling_is_not_swallowed(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = pair_of("llama")
    with monkeypatch.context() as patch:
        patch.setattr(captured.CapturesSteps, "make", failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            write(drafter, random_prompts(1), **CHAIN)
    plain, ours = write(drafter, random_prompts(1), **CHAIN)
    assert torch.equal(plain, ours)
    assert drafter.stats.fallbacks == []


def test_graphs_go_when_weights_change() -> None:
    """What is written through `.data` leaves the version of a tensor as it was, and packed weights are copies."""
    drafter = pair_of("llama")
    weight = drafter.binding.model.model.layers[1].self_attn.q_proj.weight
    for change in (lambda: weight.requires_grad_(False).mul_(2), lambda: weight.data.add_(0.01)):
        steps = Pair.of(drafter).current_graphs()
        assert steps.copied_bytes
        assert Pair.of(drafter).current_graphs() is steps
        change()
        assert Pair.of(drafter).current_graphs() is not steps


def test_large_weights_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PACKED_BYTES", 0)
    drafter = pair_of("llama")
    assert not Pair.of(drafter).current_graphs().copied_bytes


def test_graphs_are_not_copied_with_their_target() -> None:
    pair = Pair.of(pair_of("llama"))
    assert copy.deepcopy(pair) is None
    assert pickle.loads(pickle.dumps(pair)) is None
