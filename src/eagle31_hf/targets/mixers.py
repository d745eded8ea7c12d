"""Recurrent and convolution layers over a chain of drafts: in one call, of which any number of tokens can be kept.

A mixer is a module whose forward talks to the states of a transformers cache. Its code for many tokens leaves one
state, that after the last. Of a chain of drafts its recurrence is therefore recorded and answered by the model's own
code for one token (`kernel_tape`), and its convolution's window is kept with the chain behind it: the state after any
token follows from these (`cache.state_tape`). A mixer whose recurrence cannot be recorded raises, which the self-test
sees: its target is decoded plainly.

Forwards over any other cache, of other threads or of plain `generate`, are as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from ..cache.shared_changes import CHANGES, ReplacedForward
from ..cache.spans import kinds_from_config
from ..cache.states import StateLayer
from ..errors import IncompatibleTargetError
from .kernel_tape import hold_kernels, is_held, recording

STATE_CALLS = {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"}
UNRECORDED = "{} moves its recurrent state on by code that cannot be recorded"


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that read or write states of a cache, by what their forward calls."""
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and STATE_CALLS & set(code.co_names):
            yield name, module


def require_mixers(model: PreTrainedModel) -> bool:
    """Whether some layers of `model` keep states, all of which can be taken back.

    Raises:
        IncompatibleTargetError: it keeps states outside the layers of a cache, or no module that keeps them was found.
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
        num_states = [kind.num_states for kind in kinds_from_config(text).layers]
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
    """The mixers of one model, which record chains over our caches while at least one drafter holds them.

    Args:
        model: the target.
    """

    def __init__(self, model: nn.Module):
        self._mixers = [_Mixer(name, module) for name, module in find_mixers(model)]
        self._name = ("mixers", id(model))
        CHANGES.hold(self._name, self._install)

    def _install(self) -> Callable[[], object]:
        installed = ExitStack()
        for mixer in self._mixers:
            mixer.install(installed)
        return installed.close

    def let_go(self) -> None:
        """The last one leaves the model as it was."""
        CHANGES.let_go(self._name)

    @property
    def unrecorded(self) -> str:
        """Why chains cannot be read, as far as that is seen without a forward; empty if they can."""
        unrecorded = [mixer.name for mixer in self._mixers if mixer.is_recurrent and not is_held(mixer.module)]
        return UNRECORDED.format(unrecorded[0]) if unrecorded else ""


class _Mixer:
    """One mixer and its forward."""

    def __init__(self, name: str, module: nn.Module):
        self.name, self.module = name, module
        forward = inspect.unwrap(type(module).forward)
        parameters = list(inspect.signature(forward).parameters)
        self._input_name = parameters[1] if len(parameters) > 1 else ""
        self._own: Callable[..., Any] = module.forward
        self.is_recurrent = "update_recurrent_state" in forward.__code__.co_names

    def install(self, installed: ExitStack) -> None:
        """Stand before the module's own forward until what is `installed` is closed."""
        installed.enter_context(hold_kernels(self.module))
        self._own = self.module.forward
        installed.callback(ReplacedForward(self.module, self._forward).undo)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        cache: Any = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        if not getattr(cache, "with_states", None):
            return self._own(*args, **kwargs)
        hidden: Tensor = args[0] if args else kwargs[self._input_name]

        def run(tokens: Tensor) -> Any:
            return self._own(tokens, *args[1:], **kwargs) if args else self._own(**{**kwargs, self._input_name: tokens})

        cache.placement.check(*hidden.shape[:2])
        read = self._read_chain if cache.placement.is_chain else self._read_groups
        return read(cache.layers[self.module.layer_idx], hidden, run)  # type: ignore[index]

    def _read_groups(self, layer: StateLayer, hidden: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """A chunk of a prompt `(B, T, H)`, or a token of each row, row group by row group: no mixer is shown a pad."""
        parts = []
        for group in layer.placement.groups:
            rows = group.rows_on(hidden.device)
            tokens = hidden if rows is None else hidden[rows]
            layer.begin(group)
            parts.append((rows, run(tokens[:, : group.count])))
            layer.end()
        return _joined(parts, hidden)

    def _read_chain(self, layer: StateLayer, hidden: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Drafts `(B, T, H)` of all rows."""
        [group] = layer.placement.groups
        layer.begin(group)
        with recording() as records:
            out = run(hidden)
        if len(records) != self.is_recurrent:
            raise IncompatibleTargetError(
                UNRECORDED.format(self.name) + ", so that drafts cannot be taken back; generate without a drafter"
            )
        layer.end(records[0] if records else None)
        return out


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
