"""Compiled steps write the text of the eager ones, with few graphs, and make way for them where they cannot."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache import SpeculativeCache
from eagle31_hf.compiled import draft_session, graphs, round_graphs
from eagle31_hf.compiled.draft_graphs import DraftedChain
from eagle31_hf.compiled.draft_session import CompiledDrafting
from eagle31_hf.compiled.graphs import MOST_SAMPLING_SETTINGS, Graphs
from eagle31_hf.compiled.round_graphs import AcceptAndDraft, RoundGraph, TreeAcceptAndDraft
from eagle31_hf.compiled.shapes import NODE_BUCKET, node_bucket, slot_bucket
from eagle31_hf.compiled.verify import CompiledVerification
from eagle31_hf.decoding import draft_backoff
from eagle31_hf.decoding.round import Accepted, RoundBatch, RoundWrapper
from eagle31_hf.sampling.acceptance import Acceptance, accept_greedy, accept_sampled_target
from eagle31_hf.sampling.draw import draw
from eagle31_hf.sampling.rejection import accept_rejection
from eagle31_hf.target.binding import TargetOutput
from eagle31_hf.target.verify import Verification
from eagle31_hf.trees.draft_tree import DraftTree
from eagle31_hf.trees.static import StaticTopology
from helpers import (
    CONFIGS,
    FAMILIES,
    GROUPED,
    assert_same_or_tie,
    configured,
    left_padded,
    oracle_drafts,
    random_drafter,
    random_prompts,
    random_target,
    use_fixed_shapes_only,
    wrapped_rounds,
)
from matrix import WHOLE

CHAIN: dict[str, Any] = {"num_assistant_tokens": 5}
# As many nodes as are compiled for a chain.
NARROW: dict[str, Any] = {"draft_top_k": 2, "draft_tree_size": 8, "num_assistant_tokens": 4}
# Graphs that are really compiled draft two tokens deep: every step is in the graph once more, and compiled again.
SHORT_CHAIN: dict[str, Any] = {"num_assistant_tokens": 2}
SHORT_TREE = NARROW | {"num_assistant_tokens": 2}
WINDOWED = ("mistral", "gemma3")  # families with sliding windows
NEW_TOKENS = 40


def pair_of(family: str, layers: int = 4, **overrides: Any) -> Eagle31Drafter:
    """A drafter of its own attached to a target of its own, so that no test sees another's graphs."""
    config = CONFIGS[family]()
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return random_drafter(random_target(config), aux_layers=[0, 1, min(2, layers)], **overrides)


def write(drafter: Eagle31Drafter, prompts: list[list[int]], oracle_seed: int = 0, **fields: Any) -> tuple[Any, Any]:
    """What the target writes plainly, and with the drafter under these settings."""
    target, inputs = drafter.require_binding().model, left_padded(prompts)
    kwargs = {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**kwargs)
    with (
        configured(drafter, speculation_loop="own", acceleration="compile", **fields),
        oracle_drafts(plain, inputs["input_ids"].shape[1], oracle_seed),
    ):
        return plain, target.generate(**kwargs, assistant_model=drafter)


@pytest.fixture(autouse=True)
def _unpacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying products for every shape takes longer than all the rest here: tests that want it ask for it."""
    monkeypatch.setattr(graphs, "PACKED_BYTES", 0)


@pytest.fixture
def packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PACKED_BYTES", 2**30)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)


@pytest.fixture
def compile_only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with names of steps: from now on these go to the compiler, and the others run as they are."""
    compile_ = graphs._compile

    def only(*steps: str) -> None:
        monkeypatch.setattr(
            graphs, "_compile", lambda step, device: compile_(step, device) if step.__name__ in steps else step
        )

    return only


