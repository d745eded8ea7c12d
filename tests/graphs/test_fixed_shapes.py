"""Fixed shapes without the compiler: few of them, and drafts, draws and verdicts are those of the eager steps."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.graphs.captured import CapturesSteps
from eagle31_hf.graphs.graphs import Graphs
from eagle31_hf.graphs.steps import GraphKey
from eagle31_hf.loop.accept import Accepted
from eagle31_hf.loop.choosing import RoundBatch
from eagle31_hf.loop.pair import Pair
from eagle31_hf.targets.binding import TargetOutput, Verification
from helpers import (
    CONFIGS,
    RoundWrapper,
    assert_same_text,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
    use_fixed_shapes_only,
    wrapped_rounds,
)

CHAIN: dict[str, Any] = {"num_assistant_tokens": 5}
# As many nodes as are compiled for a chain.
NARROW: dict[str, Any] = {"draft_top_k": 2, "draft_tree_size": 8, "num_assistant_tokens": 4}
WINDOWED = ("mistral", "gemma3")  # families with sliding windows
NEW_TOKENS = 40


def pair_of(family: str, layers: int = 4, **overrides: Any) -> Eagle31Drafter:
    """A drafter of its own attached to a target of its own, so that no test sees another's graphs."""
    config = CONFIGS[family]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return random_drafter(random_target(config), aux_layers=[0, 1, min(2, layers)], **overrides)


def assert_plain(drafter: Eagle31Drafter, prompts: list[list[int]], oracle: int = 0, **fields: Any) -> None:
    """Our loop's text by graphs, with drafts that are right for a while, is plain's."""
    settings, inputs = {"acceleration": "compile", **fields}, left_padded(prompts)
    assert_same_text(
        drafter.binding.model, drafter, inputs, oracle=oracle, settings=settings, max_new_tokens=NEW_TOKENS
    )


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)


def test_fixed_shapes_are_few_and_serve_the_next_generation(uncompiled: None) -> None:
    drafter = pair_of("llama")
    for seed in range(6):
        assert_plain(drafter, random_prompts(1, seed=seed), seed, **CHAIN)
    shapes = Pair.of(drafter).graphs.keys
    # Rows of 16, 32, 64 and 128 slots at most, and one width of rounds and steps.
    assert len([shape for shape in shapes if shape[0] == "verify"]) <= 4
    assert len([shape for shape in shapes if shape[0] == "step"]) <= 4


def test_rows_that_become_longer_take_the_graph_of_their_new_length(
    uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the very round they do: the one before is made for buffers that are no longer there."""
    run, lengths = Graphs.run_or_eager, []

    def watching(self: Graphs, key: GraphKey, make: Any, inputs: Any, *told: Any, **more: Any) -> Any:
        def watched() -> tuple:
            filled = inputs()
            if key.kind == "verify":
                lengths.append((dict(key.shape[2:]), filled[-1].layers[0].keys.shape[2]))
            return filled

        return run(self, key, make, watched, *told, **more)

    monkeypatch.setattr(Graphs, "run_or_eager", watching)
    assert_plain(pair_of("llama"), random_prompts(1), **CHAIN)
    assert len({slots for _, slots in lengths}) > 1
    for made_for, slots in lengths:
        assert set(made_for.values()) == {slots}


@pytest.mark.parametrize("family", ["llama", "mistral"])  # the second with windows
def test_the_last_token_of_a_text_takes_a_graph_that_is_there(
    family: str, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, prompts = pair_of(family), random_prompts(1)
    eager, forward = [], Verification.__call__
    monkeypatch.setattr(Verification, "__call__", lambda self, tree: eager.append(tree.size) or forward(self, tree))
    how = {"settings": {"acceleration": "compile", **CHAIN}, "max_new_tokens": 2}
    for made in ([1], []):
        eager.clear()
        assert_same_text(drafter.binding.model, drafter, left_padded(prompts), **how)
        assert eager == made


@pytest.fixture
def drafted() -> Iterator[list[tuple[DraftTree, list[int]]]]:
    """Each round's drafts from now on, and the rows that need them: what others get is of no account."""
    kept: list[tuple[DraftTree, list[int]]] = []

    class Keeping(RoundWrapper):
        def draft(self, batch: RoundBatch) -> DraftTree:
            tree = self.inner.draft(batch)
            kept.append((tree, list(batch.live)))
            return tree

    with wrapped_rounds(Keeping):
        yield kept


DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 0.9}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # settings of the draft, of sampling, nodes
    "greedy chain": (CHAIN, {"do_sample": False}, 6),
    "sampled chain": (CHAIN, DRAWN, 6),
    "sampled chain of few": (CHAIN, DRAWN | {"top_k": 7}, 6),
    "greedy tree": (NARROW, {"do_sample": False}, 8),
    "sampled tree": (NARROW, DRAWN, 8),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second with a reduced draft vocabulary
