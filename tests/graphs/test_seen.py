"""Whatever changes what a target's forward does is noticed, in this process and by the name of its folder on disk; and
so are changed weights, whatever they were changed by."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.graphs import seen
from eagle31_hf.graphs.seen import ModelState, SeenWeights, weights_of
from families import RECURRENT_FAMILIES, TEXT_FAMILIES, recurrent_target
from helpers import CONFIGS, random_target

peft = pytest.importorskip("peft")

OTHER_ADAPTERS: dict[str, Any] = {
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], use_dora=True),
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "LoHa": lambda: peft.LoHaConfig(r=2, target_modules=["q_proj"]),
    "OFT": lambda: peft.OFTConfig(task_type="CAUSAL_LM", oft_block_size=4, target_modules=["q_proj"]),
    "VeRA": lambda: peft.VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("kind", OTHER_ADAPTERS)
def test_adapters_of_other_kinds_are_seen(kind: str) -> None:
    bare = random_target(CONFIGS["llama"]())
    before = ModelState(bare)
    model = peft.get_peft_model(bare, OTHER_ADAPTERS[kind]()).eval()
    at_work = ModelState(model.get_base_model())
    assert at_work.told != before.told
    with model.disable_adapter():
        assert ModelState(model.get_base_model()).told != at_work.told
    assert ModelState(model.get_base_model().eval()) == at_work


class Negated(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, states: Any) -> Any:
        return -self.inner(states)


def replace_a_forward(model: Any) -> None:
    mlp = model.model.layers[2].mlp
    mlp.forward = functools.partial(lambda forward, states: -forward(states), mlp.forward)


def replace_a_method(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(lambda self, states: -self.down_proj(states), mlp)


def change_a_class(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Other", (type(mlp),), {})


OF_MODULES: dict[str, Callable[[Any], object]] = {
    "a forward": replace_a_forward,
    "a method": replace_a_method,
    "a module that is wrapped": lambda model: setattr(model.model.layers[1], "mlp", Negated(model.model.layers[1].mlp)),
    "a class": change_a_class,
    "a scalar": lambda model: setattr(model.model.layers[3].self_attn, "scaling", 2.0),
    "an epsilon": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda *_: None),
    "a pre-hook": lambda model: model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: None),
}
NAMED_BESIDE: dict[str, Callable[[Any], object]] = {
    "the config": lambda model: model.config.rope_parameters.update(rope_theta=7.0),
    "the attention": lambda model: model.set_attn_implementation("eager"),
    "another tensor": lambda model: setattr(model.model.norm, "shift", torch.ones(2)),
    "a written tensor": lambda model: model.model.norm.shift.add_(1.0),
}
"""Configuration and tensors are in the folder's name beside the state."""


@pytest.mark.parametrize("change", [*OF_MODULES, *NAMED_BESIDE])
def test_what_becomes_of_modules_is_seen(change: str) -> None:
    model = random_target(CONFIGS["llama"]())
    model.model.norm.shift = torch.zeros(2)  # neither a parameter nor a buffer
    before = ModelState(model)
    (OF_MODULES | NAMED_BESIDE)[change](model)
    after = ModelState(model)
    assert before != after
    assert before.told != after.told or change in NAMED_BESIDE


def test_a_class_whose_forward_is_exchanged_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_target(CONFIGS["llama"]())
    before = ModelState(model)
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, states: states)
    after = ModelState(model)
    assert before != after
    assert after.replaced


def test_code_of_others_is_told_from_that_of_libraries() -> None:
    model = random_target(CONFIGS["llama"]())
    drafter = Eagle31Drafter.from_target(model)  # hangs hooks of its own on it
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    state = ModelState(model)
    assert (state.hooks, state.replaced) == ([], [])
    replace_a_forward(model)
    OF_MODULES["a hook"](model)
    state = ModelState(model)
    assert (len(state.hooks), len(state.replaced)) == (1, 1)
    drafter.detach()


def test_where_a_model_comes_from_and_what_is_generated_are_no_difference() -> None:
    model = random_target(CONFIGS["llama"]())
    before = ModelState(model)
    model.name_or_path = model.config._name_or_path = "elsewhere"
    model.generation_config = hf.GenerationConfig(do_sample=True)
    assert ModelState(model) == before
    other = copy.deepcopy(model)
    assert ModelState(other).told == before.told, "another process would find the same folder"


@contextmanager
def replaced(owner: Any, name: str) -> Iterator[None]:
    """As a kernel package does it, by a function of its own."""
    own = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *args, **kwargs: own(*args, **kwargs)):
        yield


@contextmanager
def hooked(register: Callable[[Any], Any]) -> Iterator[None]:
    handle = register(lambda *_: None)
    yield
    handle.remove()


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def coarse_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


