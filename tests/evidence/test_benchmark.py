"""`eagle31 bench loop`: what is measured, counted and put in tables. No figure here depends on how fast anything is."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from small_loops import CHAIN, tensors

from eagle31_hf.decoding.calibration.bare_meter import BareCosts, BareMeter
from eagle31_hf.errors import ConfigurationError, UnsupportedGenerationError
from eagle31_hf.evidence import loop_tables
from eagle31_hf.evidence.loop import LoopBenchmark, PassCounter, Tally, ends_off, typical_context
from eagle31_hf.evidence.methods import LoopSettings, Output, all_methods, early_exit_refusal
from eagle31_hf.evidence.prompt_batches import batches_of
from eagle31_hf.evidence.records import LoopRecord, LoopReport, RoundSplit, Sample
from helpers import drafter_of, random_prompts, target_of

BARE = BareCosts(0.010, verify_s=0.012, drafter_step_s=0.001, absorb_s=0.002, verified_tokens=5, drafter_steps=4)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def sample(seconds, *, split=None, bare=None):
    return Sample(seconds, 128, 30, 4.5, split, bare)


def record(**fields):
    split = RoundSplit(0.005, 0.012, 0.001)
    ours = tuple(sample(s, split=split, bare=BARE) for s in (0.4, 0.5, 0.25))
    plain = tuple(sample(s) for s in (1.6, 1.0, 1.5))
    made = LoopRecord("chain", 1, ours, plain, "own", 3, 3)
    return replace(made, **fields)


def test_speedups_are_formed_within_a_repeat():
    assert record().speedups == pytest.approx([4.0, 2.0, 6.0])
    assert record().speedup == pytest.approx(4.0)  # of the medians it would be 3.75


def test_the_ceiling_is_made_of_bare_forwards_and_the_plain_step():
    assert BARE.round_s == pytest.approx(0.017)  # verify, absorb, three more steps
    assert BARE.ceiling(4.0) == pytest.approx(4.0 * 10 / 17)
    assert record().plain_step_s == pytest.approx(1.5 / 128)
    assert record().ceiling == pytest.approx(4.5 * (1.5 / 128) / 0.017)
    assert record(batch_size=4).plain_step_s == pytest.approx(4 * 1.5 / 128)  # a step writes a token to each row


def test_overhead_is_a_round_over_its_bare_forwards():
    assert record().round_over_bare == pytest.approx(18 / 17)
    assert record(samples=record().plain).round_over_bare is None


def test_acceptance_without_a_drafter_is_tokens_per_pass_after_the_prompt():
    tally = Tally()
    tally.add(1.0, Output(torch.zeros(1, 13)), target_passes=5)  # 1 token by the prompt's pass, 12 by 4 more
    tally.add(1.0, Output(torch.zeros(1, 13)), target_passes=9)
    assert tally.sample(1, bare=None).acceptance_length == pytest.approx(24 / 12)
    assert tally.sample(1, bare=None).split is None


# --- prompts ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 5))
def test_batches_are_full_and_hold_every_prompt(lengths, size):
    prompts = [torch.full((length,), 7 + i) for i, length in enumerate(lengths)]
    batches = batches_of(prompts, size, pad_id=0)
    assert all(batch.input_ids.shape[0] == size for batch in batches)
    rows = [ids[pad:] for batch in batches for ids, pad in zip(batch.input_ids, batch.padding, strict=True)]
    assert 0 <= len(rows) - len(prompts) < size
    assert all(torch.equal(row, prompts[i % len(prompts)]) for i, row in enumerate(rows))


def test_the_typical_context_lies_half_way_through_the_median_text():
    prompts = [torch.arange(n) for n in (2, 4, 30)]
    assert typical_context(prompts, 10).tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2]]
    assert typical_context(prompts, 100).shape == (1, 54)  # longer than all of them: over again


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    drafter = drafter_of("llama")
    before = vars(drafter.generation_config).copy()
    wanted = LoopSettings(new_tokens=12, batch_sizes=(1, 2), repeats=2, depth=3, tree_width=2, tree_size=5)
    done = []
    bench = LoopBenchmark(drafter, tensors(random_prompts(3, longest=8)), wanted, done.append)
    result = bench.run()
    assert vars(drafter.generation_config) == before, "settings are put back"
    assert done == pytest.approx([0.25, 0.5, 0.75, 1.0])
    return result


@pytest.mark.slow
def test_records_are_complete(measured):
    methods = ["plain generate", "prompt lookup", "early exit", "stock loop", "chain", "tree"]
    assert [r.name for r in measured.records if r.batch_size == 1] == methods
    assert [r.name for r in measured.records if r.batch_size == 2] == [methods[0], *methods[4:]]
    assert not measured.left_out
    for each in measured.records:
        calls, own = math.ceil(3 / each.batch_size), each.name.startswith(("chain", "tree"))
        assert len(each.samples) == 2
        assert all(s.new_tokens == 12 * calls * each.batch_size for s in each.samples)
        assert each.equal_texts == each.texts == calls * each.batch_size
        assert (each.split is not None) == (each.bare is not None) == (each.ceiling is not None) == own
        assert all(s.target_passes >= 2 * calls for s in each.samples)
        assert each.acceptance_length >= 1
        assert each.served_by == ("own" if own else "stock: asked for" if each.name == "stock loop" else "")
    plain = measured.records[0]
    assert plain.speedups == [1.0, 1.0]
    assert plain.acceptance_length == 1.0
    assert plain.samples[0].target_passes == 3 * 12
    tree = next(r for r in measured.records if r.name == "tree")
    assert 3 < tree.bare.verified_tokens <= 5
    assert 1.5 < tree.bare.drafter_steps <= 3


def test_accelerated_loops_are_measured_on_request():
    names = [method.name for method in all_methods(drafter_of("llama"), LoopSettings(compiled=True, acceptance=(0.5,)))]
    assert names == ["plain generate", "chain", "tree", "chain compiled", "tree compiled"]


@pytest.mark.slow
def test_records_become_tables_and_json(measured):
    console = Console(width=80, record=True, file=None, quiet=False)
    with console.capture() as capture:
        for table_of in (loop_tables.ceiling_table, loop_tables.loop_table, loop_tables.round_table):
            console.print(table_of(measured))
    text = capture.get()
    assert "…" not in text, "no cell is cut"
    assert all(word in text for word in ("prompt lookup", "stock loop", "round/bare", "Theoretical ceiling"))
    back = json.loads(loop_tables.json_line(measured.to_dict()))
    assert len(back["records"]) == len(measured.records)
    assert back["records"][0]["speedup"] == 1.0


def test_notes_tell_what_the_tables_cannot():
    odd = LoopReport((record(served_by="stock: no trees"), record(equal_texts=2)), {"early exit": "because"})
    notes = " ".join(note.plain for note in loop_tables.loop_notes(odd, synthetic=False))
    assert all(part in notes for part in ("early exit: because", "served by stock: no trees", "ties"))
    assert "means nothing" in loop_tables.loop_notes(LoopReport((), {}), synthetic=True)[0].plain


def test_transformers_alternatives_that_fail_are_left_out(monkeypatch):
    drafter = drafter_of("qwen2")
    generate = type(target_of("qwen2")).generate

    def failing(self, *args, **kwargs):
        if kwargs.get("prompt_lookup_num_tokens"):
            raise RuntimeError("not today\nat all")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target_of("qwen2")), "generate", failing)
    wanted = LoopSettings(new_tokens=4, batch_sizes=(1,), repeats=1)
    result = LoopBenchmark(drafter, tensors(random_prompts(1)), wanted).run()
    assert result.left_out["prompt lookup"] == "RuntimeError: not today"
    assert "prompt lookup" not in [r.name for r in result.records]


def test_early_exit_is_for_targets_that_heed_their_layer_count():
    llama, neox = drafter_of("llama").require_binding(), drafter_of("gpt_neox").require_binding()
    assert early_exit_refusal(llama, 2) == ""
    whole = neox.text_config.num_hidden_layers
    assert "runs all its layers" in early_exit_refusal(neox, 2)
    assert (llama.text_config.num_hidden_layers, neox.text_config.num_hidden_layers) == (4, whole)


def test_passes_of_an_early_exit_are_drafts():
    model, binding = target_of("llama"), drafter_of("llama").require_binding()
    counter, ids = PassCounter(binding), torch.tensor([[1, 2, 3]])
    with counter.counting(), torch.no_grad():
        model(input_ids=ids)
        model.config.num_hidden_layers = 2
        model(input_ids=ids)
        model.config.num_hidden_layers = 4
    model(input_ids=ids)
    assert counter.count == 1


def test_ends_are_back_after_an_error():
    model = target_of("llama")
    model.generation_config.eos_token_id = 5
    try:
        with ends_off(model):
            assert model.generation_config.eos_token_id is None
        with pytest.raises(IndexError), ends_off(model):
            [].pop()
        assert model.generation_config.eos_token_id == 5
    finally:
        model.generation_config.eos_token_id = None


def test_texts_of_another_length_are_refused(monkeypatch):
    drafter = drafter_of("llama")
    monkeypatch.setattr(drafter.require_binding().model.generation_config, "max_time", 1e-9)
    bench = LoopBenchmark(drafter, tensors(random_prompts(1)), LoopSettings(new_tokens=6, batch_sizes=(1,)))
    with pytest.raises(UnsupportedGenerationError, match="ends its texts early"):
        bench.run()


@pytest.mark.parametrize(
    "wrong", [{"new_tokens": 2}, {"repeats": 0}, {"batch_sizes": ()}, {"batch_sizes": (0,)}, {"depth": 0},
              {"tree_width": 1}, {"tree_size": 2}, {"temperature": float("nan")}, {"temperature": -1.0}]
)  # fmt: skip
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(ConfigurationError):
        LoopSettings(**wrong).check()


@pytest.mark.parametrize("chances", [(), (1.1,), (0.5, -0.1), (float("nan"),)])
def test_chances_are_probabilities(chances):
    with pytest.raises(ConfigurationError, match="probability"):
        LoopSettings(acceptance=chances).check()


def test_no_prompts_is_an_error(drafter):
    with pytest.raises(ConfigurationError, match="no prompts"):
        LoopBenchmark(drafter, [], LoopSettings())
    with pytest.raises(ConfigurationError, match="context of 1 token"):
        BareMeter(drafter, torch.tensor([[1]]), CHAIN)
