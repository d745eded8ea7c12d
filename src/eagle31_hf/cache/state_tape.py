"""States of a chain rebuilt from what went into the recurrence, instead of one kept after every token.

A recurrence kernel's inputs are small beside its state. They are recorded while a chain is verified; when it is known
how many of its tokens each row keeps, the same kernel runs once more, over all layers at once, from the committed
states. Tokens that are not kept are turned into exact no-ops (nothing decays, nothing is added), so rows of unlike
counts go together, and each stops where it would have stopped alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..trees.host_numbers import on_device


class Recurrence(Protocol):
    """One kernel with its settings; equal ones are run together, hence hashable."""

    head_dims: ClassVar[tuple[int, ...]]
    """Along which dimension each input lists heads: 2 where it has tokens, `(B, T, H, *)`."""

    def final_state(self, inputs: Sequence[Tensor], state: Tensor, kept: Tensor | None) -> Tensor:
        """The state `(B, H, *, *)` after the tokens that are `kept` `(B, T)`, or all. `state` may be written over."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Recorded:
    """What a kernel was called with over a chain of `T` tokens."""

    recurrence: Recurrence
    inputs: tuple[Tensor, ...]

    @property
    def likeness(self) -> Hashable:
        """Calls that are alike may be joined along their heads."""
        return self.recurrence, tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in self.inputs)


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta net and Kimi delta attention: `S <- S exp(g)`, then `S <- S + beta k (v - k S)`.

    Attributes:
        kernel: the model's own for one token after the other.
        options: what it is told beside tensors.
    """

    kernel: Callable[..., tuple[Tensor, Tensor | None]]
    options: tuple[tuple[str, Any], ...]
    head_dims: ClassVar[tuple[int, ...]] = (2, 2, 2, 2, 2)

    def final_state(self, inputs: Sequence[Tensor], state: Tensor, kept: Tensor | None) -> Tensor:
        query, key, value, decay, beta = inputs
        if kept is not None:
            per_head = kept[..., None]
            decay, beta = decay * (per_head if decay.dim() == 3 else per_head[..., None]), beta * per_head
        _, final = self.kernel(
            query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True, **dict(self.options)
        )
        assert final is not None, "output_final_state=True"
        return final


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba 2: `S <- S exp(dt A) + dt B x`.

    Attributes:
        kernel: the model's own for one token, which writes the state in place.
        dt_softplus: as it is told.
    """

    kernel: Callable[..., Tensor]
    dt_softplus: bool
    head_dims: ClassVar[tuple[int, ...]] = (2, 2, 2, 2, 0, 0, 0)  # x, dt, B, C of each token; A, D, dt_bias

    def final_state(self, inputs: Sequence[Tensor], state: Tensor, kept: Tensor | None) -> Tensor:
        x, dt, *others = inputs
        if kept is not None:
            dt = dt.masked_fill(~kept[..., None], float("-inf"))
        self.scan((x, dt, *others), state)
        return state

    def scan(self, inputs: Sequence[Tensor], state: Tensor) -> Tensor:
        """Outputs `(B, T, H, P)`; the state is moved on."""
        x, dt, b, c, a, d, dt_bias = inputs
        head_dim, state_size = x.shape[-1], b.shape[-1]
        a = a[:, None, None].expand(-1, head_dim, state_size)
        d, dt_bias = (each[:, None].expand(-1, head_dim) for each in (d, dt_bias))
        steps = [
            self.kernel(
                state, x[:, t], dt[:, t, :, None].expand(-1, -1, head_dim), a, b[:, t], c[:, t], d, z=None,
                dt_bias=dt_bias, dt_softplus=self.dt_softplus,
            )
            for t in range(x.shape[1])
        ]  # fmt: skip
        return torch.stack(steps, dim=1)


def rebuild_states(taped: Sequence[tuple[Tensor, Recorded]], last: Sequence[int]) -> None:
    """Move committed states `(B, H, *, *)` on to each row's `last` kept node, each by what is recorded of it."""
    count = max(last) + 1
    kept = torch.tensor([[node <= end for node in range(count)] for end in last]) if min(last) < count - 1 else None
    groups: dict[Hashable, list[tuple[Tensor, Recorded]]] = {}
    for state, recorded in taped:
        groups.setdefault((recorded.likeness, state.shape, state.dtype), []).append((state, recorded))
    for group in groups.values():
        states = [state for state, _ in group]
        recurrence = group[0][1].recurrence
        columns = zip(*(recorded.inputs for _, recorded in group), strict=True)
        inputs = [
            torch.cat([each[:, :count] if dim == 2 else each for each in column], dim)
            for column, dim in zip(columns, recurrence.head_dims, strict=True)
        ]
        joined = torch.cat(states, dim=1)  # a copy, also of a single one: kernels may write in place
        final = recurrence.final_state(inputs, joined, None if kept is None else kept.to(joined.device))
        torch._foreach_copy_(states, list(final.to(joined.dtype).chunk(len(states), dim=1)))


def cut_windows(taped: Sequence[tuple[Tensor, Tensor]], last: Sequence[int]) -> None:
    """Move convolutions' windows `(B, C, K)` to where each row's last kept token is.

    Args:
        taped: windows, and what they were part of: the windows before and the chain's columns, `(B, C, K + T)`.
        last: node of each row, -1 where it stands still.
    """
    groups: dict[Hashable, list[tuple[Tensor, Tensor]]] = {}
    for window, columns in taped:
        groups.setdefault((window.shape[2], columns.shape[2], window.device, window.dtype), []).append(
            (window, columns)
        )
    for group in groups.values():
        windows, size = [window for window, _ in group], group[0][0].shape[2]
        if len(set(last)) == 1:
            parts = [columns[..., last[0] + 1 : last[0] + 1 + size] for _, columns in group]
        else:
            joined = torch.cat([columns for _, columns in group], dim=1)
            starts = on_device(last, joined.device)[:, None] + 1 + torch.arange(size, device=joined.device)
            gathered = joined.gather(2, starts[:, None].expand(-1, joined.shape[1], -1))
            parts = list(gathered.split([window.shape[1] for window in windows], dim=1))
        torch._foreach_copy_(windows, parts)
