"""Chains read by recorded kernels: logits and states of one token after the other, and few launches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.state_tape import LastNodes, make_moves, rebuilt_states
from eagle31_hf.errors import IncompatibleTargetError
from eagle31_hf.targets import kernel_tape
from eagle31_hf.targets.mixers import find_mixers
from families import recurrent_target
from helpers import random_drafter

TAPED = {"qwen3_5_text": "torch_chunk_gated_delta_rule", "kimi_linear": "chunk_kimi_delta_attention"}
TAPED |= dict.fromkeys(("nemotron_h", "bamba", "falcon_h1"), "mamba2_chunk_scan")
DRAFTS = 5


def attached(family: str) -> tuple[Any, Eagle31Drafter]:
    target = recurrent_target(family)
    return target, random_drafter(target, aux_layers=[1, 2, 3])


@torch.no_grad()
def read_prompts(drafter: Eagle31Drafter, lengths: list[int]) -> SpeculativeCache:
    binding = drafter.binding
    cache = SpeculativeCache.from_config(
        binding.text_config, batch_size=len(lengths), capacity=64, block=32, masks_by_type=binding.masks_by_type
    )
    ids = torch.arange(3, 3 + max(lengths)).expand(len(lengths), -1)
    cache.place(max(lengths), counts=lengths)
    binding.forward(ids, cache.position_ids(), cache.attention_mask(dtype=binding.compute_dtype), cache)
    cache.commit(lengths)
    return cache


@torch.no_grad()
def verify(drafter: Eagle31Drafter, cache: SpeculativeCache, count: int, after: int = 0) -> Tensor:
    binding, tokens = drafter.binding, torch.arange(40 + after, 40 + after + count).expand(cache.batch_size, -1)
    cache.place(count, is_draft=True)
    mask = cache.attention_mask(dtype=binding.compute_dtype)
    return binding.forward(tokens, cache.position_ids(), mask, cache).logits


@pytest.mark.parametrize("family", [*TAPED, "lfm2"])
def test_the_tape_is_one_token_after_the_other(family: str) -> None:
    _, drafter = attached(family)
    for counts in ([0, 1, 2, 3, 4, 5], [3, 3], [5], [0, 0]):
        lengths = [9 + row for row in range(len(counts))]
        cache, alone = read_prompts(drafter, lengths), read_prompts(drafter, lengths)
        logits = verify(drafter, cache, DRAFTS)
        cache.keep(None, counts)
        for place in range(DRAFTS):
            wanted = verify(drafter, alone, 1, after=place)
            alone.keep(None, [int(count > place) for count in counts])
            rows = [row for row, count in enumerate(counts) if count > place]
            torch.testing.assert_close(logits[rows, place], wanted[rows, 0], atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(cache.with_states, alone.with_states, strict=True):
            for key, state in theirs.held_states().items():
                torch.testing.assert_close(ours.held_states()[key], state, atol=1e-5, rtol=1e-5)


def rebuild(taped: list[Any], last: list[int]) -> None:
    make_moves(rebuilt_states(taped, LastNodes(last, torch.device("cpu"))))


@torch.no_grad()
@pytest.mark.parametrize("family", TAPED)
def test_a_row_that_stands_still_and_one_that_stops_are_exact(family: str) -> None:
    """Tokens that are not kept are no-ops, and a row that keeps none stays as it is bit for bit."""
    _, drafter = attached(family)
    cache = read_prompts(drafter, [9, 9])
    verify(drafter, cache, DRAFTS)
    [(state, recorded)] = cache.with_states[0].taped_states
    for last in range(-1, DRAFTS):
        beside, alone = state.clone(), state.clone()
        rebuild([(beside, recorded)], [last, DRAFTS - 1])
        if last >= 0:
            rebuild([(alone, recorded)], [last, last])
        # Other shapes in memory may round the last bit otherwise; what is not kept adds nothing at all.
        torch.testing.assert_close(beside[0], alone[0], atol=1e-7, rtol=1e-6)
        assert last >= 0 or torch.equal(beside[0], state[0])


VIEWS = {"view", "t", "transpose", "expand", "permute", "slice", "select", "unsqueeze", "squeeze", "detach", "split",
         "split_with_sizes", "alias", "as_strided", "unbind", "chunk", "_unsafe_view", "unfold", "empty", "empty_like",
         "new_empty", "_reshape_alias", "lift_fresh"}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations that move numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def launches_of_a_mixer(target: Any, drafter: Eagle31Drafter) -> int:
    [(_, mixer), *_] = find_mixers(target)
    cache, counting = read_prompts(drafter, [9]), Launches()
    own = vars(mixer)["forward"]
    vars(mixer)["forward"] = lambda *args, **kwargs: counted(counting, own, *args, **kwargs)
    verify(drafter, cache, DRAFTS)
    vars(mixer)["forward"] = own
    return counting.count


def counted(counting: Launches, function: Any, *args: Any, **kwargs: Any) -> Any:
    with counting:
        return function(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "kimi_linear"])
def test_launches(family: str) -> None:
    target, drafter = attached(family)
    assert launches_of_a_mixer(target, drafter) <= 100
    cache = read_prompts(drafter, [9])
    verify(drafter, cache, DRAFTS)
    states = [pair for layer in cache.with_states for pair in layer.taped_states]
    assert len(states) > 1
    counts = []
    for last in ([0], [2], [4]):
        with Launches() as rebuilding:
            rebuild(states, last)
        counts.append(rebuilding.count)
    assert max(counts) <= 50, "of all layers together, however many tokens are kept"


@contextmanager
def going_past(family: str) -> Iterator[None]:
    """Mixers call a kernel that nobody intercepts."""
    module: Any = sys.modules[type(next(find_mixers(recurrent_target(family)))[1]).__module__]
    name = TAPED[family]
    intercepted = getattr(module, name)
    setattr(module, name, intercepted.__wrapped__)
    try:
        yield
    finally:
        setattr(module, name, intercepted)


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_kernel_that_goes_past_the_tape_is_plain_decoding(family: str) -> None:
    """Replaced before the call; one that is replaced within it raises."""
    target, drafter = attached(family)
    ids = torch.tensor([[5, 17, 23, 8, 41, 9]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    cache = read_prompts(drafter, [9])
    with going_past(family):
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
        with pytest.raises(IncompatibleTargetError, match="code that cannot be recorded"):
            verify(drafter, cache, DRAFTS)
    assert drafter.stats is not None
    assert drafter.stats.loop == "plain"
    assert "code that cannot be recorded" in drafter.stats.reason
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    assert drafter.stats.loop == "own"


def test_a_kernel_that_is_told_more_is_not_recorded() -> None:
    def single(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, scale: float | None = None) -> None:
        raise AssertionError("the mixer's own kernel answers")

    given, records = {"g": torch.ones(1), "beta": torch.ones(1), "initial_state": torch.ones(1)}, list[Any]()
    tokens = (torch.ones(1),) * 3
    assert kernel_tape._gated_delta(single, records, tokens, {**given, "scale": 2.0}) is NotImplemented
    assert not records


def test_the_modeling_file_is_left_as_it_was() -> None:
    target, drafter = attached("qwen3_5_text")
    module: Any = sys.modules[type(next(find_mixers(target))[1]).__module__]
    other = attached("qwen3_5_text")[1]
    assert hasattr(module.torch_chunk_gated_delta_rule, "__wrapped__")
    held = module.torch_chunk_gated_delta_rule
    drafter.detach()
    assert module.torch_chunk_gated_delta_rule is held, "another target's mixers call it"
    other.detach()
