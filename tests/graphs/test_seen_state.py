"""Whatever changes what a target's forward does is noticed, in this process and by the name of its folder on disk."""

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
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from adapter_changes import CHANGES, adapted, peft
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.graphs.seen import ModelState
from families import RECURRENT_FAMILIES, TEXT_FAMILIES, recurrent_target
from helpers import CONFIGS, random_target


@pytest.mark.parametrize("name", CHANGES)
def test_what_becomes_of_adapters_is_seen(name: str) -> None:
    model = adapted()
    before = ModelState(model.get_base_model())
    assert before == ModelState(model.get_base_model())
    CHANGES[name](model)
    after = ModelState(model.get_base_model())
    assert before != after
    assert before.told != after.told, "or graphs on disk would be taken for its own"


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


def test_an_adapter_that_is_put_back_is_no_change() -> None:
    model = adapted()
    before = ModelState(model.get_base_model())
    with model.disable_adapter():
        assert ModelState(model.get_base_model()) != before
    model.set_adapter("B")
    model.set_adapter("A")
    assert ModelState(model.get_base_model().eval()) == before


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


def wrap_a_module(model: Any) -> None:
    model.model.layers[1].mlp = Negated(model.model.layers[1].mlp)


def change_a_class(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("Other", (type(mlp),), {})


def change_a_scalar(model: Any) -> None:
    model.model.layers[3].self_attn.scaling *= 2


def change_an_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def hang_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda *_: None)


def hang_a_pre_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        replace_a_forward,
        replace_a_method,
        wrap_a_module,
        change_a_class,
        change_a_scalar,
        change_an_epsilon,
        hang_a_hook,
        hang_a_pre_hook,
    ],
)
def test_what_becomes_of_modules_is_seen(change: Callable[[Any], None]) -> None:
    model = random_target(CONFIGS["llama"]())
    before = ModelState(model)
    change(model)
    after = ModelState(model)
    assert before != after
    assert before.told != after.told


def change_the_config(model: Any) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 7.0}


def change_the_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def replace_a_tensor(model: Any) -> None:
    model.model.norm.shift = torch.ones(2)


def write_a_tensor(model: Any) -> None:
    model.model.norm.shift += 1.0


@pytest.mark.parametrize("change", [change_the_config, change_the_attention, replace_a_tensor, write_a_tensor])
def test_what_has_another_name_on_disk_is_seen(change: Callable[[Any], None]) -> None:
    """Configuration and tensors are in the folder's name beside the state."""
    model = random_target(CONFIGS["llama"]())
    model.model.norm.shift = torch.zeros(2)  # neither a parameter nor a buffer
    before = ModelState(model)
    change(model)
    assert ModelState(model) != before


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
    hang_a_hook(model)
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


# --- what holds for the whole process ---------------------------------------------------------------------------------


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
    assert ModelState(model) == before


@pytest.mark.parametrize("change", [name for name in FOR_THE_PROCESS if name not in PRECISION])
def test_code_of_others_for_the_whole_process_is_told_from_that_of_libraries(change: str) -> None:
    model = random_target(CONFIGS["llama"]())
    with FOR_THE_PROCESS[change]():
        after = ModelState(model)
        assert after.why_no_graph()
        assert bool(after.hooks or after.autocast) == bool(after.why_no_graph(recorded=True))


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *RECURRENT_FAMILIES])
@pytest.mark.thorough(every=4)
def test_nothing_of_a_stock_model_is_code_of_others(family: str) -> None:
    make = TEXT_FAMILIES.get(family)
    state = ModelState(recurrent_target(family) if make is None else random_target(make()))
    assert (state.replaced, state.hooks, state.autocast) == ([], [], "")
