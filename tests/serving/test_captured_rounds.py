"""A server's rounds by captured steps, on a CPU that runs again what a card would replay: the texts of eager rounds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from batches import GREEDY, batch_of, plain, read_in_pieces, text_of, write_all
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
from eagle31_hf.serving.rows import ServedText
from eagle31_hf.serving.text import Sampling
from families import recurrent_target
from helpers import (
    CONFIGS,
    RoundWrapper,
    configured,
    drafter_of,
    random_drafter,
    random_prompts,
    random_target,
    target_of,
)
from recorder import Recorder

ROWS = 3
SAMPLED = Sampling(temperature=0.9, top_k=20, seed=5)
PENALISED = Sampling(temperature=0.8, seed=6, repetition_penalty=1.3)
TOKENIZER = AutoTokenizer.from_pretrained(target_path())
TOLD = [TOKENIZER(text)["input_ids"] for text in ("Tell me a story.", "What is a dog", "The sun is")]
POISON = 90
"""A token whose embedding is no number where a test makes it so."""


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(captured.CAPTURES, "cpu", made)
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 16)
    monkeypatch.setattr(planner, "VAIN_ROUNDS", 1000)  # rounds at rest have graphs of their own
    return made


@pytest.fixture
def drafter() -> Eagle31Drafter:
    made = random_drafter(target_of("llama"), aux_layers=[1, 2, 4])
    made.generation_config.num_assistant_tokens = 3
    made.generation_config.num_assistant_tokens_schedule = "constant"
    return made


def new_texts(sampling: Sampling = GREEDY) -> list[ServedText]:
    prompts = random_prompts(7, seed=3, longest=30)
    return [text_of(prompt, 9 + 5 * number, sampling) for number, prompt in enumerate(prompts)]


def test_greedy_texts_are_plains_and_what_was_recorded_serves_the_next(
    drafter: Eagle31Drafter, recorder: Recorder
) -> None:
    batch, texts = batch_of(drafter), new_texts()
    wanted = [plain(target_of("llama"), text.request.prompt, 9 + 5 * n) for n, text in enumerate(texts)]
    assert write_all(batch, texts) == wanted
    recorded, replayed = recorder.recorded, recorder.replayed
    assert replayed > 20
    assert write_all(batch, new_texts()) == wanted
    assert recorder.recorded == recorded
    assert recorder.replayed > replayed
    assert batch.stats.fallbacks == []


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.thorough(every=3)
def test_rounds_of_texts_that_choose_alike_are_two_graphs(sampling: Sampling, recorder: Recorder) -> None:
    drafter, texts = drafter_of("demo-target"), [text_of(prompt, 40, sampling) for prompt in TOLD]
    Pair.of(drafter).graphs = None  # what another test recorded is not counted here
    with configured(drafter, num_assistant_tokens=3, num_assistant_tokens_schedule="constant"):
        batch, replayed = batch_of(drafter), list[int]()
        with torch.inference_mode():
            for text in texts:
                read_in_pieces(batch, text, writing=False)
            while len(batch.texts) == ROWS:
                before, recorded = recorder.replayed, recorder.recorded
                at_end = min(text.writer.remaining for text in texts) < 5
                batch.round()
                replayed.append(recorder.replayed - before)
                if at_end or recorder.recorded > recorded:
                    replayed.pop()
        assert set(replayed) == {2}
        assert batch.stats.acceptance_length > 1.3
        written = [list(text.writer.tokens) for text in texts]
        with configured(drafter, acceleration="eager"):
            again = [text_of(prompt, 40, sampling) for prompt in TOLD]
            whole = write_all(batch_of(drafter), again)
    assert all(tokens == eager[: len(tokens)] for tokens, eager in zip(written, whole, strict=True))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_whose_scores_are_no_numbers_ends_alone(sampling: Sampling, recorder: Recorder) -> None:
    """What a graph goes on with behind a token that is none is nobody's."""
    target = random_target(CONFIGS["llama"]())
    drafter = random_drafter(target, aux_layers=[1, 2, 4])
    with torch.no_grad():
        target.get_input_embeddings().weight[POISON] = torch.nan
        target.get_output_embeddings().weight[POISON] = 0.0  # nobody else writes it
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    prompts = [[token for token in prompt if token != POISON] for prompt in random_prompts(2, seed=8)]
    wanted = write_all(batch_of(drafter), [text_of(prompt, 20, sampling) for prompt in prompts])
    batch, texts = batch_of(drafter), [text_of(prompt, 20, sampling) for prompt in prompts]
    harmful = text_of([5, 6, 7, POISON], 20, sampling)
    with torch.inference_mode():
        for text in (*texts[:1], harmful, *texts[1:]):
            read_in_pieces(batch, text, writing=False)
        ends = {id(text): output for text, output in batch.round() if output.finish is not None}
        assert list(ends) == [id(harmful)]
        assert "no numbers" in ends[id(harmful)].error
        while batch.texts:
            batch.round()
    assert [text.writer.tokens for text in texts] == wanted
    assert batch.stats.fallbacks == []
    assert "advance" in {key.kind for key in batch.rounds.graphs.keys if key.rows == ROWS}


