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
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.state_tape import LastNodes, make_moves, rebuilt_states
from eagle31_hf.errors import IncompatibleTargetError
from eagle31_hf.targets import kernel_tape
from eagle31_hf.targets.mixers import find_mixers
from families import recurrent_target
from helpers import assert_same_text, configured, first_row, oracle_drafts, random_drafter

FAMILIES = ("qwen3_5_text", "bamba", "lfm2", "falcon_h1")


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Any:
    return recurrent_target(request.param)


def attached(target: Any) -> Any:
    return random_drafter(target, aux_layers=[1, 2, 3])


def own_forwards(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def greedy(model: Any, ids: Tensor, new_tokens: int = 12, **kwargs: Any) -> Tensor:
    return model.generate(ids, **{**GREEDY, "max_new_tokens": new_tokens}, **kwargs)


IDS = torch.tensor([[5, 17, 23, 8, 41, 9]])


@pytest.mark.thorough(every=2)
def test_detaching_leaves_the_target_as_it_was(target: Any) -> None:
    plain = greedy(target, IDS)
    first, second = attached(target), attached(target)
    assert own_forwards(target)
    first.detach()
    del first
    gc.collect()
    assert own_forwards(target), "another drafter still needs them, and the first one lets go once"
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


@torch.no_grad()
def read_prompts(drafter: Any, lengths: list[int]) -> SpeculativeCache:
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
def verify(drafter: Any, cache: SpeculativeCache, count: int, after: int = 0) -> Tensor:
    binding, tokens = drafter.binding, torch.arange(40 + after, 40 + after + count).expand(cache.batch_size, -1)
    cache.place(count, is_draft=True)
    mask = cache.attention_mask(dtype=binding.compute_dtype)
    return binding.forward(tokens, cache.position_ids(), mask, cache).logits


def test_a_forward_that_fails_half_way_leaves_states_as_they_were(target: Any) -> None:
    drafter = attached(target)
    binding, cache = drafter.binding, read_prompts(drafter, [6])
    before = [layer.held_states() for layer in cache.with_states]
    failing = mock.patch.object(binding.layers[-1], "forward", side_effect=RuntimeError("out of memory"))
    with failing, pytest.raises(RuntimeError):
        verify(drafter, cache, 4)
    cache.rollback(cache.lengths)
    first = verify(drafter, cache, 4)
    after = [layer.held_states() for layer in cache.with_states]
    assert all(torch.equal(old[key], new[key]) for old, new in zip(before, after, strict=True) for key in old)
    assert torch.equal(first, verify(drafter, cache, 4)), "nothing of the first reading is left"


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
    verify(drafter, cache, 2)
    with pytest.raises(IncompatibleTargetError, match="layer 0 of the target"):
        cache.keep(None, [1])


def read_prompt_of_another() -> Any:
    drafter = attached(recurrent_target("qwen3_5_text"))
    return first_row(read_prompts(drafter, [6]), DynamicCache(config=drafter.binding.text_config))


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
    assert_same_text(target, drafter, IDS, loop="plain", **GREEDY)
    assert "self-test" in drafter.stats.reason


def test_graphs_of_a_cpu_make_way(target: Any) -> None:
    drafter = attached(target)
    settings = {"acceleration": "compile", "num_assistant_tokens": 3}
    assert_same_text(target, drafter, IDS, settings=settings, **GREEDY)
    assert any("recurrent states" in why for why in drafter.stats.fallbacks)


# --- what is recorded -----------------------------------------------------------------------------------------------

TAPED = {"qwen3_5_text": "torch_chunk_gated_delta_rule", "kimi_linear": "chunk_kimi_delta_attention"}
TAPED |= dict.fromkeys(("nemotron_h", "bamba", "falcon_h1"), "mamba2_chunk_scan")
DRAFTS = 5


@pytest.mark.parametrize("family", [*TAPED, "lfm2"])
def test_the_tape_is_one_token_after_the_other(family: str) -> None:
    drafter = attached(recurrent_target(family))
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
    drafter = attached(recurrent_target(family))
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


def launches_of_a_mixer(target: Any, drafter: Any) -> int:
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
    target = recurrent_target(family)
    drafter = attached(target)
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
    target = recurrent_target(family)
    drafter = attached(target)
    cache = read_prompts(drafter, [9])
    with going_past(family):
        assert_same_text(target, drafter, IDS, loop="plain", **GREEDY)
        with pytest.raises(IncompatibleTargetError, match="code that cannot be recorded"):
            verify(drafter, cache, DRAFTS)
    assert "code that cannot be recorded" in drafter.stats.reason
    assert_same_text(target, drafter, IDS, **GREEDY)


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
