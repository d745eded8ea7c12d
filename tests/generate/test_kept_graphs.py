"""`acceleration="auto"`: graphs that were compiled ahead write the plain text, whatever is wrong with them.

The compiler is left out where it is not what is tested: a package then is the exported step itself.
"""

from __future__ import annotations

import copy
import errno
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_pairs import (
    GREEDY,
    SAMPLING,
    assert_plain,
    exported_in,
    failing,
    forgotten,
    kept_files,
    kept_target,
    kinds,
    make_pair,
    write,
    write_exported,
)
from torch.nn import functional

from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.generate.warm_up import prompt_lengths, warm_up
from eagle31_hf.graphs import graphs
from eagle31_hf.graphs.ahead import kept as kept_folder
from eagle31_hf.graphs.ahead import packages
from eagle31_hf.graphs.ahead.compiler_processes import CompilerProcesses
from eagle31_hf.graphs.seen import ModelState
from eagle31_hf.graphs.steps import GraphKey
from eagle31_hf.loop.pair import Pair
from eagle31_hf.loop.round import Round
from eagle31_hf.measure.bench import BenchSettings, has_graphs
from eagle31_hf.targets.binding import TargetOutput
from helpers import assert_same_text, configured

pytestmark = pytest.mark.usefixtures("no_compiler")

# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [GREEDY, SAMPLING], ids=["greedy", "sampled"])
def test_auto_is_eager_until_graphs_are_kept_and_writes_the_same_text(
    how: dict[str, Any], pair: Eagle31Drafter, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.GraphPackages, "compile", failing(AssertionError("auto compiles nothing")))
    assert pair.generation_config.acceleration == "auto"
    for seed in range(3):
        assert_plain(pair, seed, **how)
    assert not kinds(pair)
    shutil.copytree(kept, kept_folder.cache_folder())
    texts = [assert_plain(pair, seed, **how) for seed in range(4)]
    assert kinds(pair) == {"absorb", "chain", "verify", "advance"}
    assert pair.stats.fallbacks == []
    assert pair.stats.rounds > 5
    assert len(set(map(str, texts))) == 4


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
    told, load = later.read_text(), packages.GraphPackages.make
    later.unlink()

    def load_and_keep_more(self: packages.GraphPackages, *given: Any) -> Any:
        later.write_text(told)
        return load(self, *given)

    monkeypatch.setattr(packages.GraphPackages, "make", load_and_keep_more)
    write(warmed)
    known = Pair.of(warmed).graphs.keys
    assert "advance" in kinds(warmed)
    assert {key.size for key in known if key.kind == "verify"} == {1}
    write(warmed)
    assert 8 in {key.size for key in Pair.of(warmed).graphs.keys if key.kind == "verify"}


@pytest.mark.parametrize(
    "how", [{"rows": 2}, {"do_sample": True, "temperature": 0.5}, {"num_beams": 2}, {"repetition_penalty": 1.3}]
)
def test_what_was_not_compiled_for_is_eager(warmed: Eagle31Drafter, how: dict[str, Any]) -> None:
    write(warmed, **how)
    assert "advance" not in kinds(warmed)


def test_longer_texts_than_were_compiled_for(warmed: Eagle31Drafter) -> None:
    ids = torch.arange(3, 93)[None]
    assert_same_text(kept_target(), warmed, ids, max_new_tokens=80)
    assert {key.shape[-1] for key in Pair.of(warmed).graphs.keys if key.kind == "advance"} == {128}


# --- what is found ----------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_twice_and_every_length_of_rows_once(warmed: Eagle31Drafter) -> None:
    assert warm_up(warmed, tokens=100, **GREEDY) == []
    assert prompt_lengths(100) == [8]
    assert prompt_lengths(600) == [8, 129, 257, 513]


def test_graphs_are_found_whatever_was_written_before() -> None:
    """A drafter makes its list of draft ids with its first draft."""
    pair, fresh = make_pair(draft_vocab_size=40), make_pair(draft_vocab_size=40)
    write(pair)
    assert len(warm_up(pair, tokens=100, **GREEDY)) > 3
    assert_plain(fresh)
    assert "advance" in kinds(fresh)


