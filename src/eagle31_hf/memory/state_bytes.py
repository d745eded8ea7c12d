"""Bytes of recurrent and convolution states: what a model caches of one token, read on the meta device.

A row has one set of them, however long it is. A block of drafts leaves a set after each of its nodes, or, where a
recurrence's kernel can be recorded and the draft is a chain (`cache.state_tape`), one set and the record. Nothing is
known of families: shapes and dtypes are those of the states that the model's own forward makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..cache.state_tape import Kernels, kernels_of
from ..cache.states import RECURRENT
from ..cache.stock import read_stock_layers
from ..errors import MemoryPlanError, first_line
from .storage_counter import StorageCounter
from .weight_bytes import config_json, meta_model


@dataclass(frozen=True)
class StateShape:
    """Bytes of one row's states, of all layers together.

    Attributes:
        stepped: of layers that keep a set after every node of any block.
        stepped_recurrent: what of these are recurrent states, which captured steps do not keep twice.
        taped: of layers that keep a record of a chain instead.
        rebuilding: what moving these on by a record takes; `rebuilding_token`: and of each token in it.
        tape: of a record, whatever its length; `tape_token`: of each token in it.
        forward_token: most bytes a forward over many tokens takes for each; 0 where it is not known.
        forward_step: most that a kernel takes which reads one token after the other, whatever their number.
    """

    stepped: int
    stepped_recurrent: int
    taped: int
    rebuilding: int
    rebuilding_token: int
    tape: int
    tape_token: int
    forward_token: int = 0
    forward_step: int = 0

    @property
    def num_bytes(self) -> int:
        """One set."""
        return self.stepped + self.taped

    def block_bytes(self, nodes: int, *, is_tree: bool) -> int:
        """Sets that a block of so many nodes leaves."""
        return nodes * self.num_bytes if is_tree else nodes * self.stepped + self.taped

    def tape_bytes(self, nodes: int, *, is_tree: bool) -> int:
        """What is recorded of a chain of so many tokens; a single one is not."""
        return 0 if is_tree or nodes == 1 else self.tape + nodes * self.tape_token

    def rebuilding_bytes(self, nodes: int, *, is_tree: bool) -> int:
        """What moving states on after a chain of so many tokens takes."""
        recorded = self.tape_bytes(nodes, is_tree=is_tree) > 0
        return self.rebuilding + nodes * self.rebuilding_token if recorded else 0

    def given_bytes(self, nodes: int, *, is_tree: bool) -> int:
        """What captured forwards over a chain of so many tokens, and over one, give of states; trees are eager. Of what
        a convolution made they give the chain's own columns alone."""
        if is_tree:
            return self.num_bytes
        before = self.tape // 2 if nodes > 1 else 0
        return nodes * self.stepped + self.tape_bytes(nodes, is_tree=False) - before + self.num_bytes


def state_shape(config: PreTrainedConfig, element_bytes: int) -> StateShape:
    """States of a model of this configuration whose other activations have `element_bytes`.

    Raises:
        MemoryPlanError: its forward does not run without memory, so nobody can tell.
    """
    config_class: Any = type(config)
    found = _found(config_class, config_json(config))
    layers = [layer.shape(element_bytes) for layer in found.layers]
    every = StateShape(*map(sum, zip(*(vars(layer).values() for layer in layers), strict=True)))
    return replace(
        every,
        forward_token=found.forward_token * element_bytes // 2,
        forward_step=max((layer.forward_step for layer in layers), default=0),  # one layer after the other
    )


def logit_bytes(config: PreTrainedConfig) -> int:
    """Bytes of a logit of a model with states, if it gives them in another precision than its own; else 0.

    Raises:
        MemoryPlanError: as of `state_shape`.
    """
    config_class: Any = type(config)
    return _found(config_class, config_json(config)).logit_bytes


class _State(NamedTuple):
    """One state of a row: its shape without rows, and bytes of an element, `None` where it follows the model's."""

    is_recurrent: bool
    shape: tuple[int, ...]
    fixed_bytes: int | None

    def num_bytes(self, element_bytes: int) -> int:
        return math.prod(self.shape) * (self.fixed_bytes or element_bytes)


