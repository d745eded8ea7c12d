"""`acceleration="auto"` on a device that records launches: the plain text, from memory that stays where it is.

A CPU records nothing, so here a replay runs the step again on the very tensors it was recorded with, and puts the
outputs where the recorded ones were: what a card does, without the card.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from kept_pairs import GREEDY, SAMPLING, assert_plain, failing, kept_target, kinds, make_pair, write
from torch import Tensor
from torch.nn.modules import module as modules
from transformers import LogitsProcessor
from transformers.models.llama import modeling_llama

from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.graphs import captured, graphs
from eagle31_hf.graphs.captured import Recording
from eagle31_hf.loop import accept
from eagle31_hf.loop.decoder import SpeculativeDecoder
from eagle31_hf.loop.pair import Pair
from helpers import configured, random_prompts
from recorder import Recorder, record_operations

WAYS = [GREEDY, SAMPLING]
TREE = {"draft_top_k": 2, "draft_tree_size": 6}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("how", WAYS, ids=["greedy", "sampled"])
def test_a_repetition_penalty_where_asking_the_device_takes_time(
    how: dict[str, Any], rows: int, pair: Eagle31Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager rounds on a card judge all nodes by masks, as graphs do. Instruct models of Qwen2.5 set a penalty."""
    monkeypatch.setattr(accept, "ASKED_NODE_BY_NODE", ())
    monkeypatch.setattr(accept.Acceptor, "_ask", failing(AssertionError("waits for every node")))
    with configured(pair, acceleration="eager"):
        assert_plain(pair, 3, rows, **how, repetition_penalty=1.3)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_is_recorded_once(rows: int, pair: Eagle31Drafter, recorder: Recorder) -> None:
    """The next text's keys and values lie where the last one's lay, so its steps are there already."""
    write(pair, 0, rows)
    first = recorder.recorded
    assert 0 < first <= 2 * len(kinds(pair))
    for seed in range(1, 4):
        assert_plain(pair, seed, rows)
    assert recorder.recorded == first
    assert recorder.replayed >= 10 * recorder.recorded


def test_a_longer_text_takes_more_memory_and_a_shorter_one_none_of_its_own(
    pair: Eagle31Drafter, recorder: Recorder
) -> None:
    kept, recorded = [], []
    for new_tokens in (40, 200, 40, 200, 40):
        assert_plain(pair, max_new_tokens=new_tokens)
        storages = Pair.of(pair).graphs.kept._storages.values()
        kept.append(sum(storage.nbytes for layer in storages for storage in layer))
        recorded.append(recorder.recorded)
    assert kept[0] < kept[1] == kept[2] == kept[4]
    assert recorded[0] < recorded[1] < recorded[2] == recorded[4], "over the larger buffers once, for either length"
    slots = {storage.shape[2] for layer in storages for storage in layer}
    assert slots == {256}, "prompt, new tokens and a block, in steps of 128 here; not twice that"


def test_a_text_that_no_buffer_is_left_for_writes_in_its_own(pair: Eagle31Drafter, recorder: Recorder) -> None:
    somebody = Borrower()
    write(pair)
    kept = Pair.of(pair).graphs.kept
    assert kept.lend(somebody)
    assert_plain(pair, 1)
    assert kept._borrower() is somebody
    del somebody
    assert kept.lend(Borrower()), "who is gone needs none"