@pytest.mark.thorough(every=2)
def test_graphs_draft_and_accept_what_eager_rounds_do(family: str, way: str, uncompiled: None, drafted: list) -> None:
    """A text alone does not say that fewer drafts were accepted, or others made."""
    drafter, (fields, sampling, nodes) = (
        pair_of(family, **({"draft_vocab_size": 40} if family == "qwen3" else {})),
        WAYS[way],
    )
    for rows in (1, 3):
        rounds, accepted = [], []
        for acceleration in ("eager", "compile"):
            drafted.clear()
            settings = {"acceleration": acceleration, **fields}
            how: dict[str, Any] = {"settings": settings, "max_new_tokens": 30, **sampling}
            assert_same_text(drafter.binding.model, drafter, left_padded(random_prompts(rows)), seed=3, **how)
            assert drafter.stats.fallbacks == []
            rounds.append(list(drafted))
            accepted.append((drafter.stats.accepted_at, drafter.stats.drafted_at))
        assert accepted[0] == accepted[1]
        compared = 0
        for (stepwise, live), (whole, also_live) in zip(*rounds, strict=True):
            assert stepwise.max_depth == whole.max_depth
            if whole.max_depth == fields["num_assistant_tokens"]:  # else the last of a text, and then cut
                for name in ("tokens", "parents", "depths", "ancestors"):
                    assert torch.equal(getattr(stepwise, name)[live], getattr(whole, name)[also_live]), name
                compared += 1
        assert compared > 3
    made = {key[:3] for key in Pair.of(drafter).graphs.keys}
    first = ("tree", 8) if fields is NARROW else ("chain", 5)
    assert made >= {(kind, rows, size) for rows in (1, 3) for kind, size in (("advance", nodes), first)}


@pytest.fixture
def sizes() -> Iterator[list[tuple[int, int]]]:
    """Of each verification: rows of the batch, and how many of them need tokens."""
    sizes: list[tuple[int, int]] = []

    class Counting(RoundWrapper):
        def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
            sizes.append((len(tree.tokens), len(batch.live)))
            return self.inner.accept(tree, verified, batch)

    with wrapped_rounds(Counting):
        yield sizes


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
@pytest.mark.thorough(every=3)
def test_ended_rows_stand_still_until_few_are_left(family: str, uncompiled: None, sizes: list[tuple[int, int]]) -> None:
    """Graphs are made for the size a batch begins with; a few rows are cheaper without."""
    drafter = pair_of(family)
    for fields, seed in itertools.product((CHAIN, NARROW), range(3)):
        before = len(sizes)
        assert_plain(drafter, random_prompts(5, seed=2), seed, **fields)
        stats, rounds = drafter.stats, sizes[before:]
        assert (stats.passes, stats.rounds) == (len(rounds), sum(live for _, live in rounds))
    assert {(5, 5), (5, 4), (5, 3), (5, 2), (1, 1)} == {*sizes}
    assert {shape[1] for shape in Pair.of(drafter).graphs.keys} == {5}


def test_scores_that_somebody_wants_are_not_judged_at_once(uncompiled: None) -> None:
    drafter = pair_of("llama")
    settings = {"acceleration": "compile", **CHAIN}
    asked: dict[str, Any] = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True}
    inputs = left_padded(random_prompts(1))
    assert_same_text(drafter.binding.model, drafter, inputs, settings=settings, max_new_tokens=20, **asked)
    assert "advance" not in {kind for kind, *_ in Pair.of(drafter).graphs.keys}


# --- where there are no graphs ----------------------------------------------------------------------------------------


def test_a_target_on_several_devices_stays_eager(uncompiled: None) -> None:
    drafter = pair_of("llama")
    drafter.binding.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert_plain(drafter, random_prompts(1), **CHAIN)
    assert not Pair.of(drafter).graphs.keys


def test_an_interrupt_while_compiling_is_not_swallowed(uncompiled: None) -> None:
    drafter = pair_of("llama")
    interrupted = mock.patch.object(CapturesSteps, "make", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        assert_plain(drafter, random_prompts(1), **CHAIN)
    assert_plain(drafter, random_prompts(1), **CHAIN)
    assert drafter.stats.fallbacks == []


def test_graphs_are_not_copied_with_their_target() -> None:
    pair = Pair.of(pair_of("llama"))
    assert copy.deepcopy(pair) is None
    assert pickle.loads(pickle.dumps(pair)) is None