@pytest.mark.thorough
def test_graphs_are_compiled_together(pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waited = list[Callable[[], Path]](), list[int]()  # how many had begun whenever one was waited for

    def compile_(self: CompilerProcesses, exported: Any) -> Callable[[], Path]:
        written = write_exported(self, exported)
        begun.append(written)

        def waited_for() -> Path:
            waited.append(len(begun))
            return written()

        return waited_for

    monkeypatch.setattr(CompilerProcesses, "compile", compile_)
    assert 3 < len(warm_up(pair, tokens=100, **GREEDY)) < len(begun)
    assert waited == [len(begun)] * len(begun)
    assert_plain(forgotten(pair))


# --- when a text asks for it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "fields", "reason"),
    [
        ({"rows": 3}, {}, "single rows"),
        ({}, {}, "`eagle31 warmup` compiles them"),
        ({}, {"cache_type": "int8"}, "8 bits"),
        ({}, {"num_assistant_tokens_schedule": "pid"}, "steers it"),
        ({}, {"draft_min_confidence": 0.3}, "doubt"),
        ({"no_repeat_ngram_size": 2}, {}, "logits processor"),
    ],
)
def test_who_asks_for_graphs_is_told_why_there_are_none(
    pair: Eagle31Drafter, how: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    with configured(pair, acceleration="compile", **fields):
        ours = write(pair, **how)
        assert any("not compiled" in why and reason in why for why in pair.stats.fallbacks)
        with configured(pair, acceleration="eager"):
            assert torch.equal(ours, write(pair, **how))
    assert not kinds(pair)


def test_graphs_are_measured_where_some_are_kept_or_asked_for(warmed: Eagle31Drafter) -> None:
    greedy, other = BenchSettings(), BenchSettings(temperature=0.3)
    assert has_graphs(warmed, greedy)
    assert not has_graphs(warmed, other), "none are kept for it"
    with configured(warmed, acceleration="eager"):
        assert not has_graphs(warmed, greedy)
    with configured(warmed, acceleration="compile"):
        assert has_graphs(warmed, other)


def layer(number: int) -> Any:
    return kept_target().model.layers[number]


def replace(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """As kernel packages do."""
    own = getattr(owner, name)
    patch.setattr(owner, name, lambda first, *told, **more: change(own, first, *told, **more))


DIFFERS: dict[str, Callable[[Eagle31Drafter, pytest.MonkeyPatch], object]] = {  # what else is seen: graphs/test_seen
    "the machine": lambda _, patch: patch.setattr(kept_folder, "_processor", lambda: ("another CPU",)),
    "a scalar": lambda _, patch: patch.setattr(layer(1).self_attn, "scaling", layer(1).self_attn.scaling * 3),
    "a function of torch": lambda _, patch: replace(
        patch, functional, "silu", lambda own, states, **_: 1.4 * own(states)
    ),
}


@pytest.mark.parametrize("differs", DIFFERS)
def test_graphs_of_others_are_not_touched(
    differs: str, warmed: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    DIFFERS[differs](warmed, monkeypatch)
    load, loaded = packages.GraphPackages.make, []

    def note(self: packages.GraphPackages, *given: Any) -> Any:
        loaded.append(given)
        return load(self, *given)

    monkeypatch.setattr(packages.GraphPackages, "make", note)
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
        with pytest.raises(ConfigurationError, match=r"cannot be kept safely.*chmod go-w"):
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
        path.write_bytes(path.read_bytes()[:10])


def change_what_is_told(change: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
    def write_anew() -> None:
        for path in kept_files(".json"):
            told = json.loads(path.read_text())
            changed = change(told)
            path.write_text(json.dumps(told if changed is None else changed))

    return write_anew


def turn_inputs_around(told: dict[str, Any]) -> None:
    """Other strides than the package was made for."""
    told["signature"] = [[shape, stride and [1] * len(stride), dtype] for shape, stride, dtype in told["signature"]]


def name_another_weight(told: dict[str, Any]) -> None:
    """A file that another version has written, say."""
    told["fixed"] = [["weight", "models.7.weight"] for _ in told["fixed"]]


BROKEN = {
    "short": cut_packages_short,
    "empty": change_what_is_told(lambda told: []),
    "inputs": change_what_is_told(turn_inputs_around),
    "weights": change_what_is_told(name_another_weight),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.thorough(every=2)
def test_what_is_broken_is_done_without_and_made_anew(
    warmed: Eagle31Drafter, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    BROKEN[broken]()
    with caplog.at_level(logging.WARNING, logger="eagle31_hf"):
        for seed in (0, 1):
            assert_plain(warmed, seed)
    assert not kinds(warmed)
    assert caplog.text.count("a kept graph cannot be used") == 1, "said once"
    assert len(warm_up(forgotten(warmed), tokens=100, **GREEDY)) == 5
    write(forgotten(warmed))
    assert "advance" in kinds(warmed)


# --- weights, which graphs share ------------------------------------------------------------------------------------


def test_a_layer_is_kept_once(warmed: Eagle31Drafter) -> None:
    """What comes before the layers, one for all of them, what comes after; and no weights."""
    (verify,) = (path for path in kept_files(".json") if path.name.startswith("verify-1x8"))
    told = json.loads(verify.read_text())
    first, *layers, last = (piece for piece, _ in told["calls"])
    assert len(layers) == len(warmed.binding.layers)
    assert set(layers) == {1}
    assert (first, last, len(told["packages"])) == (0, 2, 3)
    assert [exported_in(verify.parent / name)[1] for name in told["packages"]] == [{}] * 3


def test_weights_are_packed_once_and_go_where_memory_runs_out(warmed: Eagle31Drafter) -> None:
    """Though the text that is being written holds its graphs until it ends."""
    write(warmed)
    graphs_of_pair = Pair.of(warmed).graphs
    held_by_a_text = graphs_of_pair.made_by(graphs_of_pair.maker)
    packed = held_by_a_text.packed
    after_one = len(packed._copies)
    write(warmed, 1)
    assert packed is Pair.of(warmed).graphs.packed
    assert len(packed._copies) == after_one > 0
    graphs_of_pair.drop("memory is wanted elsewhere")
    assert not packed._copies
    assert not packed._packed


def test_graphs_read_the_weights_as_they_are_now(warmed: Eagle31Drafter) -> None:
    """Also while they are in use: of a target that was trained further, or whose new tokens' rows were set."""
    target = copy.deepcopy(kept_target())
    drafter = make_pair(target)
    up, head = target.model.layers[1].mlp.up_proj.weight, target.lm_head.weight
    changes = (lambda: None, lambda: up.mul_(-1.5), lambda: head.mul_(-1.5), lambda: head.data[7].fill_(1.0))
    texts: list[str] = []
    for change in changes:
        with torch.no_grad():
            change()
        texts.append(str(assert_plain(drafter, target=target)))
        assert "advance" in kinds(drafter)
    assert len({*texts[:3]}) == 3, "or a stale graph would not be noticed"


# --- what cannot be kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("no C++ compiler"), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.thorough(every=2)
def test_without_a_compiler_or_room_nothing_is_kept(
    pair: Eagle31Drafter, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompilerProcesses, "compile", lambda *_: failing(failure))
    with pytest.raises(ConfigurationError, match=r"g\+\+"):
        warm_up(pair, tokens=100, **GREEDY)
    assert [path for path in kept_files("") if path.is_file()] == []
    assert_plain(forgotten(pair))


def test_graphs_are_checked_on_text_and_not_on_chains_of_one_token(
    pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which move the logits of a model in half precision by more than a right graph may be off."""
    verify, read = Round.verify, list[list[int]]()

    def noting(round: Round, tree: DraftTree) -> TargetOutput:
        read.append(tree.tokens[0, 1:].tolist())
        return verify(round, tree)

    monkeypatch.setattr(Round, "verify", noting)
    monkeypatch.setattr(CompilerProcesses, "compile", lambda *_: failing(RuntimeError("none")))
    with pytest.raises(ConfigurationError):
        warm_up(pair, tokens=100, **GREEDY)
    vocabulary = pair.config.vocab_size
    assert sum(drafts == [7 * (8 + n) % vocabulary for n in range(len(drafts))] for drafts in read if drafts) >= 2


def test_what_cannot_be_loaded_is_compiled_once(pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing may be run from the folder for temporary files, say."""
    monkeypatch.setattr(packages, "load_package", failing(RuntimeError("failed to map segment")))
    begun: list[GraphKey] = []

    def once(key: GraphKey) -> None:
        assert key not in begun
        begun.append(key)

    with pytest.raises(ConfigurationError, match="failed to map segment"):
        warm_up(pair, tokens=100, on_compile=once, **GREEDY)
    assert begun


def test_a_folder_that_cannot_be_used(pair: Eagle31Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv(kept_folder.CACHE_VARIABLE, str(file))
    with pytest.raises(ConfigurationError, match=rf"cannot be kept safely in .*{kept_folder.CACHE_VARIABLE}"):
        warm_up(pair, tokens=100, **GREEDY)
    assert_plain(pair)


def test_pairs_that_graphs_are_not_kept_for(pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    for fields, why in ({"cache_type": "int8"}, "8 bits"), ({"num_assistant_tokens_schedule": "pid"}, "pid"):
        with configured(pair, **fields), pytest.raises(ConfigurationError, match=why):
            warm_up(pair, tokens=100, **GREEDY)
    assert not kept_files(""), "what no text would load is not compiled"
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
