"""States after a chain in closed form, against the recurrences written out token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update

from eagle31_hf.cache.state_tape import (
    GatedDelta,
    LastNodes,
    Recorded,
    SelectiveScan,
    moved_windows,
    rebuilt_states,
)
from eagle31_hf.targets import kernel_tape

ROWS, TOKENS, LAYERS = 3, 13, 2
HEADS, SHARING, WIDTH, OTHER = 4, 2, 8, 6  # of key heads, or of a group's B, half as many; states are (H, 8, 6)
CPU = torch.device("cpu")
KEPT = ([-1, 0, 12], [4, 4, 4], [12, 12, 12], [-1, -1, 7])


def one_token(*_: object, **__: object) -> Tensor:
    raise AssertionError("closed forms call no kernel")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gated_delta(seed: int, *, by_channel: bool, decay: float, alike: float) -> Recorded:
    """Keys that are `alike` up to 1, as where a text repeats a token."""
    keys = (1 - alike) * drawn(ROWS, TOKENS, SHARING, WIDTH, seed=seed) + alike * drawn(1, 1, SHARING, WIDTH, seed=9)
    decays = -decay * drawn(ROWS, TOKENS, HEADS, *[WIDTH] * by_channel, seed=seed + 1).abs()
    betas = drawn(ROWS, TOKENS, HEADS, seed=seed + 2).add(2).sigmoid()
    values = drawn(ROWS, TOKENS, HEADS, OTHER, seed=seed + 3)
    recurrence = GatedDelta(is_normed=True)
    if by_channel:
        keys = keys.repeat_interleave(HEADS // SHARING, 2)
    return Recorded(recurrence, (keys, keys, values, decays, betas))


def selective_scan(seed: int, *, dt_softplus: bool) -> Recorded:
    x, dt = drawn(ROWS, TOKENS, HEADS, WIDTH, seed=seed), drawn(ROWS, TOKENS, HEADS, seed=seed + 1)
    b = drawn(ROWS, TOKENS, SHARING, OTHER, seed=seed + 2)
    a, d, bias = -drawn(HEADS, seed=seed + 3).exp(), drawn(HEADS, seed=seed + 4), drawn(HEADS, seed=seed + 5)
    if not dt_softplus:
        dt, bias = dt.abs(), bias.abs()
    return Recorded(SelectiveScan(one_token, dt_softplus=dt_softplus), (x, dt, b, b, a, d, bias))


def after(recorded: Recorded, state: Tensor, row: int, last: int) -> Tensor:
    """A row's state `(H, *, *)` once so many of its tokens were read, in float64."""
    inputs, state = [each.double() for each in recorded.inputs], state[row].double()
    for t in range(last + 1):
        if isinstance(recorded.recurrence, GatedDelta):
            _, key, value, decay, beta = (each[row, t] for each in inputs)
            key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + 1e-6)
            key = key.repeat_interleave(HEADS // len(key), 0)
            state = state * (decay if decay.dim() == 2 else decay[:, None]).exp()[..., None]
            known = torch.einsum("hkv,hk->hv", state, key)
            state = state + torch.einsum("hk,hv->hkv", key, (value - known) * beta[:, None])
        else:
            assert isinstance(recorded.recurrence, SelectiveScan)
            x, dt, b = (each[row, t] for each in inputs[:3])
            dt = dt + inputs[6]
            dt = torch.nn.functional.softplus(dt) if recorded.recurrence.dt_softplus else dt
            added = torch.einsum("hp,hn,h->hpn", x, b.repeat_interleave(HEADS // SHARING, 0), dt)
            state = state * (dt * inputs[4]).exp()[:, None, None] + added
    return state


CASES = {
    "gated delta": lambda seed: gated_delta(seed, by_channel=False, decay=0.1, alike=0.0),
    "repeated tokens": lambda seed: gated_delta(seed, by_channel=False, decay=0.01, alike=0.999),
    "forgotten at once": lambda seed: gated_delta(seed, by_channel=False, decay=60.0, alike=0.5),
    "by channel": lambda seed: gated_delta(seed, by_channel=True, decay=0.1, alike=0.5),
    "channels forgotten at once": lambda seed: gated_delta(seed, by_channel=True, decay=60.0, alike=0.5),
    "selective scan": lambda seed: selective_scan(seed, dt_softplus=True),
    "without softplus": lambda seed: selective_scan(seed, dt_softplus=False),
}


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("last", KEPT, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_states_are_those_of_one_token_after_the_other(case: str, last: list[int], in_graph: bool) -> None:
    cases = [*[case] * LAYERS, "selective scan"]  # calls that are unlike are answered apart
    taped = [(drawn(ROWS, HEADS, WIDTH, OTHER, seed=n), CASES[each](10 * n)) for n, each in enumerate(cases)]
    kept = LastNodes(torch.tensor(last) if in_graph else last, CPU)
    moves = rebuilt_states(taped, kept)
    assert [state for state, _ in moves] == [state for state, _ in taped]
    for (state, recorded), (_, found) in zip(taped, moves, strict=True):
        for row, end in enumerate(last):
            wanted = after(recorded, state, row, end)
            torch.testing.assert_close(found[row].double(), wanted, atol=2e-6, rtol=2e-6)
            assert end >= 0 or torch.equal(found[row], state[row]), "a row that stands still is left bit for bit"


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("last", KEPT, ids=str)
def test_a_scan_that_rounds_is_followed_bit_for_bit(last: list[int], in_graph: bool) -> None:
    """In half precision transformers' own code for one token rounds what it adds."""
    recorded = selective_scan(0, dt_softplus=True)
    inputs = tuple([each.bfloat16() for each in recorded.inputs])
    state = drawn(ROWS, HEADS, WIDTH, OTHER, seed=5)
    kept = LastNodes(torch.tensor(last) if in_graph else last, CPU)
    scan = SelectiveScan(mamba2_selective_state_update, dt_softplus=True, rounds=True)
    [(_, found)] = rebuilt_states([(state, Recorded(scan, inputs))], kept)
    for row, end in enumerate(last):
        wanted = state[row : row + 1].clone()
        if end >= 0:
            x, dt, b, c, *others = inputs
            scan.scan([*(each[row : row + 1, : end + 1] for each in (x, dt, b, c)), *others], wanted)
        assert torch.equal(found[row], wanted[0])


def test_a_kernel_is_asked_whether_it_rounds() -> None:
    def in_float32(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *_: Any, **__: Any) -> Tensor:
        state.add_(dt.float()[..., None] * x.float()[..., None] * b.float()[:, :, None])
        return x

    assert kernel_tape._rounds(mamba2_selective_state_update, torch.bfloat16, CPU)
    assert not kernel_tape._rounds(in_float32, torch.bfloat16, CPU)


@pytest.mark.parametrize("last", KEPT, ids=str)
def test_windows_end_where_rows_do(last: Sequence[int]) -> None:
    """Of one convolution and of two that are alike, by numbers that are known to the host or to a graph alone."""
    columns = [drawn(ROWS, WIDTH, 3 + TOKENS, seed=seed) for seed in range(2)]
    taped = [(each[..., :3].clone(), each) for each in columns]
    for kept in (LastNodes(last, CPU), LastNodes(torch.tensor(last), CPU)):
        for (_, whole), (_, found) in zip(taped, moved_windows(taped, kept), strict=True):
            for row, end in enumerate(last):
                assert torch.equal(found[row], whole[row, :, end + 1 : end + 4])


class Passes(TorchDispatchMode):
    """Names the operations that go over all states: on a card each reads or writes megabytes of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = {each.numel() for each in tree_iter((args, result)) if isinstance(each, Tensor)}
        name, views = function.overloadpacket.__name__, {"view", "_unsafe_view", "unbind", "slice", "transpose"}
        if LAYERS * ROWS * HEADS * WIDTH * OTHER in sizes and name not in views:
            self.names.append(name)
        return result


@pytest.mark.parametrize("case", ["gated delta", "by channel", "selective scan"])
def test_states_are_gone_over_as_often_however_many_tokens_are_kept(case: str) -> None:
    taped = [(drawn(ROWS, HEADS, WIDTH, OTHER, seed=layer), CASES[case](10 * layer)) for layer in range(LAYERS)]
    for last in (0, 4, 6):  # of whose tokens nothing is as large as a state
        with Passes() as passes:
            rebuilt_states(taped, LastNodes([last] * ROWS, CPU))
        assert passes.names == ["stack", *["bmm"] * (case != "selective scan"), "mul_", "baddbmm_"]
