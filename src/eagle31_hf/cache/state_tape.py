"""States of a chain rebuilt from what went into the recurrence, instead of one kept after every token.

A recurrence kernel's inputs are small beside its state. They are recorded while a chain is verified; when it is known
how many of its tokens each row keeps, the states after them follow from the committed ones in closed form, of all
layers at once. One token after the other would read and write every state several times for each. Tokens that are not
kept are turned into exact no-ops (nothing decays, nothing is added), so rows of unlike counts go together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..drafting.host_numbers import on_device
from .slot_moves import DeviceCopies
from .torch_internals import copy_all

NORM_EPS = 1e-6
"""Of keys, in every kernel of this kind."""

Inputs = Sequence[Tensor]
Moves = list[tuple[Tensor, Tensor]]
"""Committed states, each with its value after a round."""


class LastNodes:
    """The last node each row keeps, -1 where a row stands still.

    Args:
        nodes: one for each row; in a graph a tensor `(B,)`, which is known when that is replayed.
        device: where they are sent first.
    """

    def __init__(self, nodes: Sequence[int] | Tensor, device: torch.device):
        self.device = device
        self.nodes: Sequence[int] | None = None if isinstance(nodes, Tensor) else nodes
        self._copies = DeviceCopies(nodes) if isinstance(nodes, Tensor) else None

    @property
    def common(self) -> int | None:
        """The node, if it is known to be the same in all rows."""
        return self.nodes[0] if self.nodes is not None and len(set(self.nodes)) == 1 else None

    def on(self, device: torch.device) -> Tensor:
        """The nodes there, `(B,)`."""
        if self._copies is None:
            assert self.nodes is not None, "they are numbers or a tensor"
            self._copies = DeviceCopies(on_device(self.nodes, self.device))
        return self._copies.on(device)[0]

    def reach(self, num_tokens: int) -> int:
        """How many tokens of a chain are kept in any row, at most."""
        return num_tokens if self.nodes is None else min(max(self.nodes) + 1, num_tokens)

    def kept(self, count: int, device: torch.device) -> Tensor | None:
        """Which of a chain's first tokens each row keeps, `(B, count)`; `None`: all of them."""
        if self.nodes is not None and min(self.nodes) >= count - 1:
            return None
        return torch.arange(count, device=device) <= self.on(device)[:, None]


