"""Changed weights are noticed, whatever they were changed by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from eagle31_hf.graphs.seen import SeenWeights, weights_of


def network() -> nn.Sequential:
    """Shared weights, weights that lie otherwise than their shape, a scalar, a buffer of another dtype."""
    inner = nn.Linear(64, 64)
    net = nn.Sequential(inner, nn.Linear(64, 64), inner, nn.BatchNorm1d(64))
    net[1].weight = nn.Parameter(torch.randn(64, 64).T)
    net.wide = nn.Parameter(torch.randn(64, 96)[:, :64])  # neither dense nor whole
    net.experts = nn.Parameter(torch.randn(3, 16, 8))
    net.odd = nn.Parameter(torch.randn(7, 5, dtype=torch.bfloat16))  # no row of it ends with a machine word
    net.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.bfloat16))
    return net


def write(net: nn.Sequential) -> None:
    with torch.no_grad():
        net[0].weight[3, 3] += 1.0


def write_past_the_version(net: nn.Sequential) -> None:
    net[1].weight.data += 1e-3


def write_past_the_version_of_a_slice(net: nn.Sequential) -> None:
    net.wide.data += 1e-3


def write_a_row_past_the_version(net: nn.Sequential) -> None:
    """As new tokens' embeddings are usually set."""
    net[0].weight.data[7] = 1.0


def write_an_element_past_the_version(net: nn.Sequential) -> None:
    net[1].weight.data[5, 9] += 1e-3


def write_an_element_of_a_slice_past_the_version(net: nn.Sequential) -> None:
    net.wide.data[5, 9] += 1e-3


def swap_rows_past_the_version(net: nn.Sequential) -> None:
    net[0].weight.data[[3, 9]] = net[0].weight.data[[9, 3]]


def swap_columns_past_the_version(net: nn.Sequential) -> None:
    net[0].weight.data[:, [3, 9]] = net[0].weight.data[:, [9, 3]]


def swap_elements_of_two_rows_past_the_version(net: nn.Sequential) -> None:
    weight = net[0].weight.data
    weight[3, 10], weight[9, 10] = weight[9, 10].item(), weight[3, 10].item()


def swap_parts_of_columns_of_a_slice_past_the_version(net: nn.Sequential) -> None:
    """As heads change places."""
    net.wide.data[:, :32] = net.wide.data[:, :32].roll(8, dims=1)


def swap_within_a_vector_past_the_version(net: nn.Sequential) -> None:
    net[0].bias.data[[10, 14]] = net[0].bias.data[[14, 10]]


def swap_experts_past_the_version(net: nn.Sequential) -> None:
    net.experts.data[[0, 2]] = net.experts.data[[2, 0]]


def write_an_odd_row_past_the_version(net: nn.Sequential) -> None:
    net.odd.data[4, 2] += 1.0


def write_a_scalar(net: nn.Sequential) -> None:
    net.scale.data += 1.0


def count(net: nn.Sequential) -> None:
    net[3].num_batches_tracked += 1


def replace(net: nn.Sequential) -> None:
    net[1].weight = nn.Parameter(net[1].weight.detach().clone())


def remove(net: nn.Sequential) -> None:
    net[1].bias = None


@pytest.mark.parametrize(
    "change",
    [
        write,
        write_past_the_version,
        write_past_the_version_of_a_slice,
        write_a_row_past_the_version,
        write_an_element_past_the_version,
        write_an_element_of_a_slice_past_the_version,
        swap_rows_past_the_version,
        swap_columns_past_the_version,
        swap_elements_of_two_rows_past_the_version,
        swap_parts_of_columns_of_a_slice_past_the_version,
        swap_within_a_vector_past_the_version,
        swap_experts_past_the_version,
        write_an_odd_row_past_the_version,
        write_a_scalar,
        count,
        replace,
        remove,
    ],
)
def test_a_change_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    net = network()
    seen = SeenWeights(weights_of(net), by_content=True)
    assert seen.are_still(weights_of(net))
    change(net)
    assert not seen.are_still(weights_of(net))


def test_a_nan_is_no_change() -> None:
    net = network()
    net[0].weight.data.fill_(torch.nan)
    assert SeenWeights(weights_of(net), by_content=True).are_still(weights_of(net))


def test_all_weights_are_found() -> None:
    net = network()
    net.append(net)  # some models hold themselves
    wanted = {id(tensor) for tensor in (*net.parameters(), *net.buffers())}
    assert {id(tensor) for tensor in weights_of(net)} == wanted
