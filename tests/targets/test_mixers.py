"""Mixers of a target while chains are read and recorded, and the target as others see it."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.errors import IncompatibleTargetError
from eagle31_hf.targets import kernel_tape
from eagle31_hf.targets.binding import Verification
from eagle31_hf.targets.mixers import find_mixers
from eagle31_hf.targets.self_test import probe_cache, read_prompts
from families import recurrent_target
from helpers import assert_same_text, configured, oracle_drafts, random_drafter, write

FAMILIES = ("qwen3_5_text", "bamba", "lfm2", "falcon_h1")


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Any:
    return recurrent_target(request.param)


def attached(target: Any) -> Any:
    return random_drafter(target, aux_layers=[1, 2, 3])


def own_forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


IDS = torch.tensor([[5, 17, 23, 8, 41, 9]])


def functions_of_the_file(model: nn.Module) -> dict[str, Any]:
    """What stands in the modeling files of a target's mixers."""
    files = {type(mixer).__module__ for _, mixer in find_mixers(model)}
    return {f"{file}.{name}": value for file in files for name, value in vars(sys.modules[file]).items()}


def test_the_last_drafter_that_goes_leaves_the_target_as_it_was(target: Any) -> None:
    """One is detached, the other dropped, as in a notebook where a cell that attaches one is run again."""
    gc.collect()  # an earlier test's drafters may have left cycles that hold on to these functions
    plain, before = write(target, IDS), functions_of_the_file(target)
    first, second = attached(target), attached(target)
    assert own_forwards(target)
    first.detach()
    del first
    gc.collect()
    assert own_forwards(target), "another drafter still needs them, and the first one lets go once"
    assert torch.equal(write(target, IDS, assistant_model=second), plain)
    del second
    gc.collect()
    assert own_forwards(target) == []
    assert all(functions_of_the_file(target)[name] is value for name, value in before.items())
    assert torch.equal(write(target, IDS), plain)


@pytest.mark.thorough(every=2)
def test_a_copy_is_a_target_of_its_own(target: Any) -> None:
    drafter = attached(target)
    plain = write(target, IDS)
    for other in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        with torch.no_grad():
            for weight in other.parameters():
                weight.zero_()
        assert torch.equal(write(target, IDS), plain)
        assert not torch.equal(write(other, IDS), plain), "its mixers compute with its own weights"
    assert torch.equal(write(target, IDS, assistant_model=drafter), plain)


@torch.no_grad()
def read_prompt(drafter: Any) -> SpeculativeCache:
    cache = probe_cache(drafter.binding, rows=1, length=IDS.shape[1])
    read_prompts(drafter.binding, cache, IDS, None)
    return cache


@torch.no_grad()
def verify(drafter: Any, cache: SpeculativeCache) -> None:
    Verification(drafter.binding, cache)(DraftTree.chain(torch.arange(40, 44)[None]))


def test_a_mixer_that_was_replaced_is_an_error_that_names_the_layer() -> None:
    target = recurrent_target("qwen3_5_text")
    drafter = attached(target)
    [(_, mixer), *_] = find_mixers(target)
    wrapped = vars(mixer).pop("forward")
    with pytest.raises(IncompatibleTargetError, match=r"layer 0 of the target .* attach the drafter again"):
        write(target, IDS, assistant_model=drafter)
    vars(mixer)["forward"] = wrapped
    cache = read_prompt(drafter)
    vars(mixer)["forward"] = lambda hidden_states, **_: hidden_states  # whole layers, as some hubs' kernels do
    verify(drafter, cache)
    with pytest.raises(IncompatibleTargetError, match="layer 0 of the target"):
        cache.commit([1])


@pytest.mark.thorough(every=6)
def test_plain_generation_in_another_thread_is_plain(target: Any) -> None:
    drafter = attached(target)
    plain = write(target, IDS, max_new_tokens=24)
    beside: list[Tensor] = []
    thread = threading.Thread(target=lambda: beside.extend(write(target, IDS, max_new_tokens=24) for _ in range(3)))
    thread.start()
    with configured(drafter, num_assistant_tokens=4), oracle_drafts(plain, IDS.shape[1]):
        ours = [write(target, IDS, max_new_tokens=24, assistant_model=drafter) for _ in range(3)]
    thread.join()
    assert all(torch.equal(text, plain) for text in ours + beside)


def test_a_target_that_fails_the_self_test_is_decoded_plainly() -> None:
    """Here because its code for one token computes something else than that over which its prompts are read."""
    target = recurrent_target("bamba")
    module = __import__(type(target).__module__, fromlist=["mamba2_selective_state_update"])
    update = module.mamba2_selective_state_update
    calls = iter(range(10**9))

    def forgetful(state: Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(state.mul_(1 + 0.5 * (next(calls) % 3)), *args, **kwargs)

    with mock.patch.object(module, "mamba2_selective_state_update", forgetful):
        drafter = attached(target)
    assert "self-test" in drafter.binding.tree_unsupported_reason
    assert_same_text(target, drafter, IDS, loop="plain")
    assert "self-test" in drafter.stats.reason


# --- what is recorded -----------------------------------------------------------------------------------------------

TAPED = {"qwen3_5_text": "torch_chunk_gated_delta_rule", "nemotron_h": "mamba2_chunk_scan"}


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


@pytest.mark.parametrize("family", TAPED)
def test_a_kernel_that_goes_past_the_tape_is_plain_decoding(family: str) -> None:
    """Replaced before the call; one that is replaced within it raises."""
    target = recurrent_target(family)
    drafter = attached(target)
    cache = read_prompt(drafter)
    with going_past(family):
        assert_same_text(target, drafter, IDS, loop="plain")
        with pytest.raises(IncompatibleTargetError, match="code that cannot be recorded"):
            verify(drafter, cache)
    assert "code that cannot be recorded" in drafter.stats.reason
    assert_same_text(target, drafter, IDS)


def test_a_kernel_that_is_told_more_is_not_recorded() -> None:
    def single(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, scale: float | None = None) -> None:
        raise AssertionError("the mixer's own kernel answers")

    given, records = {"g": torch.ones(1), "beta": torch.ones(1), "initial_state": torch.ones(1)}, list[Any]()
    tokens = (torch.ones(1),) * 3
    assert kernel_tape._gated_delta(single, records, tokens, {**given, "scale": 2.0}) is NotImplemented
    assert not records


def test_the_modeling_file_is_left_as_it_was() -> None:
    target = recurrent_target("qwen3_5_text")
    drafter = attached(target)
    module: Any = sys.modules[type(next(find_mixers(target))[1]).__module__]
    other = attached(recurrent_target("qwen3_5_text"))
    assert hasattr(module.torch_chunk_gated_delta_rule, "__wrapped__")
    held = module.torch_chunk_gated_delta_rule
    drafter.detach()
    assert module.torch_chunk_gated_delta_rule is held, "another target's mixers call it"
    other.detach()