FOR_THE_PROCESS: dict[str, Callable[[], Any]] = {
    "a hook": lambda: hooked(modules.register_module_forward_hook),
    "a pre-hook": lambda: hooked(modules.register_module_forward_pre_hook),
    "a function of the modeling file": lambda: replaced(modeling_llama, "apply_rotary_pos_emb"),
    "one that such a function calls": lambda: replaced(modeling_llama, "rotate_half"),
    "a function of torch.nn.functional": lambda: replaced(functional, "silu"),
    "attention": lambda: replaced(functional, "scaled_dot_product_attention"),
    "a function of torch": lambda: replaced(torch, "rsqrt"),
    "the call of all modules": lambda: replaced(nn.Module, "__call__"),
    "functions of this thread": Functions,
    "operations of this thread": Operations,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "the precision of products": coarse_products,
    "a kernel of attention": lambda: sdpa_kernel(SDPBackend.MATH),
}


PRECISION = ("the precision of products", "a kernel of attention")


@pytest.mark.parametrize("change", FOR_THE_PROCESS)
def test_what_holds_for_the_whole_process_is_seen(change: str) -> None:
    model = random_target(CONFIGS["llama"]())
    before = ModelState(model)
    with FOR_THE_PROCESS[change]():
        after = ModelState(model)
        assert after != before
        assert after.told != before.told, "or graphs on disk would be taken for its own"
        assert ModelState(model) == after or after.hooks
        assert bool(after.why_no_graph()) == (change not in PRECISION)
        assert bool(after.why_no_graph(recorded=True)) == bool(after.hooks or after.autocast)
    assert ModelState(model) == before


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *RECURRENT_FAMILIES])
@pytest.mark.thorough(every=4)
def test_nothing_of_a_stock_model_is_code_of_others(family: str) -> None:
    make = TEXT_FAMILIES.get(family)
    state = ModelState(recurrent_target(family) if make is None else random_target(make()))
    assert (state.replaced, state.hooks, state.autocast) == ([], [], "")


def network() -> nn.Sequential:
    """Shared weights, weights that lie otherwise than their shape, a scalar, a buffer of another dtype."""
    inner = nn.Linear(64, 64)
    net = nn.Sequential(inner, nn.Linear(64, 64), inner, nn.BatchNorm1d(64))
    net[1].weight = nn.Parameter(torch.randn(64, 64).T)
    net.wide = nn.Parameter(torch.randn(64, 96)[:, :64])  # neither dense nor whole
    net.experts = nn.Parameter(torch.randn(3, 16, 8))
    net.odd = nn.Parameter(torch.randn(7, 5, dtype=torch.bfloat16))  # no row of it ends with a machine word
    net.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    return net


def swap(data: Tensor, one: Any, other: Any) -> None:
    data[one], data[other] = data[other].clone(), data[one].clone()


OF_WEIGHTS: dict[str, Callable[[Any], object]] = {
    "written": lambda net: net.requires_grad_(False)[0].weight[3, 3].add_(1.0),
    "counted": lambda net: net[3].num_batches_tracked.add_(1),
    "replaced": lambda net: setattr(net[1], "weight", nn.Parameter(net[1].weight.detach().clone())),
    "removed": lambda net: setattr(net[1], "bias", None),
}
PAST_THE_VERSION: dict[str, Callable[[Any], object]] = {  # as tokens' embeddings are set and adapters are merged
    "all": lambda net: net[1].weight.data.add_(1e-3),
    "a slice": lambda net: net.wide.data.add_(1e-3),
    "a row": lambda net: net[0].weight.data[7].fill_(1.0),
    "an element": lambda net: net[1].weight.data[5, 9].add_(1e-3),
    "an element of a slice": lambda net: net.wide.data[5, 9].add_(1e-3),
    "an element of an odd row": lambda net: net.odd.data[4, 2].add_(1.0),
    "a scalar": lambda net: net.scale.data.add_(1.0),
    "rows that change places": lambda net: swap(net[0].weight.data, 3, 9),
    "columns that do": lambda net: swap(net[0].weight.data.T, 3, 9),
    "elements of two rows": lambda net: swap(net[0].weight.data, (3, 10), (9, 10)),
    "heads of a slice": lambda net: net.wide.data[:, :32].copy_(net.wide.data[:, :32].roll(8, dims=1)),
    "elements of a vector": lambda net: swap(net[0].bias.data, 10, 14),
    "experts": lambda net: swap(net.experts.data, 0, 2),
}


@pytest.mark.parametrize("change", [*OF_WEIGHTS, *PAST_THE_VERSION])
def test_a_change_of_weights_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "CHUNK", 64)
    net = network()
    contents, versions = (SeenWeights(weights_of(net), by_content=content) for content in (True, False))
    assert contents.are_still(weights_of(net))
    (OF_WEIGHTS | PAST_THE_VERSION)[change](net)
    assert not contents.are_still(weights_of(net))
    assert versions.are_still(weights_of(net)) == (change in PAST_THE_VERSION), "or the test tries something else"


def test_a_nan_is_no_change() -> None:
    net = network()
    net[0].weight.data.fill_(torch.nan)
    assert SeenWeights(weights_of(net), by_content=True).are_still(weights_of(net))


def test_all_weights_are_found() -> None:
    net = network()
    net.append(net)  # some models hold themselves
    wanted = {id(tensor) for tensor in (*net.parameters(), *net.buffers())}
    assert {id(tensor) for tensor in weights_of(net)} == wanted
