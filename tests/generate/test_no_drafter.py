"""A target without a drafter: the text is plain `generate`'s, and takes fewer passes where it repeats itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from kept_pairs import kept_target, kinds, make_pair

from eagle31_hf import NoDrafter, SpeculationStats
from eagle31_hf.errors import ConfigurationError, IncompatibleTargetError
from eagle31_hf.generate.warm_up import warm_up
from eagle31_hf.graphs.steps import GraphKey
from eagle31_hf.loop.pair import Pair
from eagle31_hf.loop.round import Round
from eagle31_hf.loop.text import Sequences
from eagle31_hf.measure.bench import Bench
from eagle31_hf.measure.exactness import Kind
from eagle31_hf.measure.results import PLAIN, PLAIN_BY_GRAPHS, BenchSettings, Method, Task, Writer
from eagle31_hf.texts.prompts import Prompt
from families import recurrent_target
from helpers import (
    CONFIGS,
    FAMILIES,
    VOCABULARY,
    assert_same_text,
    assert_same_turns,
    configured,
    drafter_of,
    left_padded,
    random_prompts,
    random_target,
    target_of,
    use_fixed_shapes_only,
)  # fmt: skip
from matrix import pairwise
from memory_faults import Fault
from recorder import Recorder

FEW_WORDS: dict[str, Any] = {"suppress_tokens": [0, 1, 2, *range(11, VOCABULARY)]}
"""A text of eight different tokens repeats itself soon."""
GREEDY: dict[str, Any] = {"max_new_tokens": 60, **FEW_WORDS}
SAMPLING: dict[str, Any] = {**GREEDY, "do_sample": True, "temperature": 0.3}
CHOICES = {"greedy": GREEDY, "sampled": SAMPLING}
WAYS = pytest.mark.parametrize("how", CHOICES.values(), ids=CHOICES)
MORE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalty": {"repetition_penalty": 1.3},
    "ends": {"eos_token_id": [4, 7]},
    "no end before": {"eos_token_id": 5, "min_new_tokens": 20},
}
"""Rows end at places of their own, inside drafts, too."""


def assert_plain(alone: NoDrafter, rows: int, how: dict[str, Any]) -> SpeculationStats:
    """Texts after prompts of unlike length are plain's, by our loop. Returns their figures."""
    assert_same_text(alone.binding.model, alone, left_padded(random_prompts(rows, seed=rows)), seed=7, **how)
    return alone.stats


def assert_helped(alone: NoDrafter, rows: int, how: dict[str, Any]) -> None:
    """The same without a step down, by drafts that were accepted."""
    stats = assert_plain(alone, rows, how)
    assert stats.fallbacks == []
    assert stats.accepted > 0
    assert stats.passes < how["max_new_tokens"]


@pytest.mark.parametrize(
    ("family", "rows", "choice", "more"),
    pairwise(("llama", "gemma3", "qwen3_5_text"), (1, 4), [*CHOICES], [*MORE]),
)
def test_the_text_is_plains_in_fewer_passes(family: str, rows: int, choice: str, more: str) -> None:
    alone = NoDrafter(recurrent_target(family) if "qwen" in family else target_of(family))
    if more == "nothing":
        assert_helped(alone, rows, CHOICES[choice])
    else:
        assert assert_plain(alone, rows, CHOICES[choice] | MORE[more]).fallbacks == []


def test_a_prompt_that_is_quoted_is_drafted() -> None:
    """The text goes on as its prompt did: what follows there is looked up from the first round on."""
    target = target_of("llama")
    alone, prompt = NoDrafter(target), torch.tensor([random_prompts(1)[0] * 4])
    wanted = target.generate(prompt, do_sample=False, max_new_tokens=16)
    quoting = torch.cat((wanted, prompt), 1)  # what the prompt was followed by stands in the new one
    assert_same_text(target, alone, quoting)
    assert alone.stats.drafted > 0