class Recorded(NamedTuple):
    """What a kernel was called with over a chain of `T` tokens; inputs with tokens are `(B, T, H, *)`."""

    recurrence: GatedDelta | SelectiveScan
    inputs: tuple[Tensor, ...]

    @property
    def likeness(self) -> Hashable:
        """Calls that are alike may be answered together."""
        return self.recurrence, tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in self.inputs)


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta net and Kimi delta attention: `S <- S exp(g)`, then `S <- S + beta k (v - k S)`.

    Attributes:
        is_normed: keys are normed first.
    """

    is_normed: bool
    reads: ClassVar[tuple[int, ...]] = (1, 2, 3, 4)
    """Which of the recorded inputs states are moved on by; others make outputs, which are known already."""

    def final_states(self, inputs: Inputs, states: Tensor, kept: Tensor | None) -> Tensor:
        """States `(L, B, H, *, *)` of `L` layers after the tokens that are `kept` `(B, T)`, or all.

        Args:
            inputs: those it `reads`, of all layers. Where they have tokens, heads come first: `(L, B, H, T, *)`.
            states: before; they may be written over.
            kept: 1 or 0.
        """
        key, value, decay, beta = inputs
        if kept is not None:
            kept = kept[:, None]  # (B, 1, T)
            decay, beta = decay * (kept if decay.dim() == 4 else kept[..., None]), beta * kept
        return _gated_delta((key, value, decay, beta), states.float(), is_normed=self.is_normed)


def _gated_delta(inputs: Inputs, states: Tensor, *, is_normed: bool) -> Tensor:
    """In place and in float32, as kernels compute it.

    With `d_ij` what decays from token `j` to token `i`, and `d_i` from the beginning, token `i` of `T` adds
    `d_Ti k_i u_i` to the last state, where `u_i = beta_i (v_i - k_i d_i S - sum over j < i of (k_i d_ij k_j) u_j)`.

    Args:
        inputs: keys `(L, B, Hk, T, K)`, values `(L, B, H, T, V)`, logs of decays `(L, B, H, T)` or
            `(L, B, H, T, K)`, betas `(L, B, H, T)`.
        states: `(L, B, H, K, V)`.
    """
    key, value, decay, beta = (each.float() for each in inputs)
    if is_normed:
        key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + NORM_EPS)
    if key.shape[2] != states.shape[2]:
        key = key.repeat_interleave(states.shape[2] // key.shape[2], dim=2)
    by_channel = decay.dim() == 5
    key, value, decay, beta = (each.flatten(0, 2) for each in (key, value, decay, beta))  # (N, T, *), a head each
    decay, beta, states_of = decay.mT if by_channel else decay[:, None], beta[..., None], states.flatten(0, 2)
    since = decay.cumsum(-1).exp()  # (N, K or 1, T)
    between = _sums_after(decay).cumsum(-2).exp()  # (N, K or 1, T, T)
    if by_channel:
        alike = (key.mT[:, :, :, None] * key.mT[:, :, None] * between).sum(1)
    else:
        alike = torch.bmm(key, key.mT) * between[:, 0]
    alike = (alike * beta).tril(-1)  # (N, T, T)
    added = (value - torch.bmm(key * since.mT, states_of)) * beta  # (N, T, V)
    for t in range(1, key.shape[1]):
        added[:, t : t + 1].baddbmm_(alike[:, t : t + 1, :t], added[:, :t], alpha=-1)
    states_of.mul_(since[:, :, -1:]).baddbmm_(key.mT * between[:, :, -1], added)
    return states


def _sums_after(numbers: Tensor) -> Tensor:
    """`(*, T, T)` whose columns add up to what comes after their place in `(*, T)`. Differences of sums would lose
    what is small beside them."""
    return numbers[..., None].expand(*numbers.shape, numbers.shape[-1]).tril(-1)


@dataclass(frozen=True)
class SelectiveScan:
    """Mamba 2: `S <- S exp(dt A) + dt B x`.

    Attributes:
        kernel: the model's own for one token, which writes the state in place.
        dt_softplus: as the kernel takes it.
        rounds: it adds `dt B x` in the activations' precision, as transformers' own code does, and not in float32, as
            compiled ones do.
    """

    kernel: Callable[..., Tensor]
    dt_softplus: bool
    rounds: bool = False
    reads: ClassVar[tuple[int, ...]] = (0, 1, 2, 4, 6)

    def final_states(self, inputs: Inputs, states: Tensor, kept: Tensor | None) -> Tensor:
        """As `GatedDelta.final_states`."""
        x, dt, b, a, dt_bias = inputs  # (L, B, H, T, P), (L, B, H, T), (L, B, G, T, N), (L, H), (L, H)
        dt, a = dt + dt_bias.to(dt.dtype)[:, None, :, None], a.float()[:, None, :, None]
        dt = F.softplus(dt) if self.dt_softplus else dt
        if kept is not None:
            dt = dt * kept[:, None]
        states = states.float()
        return (
            _scan_rounding(x, dt, b, a, states) if self.rounds else _scan(x.float(), dt.float(), b.float(), a, states)
        )

    def scan(self, inputs: Sequence[Tensor], state: Tensor) -> Tensor:
        """Outputs `(B, T, H, P)` of one token after the other, as the model computes them; the state is moved on."""
        x, dt, b, c, a, d, dt_bias = inputs
        head_dim, state_size = x.shape[-1], b.shape[-1]
        a = a[:, None, None].expand(-1, head_dim, state_size)
        dt_bias, d = (each[:, None].expand(-1, head_dim) for each in (dt_bias, d))
        outputs = [
            self.kernel(
                state, x[:, t], dt[:, t, :, None].expand(-1, -1, head_dim), a, b[:, t], c[:, t], d, z=None,
                dt_bias=dt_bias, dt_softplus=self.dt_softplus,
            )
            for t in range(x.shape[1])
        ]  # fmt: skip
        return torch.stack(outputs, dim=1)


def _scan(x: Tensor, dt: Tensor, b: Tensor, a: Tensor, states: Tensor) -> Tensor:
    """In place and in closed form: each token adds `exp(A * dt of those after it) dt B x`. `a`: `(L, 1, H, 1)`."""
    left = (_sums_after(dt).sum(-2) * a).exp()  # (L, B, H, T), of what each token adds
    weighted = (x * (left * dt)[..., None]).unflatten(2, (b.shape[2], -1))  # (L, B, G, H / G, T, P)
    states.mul_((dt.sum(-1, keepdim=True) * a).exp()[..., None])
    added = weighted.transpose(-1, -2).flatten(3, 4).flatten(0, 2)  # (N, H / G * P, T): heads of a group share its B
    states.view(len(added), added.shape[1], -1).baddbmm_(added, b.flatten(0, 2))
    return states


def _scan_rounding(x: Tensor, dt: Tensor, b: Tensor, a: Tensor, states: Tensor) -> Tensor:
    """In place and one token after the other, rounded as transformers' own code does: with other last bits in every
    layer, half of the texts in half precision would soon be others."""
    decays = (dt.float() * a).exp()
    added = dt[..., None] * b.repeat_interleave(x.shape[2] // b.shape[2], dim=2)  # (L, B, H, T, N)
    for t in range(x.shape[3]):
        states.mul_(decays[..., t, None, None])
        states.add_(added[..., t, None, :] * x[..., t, :, None])
    return states


def rebuilt_states(taped: Sequence[tuple[Tensor, Recorded]], last: LastNodes) -> Moves:
    """Committed states `(B, H, *, *)`, each with that after the rows' last kept nodes, by what is recorded of it."""
    groups: dict[Hashable, list[tuple[Tensor, Recorded]]] = {}
    for state, recorded in taped:
        groups.setdefault((recorded.likeness, state.shape, state.dtype), []).append((state, recorded))
    moves: Moves = []
    for group in groups.values():
        states, recurrence = [state for state, _ in group], group[0][1].recurrence
        columns = list(zip(*(recorded.inputs for _, recorded in group), strict=True))
        count = last.reach(columns[0][0].shape[1])
        inputs = [torch.stack([_heads_first(each, count) for each in columns[place]]) for place in recurrence.reads]
        final = recurrence.final_states(inputs, torch.stack(states), last.kept(count, states[0].device))
        moves += zip(states, final.to(states[0].dtype), strict=True)
    return moves


