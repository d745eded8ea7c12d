"""A target without a drafter: the text is plain `generate`'s, and takes fewer passes where it repeats itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_pairs import kept_target, kinds, leave_the_compiler_out, make_pair
from transformers import DynamicCache

from eagle31_hf import NoDrafter, SpeculationStats
from eagle31_hf.errors import ConfigurationError, IncompatibleTargetError, UnsupportedGenerationError
from eagle31_hf.generate.warm_up import warm_up
from eagle31_hf.graphs.ahead import kept as kept_folder
from eagle31_hf.loop import decoder as decoders
from eagle31_hf.loop.kept_graphs import compiling_ahead
from eagle31_hf.loop.pair import Pair
from eagle31_hf.loop.text import Sequences
from eagle31_hf.measure.bench import PLAIN, PLAIN_BY_GRAPHS, Bench, BenchSettings, Method, Task, Writer
from eagle31_hf.measure.exactness import Kind
from eagle31_hf.targets.binding import CACHE_ARGUMENT
from eagle31_hf.texts.prompts import Prompt
from families import recurrent_target
from helpers import (
    CONFIGS,
    FAMILIES,
    VOCABULARY,
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    random_prompts,
    random_target,
    target_of,
    use_fixed_shapes_only,
)  # fmt: skip
from recorder import Recorder, record_steps

FEW_WORDS: dict[str, Any] = {"suppress_tokens": [0, 1, 2, *range(11, VOCABULARY)]}
"""A text of eight different tokens repeats itself soon."""
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60, **FEW_WORDS}
SAMPLING: dict[str, Any] = {**GREEDY, "do_sample": True, "temperature": 0.3}


def assert_plain(alone: NoDrafter, rows: int, how: dict[str, Any], loop: str = "own") -> SpeculationStats:
    """Texts after prompts of unlike length are plain's, by our loop without a step down. Returns their figures."""
    inputs = left_padded(random_prompts(rows, seed=rows))
    assert_same_text(alone.binding.model, alone, inputs, seed=7, loop=loop, **how)
    assert alone.stats is not None
    return alone.stats


def assert_helped(alone: NoDrafter, rows: int, how: dict[str, Any]) -> None:
    """The same, by drafts that were accepted."""
    stats = assert_plain(alone, rows, how)
    assert (stats.reason, stats.fallbacks) == ("", [])
    assert stats.accepted > 0
    assert stats.passes < how["max_new_tokens"]


@pytest.mark.parametrize("how", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.thorough(every=2)
def test_the_text_is_plains_in_fewer_passes(family: str, rows: int, how: dict[str, Any]) -> None:
    assert_helped(NoDrafter(target_of(family)), rows, how)


@pytest.mark.parametrize("how", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_a_target_that_keeps_states(how: dict[str, Any]) -> None:
    assert_helped(NoDrafter(recurrent_target("qwen3_5_text")), 2, how)


@pytest.mark.parametrize("drawn", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "how",
    [{"repetition_penalty": 1.3}, {"eos_token_id": [4, 7]}, {"eos_token_id": 5, "min_new_tokens": 20}],
    ids=["penalty", "ends", "no end before"],
)
def test_processors_and_ends_are_plains(how: dict[str, Any], drawn: dict[str, Any]) -> None:
    """Rows end at places of their own, inside drafts, too."""
    assert assert_plain(NoDrafter(target_of("llama")), 4, {**drawn, **how, "pad_token_id": 0}).fallbacks == []


def test_a_prompt_that_is_quoted_is_drafted() -> None:
    """The text goes on as its prompt did: what follows there is looked up from the first round on."""
    target = target_of("llama")
    alone, told = NoDrafter(target), {"do_sample": False, "max_new_tokens": 24}
    prompt = torch.tensor([random_prompts(1)[0] * 4])
    wanted = target.generate(prompt, **told)
    quoting = torch.cat((wanted, prompt), 1)  # what the prompt was followed by stands in the new one
    assert_same_text(target, alone, quoting, **told)
    assert alone.stats is not None
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


def test_nothing_is_drafted_by_the_constant_schedule() -> None:
    with configured(NoDrafter(target_of("llama")), num_assistant_tokens_schedule="constant") as alone:
        stats = assert_plain(alone, 1, GREEDY)
    assert (stats.drafted, stats.rounds) == (0, 59)


def test_a_cache_goes_from_turn_to_turn() -> None:
    target = target_of("llama")
    alone, cache = NoDrafter(target), DynamicCache(config=target.config)
    text = torch.tensor([random_prompts(1)[0]])
    for _ in range(2):
        how = {**GREEDY, "max_new_tokens": 20}
        out = target.generate(
            text, assistant_model=alone, return_dict_in_generate=True, **{CACHE_ARGUMENT: cache}, **how
        )  # fmt: skip
        assert torch.equal(out.sequences, target.generate(text, **how))
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        text = torch.cat((out.sequences, torch.tensor([[5, 6, 7]])), 1)
    assert alone.stats is not None
    assert alone.stats.prefilled_tokens == 4, "the last token of the first turn, and three new ones"


def test_a_drafter_may_be_attached_beside_it() -> None:
    """Each has its own hold on the target; neither's figures are the other's."""
    target, drafter = target_of("llama"), drafter_of("llama")
    alone, prompt = NoDrafter(target), left_padded(random_prompts(1))
    assert_same_text(target, drafter, prompt, **GREEDY)
    assert_same_text(target, alone, prompt, **GREEDY)
    alone.detach()
    assert_same_text(target, drafter, prompt, **GREEDY)


def test_no_hidden_states_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("llama")
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())
    alone = NoDrafter(target)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()) == hooks
    assert not list(alone.parameters())
    assert not copy.deepcopy(alone).is_attached


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft_top_k", 4),
        ("draft_tree_size", 12),
        ("draft_window", 64),
        ("num_assistant_tokens_schedule", "pid"),
    ],
)
def test_settings_of_a_drafter_are_refused(field: str, value: Any) -> None:
    alone = NoDrafter(target_of("llama"))
    with configured(alone, **{field: value}), pytest.raises(ConfigurationError, match="there is no drafter"):
        assert_plain(alone, 1, GREEDY)


