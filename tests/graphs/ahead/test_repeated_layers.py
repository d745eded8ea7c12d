"""One layer is compiled for all of its kind, reads weights that are packed once, and computes what eager code does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from eagle31_hf.graphs.ahead.packed_weights import PackedWeights, pack_products
from eagle31_hf.graphs.ahead.pieces import PieceProgram
from helpers import CONFIGS, random_drafter, random_target


def pieces_of(module: nn.Module, inputs: tuple[Any, ...], layers: set[type]) -> list[fx.GraphModule]:
    """What a step is cut into, each kind once."""
    exported = torch.export.export(module, inputs, strict=False)
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    return PieceProgram.of(exported, layers, PackedWeights(module.parameters()), named).pieces


class Forward(nn.Module):
    """A target's forward over tokens, as exported steps have it."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def test_a_layer_that_does_something_else_is_a_piece_of_its_own() -> None:
    """Else there are three: before the layers, a layer, after them."""
    binding = random_drafter(random_target(CONFIGS["llama"]()), aux_layers=[0, 1, 4]).binding
    binding.layers[2].mlp.register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[operator, union-attr]
    with torch.no_grad():
        pieces = pieces_of(Forward(binding.model), (torch.arange(6)[None],), {type(layer) for layer in binding.layers})
    assert len(pieces) == 4


def test_layers_of_equal_code_and_other_shapes_are_told_apart() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, states: Tensor) -> Tensor:
            return self.narrow(self.wide(states))

    with torch.no_grad():
        assert len(pieces_of(Both(), (torch.randn(3, 8),), {nn.Linear})) == 2


# --- packed weights ---------------------------------------------------------------------------------------------------


class Projections(nn.Module):
    """Three products of the same states, one with a bias, and one of what became of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(32, 48, bias=False),
            nn.Linear(32, 16, bias=False),
            nn.Linear(32, 16),
        )
        self.out = nn.Linear(80, 32, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.out(torch.cat((self.query(states), self.key(states), self.value(states)), -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_are_the_plain_ones(dtype: torch.dtype) -> None:
    module, states = Projections().to(dtype), torch.randn(2, 4, 32).to(dtype)
    weights = PackedWeights(module.parameters())
    if not weights.may_pack(module.out.weight):
        pytest.skip("this processor does not multiply packed matrices of this precision")
    with torch.no_grad():
        exported = torch.export.export(module, (states,), strict=False)
        graph = exported.graph_module
        given = [*module.parameters(), states]
        reads = pack_products(graph.graph, given, weights)
        graph.recompile()
        (found,) = graph(*given, *(weights.of([given[place] for place in read.places], read.rows) for read in reads))
        expected = module(states)
    torch.testing.assert_close(found, expected)
    joined = [tuple(given[place].shape[0] for place in read.places) for read in reads]
    assert joined == [(48, 16), (16,), (32,)], "products without a bias are one"


def test_only_weights_of_the_pair_are_packed() -> None:
    ours, other = nn.Linear(8, 8), nn.Linear(8, 8)
    weights = PackedWeights(ours.parameters())
    assert weights.may_pack(ours.weight)
    assert not weights.may_pack(other.weight), "nobody watches it for changes"
    assert not weights.may_pack(ours.bias)
    assert not weights.may_pack(ours.weight.t()), "another matrix at the same address"


def test_numbers_of_rows_with_one_layout_share_a_copy() -> None:
    weight = nn.Linear(64, 96, bias=False).weight
    weights = PackedWeights([weight])
    copies = [weights.of([weight], rows) for rows in (1, 2, 8, 16, 24, 8)]
    layouts = {torch.ops.mkldnn._get_mkldnn_serialized_md(copy).numpy().tobytes() for copy in copies}
    assert len({id(copy) for copy in copies}) == len(layouts)
    assert len(weights._copies) == len(layouts)
