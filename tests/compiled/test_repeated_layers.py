"""One layer is compiled for all of its kind, reads weights that are packed once, and computes what eager code does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from eagle31_hf import Eagle31Drafter
from eagle31_hf.compiled import graph_makers, graphs, repeated_layers
from eagle31_hf.compiled.packed_weights import PackedWeights, pack_products
from eagle31_hf.compiled.repeated_layers import LayerCompiler
from helpers import CONFIGS, configured, left_padded, random_drafter, random_prompts, random_target


@pytest.fixture
def whole_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """What inductor would be given, run as it is instead."""
    given: list[fx.GraphModule] = []

    def keep(captured: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        given.append(captured)
        return captured.forward

    monkeypatch.setattr(repeated_layers, "compile_whole", keep)
    monkeypatch.setattr(graphs, "FROZEN_BYTES", 0)
    torch._dynamo.reset()
    return given


def pair_of(family: str, layers: int) -> Eagle31Drafter:
    config = CONFIGS[family]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    return random_drafter(random_target(config), aux_layers=[0, 1, layers])


def write(drafter: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """What the target writes plainly and with its verification compiled; all else stays eager."""
    compile_, target = graph_makers.compile_step, drafter.require_binding().model
    monkeypatch.setattr(
        graph_makers, "compile_step", lambda step: compile_(step) if step.__name__ == "verify" else step
    )
    kwargs = {**left_padded(random_prompts(1)), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**kwargs)
    with configured(drafter, speculation_loop="own", acceleration="compile", num_assistant_tokens=3):
        ours = target.generate(**kwargs, assistant_model=drafter)
    assert drafter.stats.fallbacks == []
    return plain, ours


@pytest.mark.parametrize("layers", [4, 6])
def test_layers_of_one_kind_are_one_piece(
    layers: int, whole_graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = pair_of("llama", layers)
    plain, ours = write(drafter, monkeypatch)
    assert torch.equal(plain, ours)
    assert len(whole_graphs) == 3, "what comes before the layers, a layer, what comes after them"


def test_layers_of_two_kinds_are_two_pieces(
    whole_graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = pair_of("gemma3", 6)
    kinds = set(drafter.require_binding().text_config.layer_types)
    assert kinds == {"sliding_attention", "full_attention"}
    plain, ours = write(drafter, monkeypatch)
    assert torch.equal(plain, ours)
    assert len(whole_graphs) == 2 + len(kinds)


def test_a_layer_that_does_something_else_is_a_piece_of_its_own(
    whole_graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = pair_of("llama", 5)
    layer = drafter.require_binding().layers[2]
    layer.mlp.register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[operator, union-attr]
    plain, ours = write(drafter, monkeypatch)
    assert torch.equal(plain, ours)
    assert len(whole_graphs) == 4


def test_what_cannot_be_cut_is_compiled_whole(
    whole_graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("cannot be split\nat line 7")

    monkeypatch.setattr(repeated_layers, "split_module", fail)
    drafter = pair_of("llama", 3)
    with caplog.at_level(logging.WARNING, logger="eagle31_hf.compiled.repeated_layers"):
        plain, ours = write(drafter, monkeypatch)
    assert torch.equal(plain, ours)
    assert len(whole_graphs) == 1
    assert drafter.require_binding().compiled.compiler.whole_reason == "RuntimeError: cannot be split"
    assert "cannot be split" in caplog.text


def test_layers_of_equal_code_and_other_shapes_are_told_apart(whole_graphs: list[fx.GraphModule]) -> None:
    wide, narrow = nn.Linear(8, 16), nn.Linear(16, 8)
    compiled = torch.compile(
        lambda states: narrow(wide(states)), fullgraph=True, dynamic=False, backend=LayerCompiler({nn.Linear}, None)
    )
    states = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(compiled(states), narrow(wide(states)))
    assert len(whole_graphs) == 2


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
    inputs: list[list[tuple[int, ...]]] = []

    def pack(captured: fx.GraphModule, given: Sequence[Any]) -> Callable:
        reads = pack_products(captured.graph, given, weights)
        inputs.append([tuple(given[place].shape[0] for place in read.places) for read in reads])
        captured.recompile()
        return lambda *args: captured.forward(
            *args, *(weights.of([args[place] for place in read.places], read.rows) for read in reads)
        )

    with torch.no_grad():
        expected = module(states)
        found = torch.compile(module, fullgraph=True, dynamic=False, backend=_on_a_copy(pack))(states)
    torch.testing.assert_close(found, expected)
    assert inputs == [[(48, 16), (16,), (32,)]], "products without a bias are one"


def _on_a_copy(backend: Callable) -> Callable:
    return lambda captured, given: backend(repeated_layers._copy(captured), given)


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
    assert weights.nbytes == len(layouts) * weight.nbytes


def test_graphs_share_packed_weights(whole_graphs: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = pair_of("llama", 3)
    write(drafter, monkeypatch)
    packed = drafter.require_binding().compiled.compiler.weights
    after_one = packed.nbytes
    model = drafter.require_binding().model
    assert 0 < after_one <= sum(weight.nbytes for weight in model.parameters()) + model.lm_head.weight.nbytes
    write(drafter, monkeypatch)
    assert packed is drafter.require_binding().compiled.compiler.weights
    assert packed.nbytes == after_one
