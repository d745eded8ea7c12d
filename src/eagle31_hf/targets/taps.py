"""Hidden states of a target, caught on their way into the layers a drafter reads.

A server's threads share one target. What is caught belongs to the thread whose forward it was: another thread's, with
a drafter or without, is none of its business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import IncompatibleTargetError


class UnreadableStatesError(IncompatibleTargetError):
    """More than one vector a token passes between the layers of a target, as in Gemma 3n: no drafter reads that."""


class HiddenStateTaps:
    """Forward hooks on decoder layers.

    Args:
        decoder: the part of a target that reads text; its output is normed.
        layers: the decoder's layers.
        indices: `hs` indices: `k` is the input of layer `k`, the number of layers the output of the last, and one more
            the output of the decoder, behind its final norm.
    """

    def __init__(self, decoder: nn.Module, layers: nn.ModuleList, indices: Sequence[int]):
        self._indices = tuple(indices)
        self._caught: dict[int, dict[int, Tensor]] = {}  # by thread, then by index
        self._handles = [self._tap(decoder, layers, index) for index in sorted(set(indices))]

    def _tap(self, decoder: nn.Module, layers: nn.ModuleList, index: int) -> Any:
        if index < len(layers):
            before = _Tap(lambda args, kwargs: self._catch(index, args[0] if args else kwargs["hidden_states"]))
            return layers[index].register_forward_pre_hook(before, with_kwargs=True)
        after = _Tap(lambda _, output: self._catch(index, output if isinstance(output, Tensor) else output[0]))
        return (layers[-1] if index == len(layers) else decoder).register_forward_hook(after)

    def _catch(self, index: int, states: Tensor) -> None:
        # While nothing is watched, a graph of the target's user stays whole: asking for the thread breaks it.
        if self._caught and (caught := self._caught.get(threading.get_ident())) is not None:
            caught[index] = states

    @property
    def are_open(self) -> bool:
        """Whether this thread's forwards are being watched."""
        return threading.get_ident() in self._caught

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, this thread's forwards leave their hidden states to `take`."""
        thread = threading.get_ident()
        outer = self._caught.get(thread)
        self._caught[thread] = {}
        try:
            yield
        finally:
            if outer is None:
                del self._caught[thread]
            else:
                self._caught[thread] = outer

    def take(self, device: torch.device) -> Tensor:
        """What the thread's last forward left, `(B, T, A*Ht)` on `device`, lowest index first. Handed over once.

        Raises:
            IncompatibleTargetError: the hooks did not run (the model was compiled before they were there).
            UnreadableStatesError: there is no one vector a token.
        """
        thread = threading.get_ident()
        caught, self._caught[thread] = self._caught[thread], {}
        missing = [index for index in self._indices if index not in caught]
        if missing:
            raise IncompatibleTargetError(
                f"the target's hidden states {missing} were not seen during its forward pass; if the target was "
                "compiled with torch.compile, attach the drafter before compiling"
            )
        states = [caught[index].to(device) for index in self._indices]
        if any(each.dim() != 3 for each in states):
            raise UnreadableStatesError(
                f"the target passes states of shape {tuple(states[0].shape)} from layer to layer; wanted one vector a "
                "token, which is what drafters read: there are none for such targets"
            )
        return torch.cat(states, dim=-1)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Tap:
    """A forward hook that stays behind when its target is copied or pickled: the copy has an idle one.

    A plain function would go along: a copy's forward would overwrite our hidden states, and pickling would fail.
    """

    def __init__(self, hook: Callable[..., None] | None = None):
        self._hook = hook

    def __call__(self, _module: nn.Module, *call: Any) -> None:
        if self._hook is not None:
            self._hook(*call)

    def __reduce__(self) -> tuple[type[_Tap], tuple[()]]:
        return _Tap, ()
