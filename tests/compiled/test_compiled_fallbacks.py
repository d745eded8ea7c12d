"""Compiled steps make way for the eager ones where they cannot be, and go when weights change."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_pairs import CHAIN, NARROW, pair_of, write
from torch import Tensor
from torch.utils._pytree import tree_map_only

from eagle31_hf.compiled import graph_makers
from eagle31_hf.compiled.graphs import Graphs
from eagle31_hf.target.cache_argument import CACHE_ARGUMENT
from helpers import random_prompts

pytestmark = pytest.mark.usefixtures("unpacked_weights")


def test_nothing_is_compiled_by_itself() -> None:
    drafter = pair_of("llama")
    assert drafter.generation_config.acceleration == "auto"
    drafter.require_binding().model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, assistant_model=drafter)
    assert drafter.require_binding().compiled is None


def failing(failure: Exception) -> Callable:
    def compile_nothing(*args: Any, **kwargs: Any) -> Any:
        raise failure

    return compile_nothing


def test_a_failing_compiler_leaves_the_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", failing(RuntimeError("no compiler here\nat line 7")))
    drafter = pair_of("llama")
    with caplog.at_level(logging.WARNING, logger="eagle31_hf.compiled.graphs"):
        for _ in range(3):
            plain, ours = write(drafter, random_prompts(1), **CHAIN)
            assert torch.equal(plain, ours)
            (reason,) = drafter.stats.fallbacks
            assert "no compiler here" in reason
            assert "\n" not in reason
    assert len(caplog.records) == 1
    assert drafter.require_binding().compiled.keys == []


def test_a_graph_that_computes_something_else_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(step: Callable) -> Callable:
        return lambda *inputs: tree_map_only(Tensor, lambda output: output.flip(-1), step(*inputs))

    monkeypatch.setattr(graph_makers, "compile_step", wrong)
    drafter = pair_of("llama")
    plain, ours = write(drafter, random_prompts(2), **CHAIN)
    assert torch.equal(plain, ours)
    assert "is off by" in drafter.stats.fallbacks[0]


def counts_what_is_cached(module: Any, args: Any, kwargs: dict) -> None:
    kwargs[CACHE_ARGUMENT].get_seq_length()


def looks_at_the_data(module: Any, args: Any, kwargs: dict) -> None:
    assert kwargs["input_ids"].sum() > 0


@pytest.mark.parametrize(
    ("hook", "reason"), [(counts_what_is_cached, "asks its cache"), (looks_at_the_data, "data-dependent")]
)
def test_a_target_that_cannot_be_compiled_stays_eager(
    hook: Callable, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **_: compile_(step, fullgraph=True, backend="eager"))
    drafter = pair_of("llama", layers=3)
    drafter.require_binding().model.register_forward_pre_hook(hook, with_kwargs=True)
    for fields in (CHAIN, NARROW):
        plain, ours = write(drafter, random_prompts(3), **fields)
        assert torch.equal(plain, ours)
        (found,) = drafter.stats.fallbacks
        assert reason in found.lower()


@pytest.mark.slow
def test_a_hook_that_keeps_changing_costs_the_graph_not_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at once in a generation; graph after graph is made for it until the compiler has had enough."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **_: compile_(step, fullgraph=True, backend="eager"))
    drafter = pair_of("llama", layers=3)

    class Counter:
        count = 0

        def __call__(self, *_: Any) -> None:
            self.count += 1

    drafter.require_binding().model.register_forward_hook(Counter())
    reasons = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            plain, ours = write(drafter, random_prompts(1), **CHAIN)
            assert torch.equal(plain, ours)
            reasons.append(drafter.stats.fallbacks)
    assert reasons[0] == [], "one graph serves a whole generation"
    assert "recompile" in reasons[-1][0].lower()


def test_a_target_on_several_devices_stays_eager(uncompiled: None) -> None:
    drafter = pair_of("llama")
    drafter.require_binding().model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    plain, ours = write(drafter, random_prompts(1), **CHAIN)
    assert torch.equal(plain, ours)
    assert "2 devices" in drafter.stats.fallbacks[0]


def test_an_interrupt_while_compiling_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = pair_of("llama")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", failing(KeyboardInterrupt()))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            write(drafter, random_prompts(1), **CHAIN)
    monkeypatch.setattr(graph_makers, "compile_step", lambda step: step)
    plain, ours = write(drafter, random_prompts(1), **CHAIN)
    assert torch.equal(plain, ours)
    assert drafter.stats.fallbacks == []


def test_graphs_go_when_weights_change() -> None:
    drafter = pair_of("llama")
    steps = Graphs.of(drafter)
    assert Graphs.of(drafter) is steps
    with torch.no_grad():
        drafter.require_binding().model.lm_head.weight.mul_(2)
    assert Graphs.of(drafter) is not steps


def test_graphs_with_packed_weights_go_when_weights_change_unseen(packed_weights: None) -> None:
    """What is written through `.data` leaves the version of a tensor as it was, and packed weights are copies."""
    drafter = pair_of("llama")
    steps = Graphs.of(drafter)
    assert steps.freezes_weights
    assert Graphs.of(drafter) is steps
    drafter.require_binding().model.model.layers[1].self_attn.q_proj.weight.data += 0.01
    assert Graphs.of(drafter) is not steps


def test_large_weights_are_not_packed() -> None:
    drafter = pair_of("llama")
    assert not Graphs.of(drafter).freezes_weights, "every graph would hold a copy"


def test_graphs_are_not_copied_with_their_target() -> None:
    steps = Graphs.of(pair_of("llama"))
    assert copy.deepcopy(steps) is None
    assert pickle.loads(pickle.dumps(steps)) is None
