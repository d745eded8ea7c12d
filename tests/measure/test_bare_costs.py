"""What a round's forwards cost alone: which are timed, at which widths, and the means of them."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_loops import CHAIN, TREE

from eagle31_hf.decoding.pair import Pair
from eagle31_hf.measure.bare_meter import BareCosts, BareMeter, drafted_depths, quantiles
from eagle31_hf.measure.methods import requested_shape
from eagle31_hf.stats import SpeculationStats
from eagle31_hf.trees.shape import DraftShape
from families import recurrent_target
from helpers import drafter_of, random_drafter, use_fixed_shapes_only


def test_depth_shares_follow_where_chains_ended():
    stats = SpeculationStats()
    stats.record_round(depth=3, nodes=3, accepted=[1, 1])
    stats.record_round(depth=1, nodes=1, accepted=[0])
    stats.record_round(depth=0, nodes=0, accepted=[0])
    assert drafted_depths(stats) == {0: 0.25, 1: 0.25, 3: 0.5}
    assert drafted_depths(SpeculationStats()) is None


@given(st.dictionaries(st.integers(0, 12), st.integers(1, 50), min_size=1), st.integers(1, 12))
def test_quantiles_stand_for_shares(counts, count):
    shares = {key: each / sum(counts.values()) for key, each in counts.items()}
    chosen = quantiles(shares, count)
    assert len(chosen) == count
    assert all(abs(chosen.count(key) - share * count) < 1 + 1e-9 for key, share in shares.items())


def measured(meter: BareMeter, depths: dict[int, float] | None = None) -> BareCosts:
    meter.time_rounds(depths)
    return meter.costs(depths)


@torch.no_grad()
def test_bare_costs_weigh_the_widths_that_occurred(drafter, monkeypatch):
    seen = []
    forward = drafter.binding.forward
    monkeypatch.setattr(
        drafter.binding, "forward", lambda ids, *rest, **_: seen.append(ids.shape) or forward(ids, *rest)
    )
    meter = BareMeter(drafter, torch.arange(9)[None], CHAIN)
    seen.clear()  # the context
    costs = measured(meter, {4: 0.5, 2: 0.5})
    assert {tuple(shape) for shape in seen} == {(1, 1), (1, 5), (1, 3)}
    assert (costs.verified_tokens, costs.drafter_steps) == (4.0, 3.0)
    assert meter.cache.lengths == [9], "nothing is committed: the context stays as long as it was"


@torch.no_grad()
def test_bare_forwards_read_states_as_rounds_do():
    """A chain at once, as far as its kernels can be recorded, a tree node by node; not by the code for prompts."""
    target = recurrent_target("qwen3_5_text")
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    binding, seen = drafter.binding, []
    forward = binding.forward

    def watched(ids, positions, mask, cache, **how):
        out = forward(ids, positions, mask, cache, **how)
        layer, placement = cache.with_states[0], cache.placement
        seen.append(
            (ids.shape[1], placement.reading.keeps_nodes, bool(layer._records), len(next(iter(layer._nodes.values()))))
        )
        return out

    with mock.patch.object(binding, "forward", watched):
        for shape in (CHAIN, DraftShape(4, top_k=2, size=8)):
            BareMeter(drafter, torch.arange(9)[None], shape).time_rounds()
    taped = binding.mixers.taped
    assert set(seen) == {
        (9, False, False, 1),
        (1, True, False, 1),
        (5, True, taped, 1 if taped else 5),
        (8, True, False, 8),
    }


@torch.no_grad()
@pytest.mark.parametrize(("compiled", "nodes", "steps"), [(False, 1 + 3 + 8, 1 + 4), (True, 1 + 8 + 8, 4 + 4)])
def test_trees_may_be_shallow_or_missing(compiled, nodes, steps, drafter, monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    meter = BareMeter(drafter, torch.arange(9)[None], DraftShape(4, top_k=2, size=8), compiled=compiled)
    costs = measured(meter, {0: 1 / 3, 1: 1 / 3, 4: 1 / 3})
    assert costs.verified_tokens == pytest.approx(nodes / 3)
    assert costs.drafter_steps == pytest.approx(steps / 3)


@torch.no_grad()
def test_bare_costs_are_means_of_what_was_timed_since_the_last(drafter, monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr("eagle31_hf.measure.bare_meter.now", lambda device: next(ticks))
    ticks = (total for second in seconds for total in (0.0, float(second)))  # forward n takes n seconds
    meter = BareMeter(drafter, torch.arange(9)[None], CHAIN)
    meter.time_rounds({2: 1.0}, 1)  # 0 1 target steps | 2 3 4, 5 6 7 uncounted | 8 verify, 9 absorb, 10 step
    meter.time_rounds({2: 1.0}, 1)  # 11 12 | 13 14 15 uncounted | 16 17 18
    assert meter.costs({2: 1.0}) == BareCosts(6.5, 12.0, 14.0, 13.0, verified_tokens=3.0, drafter_steps=2.0)
    meter.time_rounds({2: 1.0}, 1)  # 19 20 | 21 22 23 | 24 25 26
    assert meter.costs({2: 1.0}).verify_s == 24.0


@torch.no_grad()
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_bare_costs_of_compiled_loops_are_those_of_compiled_forwards(drafter, shape, monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    meter = BareMeter(drafter, torch.arange(9)[None], shape, compiled=True)
    costs = measured(meter)
    graphs = {kind for kind, *_ in Pair.of(drafter).graphs.keys}
    assert graphs == {"verify", "absorb", "step"}
    assert Pair.of(drafter).graphs.disabled_reason == ""
    assert min(costs.verify_s, costs.drafter_step_s, costs.absorb_s) > 0
    assert meter.cache.lengths == [9]
    assert meter.session.cache.lengths == [8]


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.none() | st.integers(2, 40))
def test_requested_trees_hold_no_more_than_their_candidates(depth, top_k, size):
    class Requested:
        device = torch.device("cpu")
        generation_config = type(drafter_of("llama").generation_config)(
            num_assistant_tokens=depth, draft_top_k=top_k, draft_tree_size=size
        )

    shape = requested_shape(Requested, batch_size=1)
    assert shape.depth == depth
    assert 2 <= shape.nodes <= (depth + 1 if top_k == 1 else 1 + top_k + top_k**2 * (depth - 1))
