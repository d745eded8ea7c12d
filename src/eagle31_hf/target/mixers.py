"""Recurrent and convolution layers over a block of drafts: one token after the other, by the model's own code.

A mixer is a module whose forward talks to the states of a transformers cache. Its code for many tokens leaves one
state, that after the last; its code for one token, run token by token, leaves one after each, and computes as plain
decoding does. So a mixer is called once per token of the block, and the cache (`cache.states`) hands it the state that
the token continues: that of the one before it, or of its parent in a tree.

What a mixer projects its input by is the same for all tokens, and would otherwise be read from memory once for each:
a child that is given the mixer's own input computes all tokens at once and hands out slices, and the child whose output
the mixer returns gets its inputs together. Which children these are is seen while they run; no names are known here.

Forwards over any other cache, of other threads or of plain `generate`, are as they were.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ..cache.block_reading import RowGroup
from ..cache.placement import Placement
from ..cache.spans import kinds_from_config
from ..cache.state_blocks import KeepsStates, MixerCall
from ..cache.states import StateLayer
from ..errors import IncompatibleTargetError
from .kernel_tape import KernelTape, recording

logger = logging.getLogger(__name__)

STATE_CALLS = {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"}


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that read or write states of a cache, by what their forward calls."""
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and STATE_CALLS & set(code.co_names):
            yield name, module


def require_mixers(model: PreTrainedModel) -> bool:
    """Whether some layers of `model` keep states, all of which can be taken back.

    Raises:
        IncompatibleTargetError: it keeps states where nobody can find them.
    """
    name, text = type(model).__name__, model.config.get_text_config(decoder=True)
    stock = DynamicCache(config=text).layers
    if not model._is_stateful and not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in stock):
        return False
    refusal = (
        f"{name} keeps a state that cannot be taken back when a draft is rejected: {{}}; use a target whose "
        "states lie in transformers' own cache layers, or one whose layers are all attention"
    )
    try:
        num_states = kinds_from_config(text, None, 1).num_states
    except IncompatibleTargetError as error:
        raise IncompatibleTargetError(refusal.format(error)) from error
    if not any(num_states):
        raise IncompatibleTargetError(refusal.format("it does not lie in the layers of a transformers cache"))
    indices = {getattr(mixer, "layer_idx", None) for _, mixer in find_mixers(model)}
    unread = [index for index, count in enumerate(num_states) if count and index not in indices]
    if unread or None in indices:
        where = f"layers {unread}" if unread else "some module"
        raise IncompatibleTargetError(refusal.format(f"no module was found that keeps the states of {where}"))
    return True


class Mixers:
    """The mixers of one model, which read blocks over our caches token by token while at least one drafter holds them.

    Args:
        model: the target.
    """

    _of_models: ClassVar[WeakKeyDictionary[nn.Module, Mixers]] = WeakKeyDictionary()
    _lock: ClassVar = threading.RLock()  # garbage that is collected meanwhile may let go

    def __init__(self, model: nn.Module):
        self._mixers = [_Mixer(name, module) for name, module in find_mixers(model)]
        self._holders = 0
        self.tape_is_right: bool | None = None  # the self-test's verdict, once for all drafters

    @property
    def taped(self) -> bool:
        """Whether some of them read chains at once and are recorded, instead of token by token."""
        return any(mixer.taped for mixer in self._mixers)

    def use_tape(self, wanted: bool) -> None:
        """Read chains at once where kernels can be recorded, or step through them all."""
        for mixer in self._mixers:
            mixer.taped = wanted and mixer.tape is not None

    @property
    def stepped_recurrence(self) -> str:
        """Name of a mixer whose recurrent states are kept after every token of a block; empty if none are."""
        stepped = (mixer for mixer in self._mixers if not mixer.taped and mixer.is_recurrent)
        return next((mixer.name for mixer in stepped), "")

    @classmethod
    def hold(cls, model: nn.Module) -> Mixers:
        """Those of `model`, installed until everybody who held them has let go."""
        with cls._lock:
            mixers = cls._of_models.get(model) or cls._of_models.setdefault(model, cls(model))
            mixers._holders += 1
            if mixers._holders == 1:
                for mixer in mixers._mixers:
                    mixer.install()
        return mixers

    def let_go(self) -> None:
        """The last one leaves the model as it was."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                for mixer in self._mixers:
                    mixer.remove()


@dataclass
class _Steps:
    """A mixer's calls over the tokens `(G, T, H)` of one group of rows."""

    hidden: Tensor
    token: int = 0
    current: Tensor | None = None  # (G, 1, H) the input of the running call
    projected: dict[str, Tensor] = field(default_factory=dict)  # (G, T, *) by child
    to_project: list[Tensor] = field(default_factory=list)  # (G, 1, *) inputs of the output projection
    last: tuple[str, Any] = ("", None)  # the child that returned last, and what


