"""A server's rounds by captured steps, on a CPU that runs again what a card would replay: the texts of eager rounds."""

from __future__ import annotations

import pytest
from batches import plain, text_of, write_all

from eagle31_hf.cache import graph_sizes
from eagle31_hf.compiled import captured, inputs
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.serving.batch import TextBatch, WrittenText
from eagle31_hf.serving.requests import Sampling
from helpers import CONFIGS, configured, random_drafter, random_prompts, random_target, target_of
from recorder import Recorder

ROWS = 3
SAMPLED = Sampling(temperature=0.9, top_k=20, seed=5)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(captured.CAPTURES, "cpu", made)
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 16)
    return made


@pytest.fixture
def drafter() -> Eagle31Drafter:
    made = random_drafter(target_of("llama"), aux_layers=[1, 2, 4])
    made.generation_config.num_assistant_tokens = 3
    made.generation_config.num_assistant_tokens_schedule = "constant"
    return made


def new_texts(sampling: Sampling | None = None) -> list[WrittenText]:
    prompts = random_prompts(7, seed=3, longest=30)
    return [text_of(prompt, 9 + 5 * number, sampling) for number, prompt in enumerate(prompts)]


def batch_of(drafter: Eagle31Drafter) -> TextBatch:
    return TextBatch(drafter, max_rows=ROWS, context=96, prefill_chunk=16)


def test_greedy_texts_are_plains(drafter: Eagle31Drafter, recorder: Recorder) -> None:
    texts = new_texts()
    wanted = [plain(target_of("llama"), list(text.request.prompt), 9 + 5 * n) for n, text in enumerate(texts)]
    batch = batch_of(drafter)
    assert write_all(batch, texts) == wanted
    assert recorder.replayed > 20
    assert batch.stats.fallbacks == []


def test_sampled_texts_are_those_of_eager_rounds(drafter: Eagle31Drafter, recorder: Recorder) -> None:
    with configured(drafter, acceleration="eager"):
        wanted = write_all(batch_of(drafter), new_texts(SAMPLED))
    assert not recorder.recorded
    assert write_all(batch_of(drafter), new_texts(SAMPLED)) == wanted
    assert recorder.replayed > 20


def test_what_was_recorded_serves_the_next_texts(drafter: Eagle31Drafter, recorder: Recorder) -> None:
    batch = batch_of(drafter)
    first = write_all(batch, new_texts())
    recorded, replayed = recorder.recorded, recorder.replayed
    assert write_all(batch, new_texts()) == first
    assert recorder.recorded == recorded
    assert recorder.replayed > replayed


def test_more_rows_than_pay_are_eager(
    drafter: Eagle31Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = write_all(batch_of(drafter), new_texts())
    monkeypatch.setattr(inputs, "MOST_POOLED_ROWS", 1)
    drafter.require_binding().compiled = None
    batch = batch_of(drafter)
    assert write_all(batch, new_texts()) == eager
    assert batch.graphs is not None
    assert {key.rows for key in batch.graphs.keys} == {1}


def test_layers_that_see_a_window_are_eager(recorder: Recorder) -> None:
    drafter = random_drafter(random_target(CONFIGS["gemma3"]()), aux_layers=[1, 2, 4])
    assert batch_of(drafter).graphs is None


def test_a_device_that_cannot_record(
    drafter: Eagle31Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: object) -> None:
        raise RuntimeError("operation not permitted when capturing")

    monkeypatch.setitem(captured.CAPTURES, "cpu", refuse)
    texts, batch = new_texts(), batch_of(drafter)
    wanted = [plain(target_of("llama"), list(text.request.prompt), 9 + 5 * n) for n, text in enumerate(texts)]
    assert write_all(batch, texts) == wanted
    assert "operation not permitted" in batch.stats.fallbacks[0]
