"""`acceleration="auto"`: graphs that were compiled ahead write the plain text, whatever is wrong with them.

The compiler is left out where it is not what is tested: a package then is the exported step itself.
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kept_pairs import (
    GREEDY,
    SAMPLING,
    assert_plain,
    done,
    failing,
    forgotten,
    keep_graphs,
    kept_files,
    kept_target,
    kinds,
    leave_the_compiler_out,
    make_pair,
    write,
    write_exported,
)
from torch.nn import functional
from torch.nn.modules import module as modules
from transformers.models.llama import modeling_llama

from eagle31_hf.cli.generate import has_graphs
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.generate import warm_up as warm_up_module
from eagle31_hf.generate.warm_up import prompt_lengths, warm_up
from eagle31_hf.graphs import graphs
from eagle31_hf.graphs.ahead import kept as kept_folder
from eagle31_hf.graphs.ahead import packages
from eagle31_hf.graphs.ahead.compiler_processes import CompilerProcesses
from eagle31_hf.graphs.seen import ModelState
from eagle31_hf.loop.decoder import SpeculativeDecoder
from eagle31_hf.loop.pair import Pair
from helpers import configured


@pytest.fixture(autouse=True)
def _no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    leave_the_compiler_out(monkeypatch)


@pytest.fixture
def pair() -> Eagle31Drafter:
    return make_pair()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with this pair's graphs for greedy and drawn texts."""
    with pytest.MonkeyPatch.context() as patch:
        return keep_graphs(tmp_path_factory.mktemp("kept") / "cache", patch)


@pytest.fixture
def warmed(kept: Path, pair: Eagle31Drafter) -> Eagle31Drafter:
    """The pair, its graphs kept, in a process that knows nothing of them yet."""
    shutil.copytree(kept, kept_folder.cache_folder())
    return pair


# --- the text ---------------------------------------------------------------------------------------------------------


def test_auto_is_eager_until_graphs_are_kept_and_writes_the_same_text(
    pair: Eagle31Drafter, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.GraphPackages, "compile", failing(AssertionError("auto compiles nothing")))
    texts = [write(None, seed) for seed in range(3)]
    assert pair.generation_config.acceleration == "auto"
    assert all(torch.equal(write(pair, seed), text) for seed, text in enumerate(texts))
    assert not kinds(pair)
    shutil.copytree(kept, kept_folder.cache_folder())
    assert all(torch.equal(write(pair, seed), text) for seed, text in enumerate(texts))
    assert kinds(pair) == {"absorb", "chain", "verify", "advance"}
    assert pair.stats.fallbacks == []
    assert pair.stats.rounds > 5


def test_drawn_texts_are_plains(warmed: Eagle31Drafter) -> None:
    drawn = [write(warmed, seed, **SAMPLING) for seed in range(4)]
    assert "advance" in kinds(warmed)
    assert all(torch.equal(write(None, seed, **SAMPLING), text) for seed, text in enumerate(drawn))
    assert len(set(map(str, drawn))) == 4