def _heads_first(recorded: Tensor, count: int) -> Tensor:
    """An input's first tokens, `(B, H, count, *)`; one that has none as it is."""
    return recorded if recorded.dim() == 1 else recorded[:, :count].transpose(1, 2)


def moved_windows(taped: Sequence[tuple[Tensor, Tensor]], last: LastNodes) -> Moves:
    """Convolutions' windows `(B, C, K)` and what they are where each row's last kept token is.

    Args:
        taped: windows, and what they were part of: the windows before and the chain's columns, `(B, C, K + T)`.
        last: of each row.
    """
    if last.common is not None:
        start = last.common + 1
        return [(window, columns[..., start : start + window.shape[2]]) for window, columns in taped]
    groups: dict[Hashable, list[tuple[Tensor, Tensor]]] = {}
    for window, columns in taped:
        alike = (window.shape[2], columns.shape[2], window.device, window.dtype)
        groups.setdefault(alike, []).append((window, columns))
    moves: Moves = []
    for group in groups.values():
        windows, size = [window for window, _ in group], group[0][0].shape[2]
        joined = torch.cat([columns for _, columns in group], dim=1)
        places = last.on(joined.device)[:, None] + 1 + torch.arange(size, device=joined.device)
        gathered = joined.gather(2, places[:, None].expand(-1, joined.shape[1], -1))
        moves += zip(windows, gathered.split([window.shape[1] for window in windows], dim=1), strict=True)
    return moves


def make_moves(moves: Moves) -> None:
    """Write each state's new value over it, in one launch for each precision."""
    groups: dict[Hashable, Moves] = {}
    for state, new in moves:
        groups.setdefault((state.dtype, state.device), []).append((state, new))
    for group in groups.values():
        copy_all(*zip(*group, strict=True))
