"""A server's rounds by captured steps, on a CPU that runs again what a card would replay: texts are `generate`'s."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from batches import GREEDY, assert_plain, batch_of, drafter_on, plain, read_in_pieces, text_of
from transformers import AutoTokenizer

from eagle31_hf.cache import graph_sizes
from eagle31_hf.demo import target_path
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.drafting import planner
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.graphs import captured, fixed_cache
from eagle31_hf.loop.choosing import RoundBatch
from eagle31_hf.loop.pair import Pair
from eagle31_hf.loop.round import Round
from eagle31_hf.serving.batch import Batch
from eagle31_hf.serving.text import Sampling
from helpers import (
    CONFIGS,
    RoundWrapper,
    configured,
    drafter_of,
    random_drafter,
    random_prompts,
    random_target,
)
from recorder import Recorder

ROWS = 3
SAMPLED = Sampling(temperature=0.9, top_k=20, seed=5)
PENALISED = Sampling(temperature=0.8, seed=6, repetition_penalty=1.3)
TOKENIZER = AutoTokenizer.from_pretrained(target_path())
TOLD = [TOKENIZER(text)["input_ids"] for text in ("Tell me a story.", "What is a dog", "The sun is")]


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(captured.CAPTURES, "cpu", made)
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 16)
    monkeypatch.setattr(planner, "VAIN_ROUNDS", 1000)  # rounds at rest have graphs of their own
    return made


def three_drafts(family: str, **overrides: Any) -> Eagle31Drafter:
    made = drafter_on(family, **overrides)
    made.generation_config.num_assistant_tokens = 3
    return made


def asked(sampling: Sampling = GREEDY) -> list[tuple[list[int], int, Sampling]]:
    """Texts on both sides of the windows, more than there are rows, which come and go."""
    return [(prompt, 9 + 5 * n, sampling) for n, prompt in enumerate(random_prompts(7, seed=3, longest=30))]


def kinds(batch: Batch) -> set[str]:
    """Of graphs for all rows."""
    assert batch.rounds.graphs is not None
    return {key.kind for key in batch.rounds.graphs.keys if key.rows == ROWS}


def test_figures_say_why_nothing_is_captured() -> None:
    with configured(drafter_of("llama"), cache_type="int8") as drafter:
        assert batch_of(drafter, ROWS).stats.fallbacks == ["steps are not captured over a cache in 8 bits"]
    assert batch_of(three_drafts("llama", sliding_window=8), ROWS).rounds.graphs is None


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_texts_are_plains_and_what_was_recorded_serves_the_next(
    family: str, sampling: Sampling, recorder: Recorder
) -> None:
    batch = batch_of(three_drafts(family), ROWS)
    assert batch.cache.has_windows is (family != "llama")
    assert_plain(batch, asked(sampling))
    recorded, replayed = recorder.recorded, recorder.replayed
    assert replayed > 20
    assert_plain(batch, asked(sampling))
    assert recorder.replayed > replayed
    assert recorder.recorded == recorded or family != "llama", "windows move on"
    assert "verify" in kinds(batch)
    assert batch.stats.fallbacks == []


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.thorough(every=3)
def test_rounds_of_texts_that_choose_alike_are_two_graphs(sampling: Sampling, recorder: Recorder) -> None:
    drafter, texts = drafter_of("demo-target"), [text_of(prompt, 40, sampling) for prompt in TOLD]
    Pair.of(drafter).graphs = None  # what another test recorded is not counted here
    with (
        configured(drafter, num_assistant_tokens=3, num_assistant_tokens_schedule="constant"),
        torch.inference_mode(),
    ):
        batch, replayed = batch_of(drafter, ROWS), list[int]()
        for text in texts:
            read_in_pieces(batch, text, writing=False)
        while len(batch.texts) == ROWS:
            before, recorded = recorder.replayed, recorder.recorded
            at_end = min(text.writer.remaining for text in texts) < 5
            batch.round()
            if not at_end and recorder.recorded == recorded:
                replayed.append(recorder.replayed - before)
    assert set(replayed) == {2}
    assert batch.stats.acceptance_length > 1.3
    for text, prompt in zip(texts, TOLD, strict=True):
        tokens = text.writer.tokens
        assert tokens == plain(drafter.binding.model, prompt, 40, sampling)[: len(tokens)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_whose_scores_are_no_numbers_ends_alone(sampling: Sampling) -> None:
    """What a graph goes on with behind a token that is none is nobody's."""
    target = random_target(CONFIGS["llama"]())
    drafter = random_drafter(target, aux_layers=[1, 2, 4])
    drafter.generation_config.num_assistant_tokens = 3
    one, harmful_prompt, other = random_prompts(3, seed=8)
    wanted = [plain(target, prompt, 20, sampling) for prompt in (one, other)]
    batch, texts = batch_of(drafter, ROWS), [text_of(prompt, 20, sampling) for prompt in (one, harmful_prompt, other)]
    with torch.inference_mode():
        for text in texts:
            read_in_pieces(batch, text, writing=False)
        first, harmful, last = texts
        row = torch.tensor([1])
        hook = target.get_input_embeddings().register_forward_hook(lambda *call: call[2].index_fill(0, row, torch.nan))
        ends = {id(text): output for text, output in batch.round() if output.finish is not None}
        hook.remove()
        assert list(ends) == [id(harmful)]
        assert "no numbers" in ends[id(harmful)].error
        while batch.texts:
            batch.round()
    assert [first.writer.tokens, last.writer.tokens] == wanted
    assert batch.stats.fallbacks == []
    assert "advance" in kinds(batch)


def test_more_rows_than_pay_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_cache, "MOST_POOLED_ROWS", 1)
    batch = batch_of(three_drafts("llama"), ROWS)
    assert_plain(batch, asked())
    assert batch.rounds.graphs is not None
    assert {key.rows for key in batch.rounds.graphs.keys} == {1}


class OracleRound(RoundWrapper):
    """Drafts that follow what texts will be, for a while: so that states are moved on by more than a token."""

    def __init__(self, inner: Round, batch: Batch, wanted: dict[tuple[int, ...], list[int]]):
        super().__init__(inner)
        self._texts, self._wanted, self._dice = batch.texts, wanted, torch.Generator().manual_seed(0)

    def draft(self, batch: RoundBatch) -> DraftTree:
        tree = self.inner.draft(batch)
        tokens = tree.tokens.clone()
        for place, row in enumerate(batch.rows):
            text = self._texts[row]
            right = int(torch.randint(0, tree.size, (), generator=self._dice))
            coming = self._wanted[text.request.prompt][len(text.writer.tokens) :][:right]
            tokens[place, 1 : 1 + len(coming)] = torch.tensor(coming, dtype=tokens.dtype)
        return dataclasses.replace(tree, tokens=tokens)


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "lfm2", "falcon_h1"])
def test_targets_that_keep_states_are_captured(family: str, recorder: Recorder) -> None:
    """Rows come and go, each keeps its own number of drafts, and each number of rows has graphs of its own."""
    batch = batch_of(three_drafts(family), ROWS)
    wanted = {tuple(each[0]): plain(batch.binding.model, *each) for each in asked()}
    batch.rounds = OracleRound(batch.rounds, batch, wanted)
    assert_plain(batch, asked())
    assert recorder.replayed > 20
    assert {("settle", rows) for rows in (2, 3)} <= {key[:2] for key in batch.rounds.graphs.keys}
    assert_plain(batch, asked())
    assert recorder.recorded == len(batch.rounds.graphs.keys), "each once: states lie where they lay"
    assert batch.stats.fallbacks == []
    assert batch.stats.acceptance_length > 1.5
