"""A step as calls of compiled pieces, whose weights stay where the models have them.

An exported step is cut where decoder layers begin and end. Pieces that compute the same are compiled once and called
with each layer's own weights, so compiling takes work that does not grow with the number of layers; layers of different
kinds (windowed and full ones, say) make one piece per kind. What is kept on disk is the code of each piece and, as
plain data, which call reads what: a weight by its name, weights packed together, an input of the step, a result of an
earlier call, a small constant of the code. So nothing on disk grows with the weights or is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.split_module import split_module

from .packed_weights import PackedWeights, pack_products

Code = Callable[[list[Tensor]], list[Tensor]]

Source = list[Any]
"""Where a tensor comes from: `["weight", name]`, `["packed", [name, ...], rows]`, `["constant", values, dtype]`,
`["input", place]` or `["result", call, place]`."""

MOST_CONSTANTS = 4096
"""Elements of a constant that is kept among the plain data."""


class PieceProgram(NamedTuple):
    """What a step does.

    Attributes:
        pieces: what is to be compiled, each with shapes noted.
        calls: for each call the piece's number and where its inputs come from.
        outputs: where the step's come from.
    """

    pieces: list[fx.GraphModule]
    calls: list[tuple[int, list[Source]]]
    outputs: list[Source]

    @classmethod
    def of(
        cls,
        exported: torch.export.ExportedProgram,
        layers: Collection[type],
        weights: PackedWeights,
        named: Mapping[str, Tensor],
    ) -> PieceProgram:
        """Cut an exported step wherever a layer begins or ends.

        Args:
            exported: changed in place.
            layers: classes of modules to compile once however often they occur.
            weights: to read packed.
            named: what will be lent, by name.

        Raises:
            ValueError: it reads something else than tensors, or large constants.
        """
        module = exported.graph_module
        sources, given = _inputs(exported, {_place(tensor): name for name, tensor in named.items()})
        packed = pack_products(module.graph, given, weights)
        sources += [["packed", [sources[place][1] for place in read.places], read.rows] for read in packed]
        module.recompile()
        _note_shapes(module)
        _drop_idle_casts(module.graph)
        segments = _segments(module.graph, layers)
        graph = split_module(module, module, segments.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
        pieces, number = _distinct(graph)
        known: dict[fx.Node, Source] = dict(zip(graph.graph.find_nodes(op="placeholder"), sources, strict=True))
        calls: list[tuple[int, list[Source]]] = []
        made_by: dict[fx.Node, int] = {}
        outputs: list[Source] = []
        for node in graph.graph.nodes:
            if node.op == "call_module":
                made_by[node], known[node] = len(calls), ["result", len(calls), 0]
                calls.append((number[str(node.target)], [known[read] for read in _nodes(node.args)]))
            elif node.op == "call_function":  # takes one of a call's results
                call, place = node.args
                known[node] = ["result", made_by[call], place]
            elif node.op == "output":
                outputs = [known[read] for read in _nodes(node.args[0])]
        return cls(pieces, calls, outputs)


def _inputs(exported: torch.export.ExportedProgram, names: Mapping[tuple, str]) -> tuple[list[Source], list[Any]]:
    """Of each placeholder, where it comes from and what it is; of the step's own inputs only how they look."""
    signature = exported.graph_signature
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    sources: list[Source] = []
    given: list[Any] = []
    own = list(signature.user_inputs)
    for node in exported.graph.find_nodes(op="placeholder"):
        look = node.meta["val"]
        if node.name in weights:
            name = weights[node.name]
            sources.append(["weight", name])
            given.append(exported.state_dict.get(name, exported.constants.get(name)))
        elif node.name in constants:
            constant = exported.constants[constants[node.name]]
            name = names.get(_place(constant), "")
            sources.append(["weight", name] if name else _constant_source(constant))
            given.append(look)
        elif node.name in own and isinstance(look, Tensor):
            sources.append(["input", own.index(node.name)])
            given.append(look)
        else:
            raise ValueError(f"the step reads {node.name}, which is no tensor")
    return sources, given