def test_another_loops_reason_is_told() -> None:
    alone, static = NoDrafter(target_of("llama")), {**GREEDY, "cache_implementation": "static"}
    assert "StaticCache" in assert_plain(alone, 1, static, loop="plain").reason
    with configured(alone, speculation_loop="own"), pytest.raises(UnsupportedGenerationError, match="StaticCache"):
        assert_plain(alone, 1, static)


def test_what_is_no_causal_model_is_refused() -> None:
    with pytest.raises(IncompatibleTargetError, match="wanted a transformers model"):
        NoDrafter(torch.nn.Linear(2, 2))


def test_memory_that_runs_out_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    verify, failures = decoders.Round.verify, iter([20, 30])
    at, calls = [next(failures)], [0]

    def scarce(self: Any, tree: Any) -> Any:
        calls[0] += 1
        if calls[0] == at[0]:
            at[0] = next(failures, -1)
            raise torch.OutOfMemoryError("out of memory")
        return verify(self, tree)

    monkeypatch.setattr(decoders.Round, "verify", scarce)
    assert sum(assert_plain(NoDrafter(target_of("llama")), 1, GREEDY).memory_steps.values()) == 2


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return record_steps(monkeypatch)


@pytest.mark.parametrize("how", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
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
    assert (stats.drafted, stats.fallbacks) == (0, [])
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


def test_graphs_are_kept_for_a_target_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`eagle31 warmup --drafter none`: a later process loads what it left, whatever is drawn."""
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path))
    leave_the_compiler_out(monkeypatch)
    made = warm_up(NoDrafter(kept_target()), tokens=100)
    assert sorted((key.kind, key.size) for key in made) == [("verify", 1), ("verify", 8)]
    for how in (GREEDY, SAMPLING):
        later = NoDrafter(kept_target())
        assert_plain(later, 1, how)
        assert {key.size for key in Pair.of(later).graphs.keys} == {1, 8}


def test_who_compiles_ahead_is_told_how_many_graphs_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path))
    leave_the_compiler_out(monkeypatch)
    alone, told = NoDrafter(kept_target()), list[tuple[int, int]]()
    with compiling_ahead(Pair.of(alone), on_made=lambda made, of: told.append((made, of))) as ahead:
        ahead.until_compiled(lambda: assert_plain(alone, 1, GREEDY))
    assert [made for made, _ in told] == [*range(1, len(ahead.made) + 1)]
    assert told[-1] == (len(ahead.made), len(ahead.made)) > (0, 0)


def test_a_benchmark_writes_it_by_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path))
    leave_the_compiler_out(monkeypatch)
    tasks = [Task(Prompt("one", "random", "random", ()), torch.tensor(random_prompts(1)[0]))]
    methods = (PLAIN, PLAIN_BY_GRAPHS, Method(Writer.LOOKUP, by_graphs=True))
    bench = Bench(make_pair(), tasks, BenchSettings(methods, new_tokens=12, repeats=1))
    measured = bench.run()
    assert {call.method for call in measured.calls} == set(methods)
    assert {verdict.kind for call in measured.calls[1:] for verdict in call.verdicts} == {Kind.SAME}
    assert kinds(bench.alone) == {"verify"}
    assert bench.alone.stats is not None
    assert bench.alone.stats.fallbacks == []
    assert measured.graphs >= 2


def test_states_are_not_stepped_by_graphs() -> None:
    with configured(NoDrafter(recurrent_target("qwen3_5_text")), acceleration="compile") as alone:
        assert "recurrent states" in assert_plain(alone, 1, GREEDY).fallbacks[0]
