"""Chains read by recorded kernels: logits and states of stepping, few launches; stepping where nothing is recorded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache.block_reading import BlockReading
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.state_tape import LastNodes, make_moves, rebuilt_states
from eagle31_hf.target.mixers import find_mixers
from families import recurrent_target
from helpers import configured, oracle_drafts, random_drafter

TAPED = {"qwen3_5_text": "torch_chunk_gated_delta_rule", "kimi_linear": "chunk_kimi_delta_attention"}
TAPED |= dict.fromkeys(("nemotron_h", "bamba", "falcon_h1"), "mamba2_chunk_scan")
DRAFTS = 5


def attached(family: str) -> tuple[Any, Eagle31Drafter]:
    target = recurrent_target(family)
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    mixers = drafter.binding.mixers
    if mixers is not None and not mixers.taped:
        pytest.skip("this version of transformers has other kernels; chains are stepped")
    return target, drafter


def read(drafter: Eagle31Drafter, counts: list[int], *, taped: bool) -> tuple[Tensor, list[dict[Any, Tensor]]]:
    """Logits of a chain behind prompts of unlike length, and the states once so many of its tokens are kept."""
    binding = drafter.binding
    assert binding.mixers is not None
    binding.mixers.use_tape(taped)
    cache = read_prompts(drafter, [9 + row for row in range(len(counts))])
    logits = verify(drafter, cache, DRAFTS)
    assert bool(cache.with_states[0]._records) == taped
    cache.keep(None, counts)
    return logits, [layer.held_states() for layer in cache.with_states]


@torch.no_grad()
def read_prompts(drafter: Eagle31Drafter, lengths: list[int]) -> SpeculativeCache:
    binding = drafter.binding
    cache = SpeculativeCache.from_config(
        binding.text_config, batch_size=len(lengths), capacity=64, block=32, masks_by_type=binding.masks_by_type
    )
    ids = torch.arange(3, 3 + max(lengths)).expand(len(lengths), -1)
    cache.place(max(lengths), reading=BlockReading(counts=lengths))
    binding.forward(ids, cache.position_ids(), cache.attention_mask(dtype=binding.compute_dtype), cache)
    cache.commit(lengths)
    return cache


@torch.no_grad()
def verify(drafter: Eagle31Drafter, cache: SpeculativeCache, count: int) -> Tensor:
    binding, tokens = drafter.binding, torch.arange(40, 40 + count).expand(cache.batch_size, -1)
    cache.place(count, reading=BlockReading.of_drafts())
    mask = cache.attention_mask(dtype=binding.compute_dtype)
    return binding.forward(tokens, cache.position_ids(), mask, cache).logits


@pytest.mark.parametrize("family", TAPED)
def test_the_tape_is_stepping(family: str) -> None:
    _, drafter = attached(family)
    for counts in ([0, 1, 2, 3, 4, 5], [3, 3], [5], [0, 0]):
        (taped, taped_states), (stepped, stepped_states) = (read(drafter, counts, taped=how) for how in (True, False))
        torch.testing.assert_close(taped, stepped, atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(taped_states, stepped_states, strict=True):
            for key, state in theirs.items():
                torch.testing.assert_close(ours[key], state, atol=1e-5, rtol=1e-5)


def rebuild(taped: list[Any], last: list[int]) -> None:
    make_moves(rebuilt_states(taped, LastNodes(last, torch.device("cpu"))))


@torch.no_grad()
@pytest.mark.parametrize("family", TAPED)
def test_a_row_that_stands_still_and_one_that_stops_are_exact(family: str) -> None:
    """Tokens that are not kept are no-ops, and a row that keeps none stays as it is bit for bit."""
    _, drafter = attached(family)
    drafter.binding.mixers.use_tape(True)  # type: ignore[union-attr]
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


def launches_of_a_mixer(target: Any, drafter: Eagle31Drafter, *, taped: bool) -> int:
    drafter.binding.mixers.use_tape(taped)  # type: ignore[union-attr]
    [(_, mixer), *_] = find_mixers(target)
    cache, counting = read_prompts(drafter, [9]), Launches()
    own = vars(mixer)["forward"]
    for _ in range(2):  # the first time it is seen which child projects
        vars(mixer)["forward"] = lambda *args, **kwargs: counted(counting, own, *args, **kwargs)
        verify(drafter, cache, DRAFTS)
        vars(mixer)["forward"] = own
        count, counting.count = counting.count, 0
    return count


def counted(counting: Launches, function: Any, *args: Any, **kwargs: Any) -> Any:
    with counting:
        return function(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "kimi_linear"])
def test_launches(family: str) -> None:
    target, drafter = attached(family)
    taped, stepped = (launches_of_a_mixer(target, drafter, taped=how) for how in (True, False))
    assert taped <= 100, (taped, stepped)
    assert taped < stepped
    drafter.binding.mixers.use_tape(True)  # type: ignore[union-attr]
    cache = read_prompts(drafter, [9])
    verify(drafter, cache, DRAFTS)
    states = [pair for layer in cache.with_states for pair in layer.taped_states]
    assert len(states) > 1
    counts = []
    for last in ([0], [2], [4]):
        with Launches() as rebuilding:
            rebuild(states, last)
        counts.append(rebuilding.count)
    print(f"{family}: launches of one mixer {taped} taped, {stepped} stepped; rebuilding all layers {counts}")
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
def test_a_kernel_that_goes_past_the_tape_is_stepped(family: str, caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = attached(family)
    ids = torch.tensor([[5, 17, 23, 8, 41, 9]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    drafting = configured(drafter, num_assistant_tokens=4)
    with drafting, oracle_drafts(plain, 6), going_past(family), caplog.at_level(logging.WARNING):
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    assert "cannot be recorded" in caplog.text
    assert not drafter.binding.mixers.taped  # type: ignore[union-attr]


def test_the_modeling_file_is_left_as_it_was() -> None:
    target, drafter = attached("qwen3_5_text")
    module: Any = sys.modules[type(next(find_mixers(target))[1]).__module__]
    other = attached("qwen3_5_text")[1]
    assert hasattr(module.torch_chunk_gated_delta_rule, "__wrapped__")
    held = module.torch_chunk_gated_delta_rule
    drafter.detach()
    assert module.torch_chunk_gated_delta_rule is held, "another target's mixers call it"
    other.detach()