@pytest.mark.parametrize(
    ("place", "failure"), [("prefill", ValueError), ("step", KeyboardInterrupt), ("stream", KeyboardInterrupt)]
)
def test_a_text_that_ends_early_gives_its_buffers_back(
    place: str, failure: type, pair: Eagle31Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a notebook keeps the traceback, and with it all that the text was doing."""
    write(pair, 0)
    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeDecoder, place, failing(failure()))
        with pytest.raises(failure) as failed:
            write(pair, 1)
    recorded = recorder.recorded
    assert_plain(pair, 2)
    assert recorder.recorded == recorded
    assert Pair.of(pair).graphs.kept.lend(Borrower())
    assert failed.value.__traceback__ is not None


class Borrower:
    """Whom buffers are lent."""


def test_a_cache_that_was_handed_over_is_not_written_over(pair: Eagle31Drafter, recorder: Recorder) -> None:
    target = pair.binding.model
    prompt = torch.tensor(random_prompts(1))
    first = target.generate(prompt, assistant_model=pair, max_new_tokens=60, return_dict_in_generate=True, **GREEDY)
    before = [layer.keys.clone() for layer in first.past_key_values.layers]
    write(pair, 5)
    assert all(map(torch.equal, before, [layer.keys for layer in first.past_key_values.layers]))
    assert recorder.replayed


def test_an_overflow_of_the_last_text_is_not_read(pair: Eagle31Drafter, recorder: Recorder) -> None:
    write(pair)
    for storages in Pair.of(pair).graphs.kept._storages.values():
        for storage in storages:
            storage.fill_(float("nan"))
    assert_plain(pair, 1)


class SharesMemory(Recorder):
    """As the recordings of a card's pool: a replay spoils what other recordings computed and nobody has copied."""

    def __init__(self) -> None:
        super().__init__()
        self.last: object = None

    def __call__(self, run: Callable[[], Sequence[Tensor]]) -> Recording:
        made, me = super().__call__(run), object()

        def replay() -> None:
            self.last = me
            made.replay()
            time.sleep(0.001)  # another thread's chance

        def copied() -> Iterator[Tensor]:
            assert self.last is me, "another recording was replayed before this one's outputs were copied"
            yield from made.outputs

        class Outputs(list):
            def __iter__(self) -> Iterator[Tensor]:
                return copied()

        return Recording(replay, Outputs(made.outputs))


@pytest.mark.parametrize("of_one_pair", [True, False])
def test_threads_take_turns_with_all_recordings(
    of_one_pair: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharesMemory()
    monkeypatch.setitem(captured.CAPTURES, "cpu", shared)
    pairs = [make_pair()] * 4 if of_one_pair else [make_pair(), make_pair()]
    plain = [write(None, seed) for seed in range(len(pairs))]
    with ThreadPoolExecutor(len(pairs)) as pool:
        texts = list(pool.map(lambda seed: write(pairs[seed], seed), range(len(pairs))))
    assert all(map(torch.equal, texts, plain))
    assert shared.replayed
    assert not any(pair.stats.fallbacks for pair in pairs)


def test_keys_and_values_of_the_last_text_go_with_the_graphs(pair: Eagle31Drafter, recorder: Recorder) -> None:
    write(pair)
    graphs_of_pair = Pair.of(pair).graphs
    seen = [weakref.ref(storage) for storages in graphs_of_pair.kept._storages.values() for storage in storages]
    graphs_of_pair.drop("memory is wanted elsewhere")
    gc.collect()
    assert seen
    assert not any(storage() is not None for storage in seen)


def test_short_texts_are_not_worth_recording(pair: Eagle31Drafter, recorder: Recorder) -> None:
    assert_plain(pair, max_new_tokens=9)
    assert not recorder.recorded


def test_a_text_goes_on_where_recording_anew_fails(
    pair: Eagle31Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer text needs larger caches, and what was recorded for the first cannot be recorded for them."""
    assert_plain(pair, max_new_tokens=40)
    assert recorder.recorded
    monkeypatch.setattr(Recorder, "__call__", failing(RuntimeError("operation not permitted when capturing")))
    assert_plain(pair, 1, max_new_tokens=200)
    assert "operation not permitted" in pair.stats.fallbacks[0]
    assert_plain(pair, 2)


@pytest.mark.parametrize("times", [1, 99])
def test_a_recording_that_is_wrong_is_given_up(
    times: int, pair: Eagle31Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once may be rounding: it is made anew."""
    made = iter(range(99))

    def record_wrong(run: Callable[[], Sequence[Tensor]]) -> Recording:
        if next(made) >= times:
            return recorder(run)
        return Recording(lambda: None, [out.flip(-1) if out.is_floating_point() else out for out in run()])

    monkeypatch.setitem(captured.CAPTURES, "cpu", record_wrong)
    assert_plain(pair)
    why = Pair.of(pair).graphs.disabled_reason
    assert "is off by" in why if times > 1 else not why
    assert bool(recorder.recorded) is (times == 1)


def test_what_is_not_captured_is_eager_and_says_so(pair: Eagle31Drafter, recorder: Recorder) -> None:
    for fields, reason in (({"cache_type": "int8"}, "8 bits"), ({"num_assistant_tokens_schedule": "pid"}, "steers it")):
        with configured(pair, **fields):
            write(pair)
        assert any("not captured" in why and reason in why for why in pair.stats.fallbacks)
    assert not recorder.recorded


class EveryOtherToken(LogitsProcessor):
    """As grammars do: what may follow depends on the token before, and each row has a state of its own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        odd = torch.arange(scores.shape[-1]) % 2
        return scores.masked_fill(odd == input_ids[:, -1:] % 2, -torch.inf)


@pytest.mark.parametrize("how", WAYS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("asks", ["grammar", "ngrams"])
def test_under_a_grammar_verification_is_captured(
    asks: str, tree: dict[str, int], how: dict[str, Any], pair: Eagle31Drafter, recorder: Recorder
) -> None:
    """It asks no processor; what does is eager code."""
    asked = {"logits_processor": [EveryOtherToken()]} if asks == "grammar" else {"no_repeat_ngram_size": 2}
    with configured(pair, **tree):
        for seed in range(2):
            assert_plain(pair, seed, **how, **asked)
            assert (pair.stats.loop, pair.stats.fallbacks) == ("own", [])
    assert "verify" in kinds(pair)
    assert "advance" not in kinds(pair)
    assert recorder.replayed > 10


@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
def test_as_many_ways_to_sample_as_clients_ask_for(
    tree: dict[str, int], pair: Eagle31Drafter, recorder: Recorder
) -> None:
    ways: list[dict[str, Any]] = [GREEDY, *({**SAMPLING, "temperature": 0.1 * n} for n in range(1, 20))]
    with configured(pair, **tree):
        for how in ways:
            assert_plain(pair, max_new_tokens=12, **how)
            assert pair.stats.fallbacks == []
        assert len({key.sampling for key in Pair.of(pair).graphs.keys if key.kind == "advance"}) == 20
        recorded = recorder.recorded
        write(pair, max_new_tokens=12, **ways[1])
        assert recorder.recorded == recorded


def test_graphs_go_where_there_are_too_many(
    pair: Eagle31Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 5)
    for temperature in (0.4, 0.6, 0.4, 0.8, 1.0, 0.4):
        how = {**SAMPLING, "temperature": temperature}
        assert_plain(pair, **how)
        assert 0 < len(Pair.of(pair).graphs.keys) <= 5
    assert pair.stats.fallbacks == []


def test_each_state_of_a_target_has_its_graphs_and_memory_takes_them_all(
    pair: Eagle31Drafter, recorder: Recorder
) -> None:
    """As where an adapter is switched on and off (`test_adapters`)."""
    attention, recorded = pair.binding.model.model.layers[0].self_attn, []
    own = attention.scaling
    for scaling in (own, 2 * own, own, 2 * own):
        with mock.patch.object(attention, "scaling", scaling):
            assert_plain(pair)
        recorded.append(recorder.recorded)
    assert 0 < recorded[0] < recorded[1] == recorded[3], "each state's steps were recorded once"
    made = Pair.of(pair).graphs
    assert len(made._of_states) == 2
    made.drop("memory is wanted elsewhere")
    assert not any(steps for _, steps in made._of_states)


@contextmanager
def other_rotations() -> Iterator[None]:
    own = modeling_llama.apply_rotary_pos_emb
    with mock.patch.object(
        modeling_llama, "apply_rotary_pos_emb", lambda q, *told, **more: own(1.4 * q, *told, **more)
    ):
        yield


@contextmanager
def a_hook_on_all_modules() -> Iterator[None]:
    layer = kept_target().model.layers[0]
    handle = modules.register_module_forward_hook(lambda module, _, out: 1.5 * out if module is layer else None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("change", [other_rotations, a_hook_on_all_modules])
def test_what_holds_for_the_whole_process_is_not_left_out(
    change: Callable[[], Any], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be recorded is written by eager code, which says so."""
    monkeypatch.setitem(captured.CAPTURES, "cpu", record_operations)
    pair, is_recorded = make_pair(), change is other_rotations
    pair.generation_config.num_assistant_tokens = 1
    texts = set()
    for open_change in (nullcontext, change, nullcontext):
        with open_change():
            text = write(pair, max_new_tokens=14)
            assert torch.equal(text, write(None, max_new_tokens=14))
            by_graphs = open_change is nullcontext or is_recorded
            assert [("not captured" in why) for why in pair.stats.fallbacks] == ([] if by_graphs else [True])
        texts.add(str(text))
    assert "advance" in kinds(pair)
    assert len(texts) == 2, "or a stale graph would not be noticed"
