"""How compiling for a CPU takes work that does not grow with the number of a target's layers.

A graph of the whole step is cut where a decoder layer begins or ends. Pieces that compute the same are compiled once,
and called with each layer's own weights. Layers of different kinds (windowed and full ones, say) make one piece per
kind.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.split_module import split_module

from .packed_weights import PackedInput, PackedWeights, looks, pack_products


class LayerCutter:
    """Cuts graphs of steps into pieces.

    Args:
        layers: classes of modules to compile once however often they occur.
        weights: to read packed.
    """

    def __init__(self, layers: Collection[type], weights: PackedWeights):
        self.layers, self.weights = frozenset(layers), weights

    def cut(self, module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[PackedInput]]:
        """Pieces of a graph, each a module, a new one wherever a layer begins or ends; and what they read packed, as
        further inputs in this order.

        Args:
            module: exported; changed in place.
            inputs: what it was captured with; those that are weights with their data.
        """
        packed = pack_products(module.graph, inputs, self.weights)
        module.recompile()
        _find_shapes(module, inputs, packed)
        _drop_idle_casts(module.graph)
        segments = _segments(module.graph, self.layers)
        pieces = split_module(module, module, segments.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
        return pieces, packed


def _find_shapes(module: fx.GraphModule, inputs: Sequence[Any], packed: Sequence[PackedInput]) -> None:
    """Write to each node's `meta["val"]` what it computes, without data."""
    placeholders = module.graph.find_nodes(op="placeholder")
    known = [given if looks(node) is None else looks(node) for node, given in zip(placeholders, inputs, strict=False)]
    mode = next(value.fake_mode for value in known if hasattr(value, "fake_mode"))  # of a tensor without data
    with mode:
        for read in packed:
            matrices = [known[place] for place in read.places]
            known.append(matrices[0].new_empty((sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1])))
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*known)


def _drop_idle_casts(graph: fx.Graph) -> None:
    """Leave out casts to the dtype there is: a layer whose input others read, too, would give its cast on to them and
    so compute something else than its like."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype):
        if len(node.args) == 2 and not node.kwargs and node.args[0].meta["val"].dtype is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _segments(graph: fx.Graph, layers: frozenset[type]) -> dict[fx.Node, int]:
    """Which piece each node belongs to: a new one wherever a layer begins or ends."""
    kinds = layers | {f"{layer.__module__}.{layer.__qualname__}" for layer in layers}  # export has names of classes
    segments: dict[fx.Node, int] = {}
    number, here = 0, None
    for node in graph.nodes:
        if node.op not in ("placeholder", "output", "get_attr"):
            layer = _layer_of(node, kinds)
            number += layer != here
            segments[node], here = number, layer
    return segments


def _layer_of(node: fx.Node, kinds: frozenset[type | str]) -> str | None:
    """The call of a layer that `node` was captured in."""
    stack = node.meta.get("nn_module_stack") or {}
    return next((call for call, (_, kind) in stack.items() if kind in kinds), None)


def distinct(pieces: fx.GraphModule) -> list[tuple[fx.GraphModule, list[str]]]:
    """One piece of each computation there is, and the names of all that compute the same."""
    found: dict[Hashable, tuple[fx.GraphModule, list[str]]] = {}
    for name, piece in pieces.named_children():
        if isinstance(piece, fx.GraphModule):
            found.setdefault(_computation(piece.graph), (piece, []))[1].append(name)
    return list(found.values())


def _computation(graph: fx.Graph) -> Hashable:
    """Equal for two graphs if they compute the same of inputs that look the same, and change the same of them."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    nodes: list[Hashable] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            nodes.append(_look(node.meta["val"]))
        elif node.op in ("get_attr", "call_module"):
            return graph  # what hides behind a name of its own may be anything
        else:
            told = fx.map_arg((node.args, node.kwargs), lambda read: f"node {places[read]}")
            nodes.append((node.op, node.target, repr(told)))
    return tuple(nodes)


def _look(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return type(value), repr(value)
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