class _Mixer:
    """One mixer, its forward and those of its children."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        parameters = list(inspect.signature(type(module).forward).parameters)
        self._input_name = parameters[1] if len(parameters) > 1 else ""
        self._own: Callable[..., Any] = module.forward
        self._output_child = ""
        self.is_recurrent = "update_recurrent_state" in inspect.unwrap(type(module).forward).__code__.co_names
        self.tape = KernelTape.of(module)
        self.taped = False  # until the self-test has seen that it is right
        self._not_apart: set[str] = set()  # children that are given the mixer's input and do not treat tokens apart
        self._replaced: list[_Replaced] = []
        self._running = threading.local()

    def install(self) -> None:
        if self.tape is not None:
            self.tape.hold()
        self._own = self.module.forward
        self._replaced = [_Replaced(self.module, self._forward)]
        for name, child in self.module.named_children():
            self._replaced.append(_Replaced(child, functools.partial(self._child, name, child, child.forward)))

    def remove(self) -> None:
        for replaced in self._replaced:
            replaced.undo()
        self._replaced = []
        if self.tape is not None:
            self.tape.let_go()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, KeepsStates)), None)
        if cache is None or not cache.has_states:
            return self._own(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs[self._input_name]

        def run(tokens: Tensor) -> Any:
            return self._own(tokens, *args[1:], **kwargs) if args else self._own(**{**kwargs, self._input_name: tokens})

        return self._read(cache, hidden, run)

    def _read(self, cache: KeepsStates, hidden: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """The placed block `(B, T, H)`, row group by row group: no mixer is shown a pad."""
        placement, index = cache.placement, self.module.layer_idx
        placement.check(*hidden.shape[:2])
        layer: Any = cache.layers[index]  # type: ignore[attr-defined]
        parts = []
        for group in placement.groups:
            rows = group.rows_on(hidden.device)
            tokens = hidden if rows is None else hidden[rows]
            parts.append((rows, self._read_group(layer, placement, group, tokens[:, : group.count], run)))
        return _joined(parts, hidden)

    def _read_group(
        self, layer: StateLayer, placement: Placement, group: RowGroup, hidden: Tensor, run: Callable[[Tensor], Any]
    ) -> Any:
        reading = placement.reading
        is_chain = reading.keeps_nodes and reading.parents is None and group.count > 1
        if self.taped and is_chain and group.index is None and not group.begins:
            out, is_recorded = self._read_taped(layer, group, hidden, run)
            if is_recorded:
                return out
        if reading.keeps_nodes:
            calls = [
                MixerCall(self.name, group, node, _parents(placement, node), begins=group.begins and node == 0)
                for node in range(group.count)
            ]
        else:
            calls = [MixerCall(self.name, group, begins=group.begins)]
        if group.count == 1 or (len(calls) == 1 and (group.begins or not reading.stepped)):
            layer.begin(calls[0])
            out = run(hidden)
            layer.end()
            return out
        steps, outs = _Steps(hidden), []
        self._running.steps = steps
        try:
            for token in range(group.count):
                if token < len(calls):
                    layer.begin(calls[token])
                steps.token, steps.current = token, hidden[:, token : token + 1]
                outs.append(run(steps.current))
                if token + 1 < len(calls):
                    layer.end()
            layer.end()
        finally:
            self._running.steps = None
        if steps.to_project:
            return self.module.get_submodule(self._output_child)(torch.cat(steps.to_project, dim=1))
        if steps.last[1] is outs[-1]:
            self._output_child = steps.last[0]
        return _in_order(outs)

    def _read_taped(
        self, layer: StateLayer, group: RowGroup, hidden: Tensor, run: Callable[[Tensor], Any]
    ) -> tuple[Any, bool]:
        """All tokens in one call. A kernel that goes past the tape leaves no record: then the mixer is stepped from now
        on, this time, too."""
        layer.begin(MixerCall(self.name, group, taped=True))
        with recording() as records:
            out = run(hidden)
        if len(records) != 1:
            layer.forget_block()
            self.taped = False
            logger.warning("eagle31: %s calls a kernel that cannot be recorded; it reads token by token", self.name)
            return None, False
        layer.end_taped(records[0])
        return out, True

    def _child(self, name: str, child: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        steps: _Steps | None = getattr(self._running, "steps", None)
        # One that lies within an adapter by now does not give what the mixer takes.
        if steps is None or self.module._modules.get(name) is not child:
            return own(*args, **kwargs)
        only = args[0] if len(args) == 1 and not kwargs else None
        if only is not None and only is steps.current and name not in self._not_apart:
            if name not in steps.projected:
                projected = own(steps.hidden)
                if not isinstance(projected, Tensor) or projected.shape[:2] != steps.hidden.shape[:2]:
                    self._not_apart.add(name)
                    return own(only)
                steps.projected[name] = projected
            return steps.projected[name][:, steps.token : steps.token + 1]
        if only is not None and name == self._output_child:
            steps.to_project.append(only)
            return only
        out = own(*args, **kwargs)
        steps.last = (name, out)
        return out


def _parents(placement: Placement, node: int) -> Any:
    if node == 0:
        return None
    return placement.state_parents[node] if placement.reading.parents is not None else node - 1


def _in_order(outs: list[Any]) -> Any:
    """Outputs of one token after the other as those of all: tensors `(G, 1, *)`, or tuples of them."""
    if isinstance(outs[0], tuple):
        return tuple(None if parts[0] is None else torch.cat(parts, dim=1) for parts in zip(*outs, strict=True))
    return torch.cat(outs, dim=1)


def _joined(parts: list[tuple[Tensor | None, Any]], hidden: Tensor) -> Any:
    """Outputs `(G, n, *)` of groups of rows, in place; zeros where a row has pads."""
    first = parts[0][1]
    if len(parts) == 1 and parts[0][0] is None:
        return first
    if isinstance(first, tuple):
        columns = zip(*(out for _, out in parts), strict=True)
        rows = [row for row, _ in parts]
        return tuple(
            None if column[0] is None else _joined(list(zip(rows, column, strict=True)), hidden) for column in columns
        )
    whole = first.new_zeros(*hidden.shape[:2], *first.shape[2:])
    for of_rows, out in parts:
        assert of_rows is not None, "one group of all rows has been returned"
        whole[of_rows, : out.shape[1]] = out
    return whole


class _Replaced:
    """A module's `forward`, replaced in the instance. A copy or pickle of the model gets its own forward back."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._module, self._forward = module, forward
        self._before = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def undo(self) -> None:
        """Unless somebody has replaced it since."""
        if self._module.__dict__.get("forward") is not self:
            return
        if self._before is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._before

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_forward, (self._module, self._before)


def _own_forward(module: nn.Module, before: Callable[..., Any] | None) -> Callable[..., Any]:
    return before if before is not None else MethodType(type(module).forward, module)