def _place(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _constant_source(constant: Tensor) -> Source:
    if constant.numel() > MOST_CONSTANTS:
        raise ValueError(f"the step has a constant of {constant.numel()} elements, {MOST_CONSTANTS} are the most")
    return ["constant", constant.tolist(), str(constant.dtype)]


def _nodes(arguments: Any) -> list[fx.Node]:
    nodes = [arguments] if isinstance(arguments, fx.Node) else list(arguments)
    if not all(isinstance(node, fx.Node) for node in nodes):
        raise ValueError(f"a piece reads or gives {arguments}; wanted tensors alone")
    return nodes


def bound(
    codes: Sequence[Code],
    calls: Sequence[tuple[int, list[Source]]],
    outputs: Sequence[Source],
    named: Mapping[str, Tensor],
    weights: PackedWeights,
) -> Code:
    """A program as a function of the step's inputs, with the weights it reads.

    Args:
        codes: of the pieces.
        calls, outputs: as `PieceProgram` has them.
        named: weights by name.
        weights: gives packed ones.

    Raises:
        KeyError, IndexError, ValueError: what was kept names something that is not there.
    """

    def resolved(source: Source) -> Tensor | tuple[int, int]:
        """A weight; of a result its call, counted from 1, and its place. The step's inputs are those of call 0."""
        kind, told, *more = source
        if kind == "input":
            return 0, told
        if kind == "result":
            return told + 1, more[0]
        if kind == "weight":
            return named[told].detach()
        if kind == "constant":
            return torch.tensor(told, dtype=getattr(torch, more[0].removeprefix("torch.")))
        if kind == "packed":
            return weights.of([named[name] for name in told], more[0])
        raise ValueError(f"{source} is not where a tensor can come from")

    prepared = [(codes[piece], [resolved(source) for source in sources]) for piece, sources in calls]
    ends = [resolved(source) for source in outputs]
    for place, sources in enumerate([*(sources for _, sources in prepared), ends]):
        if any(each[0] > place for each in sources if not isinstance(each, Tensor)):
            raise IndexError("a piece reads what none before it has computed")

    def run(tensors: list[Tensor]) -> list[Tensor]:
        made = [tensors]

        def given(sources: list[Tensor | tuple[int, int]]) -> list[Tensor]:
            return [each if isinstance(each, Tensor) else made[each[0]][each[1]] for each in sources]

        for code, sources in prepared:
            made.append(code(given(sources)))
        return given(ends)

    return run


# --- pieces -----------------------------------------------------------------------------------------------------------


def _note_shapes(module: fx.GraphModule) -> None:
    """Write to each node's `meta["val"]` what it computes, without data; placeholders have it."""
    given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    FakeTensorProp(module, given[0].fake_mode).propagate_dont_convert_inputs(*given)


def _drop_idle_casts(graph: fx.Graph) -> None:
    """Leave out casts to the dtype there is: a layer whose input others read, too, would give its cast on to them and
    so compute something else than its like."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype):
        if len(node.args) == 2 and not node.kwargs and node.args[0].meta["val"].dtype is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _segments(graph: fx.Graph, layers: Collection[type]) -> dict[fx.Node, int]:
    """Which piece each node belongs to: a new one wherever a layer begins or ends."""
    kinds = {f"{layer.__module__}.{layer.__qualname__}" for layer in layers}
    segments: dict[fx.Node, int] = {}
    number, here = 0, None
    for node in graph.nodes:
        if node.op not in ("placeholder", "output", "get_attr"):
            stack = node.meta.get("nn_module_stack") or {}
            layer = next((call for call, (_, kind) in stack.items() if kind in kinds), None)
            number += layer != here
            segments[node], here = number, layer
    return segments


def _distinct(pieces: fx.GraphModule) -> tuple[list[fx.GraphModule], dict[str, int]]:
    """One piece of each computation there is, and which of them each call is of."""
    found: dict[Hashable, tuple[int, fx.GraphModule]] = {}
    number: dict[str, int] = {}
    for name, piece in pieces.named_children():
        if isinstance(piece, fx.GraphModule):
            number[name], _ = found.setdefault(_computation(piece.graph), (len(found), piece))
    return [piece for _, piece in found.values()], number


def _computation(graph: fx.Graph) -> Hashable:
    """Equal for two graphs if they compute the same of inputs that look the same, and change the same of them."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    nodes: list[Hashable] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            look = node.meta["val"]
            nodes.append((tuple(look.shape), look.stride(), look.dtype))
        elif node.op in ("get_attr", "call_module"):
            return graph  # what hides behind a name of its own may be anything
        else:
            told = fx.map_arg((node.args, node.kwargs), lambda read: f"node {places[read]}")
            nodes.append((node.op, node.target, repr(told)))
    return tuple(nodes)
