"""Bytes of recurrent and convolution states: what a model caches of one token, read on the meta device.

A row has one set of them, however long it is. A chain of drafts leaves one more, and a record (`cache.state_tape`).
Nothing is known of families: shapes and dtypes are those of the states that the model's own forward makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ..cache.state_tape import Kernels, kernels_of
from ..cache.states import RECURRENT
from ..cache.stock import read_stock_layers
from ..errors import MemoryPlanError, first_line
from .dry_run import cache_in
from .weight_bytes import config_json, meta_model


@dataclass(frozen=True)
class StateShape:
    """Bytes of one row's states, of all layers together.

    Attributes:
        num_bytes: one set.
        unrecorded: of recurrent states that no kernel we record moves on: such a target is decoded plainly.
        rebuilding: what moving states on by a record takes; `rebuilding_token`: and of each token in it.
        tape: of a record, whatever its length; `tape_token`: of each token in it.
        convolved: what of `tape` convolutions made of their windows: captured steps do not give that.
        columns: what a recorded convolution's window is wide: it lies once more beside each token of a chunk.
        forward_step: most that a kernel takes which reads one token after the other, whatever their number.
    """

    num_bytes: int
    unrecorded: int
    rebuilding: int
    rebuilding_token: int
    tape: int
    tape_token: int
    convolved: int
    columns: int = 0
    forward_step: int = 0

    def tape_bytes(self, nodes: int) -> int:
        """What is recorded of a chain of so many tokens; a single one is not."""
        return 0 if nodes == 1 else self.tape + nodes * self.tape_token

    def rebuilding_bytes(self, nodes: int) -> int:
        """What moving states on after a chain of so many tokens takes."""
        return 0 if nodes == 1 else self.rebuilding + nodes * self.rebuilding_token

    def given_bytes(self, nodes: int) -> int:
        """What captured forwards over a chain of so many tokens, and over one, give of states."""
        recorded = 0 if nodes == 1 else self.tape_bytes(nodes) - self.convolved
        return recorded + self.num_bytes


def state_shape(config: PreTrainedConfig, element_bytes: int) -> StateShape:
    """States of a model of this configuration whose other activations have `element_bytes`.

    Raises:
        MemoryPlanError: its forward does not run without memory, so nobody can tell.
    """
    config_class: Any = type(config)
    found = _found(config_class, config_json(config))
    layers = [layer.shape(element_bytes) for layer in found]
    every = StateShape(*map(sum, zip(*(vars(layer).values() for layer in layers), strict=True)))
    return replace(  # one layer after the other
        every,
        columns=max((layer.columns for layer in layers), default=0),
        forward_step=max((layer.forward_step for layer in layers), default=0),
    )


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
        held = sum(math.prod(state.shape) * (state.fixed_bytes or element_bytes) for state in windows)
        width = sum(state.shape[0] * (state.fixed_bytes or element_bytes) for state in windows)
        moved = sum(state.num_bytes(element_bytes) for state in recurrent)
        if self.kernels is None:  # the chain's columns behind a window
            return StateShape(num_bytes, moved, 0, 0, tape=held, tape_token=width, convolved=0)
        return StateShape(
            num_bytes,
            unrecorded=0,
            rebuilding=int(self.kernels.copies(element_bytes) * moved),
            rebuilding_token=sum(self.kernels.token_bytes(state.shape) for state in recurrent),
            tape=2 * held,  # and what the convolution makes of both
            tape_token=2 * width + sum(self.kernels.gate_bytes(state.shape, element_bytes) for state in recurrent),
            convolved=held,
            columns=max((state.shape[0] * (state.fixed_bytes or element_bytes) for state in windows), default=0),
            forward_step=self.kernels.step_copies * max((math.prod(state.shape) * 4 for state in recurrent), default=0),
        )


@lru_cache(maxsize=32)
def _found(config_class: Any, config_json: str) -> tuple[_StateLayer, ...]:
    """What a bf16 model was seen to keep."""
    model = meta_model(config_class, config_json)
    kernels = {getattr(mixer, "layer_idx", None): kernels_of(mixer) for mixer in model.modules() if kernels_of(mixer)}
    try:
        states_of = _states_of_a_token(model)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise MemoryPlanError(
            f"the states of {type(model).__name__} cannot be counted without running it "
            f"({first_line(error)[:160]}); drafting works without a plan"
        ) from error
    return tuple(_StateLayer(states, kernels.get(index)) for index, states in states_of.items())


def _states_of_a_token(model: Any) -> dict[int, tuple[_State, ...]]:
    """By layer, what is cached after one token."""
    with torch.no_grad():
        output = model(torch.zeros(1, 1, dtype=torch.long, device="meta"), use_cache=True)
    return {
        index: tuple(
            _State(
                kind == RECURRENT,
                tuple(state.shape[1:]),
                None if state.dtype == torch.bfloat16 else state.element_size(),
            )
            for (kind, _), state in layer.states.items()
        )
        for index, layer in read_stock_layers(cache_in(output)).items()
        if layer.states
    }