def test_more_rows_than_pay_are_eager(
    drafter: Eagle31Drafter, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = write_all(batch_of(drafter), new_texts())
    monkeypatch.setattr(fixed_cache, "MOST_POOLED_ROWS", 1)
    Pair.of(drafter).graphs = None
    batch = batch_of(drafter)
    assert write_all(batch, new_texts()) == eager
    assert batch.rounds.graphs is not None
    assert {key.rows for key in batch.rounds.graphs.keys} == {1}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_sampled_texts_and_windows_are_those_of_eager_rounds(
    family: str, sampling: Sampling, recorder: Recorder
) -> None:
    """Prompts and texts on both sides of the window, rows that come and go."""
    target = target_of(family)
    drafter = random_drafter(target, aux_layers=[1, 2, 4])
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    with configured(drafter, acceleration="eager"):
        wanted = write_all(batch_of(drafter), new_texts(sampling))
    assert not recorder.recorded
    batch = batch_of(drafter)
    assert batch.cache.has_windows is (family != "llama")
    assert write_all(batch, new_texts(sampling)) == wanted
    assert recorder.replayed > 20
    assert "verify" in {key.kind for key in batch.rounds.graphs.keys}
    assert batch.stats.fallbacks == []
    if sampling is GREEDY:
        alone = [plain(target, list(text.request.prompt), 9 + 5 * n) for n, text in enumerate(new_texts())]
        assert wanted == alone


class OracleRound(RoundWrapper):
    """Drafts that follow what texts will be, for a while: so that states are moved on by more than a token."""

    def __init__(self, inner: Round, texts: list[ServedText], wanted: dict[tuple[int, ...], list[int]]):
        super().__init__(inner)
        self._texts, self._wanted, self._dice = texts, wanted, torch.Generator().manual_seed(0)

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
    target = recurrent_target(family)
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    batch, texts = batch_of(drafter), new_texts()
    wanted = [plain(target, list(text.request.prompt), 9 + 5 * n) for n, text in enumerate(texts)]
    by_prompt = {text.request.prompt: tokens for text, tokens in zip(texts, wanted, strict=True)}
    batch.rounds = OracleRound(batch.rounds, batch.texts, by_prompt)
    assert write_all(batch, texts) == wanted
    assert recorder.replayed > 20
    assert {("settle", rows) for rows in (2, 3)} <= {key[:2] for key in batch.rounds.graphs.keys}
    assert write_all(batch, new_texts()) == wanted
    assert recorder.recorded == len(batch.rounds.graphs.keys), "each once: states lie where they lay"
    assert batch.stats.fallbacks == []
    assert batch.stats.acceptance_length > 1.5


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "falcon_h1"])
def test_prompts_of_one_token(family: str, recorder: Recorder) -> None:
    """Nothing of them is in the caches when they join: first of all, and in places that others have left."""
    target = target_of(family) if family in CONFIGS else recurrent_target(family)
    drafter = random_drafter(target, aux_layers=[1, 2, 3])
    drafter.generation_config.num_assistant_tokens = 3
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    prompts = [[7], *random_prompts(4, seed=3), [9], [11], *random_prompts(2, seed=4), [13]]
    wanted = {tuple(prompt): plain(target, prompt, 14) for prompt in prompts}
    batch = batch_of(drafter)
    batch.rounds = OracleRound(batch.rounds, batch.texts, wanted)
    assert write_all(batch, [text_of(prompt, 14) for prompt in prompts]) == list(wanted.values())
    assert recorder.replayed > 20
    assert batch.stats.fallbacks == []


def test_a_drafter_that_sees_a_window_is_eager(recorder: Recorder) -> None:
    drafter = random_drafter(target_of("llama"), aux_layers=[1, 2, 4], sliding_window=8)
    assert batch_of(drafter).rounds.graphs is None


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
