"""A step as calls of compiled pieces, whose weights stay where the models have them.

An exported step is cut where decoder layers begin and end. Pieces that compute the same are compiled once and called
with each layer's own weights, so compiling takes work that does not grow with the number of layers; layers of different
kinds (windowed and full ones, say) make one piece per kind. What is kept on disk is the code of each piece and, as
plain data, which call reads what, and where weights come from: one by its name, several packed together, a small
constant of the code. So nothing on disk grows with the weights or is one of them.
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
"""Where a tensor comes from: `["weight", name]`, `["packed", [name, ...], rows]` or `["constant", values, dtype]`."""

MOST_CONSTANTS = 4096
"""Elements of a constant that is kept among the plain data."""


class PieceProgram(NamedTuple):
    """What a step does. Its tensors are numbered: the step's inputs, the fixed ones, then what each call gives.

    Attributes:
        pieces: what is to be compiled, each with shapes noted.
        fixed: where weights and constants come from.
        calls: for each call the piece's number and the numbers of what it reads.
        outputs: the step's, by their numbers.
    """

    pieces: list[fx.GraphModule]
    fixed: list[Source]
    calls: list[tuple[int, list[int]]]
    outputs: list[int]

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
        sources: list[Any] = _sources(exported, named)
        given = [named[source[1]] if source and source[0] == "weight" else None for source in sources]
        packed = pack_products(module.graph, given, weights)
        sources += [["packed", [sources[place][1] for place in read.places], read.rows] for read in packed]
        module.recompile()
        _note_shapes(module)
        _drop_idle_casts(module.graph)
        segments = _segments(module.graph, layers)
        graph = split_module(module, module, segments.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
        pieces, kinds = _distinct(graph)
        placeholders = list(zip(graph.graph.find_nodes(op="placeholder"), sources, strict=True))
        placeholders.sort(key=lambda read: read[1] is not None)  # the step's inputs come first
        number = {node: place for place, (node, _) in enumerate(placeholders)}
        count, calls, outputs = len(number), list[tuple[int, list[int]]](), list[int]()
        for node in graph.graph.nodes:
            if node.op == "call_module":
                piece = kinds[str(node.target)]
                calls.append((piece, [number[read] for read in _nodes(node.args)]))
                number[node] = count
                count += len(_nodes(pieces[piece].graph.output_node().args[0]))
            elif node.op == "call_function":  # takes one of a call's results
                call, place = node.args
                number[node] = number[call] + place
            elif node.op == "output":
                outputs = [number[read] for read in _nodes(node.args[0])]
        return cls(pieces, [source for _, source in placeholders if source is not None], calls, outputs)


def _sources(exported: torch.export.ExportedProgram, named: Mapping[str, Tensor]) -> list[Source | None]:
    """Of each placeholder, where it comes from; `None`: it is an input of the step."""
    signature, names = exported.graph_signature, {_place(tensor): name for name, tensor in named.items()}
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = signature.inputs_to_lifted_tensor_constants
    sources: list[Source | None] = []
    for node in exported.graph.find_nodes(op="placeholder"):
        if node.name in weights:
            sources.append(["weight", weights[node.name]])
        elif node.name in constants:
            constant = exported.constants[constants[node.name]]
            name = names.get(_place(constant), "")
            sources.append(["weight", name] if name else _constant_source(constant))
        elif node.name in signature.user_inputs and isinstance(node.meta["val"], Tensor):
            sources.append(None)
        else:
            raise ValueError(f"the step reads {node.name}, which is no tensor")
    return sources


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
    codes: Sequence[Code], program: Mapping[str, Any], named: Mapping[str, Tensor], weights: PackedWeights
) -> Code:
    """A program as a function of the step's inputs, with the weights it reads.

    Args:
        codes: of the pieces.
        program: `fixed`, `calls` and `outputs` as `PieceProgram` has them.
        named: weights by name.
        weights: gives packed ones.

    Raises:
        LookupError, TypeError, ValueError: what was kept names something that is not there.
    """
    fixed = [_tensor_of(source, named, weights) for source in program["fixed"]]
    calls = [(codes[piece], places) for piece, places in program["calls"]]
    outputs = program["outputs"]

    def run(tensors: list[Tensor]) -> list[Tensor]:
        known = [*tensors, *fixed]
        for code, places in calls:
            known += code([known[place] for place in places])
        return [known[place] for place in outputs]

    return run


def _tensor_of(source: Source, named: Mapping[str, Tensor], weights: PackedWeights) -> Tensor:
    kind, told, *more = source
    if kind == "weight":
        return named[told].detach()
    if kind == "constant":
        return torch.tensor(told, dtype=dtype_of(more[0]))
    return weights.of([named[name] for name in told], more[0])


def dtype_of(name: str) -> torch.dtype:
    """By what `str` makes of it."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


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