def test_a_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies where the target is, and reading it in every round would wait for the device."""
    read, text_of = list[int](), Sequences.text

    def text(self: Sequences, row: int, skip: int = 0) -> list[int]:
        read.append(row)
        return text_of(self, row, skip)

    monkeypatch.setattr(Sequences, "text", text)
    assert assert_plain(NoDrafter(target_of("llama")), 1, GREEDY).rounds > 5
    assert read == [0, 0], "by the prefill and by the index of what can be looked up"


def test_a_cache_goes_from_turn_to_turn() -> None:
    how = {**GREEDY, "max_new_tokens": 20}
    read = assert_same_turns(target_of("llama"), NoDrafter(target_of("llama")), left_padded(random_prompts(1)), **how)
    assert read[1] == 4, "the last token of the first turn, and three new ones"


def test_a_drafter_may_be_attached_beside_it() -> None:
    """Each has its own hold on the target; neither's figures are the other's. It reads no hidden states."""
    target, drafter, prompt = target_of("llama"), drafter_of("llama"), left_padded(random_prompts(1))
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())
    alone = NoDrafter(target)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()) == hooks
    for assistant in (drafter, alone, drafter):
        assert_same_text(target, assistant, prompt, **GREEDY)
    assert not list(alone.parameters())
    assert not copy.deepcopy(alone).is_attached
    alone.detach()
    assert_same_text(target, drafter, prompt, **GREEDY)


@pytest.mark.parametrize(
    ("field", "value"),
    [("draft_top_k", 4), ("draft_tree_size", 12), ("draft_window", 64), ("num_assistant_tokens_schedule", "pid")],
)
def test_settings_of_a_drafter_are_refused(field: str, value: Any) -> None:
    alone = NoDrafter(target_of("llama"))
    with configured(alone, **{field: value}), pytest.raises(ConfigurationError, match="there is no drafter"):
        assert_plain(alone, 1, GREEDY)


def test_what_is_no_causal_model_is_refused() -> None:
    with pytest.raises(IncompatibleTargetError, match="wanted a transformers model"):
        NoDrafter(torch.nn.Linear(2, 2))


def test_memory_that_runs_out_costs_no_token() -> None:
    with Fault(20, times=2).before(Round, "verify"):
        assert sum(assert_plain(NoDrafter(target_of("llama")), 1, GREEDY).memory_steps.values()) == 2


# --- graphs -----------------------------------------------------------------------------------------------------------


@WAYS
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.thorough(every=2)
def test_forwards_are_captured(rows: int, how: dict[str, Any], recorder: Recorder) -> None:
    alone = NoDrafter(random_target(CONFIGS["llama"]()))
    for _ in range(2):
        assert_helped(alone, rows, how)
    assert kinds(alone) == {"verify"}
    assert recorder.replayed > 20


def test_single_tokens_are_captured(recorder: Recorder) -> None:
    """The baseline of every drafter: the model alone, by graphs."""
    with configured(NoDrafter(random_target(CONFIGS["llama"]())), num_assistant_tokens_schedule="constant") as alone:
        stats = assert_plain(alone, 1, GREEDY)
    assert (stats.drafted, stats.rounds, stats.fallbacks) == (0, 59, [])
    assert {key.size for key in Pair.of(alone).graphs.keys} == {1}
    assert recorder.replayed >= 55


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.thorough(every=6)
def test_steps_of_fixed_shape_write_the_plain_text(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs for a CPU read, for every kind of target: blocks that are padded, buffers of a few lengths."""
    use_fixed_shapes_only(monkeypatch)
    with configured(NoDrafter(target_of(family)), acceleration="compile") as alone:
        assert assert_plain(alone, rows, GREEDY).fallbacks == []
    assert kinds(alone) == {"verify"}


def test_graphs_are_kept_for_a_target_alone(no_compiler: None) -> None:
    """`eagle31 warmup --drafter none`: a later process loads what it left, whatever is drawn."""
    told = list[GraphKey]()
    made = warm_up(NoDrafter(kept_target()), tokens=100, on_compile=told.append)
    assert told == made
    assert sorted((key.kind, key.size) for key in made) == [("verify", 1), ("verify", 8)]
    no_repeats = GREEDY | {"no_repeat_ngram_size": 2}  # whose drafts are never looked up
    for how, sizes in ((GREEDY, {1, 8}), (SAMPLING, {1, 8}), (no_repeats, {1})):  # graphs choose no tokens
        later = NoDrafter(kept_target())
        assert assert_plain(later, 1, how).fallbacks == []
        assert {key.size for key in Pair.of(later).graphs.keys} == sizes


def test_a_benchmark_writes_single_texts_by_graphs(no_compiler: None) -> None:
    warm_up(NoDrafter(kept_target()), tokens=100)
    tasks = [Task(Prompt("one", "random", "random", ()), torch.tensor(random_prompts(1)[0]))]
    methods = (PLAIN, PLAIN_BY_GRAPHS, Method(Writer.LOOKUP, by_graphs=True))
    bench = Bench(make_pair(), tasks, BenchSettings(methods, new_tokens=12, repeats=1, rows=(1, 2)))
    measured = bench.run()
    by_graphs = [call for call in measured.calls if call.method.by_graphs]
    assert [(call.method, len(call.answers)) for call in by_graphs] == [(method, 1) for method in methods[1:]]
    assert {verdict.kind for call in by_graphs for verdict in call.verdicts} == {Kind.SAME}
    assert not any(call.stats.fallbacks for call in by_graphs if call.stats is not None)
    assert [("single rows" in why) for why in measured.left_out.values()] == [True, True]
    assert kinds(bench.alone) == {"verify"}


def test_states_are_not_stepped_by_graphs() -> None:
    with configured(NoDrafter(recurrent_target("qwen3_5_text")), acceleration="compile") as alone:
        assert "recurrent states" in assert_plain(alone, 1, GREEDY).fallbacks[0]
