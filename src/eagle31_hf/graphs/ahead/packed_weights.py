"""Weights laid out once as products of few rows read them, for all graphs of a pair.

A graph takes packed weights as inputs like any other tensor, so one copy serves every graph and every layer that shares
a graph's code. Products of the same states (queries, keys and values; gate and up) become one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .torch_internals import can_pack, layout_of, multiply_packed, pack

_library = torch.library.Library("eagle31_hf", "DEF")
_library.define("packed_linear(Tensor states, Tensor packed, Tensor? bias) -> Tensor")


def _packed_linear_shape(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return states.new_empty((*states.shape[:-1], packed.shape[0]))


_library.impl("packed_linear", multiply_packed, "CompositeExplicitAutograd")
torch.library.register_fake("eagle31_hf::packed_linear", _packed_linear_shape, lib=_library)


PACKED_LINEAR = torch.ops.eagle31_hf.packed_linear.default


class PackedWeights:
    """Packed copies of a pair's weights; each is made when the first graph wants it.

    Args:
        weights: those that may be packed. Whoever changes one of them must let go of these copies.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self._addresses = frozenset(weight.data_ptr() for weight in weights)
        self._dtypes = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
        self._packed: dict[tuple, Tensor] = {}  # by weights and number of rows
        self._copies: dict[tuple, Tensor] = {}  # by weights and layout, which many numbers of rows have in common

    def may_pack(self, weight: Any) -> bool:
        """Whether `weight` is a matrix of the pair, and of a precision that is packed."""
        matrix = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_contiguous()
        return matrix and weight.dtype in self._dtypes and weight.data_ptr() in self._addresses

    def of(self, weights: Sequence[Tensor], rows: int) -> Tensor:
        """`weights` `(N_i, K)`, one below the other, packed for products of `rows` rows: `(sum of N_i, K)`."""
        matrices = tuple((weight.data_ptr(), tuple(weight.shape)) for weight in weights)
        key = (rows, *matrices)
        if key not in self._packed:
            joined = weights[0] if len(weights) == 1 else torch.cat(tuple(weights))
            packed = pack(joined.detach(), rows)
            self._packed[key] = self._copies.setdefault((layout_of(packed), *matrices), packed)
        return self._packed[key]

    def clear(self) -> None:
        """Let all copies go."""
        self._packed.clear()
        self._copies.clear()


LINEAR = torch.ops.aten.linear.default
"""A product with a weight, as it is exported."""


class PackedInput(NamedTuple):
    """A graph's input beyond those it was captured with: the inputs at `places`, packed for `rows` rows."""

    places: tuple[int, ...]
    rows: int


def pack_products(graph: fx.Graph, inputs: Sequence[Any], weights: PackedWeights) -> list[PackedInput]:
    """Let `graph` read packed weights, which become further placeholders in the order returned.

    Args:
        graph: exported; changed in place.
        inputs: what it was exported with.
        weights: say which inputs are weights.
    """
    placeholders = graph.find_nodes(op="placeholder")
    place = {node: index for index, node in enumerate(placeholders)}
    groups: dict[tuple, list[fx.Node]] = {}
    for node in [node for node in graph.nodes if node.target is LINEAR]:
        states, weight, bias = _arguments(node)
        if weight in place and weights.may_pack(inputs[place[weight]]):
            # Products of other states, or with a bias, stay alone.
            groups.setdefault((states,) if bias is None else (states, node), []).append(node)
    packed: dict[PackedInput, fx.Node] = {}
    for products in groups.values():
        states = _arguments(products[0])[0]
        matrices = [_arguments(node)[1] for node in products]
        read = PackedInput(tuple(place[matrix] for matrix in matrices), states.meta["val"].shape[:-1].numel())
        if read not in packed:
            with graph.inserting_after(placeholders[-1]):
                packed[read] = graph.placeholder(f"packed_{len(packed)}")
            shapes = [matrix.meta["val"].shape for matrix in matrices]
            joined = sum(rows for rows, _ in shapes), shapes[0][1]
            packed[read].meta["val"] = matrices[0].meta["val"].new_empty(joined)
            placeholders.append(packed[read])
        _replace(graph, products, packed[read])
    return list(packed)


def _arguments(linear: fx.Node) -> tuple[Any, Any, Any]:
    return linear.args[0], linear.args[1], linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")


def _replace(graph: fx.Graph, products: list[fx.Node], packed: fx.Node) -> None:
    """Compute `products`, which follow one another, at the place of the first."""
    first = products[0]
    states, _, bias = _arguments(first)
    with graph.inserting_before(first):
        joined = graph.call_function(PACKED_LINEAR, (states, packed, bias))
        parts: list[fx.Node] = [joined]
        if len(products) > 1:
            widths = [node.meta["val"].shape[-1] for node in products]
            split = graph.call_function(torch.split, (joined, widths, -1))
            parts = [graph.call_function(operator.getitem, (split, index)) for index in range(len(widths))]
            split.meta = dict(first.meta)
    joined.meta = dict(first.meta)
    for node, part in zip(products, parts, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
