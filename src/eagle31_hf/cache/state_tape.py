"""States of a chain rebuilt from what went into the recurrence, instead of one kept after every token.

A recurrence kernel's inputs are small beside its state. They are recorded while a chain is verified; when it is known
how many of its tokens each row keeps, the same kernel runs once more, over all layers at once, from the committed
states. Tokens that are not kept are turned into exact no-ops (nothing decays, nothing is added), so rows of unlike
counts go together, and each stops where it would have stopped alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..trees.host_numbers import on_device

NORM_EPS = 1e-6
"""Of keys, in every kernel of this kind."""


class Recurrence(Protocol):
    """One kernel with its settings; equal ones are run together, hence hashable."""

    head_dims: ClassVar[tuple[int, ...]]
    """Along which dimension each input lists heads: 2 where it has tokens, `(B, T, H, *)`."""
    working_copies: ClassVar[int]
    """States that moving on a state takes at its worst moment, itself included."""

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

    Where the kernel is told more than that keys are to be normed, it moves states on itself.

    Attributes:
        kernel: the model's own for one token after the other.
        options: what it is told beside tensors.
    """

    kernel: Callable[..., tuple[Tensor, Tensor | None]]
    options: tuple[tuple[str, Any], ...]
    head_dims: ClassVar[tuple[int, ...]] = (2, 2, 2, 2, 2)
    working_copies: ClassVar[int] = 2

    def final_state(self, inputs: Sequence[Tensor], state: Tensor, kept: Tensor | None) -> Tensor:
        query, key, value, decay, beta = inputs
        if kept is not None:
            per_head = kept[..., None]
            decay, beta = decay * (per_head if decay.dim() == 3 else per_head[..., None]), beta * per_head
        named = _parameters_of(self.kernel)  # it is handed much that it does not know
        told = {name: setting for name, setting in self.options if name in named and setting is not None}
        is_normed = bool(told.pop("use_qk_l2norm_in_kernel", False))
        if not told:
            return _gated_delta((key, value, decay, beta), state.float(), is_normed=is_normed)
        _, final = self.kernel(
            query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True, **dict(self.options)
        )
        assert final is not None, "output_final_state=True"
        return final


@lru_cache
def _parameters_of(kernel: Callable[..., Any]) -> frozenset[str]:
    """Names: asked in every round."""
    return frozenset(inspect.signature(kernel).parameters)


def _gated_delta(inputs: Sequence[Tensor], state: Tensor, *, is_normed: bool) -> Tensor:
    """The recurrence alone, in place and in float32 as kernels compute it: outputs, which are known already, would take
    half of the launches.

    Args:
        inputs: keys `(B, T, Hk, K)`, values `(B, T, H, V)`, logs of decays `(B, T, H)` or `(B, T, H, K)`, betas
            `(B, T, H)`.
        state: `(B, H, K, V)`.
    """
    key, value, decay, beta = (each.float() for each in inputs)
    if is_normed:
        key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + NORM_EPS)
    if key.shape[2] != state.shape[1]:
        key = key.repeat_interleave(state.shape[1] // key.shape[2], dim=2)
    decay = decay.exp()[..., None] if decay.dim() == 4 else decay.exp()[..., None, None]
    learned_key, learned_value = key * beta[..., None], value * beta[..., None]
    for t in range(key.shape[1]):
        state.mul_(decay[:, t])
        known = (state * learned_key[:, t, :, :, None]).sum(-2)
        state.addcmul_(key[:, t, :, :, None], (learned_value[:, t] - known)[:, :, None])
    return state


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
    working_copies: ClassVar[int] = 6

    def final_state(self, inputs: Sequence[Tensor], state: Tensor, kept: Tensor | None) -> Tensor:
        x, dt, b, _, a, _, dt_bias = inputs
        if kept is not None:
            dt = dt.masked_fill(~kept[..., None], float("-inf"))
        for _output in self._steps((x, dt, b, b, a, dt_bias), None, state):  # outputs nobody wants need no C and no D
            pass
        return state

    def scan(self, inputs: Sequence[Tensor], state: Tensor) -> Tensor:
        """Outputs `(B, T, H, P)`; the state is moved on."""
        *others, d, dt_bias = inputs
        return torch.stack(list(self._steps((*others, dt_bias), d, state)), dim=1)

    def _steps(self, inputs: Sequence[Tensor], d: Tensor | None, state: Tensor) -> Iterator[Tensor]:
        """Outputs `(B, H, P)` of one token after the other."""
        x, dt, b, c, a, dt_bias = inputs
        head_dim, state_size = x.shape[-1], b.shape[-1]
        a = a[:, None, None].expand(-1, head_dim, state_size)
        dt_bias, d = dt_bias[:, None].expand(-1, head_dim), None if d is None else d[:, None].expand(-1, head_dim)
        for t in range(x.shape[1]):
            yield self.kernel(
                state, x[:, t], dt[:, t, :, None].expand(-1, -1, head_dim), a, b[:, t], c[:, t], d, z=None,
                dt_bias=dt_bias, dt_softplus=self.dt_softplus,
            )  # fmt: skip


class Kernels(NamedTuple):
    """Names, in modeling files, of a kernel for many tokens and of that for one, and what both compute."""

    many: str
    one: str
    recurrence: type[GatedDelta] | type[SelectiveScan]
    decays_by_channel: bool = False

    def gate_bytes(self, state: Sequence[int], element_bytes: int) -> int:
        """What a record of one token has beside what the convolution made.

        Args:
            state: shape of a row's recurrent state, `(H, *, *)`.
            element_bytes: of the model's activations.
        """
        heads = state[0]
        if self.recurrence is SelectiveScan:
            return heads * element_bytes
        return heads * ((state[1] if self.decays_by_channel else 1) * 4 + element_bytes)  # decays, in fp32, and betas


RECORDED_KERNELS = (
    Kernels("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", GatedDelta),
    Kernels("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", GatedDelta, decays_by_channel=True),
    Kernels("mamba2_chunk_scan", "mamba2_selective_state_update", SelectiveScan),
)


def kernels_of(mixer: nn.Module) -> Kernels | None:
    """Those that the mixer's forward calls, if they can be recorded."""
    code = getattr(inspect.unwrap(type(mixer).forward), "__code__", None)
    names, file = set(code.co_names) if code is not None else set(), sys.modules.get(type(mixer).__module__)
    for kernels in RECORDED_KERNELS:
        if {kernels.many, kernels.one} <= names and hasattr(file, kernels.many) and hasattr(file, kernels.one):
            return kernels
    return None


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
        on_card = None if kept is None else kept.to(joined.device, non_blocking=joined.is_cuda)  # no host wait
        final = recurrence.final_state(inputs, joined, on_card)
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