# --- buckets ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6))
def test_rows_have_a_length_of_few(slots: int) -> None:
    bucket = slot_bucket(slots)
    assert bucket >= slots
    assert bucket < 2 * slots or bucket == 256
    assert bucket % 256 == 0
    assert (bucket // 256).bit_count() == 1
    assert slot_bucket(bucket) == bucket


@given(st.integers(2, 200).flatmap(lambda most: st.tuples(st.integers(1, most), st.just(most))))
def test_rounds_have_two_widths(nodes_and_most: tuple[int, int]) -> None:
    nodes, most = nodes_and_most
    assert nodes <= node_bucket(nodes, most) < most + NODE_BUCKET
    assert node_bucket(nodes, most) in (NODE_BUCKET, node_bucket(most, most))


# --- fixed shapes, without the compiler (that they write the plain text: test_contract) -------------------------------


def test_fixed_shapes_are_few_and_serve_the_next_generation(uncompiled: None) -> None:
    drafter = pair_of("llama")
    for seed in range(6):
        write(drafter, random_prompts(1, seed=seed), oracle_seed=seed, **CHAIN)
    shapes = drafter.require_binding().compiled.keys
    # Rows of 16, 32, 64 and 128 slots at most, and one width of rounds and steps.
    assert len([shape for shape in shapes if shape[0] == "verify"]) <= 4
    assert len([shape for shape in shapes if shape[0] == "step"]) <= 4


@pytest.mark.parametrize("family", ["llama", "mistral"])  # the second with windows, whose masks graphs are given
def test_the_last_token_of_a_text_takes_a_graph_that_is_there(
    family: str, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, prompts = pair_of(family), random_prompts(1)
    write(drafter, prompts, **CHAIN)
    eager, forward = [], Verification.__call__
    monkeypatch.setattr(Verification, "__call__", lambda self, tree: eager.append(tree.size) or forward(self, tree))
    inputs = left_padded(prompts)
    plain = drafter.require_binding().model.generate(**inputs, max_new_tokens=2, do_sample=False)
    with configured(drafter, speculation_loop="own", acceleration="compile", **CHAIN):
        ours = drafter.require_binding().model.generate(
            **inputs, max_new_tokens=2, do_sample=False, assistant_model=drafter
        )
    assert torch.equal(plain, ours)
    assert eager == ([1] if family in WINDOWED else [])


@pytest.fixture
def drafted() -> Iterator[list[tuple[DraftTree, list[int]]]]:
    """Each round's drafts from now on, and the rows that need them: what others get is of no account."""
    kept: list[tuple[DraftTree, list[int]]] = []

    class Keeping(RoundWrapper):
        def draft(self, batch: RoundBatch) -> DraftTree:
            tree = super().draft(batch)
            kept.append((tree, list(batch.live)))
            return tree

    with wrapped_rounds(Keeping):
        yield kept


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second with a reduced draft vocabulary
def test_a_chain_at_once_is_the_chain_step_by_step(
    family: str, sample: bool, uncompiled: None, drafted: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = pair_of(family, **({"draft_vocab_size": 40} if family == "qwen3" else {}))
    target = drafter.require_binding().model
    for size in (1, 3):
        texts, drafts = [], []
        for at_once in (False, True):
            drafted.clear()
            inputs = left_padded(random_prompts(size))
            with (
                configured(drafter, speculation_loop="own", acceleration="compile", **CHAIN),
                monkeypatch.context() as m,
            ):
                if not at_once:
                    m.setattr(CompiledDrafting, "chain", lambda *_: None)
                    m.setattr(RoundGraph, "__call__", lambda *_: None)
                torch.manual_seed(3)
                texts.append(target.generate(**inputs, max_new_tokens=20, assistant_model=drafter, do_sample=sample))
            drafts.append(list(drafted))
        assert torch.equal(*texts)
        for (stepwise, live), (whole, also_live) in zip(*drafts, strict=True):
            assert live == also_live
            assert torch.equal(stepwise.tokens[live], whole.tokens[live])
            drawn = sample and whole.size > 1
            assert (stepwise.proposal is None) == (whole.proposal is None) == (not drawn)
            if drawn:
                assert torch.equal(stepwise.proposal.choices[live, 1:], whole.proposal.choices[live, 1:])
                torch.testing.assert_close(stepwise.proposal.probs[live], whole.proposal.probs[live])
    assert {shape[:3] for shape in drafter.require_binding().compiled.keys if shape[0] == "chain"} == {
        ("chain", 1, 5), ("chain", 3, 5)
    }  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second with a reduced draft vocabulary
def test_a_tree_at_once_is_the_tree_level_by_level(
    family: str, uncompiled: None, drafted: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = pair_of(family, **({"draft_vocab_size": 40} if family == "qwen3" else {}))
    for size in (1, 3):
        drafts = []
        for at_once in (False, True):
            drafted.clear()
            with monkeypatch.context() as m:
                if not at_once:
                    m.setattr(CompiledDrafting, "tree", lambda *_: None)
                    m.setattr(RoundGraph, "__call__", lambda *_: None)
                plain, ours = write(drafter, random_prompts(size), **NARROW)
            assert assert_same_or_tie(drafter.require_binding().model, plain, ours) == 0
            drafts.append(list(drafted))
        assert len(drafts[0]) > 3
        for (by_level, live), (whole, also_live) in zip(*drafts, strict=False):
            assert live == also_live
            assert by_level.max_depth == whole.max_depth
            assert whole.positions.max() <= whole.max_depth
            if whole.max_depth < 4:  # the last of a text, grown as deep as any and then cut
                break
            assert by_level.max_children == whole.max_children
            for name in ("tokens", "parents", "depths", "ancestors"):
                assert torch.equal(getattr(by_level, name)[live], getattr(whole, name)[live]), name
            torch.testing.assert_close(by_level.scores[live], whole.scores[live])
    shapes = drafter.require_binding().compiled.keys
    trees = {(key.rows, key.size, *key.shape[:2]) for key in shapes if key.kind == "tree"}
    assert trees == {(rows, 8, 4, 2) for rows in (1, 3)}


def test_chains_are_compiled_for_a_few_ways_to_draw(uncompiled: None) -> None:
    drafter = pair_of("llama")
    target, inputs = drafter.require_binding().model, left_padded(random_prompts(1))
    with configured(drafter, speculation_loop="own", acceleration="compile", **CHAIN):
        for temperature in (0.5, 0.6, 0.5, 0.7, 0.8, 0.9, 1.1):
            target.generate(
                **inputs, max_new_tokens=12, assistant_model=drafter, do_sample=True, temperature=temperature
            )
    ways = {shape[-1] for shape in drafter.require_binding().compiled.keys if shape[0] == "chain"}
    assert len(ways) == MOST_SAMPLING_SETTINGS


def test_rows_that_end_do_not_make_new_shapes(uncompiled: None) -> None:
    drafter = pair_of("llama")
    plain, ours = write(drafter, random_prompts(4, seed=2), **CHAIN)  # rows get to their end in different rounds
    assert torch.equal(plain, ours)
    assert {shape[1] for shape in drafter.require_binding().compiled.keys} == {4}


@pytest.fixture
def sizes() -> Iterator[list[tuple[int, int]]]:
    """Of each verification: rows of the batch, and how many of them need tokens."""
    sizes: list[tuple[int, int]] = []

    class Counting(RoundWrapper):
        def accept(self, tree: DraftTree, verified: TargetOutput, batch: RoundBatch) -> Accepted:
            sizes.append((len(tree.tokens), len(batch.live)))
            return super().accept(tree, verified, batch)

    with wrapped_rounds(Counting):
        yield sizes


@pytest.mark.parametrize("family", ["llama", *WINDOWED])
def test_ended_rows_stand_still_until_few_are_left(family: str, uncompiled: None, sizes: list[tuple[int, int]]) -> None:
    """Graphs are made for the size a batch begins with; a few rows are cheaper without."""
    drafter = pair_of(family)
    for fields, seed in itertools.product((CHAIN, NARROW), range(3)):
        before = len(sizes)
        plain, ours = write(drafter, random_prompts(5, seed=2), oracle_seed=seed, **fields)
        assert torch.equal(plain, ours)
        stats, rounds = drafter.stats, sizes[before:]
        assert stats is not None
        assert (stats.passes, stats.rounds) == (len(rounds), sum(live for _, live in rounds))
    assert {(5, 5), (5, 4), (5, 3), (5, 2), (1, 1)} == {*sizes}
    assert {shape[1] for shape in drafter.require_binding().compiled.keys} == {5}


def test_ended_rows_leave_where_verification_stays_eager(uncompiled: None, sizes: list[tuple[int, int]]) -> None:
    write(pair_of("llama"), random_prompts(5, seed=2), cache_type="int8", **CHAIN)
    assert all(rows == live for rows, live in sizes)
    assert min(sizes) < (5, 5)


@pytest.mark.parametrize("top_k", [0, 7])
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second with a reduced draft vocabulary
def test_sampling_draws_the_same_tokens(
    family: str, top_k: int, uncompiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one row that never rests, that is: in a batch rows that have ended take numbers where they stand still, and
    none where not, as does a graph that drafts ahead of a rest."""
    monkeypatch.setattr(draft_backoff, "ROUNDS_IN_VAIN", 1000)
    drafter = pair_of(family, **({"draft_vocab_size": 40} if family == "qwen3" else {}))
    target = drafter.require_binding().model
    for seed in range(3):
        inputs, texts = left_padded(random_prompts(1, seed=seed)), []
        for mode in ("eager", "compile"):
            with configured(drafter, speculation_loop="own", acceleration=mode, **CHAIN):
                torch.manual_seed(seed)
                sampling = {"do_sample": True, "top_k": top_k}
                texts.append(target.generate(**inputs, max_new_tokens=30, assistant_model=drafter, **sampling))
        assert torch.equal(*texts)
    assert "advance" in {kind for kind, *_ in drafter.require_binding().compiled.keys}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Acceptance, Acceptance]]:
    """What graphs accept from now on, and what the eager rule accepts by the same numbers."""
    monkeypatch.setattr(draft_backoff, "ROUNDS_IN_VAIN", 1000)
    kept: list[tuple[Acceptance, Acceptance]] = []
    in_a_graph = RoundGraph.__call__

    def by_the_rule(step: AcceptAndDraft, tree: DraftTree, logits: Tensor) -> Acceptance:
        if not step.sample:
            return accept_greedy(tree, logits.argmax(-1))
        accept = accept_sampled_target if isinstance(step, TreeAcceptAndDraft) else accept_rejection
        return accept(tree, step.warping.probs(logits))

    def accept_twice(self: RoundGraph, tree: DraftTree, logits: Tensor, aux: Tensor) -> Any:
        before = torch.get_rng_state()
        made = in_a_graph(self, tree, logits, aux)
        if made is not None:
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            kept.append((made[0], by_the_rule(self.step, tree, logits)))
            torch.set_rng_state(after)
        return made

    monkeypatch.setattr(RoundGraph, "__call__", accept_twice)
    return kept


def assert_judged_alike(judged: list[tuple[Acceptance, Acceptance]]) -> None:
    """The same drafts are accepted, and the same token is drawn after them."""
    assert len(judged) > 8
    for at_once, eager in judged:
        for name in ("length", "best", "bonus", "path"):
            assert torch.equal(getattr(at_once, name), getattr(eager, name)), name


JUDGED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # settings of the draft, of sampling, nodes
    "greedy chain": (CHAIN, {"do_sample": False}, 6),
    "sampled chain": (CHAIN, {"do_sample": True, "top_k": 0, "top_p": 0.9}, 6),
    "sampled chain of few": (CHAIN, {"do_sample": True, "top_k": 7, "top_p": 0.9}, 6),
    "greedy tree": (NARROW, {"do_sample": False}, 8),
    "sampled tree": (NARROW, {"do_sample": True, "top_k": 0, "top_p": 0.9}, 8),
}


@pytest.mark.parametrize("way", JUDGED)
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second with a reduced draft vocabulary
def test_drafts_are_judged_at_once_as_by_the_eager_rule(family: str, way: str, uncompiled: None, judged: list) -> None:
    drafter = pair_of(family, **({"draft_vocab_size": 40} if family == "qwen3" else {}))
    target, (fields, sampling, nodes) = drafter.require_binding().model, JUDGED[way]
    with configured(drafter, speculation_loop="own", acceleration="compile", **fields):
        for rows in (1, 3):
            target.generate(**left_padded(random_prompts(rows)), max_new_tokens=30, assistant_model=drafter, **sampling)
    assert drafter.stats.fallbacks == []
    assert_judged_alike(judged)
    kept = [shape for shape in drafter.require_binding().compiled.keys if shape[0] == "advance"]
    assert {shape[1:3] for shape in kept} == {(rows, nodes) for rows in (1, 3)}


def test_scores_that_somebody_wants_are_not_judged_at_once(uncompiled: None) -> None:
    drafter = pair_of("llama")
    target, inputs = drafter.require_binding().model, left_padded(random_prompts(1))
    asked: dict[str, Any] = {"do_sample": True, "return_dict_in_generate": True, "output_scores": True}
    with configured(drafter, speculation_loop="own", acceleration="compile", **CHAIN):
        told = target.generate(**inputs, max_new_tokens=20, assistant_model=drafter, **asked)
    assert len(told.scores) == 20
    assert "advance" not in {kind for kind, *_ in drafter.require_binding().compiled.keys}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("paths", [[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], [(0,), (1,), (0, 0), (1, 0)]])
def test_a_fixed_verification_is_the_eager_one(family: str, paths: list[tuple[int, ...]], uncompiled: None) -> None:
    """Rows of unequal length, a chain and a tree, masks made in the graph or (windows) before it."""
    drafter = pair_of(family)
    binding = drafter.require_binding()
    cache = SpeculativeCache.from_config(
        binding.text_config, batch_size=2, capacity=128, block=32, slab=16, masks_by_type=binding.masks_by_type
    )
    verify = CompiledVerification(binding, cache, Graphs.of(drafter), most_nodes=5)
    prompts = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    tree = StaticTopology.from_paths(paths).tree(prompts[:, :5])
    with torch.no_grad(), binding.capturing():
        cache.place(20)
        binding.forward(prompts, cache.position_ids(), cache.attention_mask(), cache)
        cache.commit([20, 13])
        eager = Verification(binding, cache)(tree)
        verify(tree)  # makes the step
        fixed = verify(tree)
    torch.testing.assert_close(fixed.logits, eager.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fixed.aux, eager.aux, rtol=1e-4, atol=1e-4)
    assert len(verify.graphs.keys) == 1


# --- when it cannot be ------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_by_itself() -> None:
    drafter = pair_of("llama")
    assert drafter.generation_config.acceleration == "auto"
    drafter.require_binding().model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, assistant_model=drafter)
    assert drafter.require_binding().compiled is None


def failing(failure: Exception) -> Callable:
    def compile_nothing(*args: Any, **kwargs: Any) -> Any:
        raise failure

    return compile_nothing


def test_a_failing_compiler_leaves_the_text_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", failing(RuntimeError("no compiler here\nat line 7")))
    drafter = pair_of("llama")
    with caplog.at_level(logging.WARNING, logger="eagle31_hf.compiled.graphs"):
        for _ in range(3):
            plain, ours = write(drafter, random_prompts(1), **CHAIN)
            assert torch.equal(plain, ours)
            (reason,) = drafter.stats.fallbacks
            assert "no compiler here" in reason
            assert "\n" not in reason
    assert len(caplog.records) == 1
    assert drafter.require_binding().compiled.keys == []


def test_a_graph_that_computes_something_else_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(step: Callable, device: torch.device) -> Callable:
        return lambda *inputs: tree_map_only(Tensor, lambda output: output.flip(-1), step(*inputs))

    monkeypatch.setattr(graphs, "_compile", wrong)
    drafter = pair_of("llama")
    plain, ours = write(drafter, random_prompts(2), **CHAIN)
    assert torch.equal(plain, ours)
    assert "is off by" in drafter.stats.fallbacks[0]


def counts_what_is_cached(module: Any, args: Any, kwargs: dict) -> None:
    kwargs["past_key_values"].get_seq_length()


def looks_at_the_data(module: Any, args: Any, kwargs: dict) -> None:
    assert kwargs["input_ids"].sum() > 0


@pytest.mark.parametrize(
    ("hook", "reason"), [(counts_what_is_cached, "asks its cache"), (looks_at_the_data, "data-dependent")]
)
def test_a_target_that_cannot_be_compiled_stays_eager(
    hook: Callable, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **_: compile_(step, fullgraph=True, backend="eager"))
    drafter = pair_of("llama", layers=3)
    drafter.require_binding().model.register_forward_pre_hook(hook, with_kwargs=True)
    for fields in (CHAIN, NARROW):
        plain, ours = write(drafter, random_prompts(3), **fields)
        assert torch.equal(plain, ours)
        (found,) = drafter.stats.fallbacks
        assert reason in found.lower()


@pytest.mark.slow
def test_a_hook_that_keeps_changing_costs_the_graph_not_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at once in a generation; graph after graph is made for it until the compiler has had enough."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **_: compile_(step, fullgraph=True, backend="eager"))
    drafter = pair_of("llama", layers=3)

    class Counter:
        count = 0

        def __call__(self, *_: Any) -> None:
            self.count += 1

    drafter.require_binding().model.register_forward_hook(Counter())
    reasons = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):
            plain, ours = write(drafter, random_prompts(1), **CHAIN)
            assert torch.equal(plain, ours)
            reasons.append(drafter.stats.fallbacks)
    assert reasons[0] == [], "one graph serves a whole generation"
    assert "recompile" in reasons[-1][0].lower()


def test_a_target_on_several_devices_stays_eager(uncompiled: None) -> None:
    drafter = pair_of("llama")
    drafter.require_binding().model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    plain, ours = write(drafter, random_prompts(1), **CHAIN)
    assert torch.equal(plain, ours)
    assert "2 devices" in drafter.stats.fallbacks[0]


def test_an_interrupt_while_compiling_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = pair_of("llama")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", failing(KeyboardInterrupt()))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            write(drafter, random_prompts(1), **CHAIN)
    monkeypatch.setattr(graphs, "_compile", lambda step, device: step)
    plain, ours = write(drafter, random_prompts(1), **CHAIN)
    assert torch.equal(plain, ours)
    assert drafter.stats.fallbacks == []


def test_graphs_go_when_weights_change() -> None:
    drafter = pair_of("llama")
    steps = Graphs.of(drafter)
    assert Graphs.of(drafter) is steps
    with torch.no_grad():
        drafter.require_binding().model.lm_head.weight.mul_(2)
    assert Graphs.of(drafter) is not steps


def test_graphs_with_packed_weights_go_when_weights_change_unseen(packed_weights: None) -> None:
    """What is written through `.data` leaves the version of a tensor as it was, and packed weights are copies."""
    drafter = pair_of("llama")
    steps = Graphs.of(drafter)
    assert steps.freezes_weights
    assert Graphs.of(drafter) is steps
    drafter.require_binding().model.model.layers[1].self_attn.q_proj.weight.data += 0.01
    assert Graphs.of(drafter) is not steps


def test_large_weights_are_not_packed() -> None:
    drafter = pair_of("llama")
    assert not Graphs.of(drafter).freezes_weights, "every graph would hold a copy"


def test_graphs_are_not_copied_with_their_target() -> None:
    steps = Graphs(())
    assert copy.deepcopy(steps) is None
    assert pickle.loads(pickle.dumps(steps)) is None


def test_outputs_survive_the_next_replay() -> None:
    pool = torch.zeros(3)

    def step(value: int) -> tuple[Tensor, Tensor]:
        pool.fill_(value)
        return pool, pool

    replayed = graphs._replayed(step)
    first, _ = replayed(1)
    replayed(2)
    assert first.tolist() == [1, 1, 1]


# --- with the compiler ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("frozen_bytes", [0, 2**30])
def test_packed_weights_write_the_plain_text_before_and_after_they_change(
    frozen_bytes: int, packed_weights: None, compile_only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed once for all graphs, or into each. Of the drafter what reads, which holds every product of it; the
    target's again, after its weights changed.

    Trying products for every shape takes long: all matrices of this target have one, and as many rows as are read.
    """
    monkeypatch.setattr(graphs, "FROZEN_BYTES", frozen_bytes)
    layers = 1 if frozen_bytes else 3
    sides = {"vocab_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "num_hidden_layers": layers}
    drafter = random_drafter(random_target(hf.LlamaConfig(**GROUPED | sides)), aux_layers=[0, 1, min(2, layers)])
    for scale, steps in ((1.0, ("verify", "absorb")), (1.5, ("verify",))):
        compile_only(*steps)
        torch._dynamo.utils.counters.clear()
        drafter.require_binding().model.model.layers[0].mlp.down_proj.weight.data *= scale
        plain, ours = write(drafter, random_prompts(1, vocabulary=64), **SHORT_CHAIN)
        assert assert_same_or_tie(drafter.require_binding().model, plain, ours) == 0
        assert drafter.stats.fallbacks == []
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_text_is_the_plain_text(family: str, compile_only: Callable[..., None]) -> None:
    """Of gemma3 all that trees need and chains but the first, of llama the verification of both (trees in a batch), of
    the others that of trees.

    Few layers: compile time grows with their number, what could go wrong does not. The drafter's graphs are the same
    for every family, so one is enough to compile them for; a first chain is compiled below.
    """
    compile_only(*(("verify", "absorb", "tree", "advance") if family == "gemma3" else ("verify",)))
    torch._dynamo.utils.counters.clear()
    whole = family in WHOLE
    drafter = pair_of(family, layers=2 if whole else 1)  # of gemma3 a windowed and a full layer
    for seed, fields in enumerate((SHORT_CHAIN, SHORT_TREE) * 3 if whole else (SHORT_TREE,) * 3):
        prompts = random_prompts(3 if family == "llama" and fields is SHORT_TREE else 1, seed=seed)
        plain, ours = write(drafter, prompts, oracle_seed=seed, **fields)
        mask = left_padded(prompts)["attention_mask"]
        assert assert_same_or_tie(drafter.require_binding().model, plain, ours, mask) == 0
        assert drafter.stats.fallbacks == []
    shapes = drafter.require_binding().compiled.keys
    # One of each way to draft, its verification (unless masks come from outside) and its end, and absorbing; of each
    # batch size.
    kinds = {"tree": 1, "absorb": 1, "verify": 1, "advance": 1}
    if whole:
        kinds |= {"chain": 1, "advance": 2}
    if family == "llama":
        kinds |= {"absorb": 2, "verify": 2}
    assert Counter(kind for kind, *_ in shapes) == kinds
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made == (len(shapes) - 1 if family == "gemma3" else kinds["verify"]), "a shape was compiled again"


@pytest.mark.slow
def test_a_compiled_chain_draws_from_what_it_says_and_is_judged_by_the_rule(
    judged: list, compile_only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rejection sampling is lossless if drafts follow the distribution that comes with them, whatever that is."""
    compile_only("chain", "advance")
    drafter = pair_of("qwen3", layers=2, draft_vocab_size=40)
    target, inputs = drafter.require_binding().model, left_padded(random_prompts(3))
    numbers, chains = [], []
    make, to_tree = draft_session.chain_numbers, DraftedChain.to_tree

    def keep_numbers(*args: Any) -> Tensor:
        numbers[:] = (made := make(*args)).unbind(1)
        return made

    def keep_chain(self: DraftedChain, *args: Any) -> DraftTree:
        chain = to_tree(self, *args)  # its numbers are these, or those its round before took ahead
        chains.append((chain, list(numbers)))
        return chain

    for module in (draft_session, round_graphs):
        monkeypatch.setattr(module, "chain_numbers", keep_numbers)
    monkeypatch.setattr(DraftedChain, "to_tree", keep_chain)
    with configured(drafter, speculation_loop="own", acceleration="compile", **SHORT_CHAIN):
        sampling = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
        target.generate(**inputs, max_new_tokens=30, assistant_model=drafter, **sampling)
    assert drafter.stats.fallbacks == []
    assert len(chains) > 3
    for chain, used in chains:
        assert len(used) == SHORT_CHAIN["num_assistant_tokens"]
        assert chain.proposal.probs.shape[-1] == 20, "warped as the target's"
        for k, number in enumerate(used[: chain.max_depth]):
            assert torch.equal(chain.proposal.choices[:, k + 1], draw(chain.proposal.probs[:, k], numbers=number))
    assert_judged_alike(judged)


@pytest.mark.slow
def test_compiled_trees_of_a_batch_are_judged_by_the_rule(judged: list, compile_only: Callable[..., None]) -> None:
    compile_only("advance")
    drafter = pair_of("qwen3", draft_vocab_size=40)
    sampling = {"do_sample": True, "top_k": 0, "top_p": 0.9}
    with configured(drafter, speculation_loop="own", acceleration="compile", **SHORT_TREE):
        drafter.require_binding().model.generate(
            **left_padded(random_prompts(3)), max_new_tokens=30, assistant_model=drafter, **sampling
        )
    assert drafter.stats.fallbacks == []
    assert_judged_alike(judged)
    kinds = {(kind, rows, nodes) for kind, rows, nodes, *_ in drafter.require_binding().compiled.keys}
    assert ("advance", 3, 7) in kinds