class _StateLayer(NamedTuple):
    """A layer's states, and the kernels by which they are recorded, if they are."""

    states: tuple[_State, ...]
    kernels: Kernels | None

    def shape(self, element_bytes: int) -> StateShape:
        """The part of one layer."""
        num_bytes = sum(state.num_bytes(element_bytes) for state in self.states)
        windows = [state for state in self.states if not state.is_recurrent]
        recurrent = [state for state in self.states if state.is_recurrent]
        if self.kernels is None:
            return StateShape(num_bytes, sum(state.num_bytes(element_bytes) for state in recurrent), 0, 0, 0, 0, 0)
        # The chain's columns behind a window, and what the convolution makes of both.
        columns = [2 * state.shape[0] * (state.fixed_bytes or element_bytes) for state in windows]
        moved = sum(state.num_bytes(element_bytes) for state in recurrent)
        return StateShape(
            stepped=0,
            stepped_recurrent=0,
            taped=num_bytes,
            rebuilding=int(self.kernels.copies(element_bytes) * moved),
            rebuilding_token=sum(self.kernels.token_bytes(state.shape) for state in recurrent),
            tape=sum(column * state.shape[1] for column, state in zip(columns, windows, strict=True)),
            tape_token=sum(columns) + sum(self.kernels.gate_bytes(state.shape, element_bytes) for state in recurrent),
            forward_step=self.kernels.step_copies * max((math.prod(state.shape) * 4 for state in recurrent), default=0),
        )


class _Found(NamedTuple):
    """What a bf16 model was seen to keep, and to take for each token of a forward."""

    layers: tuple[_StateLayer, ...]
    forward_token: int
    logit_bytes: int


@lru_cache(maxsize=32)
def _found(config_class: Any, config_json: str) -> _Found:
    model = meta_model(config_class, config_json)
    kernels = {getattr(mixer, "layer_idx", None): kernels_of(mixer) for mixer in model.modules() if kernels_of(mixer)}
    try:
        states_of, logits = _states_of_a_token(model)
        forward_token = _forward_token_bytes(model) if kernels else 0
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise MemoryPlanError(
            f"the states of {type(model).__name__} cannot be counted without running it "
            f"({first_line(error)[:160]}); drafting works without a plan"
        ) from error
    layers = tuple(_StateLayer(states, kernels.get(index)) for index, states in states_of.items())
    # A chunk that goes on from another lies beside its convolution's window once more.
    columns = max(
        (2 * state.shape[0] for layer in layers for state in layer.states if not state.is_recurrent), default=0
    )
    other = 0 if logits == torch.bfloat16 else logits.itemsize
    return _Found(layers, forward_token + columns if forward_token else 0, other)


def _forward_token_bytes(model: Any) -> int:
    """Of the reference kernels, which read many tokens in chunks of up to 256. `model` is of no use afterwards."""
    _skip_layers_alike(model)
    few, many = (_forward_bytes(model, tokens) for tokens in (256, 512))
    return (many - few) // 256


def _skip_layers_alike(model: Any) -> None:
    """Of layers with parameters of the same names and shapes only the first computes: all take the same."""
    text = model.config.get_text_config(decoder=True)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    layers: Any = next((each for each in lists if len(each) == text.num_hidden_layers), ())
    width: dict[Any, int] = {}  # of the tuple that layers of a kind return; 0: a tensor

    def note(kind: Any, output: Any) -> None:
        width[kind] = 0 if isinstance(output, Tensor) else len(output)

    def skip(kind: Any, hidden_states: Any, *_args: Any, **_others: Any) -> Any:
        return (hidden_states, *[None] * (width[kind] - 1)) if width[kind] else hidden_states

    for layer in layers:
        kind = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        if kind in width:
            layer.forward = partial(skip, kind)
        else:
            width[kind] = 0
            layer.register_forward_hook(lambda _layer, _args, output, kind=kind: note(kind, output))


def _forward_bytes(model: Any, tokens: int) -> int:
    """Most alive in a forward over so many, keys and values aside."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, tokens, tokens, dtype=torch.bfloat16, device="meta")  # else elements are asked for
    with torch.no_grad(), StorageCounter() as counter:
        cache = _cache_in(model(ids, attention_mask=mask, use_cache=True, logits_to_keep=1))
    held = (tensor for layer in read_stock_layers(cache).values() for tensor in (layer.keys, layer.values))
    return counter.peak_bytes - sum(tensor.nbytes for tensor in held if tensor is not None)


def _cache_in(output: Any) -> Any:
    """The cache that a model has filled, whatever it calls it."""
    (cache,) = [value for value in output.values() if isinstance(value, Cache)]
    return cache


def _states_of_a_token(model: Any) -> tuple[dict[int, tuple[_State, ...]], Any]:
    """By layer, what is cached after one token, and the precision of its logits."""
    with torch.no_grad():
        output = model(torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True)
    states = {
        index: tuple(
            _State(
                kind == RECURRENT,
                tuple(state.shape[1:]),
                None if state.dtype == torch.bfloat16 else state.element_size(),
            )
            for (kind, _), state in layer.states.items()
        )
        for index, layer in read_stock_layers(_cache_in(output)).items()
        if layer.states
    }
    return states, output.logits.dtype
