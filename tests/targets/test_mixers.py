"""Mixers of a target while drafts are read, and the target as others see it."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.errors import IncompatibleTargetError
from eagle31_hf.targets.binding import TargetBinding
from eagle31_hf.targets.mixers import find_mixers
from families import recurrent_target
from helpers import configured, first_row, oracle_drafts, random_drafter

FAMILIES = ("qwen3_5_text", "bamba", "lfm2", "falcon_h1")


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Any:
    return recurrent_target(request.param)


def attached(target: Any) -> Eagle31Drafter:
    return random_drafter(target, aux_layers=[1, 2, 3])


def own_forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def greedy(model: Any, ids: Tensor, new_tokens: int = 12, **kwargs: Any) -> Tensor:
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **kwargs
    )


IDS = torch.tensor([[5, 17, 23, 8, 41, 9]])


@pytest.mark.thorough(every=2)
def test_detaching_leaves_the_target_as_it_was(target: Any) -> None:
    plain = greedy(target, IDS)
    first, second = attached(target), attached(target)
    assert own_forwards(target)
    first.detach()
    assert own_forwards(target), "another drafter still needs them"
    assert torch.equal(greedy(target, IDS, assistant_model=second), plain)
    second.detach()
    assert own_forwards(target) == []
    assert torch.equal(greedy(target, IDS), plain)


def functions_of_the_file(model: nn.Module) -> dict[str, Any]:
    """What stands in the modeling files of a target's mixers."""
    files = {type(mixer).__module__ for _, mixer in find_mixers(model)}
    return {f"{file}.{name}": value for file in files for name, value in vars(sys.modules[file]).items()}


def test_dropping_a_drafter_leaves_the_target_as_it_was(target: Any) -> None:
    """As in a notebook, where a cell that attaches one is run again."""
    plain, before = greedy(target, IDS), functions_of_the_file(target)
    for _ in range(2):
        drafter = attached(target)
        assert own_forwards(target)
        assert torch.equal(greedy(target, IDS, assistant_model=drafter), plain)
    del drafter
    gc.collect()
    assert own_forwards(target) == []
    assert all(functions_of_the_file(target)[name] is value for name, value in before.items())
    assert torch.equal(greedy(target, IDS), plain)


def test_a_drafter_that_was_detached_lets_go_once(target: Any) -> None:
    first, second = attached(target), attached(target)
    first.detach()
    del first
    gc.collect()
    assert own_forwards(target), "the other one still needs them"
    second.detach()
    assert own_forwards(target) == []


@pytest.mark.thorough(every=2)
def test_a_copy_is_a_target_of_its_own(target: Any) -> None:
    drafter = attached(target)
    plain = greedy(target, IDS)
    for other in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        with torch.no_grad():
            for weight in other.parameters():
                weight.zero_()
        assert torch.equal(greedy(target, IDS), plain)
        assert not torch.equal(greedy(other, IDS), plain), "its mixers compute with its own weights"
    assert torch.equal(greedy(target, IDS, assistant_model=drafter), plain)


def read_prompt(binding: TargetBinding) -> SpeculativeCache:
    cache = SpeculativeCache.from_config(
        binding.text_config, batch_size=1, capacity=64, block=16, masks_by_type=binding.masks_by_type
    )
    with torch.no_grad():
        cache.place(IDS.shape[1])
        binding.forward(IDS, cache.position_ids(), cache.attention_mask(dtype=binding.compute_dtype), cache)
    cache.commit(IDS.shape[1])
    return cache


def verify(binding: TargetBinding, cache: SpeculativeCache, count: int) -> Tensor:
    tokens = torch.arange(3, 3 + count)[None]
    with torch.no_grad():
        cache.place(count, is_draft=True)
        mask = cache.attention_mask(dtype=binding.compute_dtype)
        return binding.forward(tokens, cache.position_ids(), mask, cache).logits


def test_a_forward_that_fails_half_way_leaves_states_as_they_were(target: Any) -> None:
    binding = attached(target).binding
    cache = read_prompt(binding)
    before = [layer.held_states() for layer in cache.with_states]
    failing = mock.patch.object(binding.layers[-1], "forward", side_effect=RuntimeError("out of memory"))
    with failing, pytest.raises(RuntimeError):
        verify(binding, cache, 4)
    cache.rollback(cache.lengths)
    first = verify(binding, cache, 4)
    after = [layer.held_states() for layer in cache.with_states]
    assert all(torch.equal(old[key], new[key]) for old, new in zip(before, after, strict=True) for key in old)
    assert torch.equal(first, verify(binding, cache, 4)), "nothing of the first reading is left"


def test_a_mixer_that_was_replaced_is_an_error_that_names_the_layer() -> None:
    target = recurrent_target("qwen3_5_text")
    drafter = attached(target)
    [(_, mixer), *_] = find_mixers(target)
    wrapped = vars(mixer).pop("forward")
    with pytest.raises(IncompatibleTargetError, match=r"layer 0 of the target .* attach the drafter again"):
        greedy(target, IDS, assistant_model=drafter)
    vars(mixer)["forward"] = wrapped
    vars(mixer)["forward"] = lambda hidden_states, **_: hidden_states  # whole layers, as some hubs' kernels do
    cache = SpeculativeCache.from_config(drafter.binding.text_config, batch_size=1, capacity=9, block=9)
    cache.load_dynamic(read_prompt_of_another())
    verify(drafter.binding, cache, 2)
    with pytest.raises(IncompatibleTargetError, match="layer 0 of the target"):
        cache.keep(None, [1])


def read_prompt_of_another() -> Any:
    binding = attached(recurrent_target("qwen3_5_text")).binding
    return first_row(read_prompt(binding), DynamicCache(config=binding.text_config))


@pytest.mark.thorough(every=6)
def test_plain_generation_in_another_thread_is_plain(target: Any) -> None:
    drafter = attached(target)
    plain = greedy(target, IDS, 24)
    beside: list[Tensor] = []
    thread = threading.Thread(target=lambda: beside.extend(greedy(target, IDS, 24) for _ in range(3)))
    thread.start()
    with configured(drafter, num_assistant_tokens=4), oracle_drafts(plain, IDS.shape[1]):
        ours = [greedy(target, IDS, 24, assistant_model=drafter) for _ in range(3)]
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
    text = greedy(target, IDS, assistant_model=drafter)
    assert torch.equal(text, greedy(target, IDS))
    assert drafter.stats is not None
    assert drafter.stats.loop == "plain"
    assert "self-test" in drafter.stats.reason


def test_graphs_of_a_cpu_make_way(target: Any) -> None:
    drafter = attached(target)
    with configured(drafter, acceleration="compile", num_assistant_tokens=3):
        assert torch.equal(greedy(target, IDS, assistant_model=drafter), greedy(target, IDS))
    assert drafter.stats is not None
    assert drafter.stats.loop == "own"
    assert any("recurrent states" in why for why in drafter.stats.fallbacks)