def test_switching_between_rounds_writes_the_plain_text(
    warmed: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, step, used = random.Random(0), SpeculativeDecoder.step, set()

    def step_and_switch(self: SpeculativeDecoder) -> None:
        step(self)
        used.add(self.graphs is not None)
        self.use_graphs(self.request.graphs if dice.random() < 0.5 else None)

    monkeypatch.setattr(SpeculativeDecoder, "step", step_and_switch)
    for seed in range(4):
        assert_plain(warmed, seed)
    assert used == {True, False}


def test_drafts_adapt_to_what_kept_graphs_take(warmed: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is never right rests, by the graph of single tokens."""
    monkeypatch.setattr(packages.GraphPackages, "compile", failing(AssertionError("auto compiles nothing")))
    with configured(warmed, num_assistant_tokens_schedule="planned"):
        assert_plain(warmed)
    assert warmed.stats.skipped_rounds > 5
    made = Pair.of(warmed).graphs
    assert made is not None
    assert {key.size for key in made.keys if key.kind == "verify"} >= {1}


def test_what_is_kept_later_waits_for_the_next_text(warmed: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a text depends on when another process has compiled something."""
    (later,) = (path for path in kept_files(".json") if path.name.startswith("verify-1x8"))
    told, load = later.read_text(), packages.GraphPackages.load
    later.unlink()

    def load_and_keep_more(self: packages.GraphPackages, *given: Any) -> Any:
        later.write_text(told)
        return load(self, *given)

    monkeypatch.setattr(packages.GraphPackages, "load", load_and_keep_more)
    write(warmed)
    assert "advance" in kinds(warmed)
    assert "verify" not in kinds(warmed)
    write(warmed)
    assert "verify" in kinds(warmed)


@pytest.mark.parametrize(
    "how", [{"rows": 2}, {"do_sample": True, "temperature": 0.5}, {"num_beams": 2}, {"repetition_penalty": 1.3}]
)
def test_what_was_not_compiled_for_is_eager(warmed: Eagle31Drafter, how: dict[str, Any]) -> None:
    write(warmed, **how)
    assert "advance" not in kinds(warmed)


def test_longer_texts_than_were_compiled_for(warmed: Eagle31Drafter) -> None:
    ids = torch.arange(3, 93)[None]
    model = kept_target()
    how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 80}
    assert torch.equal(model.generate(ids, assistant_model=warmed, **how), model.generate(ids, **how))
    assert {key.shape[-1] for key in Pair.of(warmed).graphs.keys if key.kind == "advance"} == {128}


# --- what is found ----------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_twice_and_every_length_of_rows_once(warmed: Eagle31Drafter) -> None:
    assert warm_up(warmed, tokens=100, **GREEDY) == []
    assert prompt_lengths(100) == [8]
    assert prompt_lengths(600) == [8, 129, 257, 513]


def test_graphs_are_found_whatever_was_written_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter makes its list of draft ids with its first draft."""

    def make() -> Eagle31Drafter:
        return make_pair(draft_vocab_size=40)

    pair = make()
    write(pair)
    assert len(warm_up(pair, tokens=100, **GREEDY)) > 3
    fresh = make()
    assert_plain(fresh)
    assert "advance" in kinds(fresh)


@pytest.mark.thorough
def test_graphs_are_compiled_together(pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[set[str]] = []  # beside each package that was begun, which others were not done yet
    pending: set[str] = set()

    class Package(Future[None]):
        def __init__(self, name: str):
            super().__init__()
            self.name = name
            waiting.append(pending.copy())
            pending.add(name)

        def result(self, timeout: float | None = None) -> None:
            pending.discard(self.name)

    def compile_(self: CompilerProcesses, exported: Any, package: Path, settings: dict[str, Any]) -> Future[None]:
        write_exported(self, exported, package, settings)
        return Package(package.name)

    monkeypatch.setattr(CompilerProcesses, "compile", compile_)
    assert 3 < len(warm_up(pair, tokens=100, **GREEDY)) < len(waiting)
    assert [len(names) for names in waiting] == list(range(len(waiting)))
    assert_plain(forgotten(pair))


# --- when a text asks for it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told", [SAMPLING, {"max_time": 100.0, "prefill_chunk_size": 4, "num_assistant_tokens": 5, **GREEDY}]
)
@pytest.mark.thorough
def test_a_text_waits_for_what_it_asked_for(
    pair: Eagle31Drafter, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with configured(pair, acceleration="compile"):
        assert_plain(pair, **told)
        assert "advance" in kinds(pair)
        assert (pair.stats.fallbacks, pair.stats.loop) == ([], "own")
        monkeypatch.setattr(warm_up_module, "compile_graphs", failing(AssertionError("it is there")))
        assert_plain(pair, 1, **told)
    before = kept_files(".json")
    monkeypatch.setattr(packages.GraphPackages, "compile", failing(AssertionError("it is there")))
    assert_plain(forgotten(pair), **told)
    assert "advance" in kinds(pair)
    assert kept_files(".json") == before


@pytest.mark.thorough
def test_a_longer_text_waits_once_more(pair: Eagle31Drafter) -> None:
    with configured(pair, acceleration="compile"):
        assert_plain(pair)
        before = kept_files(".json")
        assert_plain(pair, max_new_tokens=150)
    assert set(kept_files(".json")) > set(before)


def test_texts_wait_for_few_ways_to_choose_and_say_so(pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(warm_up_module, "compile_graphs", lambda *_, **how: compiled.append(how))
    with configured(pair, acceleration="compile"):
        for temperature in (0.5, 0.6, 0.7, 0.8, 0.6, 0.9):
            write(pair, max_new_tokens=6, do_sample=True, temperature=temperature)
        assert len(compiled) == 4
        assert any("4 ways to choose tokens" in why for why in pair.stats.fallbacks)


def test_weights_that_change_wait_for_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target = copy.deepcopy(kept_target())
    pair = make_pair(target)
    with configured(pair, acceleration="compile"):
        for _ in range(2):
            assert_plain(pair, target=target)
            assert "advance" in kinds(pair)
            with torch.no_grad():
                target.lm_head.weight.mul_(-1.5)


@pytest.mark.parametrize(
    ("how", "fields", "reason"),
    [
        ({"rows": 3}, {}, "single rows"),
        ({}, {"cache_type": "int8"}, "8 bits"),
        ({}, {"num_assistant_tokens_schedule": "pid"}, "steers it"),
        ({}, {"draft_min_confidence": 0.3}, "doubt"),
        ({"no_repeat_ngram_size": 2}, {}, "logits processor"),
    ],
)
def test_what_cannot_be_compiled_is_eager_and_says_so(
    pair: Eagle31Drafter, how: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    with configured(pair, acceleration="compile", **fields):
        ours = write(pair, **how)
        assert any("not compiled" in why and reason in why for why in pair.stats.fallbacks)
        with configured(pair, acceleration="eager"):
            assert torch.equal(ours, write(pair, **how))
    assert not kinds(pair)


def test_a_text_goes_on_where_compiling_fails(pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompilerProcesses, "compile", lambda *_: done(RuntimeError("no C++ compiler")))
    with configured(pair, acceleration="compile"):
        for _ in range(2):
            assert_plain(pair)
            (reason,) = pair.stats.fallbacks
            assert "no C++ compiler" in reason


def test_a_command_measures_graphs_where_some_are_kept_and_not_refused(warmed: Eagle31Drafter) -> None:
    pair: Any = SimpleNamespace(drafter=warmed)
    with configured(warmed, acceleration="eager"):
        assert not has_graphs(pair)
    with configured(warmed, acceleration="auto"):
        assert has_graphs(pair)


def layer(number: int) -> Any:
    return kept_target().model.layers[number]


def replace(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """As kernel packages do."""
    own = getattr(owner, name)
    patch.setattr(owner, name, lambda first, *told, **more: change(own, first, *told, **more))


def hang_a_hook_on_all_modules(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(modules._global_forward_hooks, "ours", lambda of, _, out: 1.5 * out if of is layer(0) else None)


DIFFERS: dict[str, Callable[[Eagle31Drafter, pytest.MonkeyPatch], object]] = {
    "the machine": lambda _, patch: patch.setattr(kept_folder, "_processor", lambda: ("another CPU",)),
    "a scalar": lambda _, patch: patch.setattr(layer(1).self_attn, "scaling", layer(1).self_attn.scaling * 3),
    "a forward": lambda _, patch: replace(patch, layer(1).mlp, "forward", lambda own, states: -own(states)),
    "adapters at work": lambda _, patch: patch.setattr(
        layer(0).self_attn.q_proj, "_disable_adapters", True, raising=False
    ),
    "a function of the modeling file": lambda _, patch: replace(
        patch, modeling_llama, "apply_rotary_pos_emb", lambda own, q, *told, **more: own(1.4 * q, *told, **more)
    ),
    "a function of torch": lambda _, patch: replace(
        patch, functional, "silu", lambda own, states, **_: 1.4 * own(states)
    ),
    "a hook on all modules": lambda _, patch: hang_a_hook_on_all_modules(patch),
}


@pytest.mark.parametrize("differs", DIFFERS)
def test_graphs_of_others_are_not_touched(
    differs: str, warmed: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    DIFFERS[differs](warmed, monkeypatch)
    load, loaded = packages.GraphPackages.load, []

    def note(self: packages.GraphPackages, key: Any, step: Any) -> Any:
        loaded.append(key)
        return load(self, key, step)

    monkeypatch.setattr(packages.GraphPackages, "load", note)
    assert_plain(warmed)
    assert loaded == []


def test_graphs_stand_aside_while_operations_are_cast(warmed: Eagle31Drafter) -> None:
    write(warmed)
    assert "advance" in kinds(warmed)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            with configured(warmed, acceleration="eager"):
                by_eager_code = write(warmed)  # in so few bits plain's scores are others
            assert torch.equal(write(warmed), by_eager_code)
            with configured(warmed, acceleration="compile"):
                assert torch.equal(write(warmed), by_eager_code)
                assert any("autocast" in why for why in warmed.stats.fallbacks)
        assert_plain(warmed)
        assert "advance" in kinds(warmed)


def test_a_target_that_changes_after_its_graphs_were_loaded(warmed: Eagle31Drafter) -> None:
    target = kept_target()
    write(warmed)
    assert "advance" in kinds(warmed)
    row = target.lm_head.weight.data[7].clone()
    try:
        target.lm_head.weight.data[7] = 1.0  # as new tokens' embeddings are set; torch counts no write
        assert_plain(warmed)
        assert "advance" in kinds(warmed), "graphs read the weights as they are now"
    finally:
        target.lm_head.weight.data[7] = row
    assert_plain(warmed)


@pytest.mark.parametrize("of", ["folder", "file"])
def test_what_others_may_write_is_not_loaded(
    of: str, warmed: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs are machine code."""
    for path in [kept_folder.cache_folder()] if of == "folder" else kept_files(".pt2"):
        path.chmod(path.stat().st_mode | 0o022)
    monkeypatch.setattr(packages, "load_package", failing(AssertionError("loaded")))
    with caplog.at_level(logging.WARNING, logger="eagle31_hf"):
        assert_plain(warmed)
    assert not kinds(warmed)
    assert "others may write" in caplog.text
    if of == "folder":
        with pytest.raises(ConfigurationError, match=r"could be exchanged.*chmod go-w"):
            warm_up(forgotten(warmed), tokens=100, **GREEDY)


def folder_of(pair: Eagle31Drafter) -> Path:
    return kept_folder.pair_folder(pair, ModelState(pair.binding.model))


def test_a_targets_folder_is_no_difference(pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    before = folder_of(pair)
    monkeypatch.setattr(kept_target().config, "_name_or_path", "another/folder")
    assert folder_of(pair) == before
    monkeypatch.setattr(kept_target().config, "rms_norm_eps", 0.5)
    assert folder_of(pair) != before


def cut_packages_short() -> None:
    for path in kept_files(".pt2"):
        path.write_bytes(path.read_bytes()[:100])


def break_what_is_told() -> None:
    for path in kept_files(".json"):
        path.write_text("[]")


def turn_inputs_around() -> None:
    """Other strides than the package was made for."""
    for path in kept_files(".json"):
        told = json.loads(path.read_text())
        told["signature"] = [[shape, stride and [1] * len(stride), dtype] for shape, stride, dtype in told["signature"]]
        path.write_text(json.dumps(told))


@pytest.mark.parametrize("break_", [cut_packages_short, break_what_is_told, turn_inputs_around])
@pytest.mark.thorough(every=3)
def test_what_is_broken_is_done_without_and_made_anew(
    warmed: Eagle31Drafter, break_: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    break_()
    with caplog.at_level(logging.WARNING, logger="eagle31_hf"):
        texts = [write(warmed, seed) for seed in (0, 1)]
    assert all(torch.equal(text, write(None, seed)) for seed, text in enumerate(texts))
    assert not kinds(warmed)
    assert caplog.text.count("a kept graph cannot be used") == 1, "said once"
    assert len(warm_up(forgotten(warmed), tokens=100, **GREEDY)) == 5
    write(forgotten(warmed))
    assert "advance" in kinds(warmed)


# --- what cannot be kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("no C++ compiler"), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.thorough(every=2)
def test_without_a_compiler_or_room_nothing_is_kept(
    pair: Eagle31Drafter, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompilerProcesses, "compile", lambda *_: done(failure))
    with pytest.raises(ConfigurationError, match=r"g\+\+"):
        warm_up(pair, tokens=100, **GREEDY)
    assert [path for path in kept_files("") if path.is_file()] == []
    assert_plain(forgotten(pair))


def test_a_folder_that_cannot_be_used(pair: Eagle31Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(file))
    with pytest.raises(ConfigurationError, match=rf"cannot be kept in .*{kept_folder.CACHE_VARIABLE}"):
        warm_up(pair, tokens=100, **GREEDY)
    assert_plain(pair)


def test_pairs_that_graphs_are_not_kept_for(pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    with configured(pair, cache_type="int8"), pytest.raises(ConfigurationError, match="8 bits"):
        warm_up(pair, tokens=100, **GREEDY)
    monkeypatch.setattr(graphs, "PACKED_BYTES", 10)
    with pytest.raises(ConfigurationError, match="read a copy"):
        warm_up(forgotten(pair), tokens=100, **GREEDY)


BARE_DRAWS: dict[str, Any] = {"do_sample": True, "top_k": 0}
"""By the scores as they are: a graph reads the draft vocabulary's ids where it draws and where it translates."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "how"),
    [
        pytest.param({"advance"}, BARE_DRAWS, id="drawn"),
        pytest.param({"verify", "advance"}, GREEDY, id="greedy"),
    ],
)
@pytest.mark.thorough
def test_compiled_packages(
    compiled: set[str], how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the compiler; few graphs, since each package is compiled for a quarter of a minute and more. A round's end
    does what the drafter's other graphs do."""
    monkeypatch.undo()
    monkeypatch.setattr(kept_folder.CompilesAhead, "can_make", lambda _, key: key.kind in compiled and key.size > 1)
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(tmp_path))
    pair = make_pair(draft_vocab_size=40)
    assert {key.kind for key in warm_up(pair, tokens=100, **how)} == compiled
    forgotten(pair)
    for seed in range(3):
        assert_plain(pair, seed, **how)
    assert kinds(pair) >= compiled
    assert not Pair.of(pair).graphs.disabled_reason
