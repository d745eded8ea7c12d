"""`eagle31 bench loop`: what is measured, counted and put in tables. No figure here depends on how fast anything is."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from small_loops import CHAIN, tensors

from eagle31_hf import NoDrafter
from eagle31_hf.errors import ConfigurationError, UnsupportedGenerationError
from eagle31_hf.measure.bare_meter import BareCosts, BareMeter, typical_context
from eagle31_hf.measure.calls import PLAIN, SAME, CallRecord, Drafting, Verdict
from eagle31_hf.measure.gauges import PassCounter, ends_off
from eagle31_hf.measure.loop_report import LoopRecord, loop_parts
from eagle31_hf.measure.methods import all_methods, early_exit_refusal, left_padded
from eagle31_hf.measure.pair import measure_loops
from eagle31_hf.measure.run_settings import RunSettings
from eagle31_hf.measure.suite import BenchmarkRun, Task
from eagle31_hf.measure.summary import MethodSummary, RunSummary, Setting
from eagle31_hf.texts.prompts import Prompt
from helpers import drafter_of, random_prompts, target_of

BARE = BareCosts(0.010, verify_s=0.012, drafter_step_s=0.001, absorb_s=0.002, verified_tokens=5, drafter_steps=4)
FIXED = {"ignore_eos": True, "as_configured": True, "ceilings": True}


# --- arithmetic -------------------------------------------------------------------------------------------------------


def call(method, repeat, seconds, *, rows=1, **more):
    return CallRecord(
        turn=f"repeat {repeat}", method=method, temperature=0.0, seed=0, batch_size=rows, repeat=repeat,
        prompts=["a"], suite="a", category="a", prompt_tokens=3, new_tokens=128, seconds=seconds, first_token_s=0.1,
        texts=["t"], verdicts=[Verdict(SAME)], **more,
    )  # fmt: skip


def record(rows=1):
    drafted = Drafting(rounds=30, passes=30, drafted=120, accepted=105, drafted_at=[30] * 4, reached_at=[30] * 4,
                       accepted_at=[30] * 4, prefill_s=0.0, draft_s=0.15, verify_s=0.36, other_s=0.03)  # fmt: skip
    ours = tuple(
        call("chain", i, seconds, rows=rows, drafting=drafted, bare_round_s=0.017, served_by="own")
        for i, seconds in enumerate((0.4, 0.5, 0.25))
    )
    plain = tuple(call(PLAIN, i, s, rows=rows, target_passes=128) for i, s in enumerate((1.6, 1.0, 1.5)))
    setting = Setting(0.0, rows)
    return (
        LoopRecord(MethodSummary("chain", setting, ours, plain), BARE),
        LoopRecord(MethodSummary(PLAIN, setting, plain, plain)),
    )


def test_speedups_are_formed_within_a_repeat():
    chain, _ = record()
    assert chain.speedups == pytest.approx([4.0, 2.0, 6.0])
    assert chain.to_dict()["speedup"] == pytest.approx(4.0)  # of the medians it would be 3.75


def test_the_ceiling_is_made_of_bare_forwards_and_the_plain_step():
    assert BARE.round_s == pytest.approx(0.017)  # verify, absorb, three more steps
    assert BARE.ceiling(4.0, plain_step_s=0.010) == pytest.approx(4.0 * 10 / 17)
    chain, _ = record()
    assert chain.plain_step_s == pytest.approx(1.5 / 128)
    assert chain.ceiling == pytest.approx(4.5 * (1.5 / 128) / 0.017)
    assert record(rows=4)[0].plain_step_s == pytest.approx(4 * 1.5 / 128)  # a step writes a token to each row


def test_overhead_is_a_round_over_its_bare_forwards():
    chain, plain = record()
    assert chain.round_over_bare == pytest.approx(18 / 17)
    assert plain.round_over_bare is None
    split = chain.to_dict()["round"]
    assert split == pytest.approx({"draft_s": 0.005, "verify_s": 0.012, "other_s": 0.001, "total_s": 0.018})
    assert plain.to_dict()["round"] is None


def test_acceptance_without_a_drafter_is_tokens_per_pass_after_the_prompt():
    lookup = LoopRecord(MethodSummary("prompt lookup", Setting(0.0, 1), (
        call("prompt lookup", 0, 1.0, target_passes=33), call("prompt lookup", 0, 1.0, target_passes=33),
    ), (call(PLAIN, 0, 1.0, target_passes=128),)))  # fmt: skip
    assert lookup.acceptance_length == pytest.approx(254 / 64)  # 1 token by the prompt's pass, 127 by 32 more
    assert lookup.target_passes == [66]


# --- prompts ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 5))
def test_batches_are_full_and_hold_every_prompt(lengths, size):
    prompts = [torch.full((length,), 7 + i) for i, length in enumerate(lengths)]
    tasks = [Task(Prompt(str(i), "a", "a", ()), ids) for i, ids in enumerate(prompts)]
    run = BenchmarkRun(drafter_of("llama"), tasks, RunSettings(batch_sizes=(size,), repeats=1))
    batches = [left_padded([task.ids for task in turn.tasks], pad_id=0) for turn in run.turns]
    assert all(batch["input_ids"].shape[0] == size for batch in batches)
    rows = [ids[mask > 0] for batch in batches for ids, mask in zip(*batch.values(), strict=True)]
    assert all(mask.diff().ge(0).all() for batch in batches for mask in batch["attention_mask"]), "pads come first"
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
    wanted = RunSettings(new_tokens=12, batch_sizes=(1, 2), repeats=2, depth=3, tree_width=2, tree_size=5, **FIXED)
    done = []
    summary, records = measure_loops(drafter, tensors(random_prompts(3, longest=8)), wanted, done.append)
    assert vars(drafter.generation_config) == before, "settings are put back"
    assert done == pytest.approx([0.1] * 10)
    return summary, [record.to_dict() for record in records]


@pytest.mark.slow
def test_records_are_complete(measured):
    summary, records = measured
    methods = ["plain generate", "prompt lookup", "early exit", "stock loop", "own lookup", "chain", "tree"]
    assert [r["name"] for r in records if r["batch_size"] == 1] == methods
    assert [r["name"] for r in records if r["batch_size"] == 2] == [methods[0], *methods[4:]]
    assert not summary.left_out
    for each in records:
        rows, own = each["batch_size"], each["name"].startswith(("chain", "tree"))
        calls = math.ceil(3 / rows)
        assert len(each["tok_per_s"]) == len(each["speedups"]) == 2
        assert each["new_tokens"] == [12 * calls * rows] * 2
        assert each["equal_texts"] == each["texts"] == calls * rows
        for part in ("round", "bare", "ceiling", "round_over_bare"):
            assert (each[part] is not None) == own, part
        assert all(passes >= 2 * calls for passes in each["target_passes"])
        assert each["acceptance_length"] >= 1
        served_by = "own" if own or each["name"] == "own lookup" else ""
        assert each["served_by"] == ("stock: asked for" if each["name"] == "stock loop" else served_by)
    plain = records[0]
    assert plain["speedups"] == [1.0, 1.0]
    assert plain["acceptance_length"] == 1.0
    assert plain["target_passes"][0] == 3 * 12
    tree = next(r for r in records if r["name"] == "tree")
    assert 3 < tree["bare"]["verified_tokens"] <= 5
    assert 1.5 < tree["bare"]["drafter_steps"] <= 3


FIELDS = {
    "name", "batch_size", "tok_per_s", "speedups", "speedup", "by_compiler", "by_drafter", "acceptance_length",
    "round_over_bare", "ceiling", "median_tok_per_s", "target_passes", "new_tokens", "round", "bare", "served_by",
    "equal_texts", "texts",
}  # fmt: skip


def test_records_have_the_fields_of_those_written_before():
    assert set(record()[0].to_dict()) == FIELDS
    assert json.loads(json.dumps(record()[0].to_dict()))["texts"] == 1


def test_accelerated_loops_are_measured_on_request():
    wanted = RunSettings(compiled=True, acceptance=(0.5,))
    names = [method.name for method in all_methods(drafter_of("llama"), wanted, NoDrafter(target_of("llama")))]
    assert names == ["plain generate", "chain", "tree", "chain compiled", "tree compiled"]


def shown(summary, records, *, synthetic=False):
    console = Console(width=80)
    with console.capture() as capture:
        for part in loop_parts(summary, records, synthetic=synthetic):
            console.print(part)
    return capture.get()


def test_records_become_tables():
    records = record()
    text = shown(RunSummary({}, tuple(each.summary for each in records), {"early exit": "because"}), records)
    assert "…" not in text, "no cell is cut"
    assert all(word in text for word in ("chain", "round/bare", "Theoretical ceiling", "early exit: because"))
    assert "means nothing" not in text
    assert "means nothing" in " ".join(shown(RunSummary({}, ()), [], synthetic=True).split())


def test_transformers_alternatives_that_fail_are_left_out(monkeypatch):
    drafter = drafter_of("qwen2")
    generate = type(target_of("qwen2")).generate

    def failing(self, *args, **kwargs):
        if kwargs.get("prompt_lookup_num_tokens"):
            raise RuntimeError("not today\nat all")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target_of("qwen2")), "generate", failing)
    wanted = RunSettings(new_tokens=4, repeats=1, methods=("plain generate", "prompt lookup"), **FIXED)
    summary, records = measure_loops(drafter, tensors(random_prompts(1)), wanted, lambda _: None)
    assert summary.left_out["prompt lookup"] == "RuntimeError: not today"
    assert [each.summary.method for each in records] == ["plain generate"]


def test_methods_of_one_row_are_left_out_of_batches_with_a_reason():
    wanted = RunSettings(new_tokens=3, repeats=1, batch_sizes=(2,), methods=("plain generate", "stock loop"), **FIXED)
    summary, _ = measure_loops(drafter_of("llama"), tensors(random_prompts(1)), wanted, lambda _: None)
    assert "one row at a time" in summary.left_out["stock loop"]


def test_early_exit_is_for_targets_that_heed_their_layer_count():
    llama, neox = drafter_of("llama").binding, drafter_of("gpt_neox").binding
    assert early_exit_refusal(llama, 2) == ""
    whole = neox.text_config.num_hidden_layers
    assert "runs all its layers" in early_exit_refusal(neox, 2)
    assert (llama.text_config.num_hidden_layers, neox.text_config.num_hidden_layers) == (4, whole)


def test_passes_of_an_early_exit_are_drafts():
    model, binding = target_of("llama"), drafter_of("llama").binding
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
    monkeypatch.setattr(drafter.binding.model.generation_config, "max_time", 1e-9)
    with pytest.raises(UnsupportedGenerationError, match="ends its texts early"):
        measure_loops(drafter, tensors(random_prompts(1)), RunSettings(new_tokens=6, **FIXED), lambda _: None)


@pytest.mark.parametrize(
    "wrong", [{"new_tokens": 2}, {"repeats": 0}, {"batch_sizes": ()}, {"batch_sizes": (0,)}, {"depth": 0},
              {"tree_width": 1}, {"tree_size": 2}, {"temperatures": (float("nan"),)}, {"temperatures": (-1.0,)}]
)  # fmt: skip
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(ConfigurationError):
        RunSettings(**wrong).check()


@pytest.mark.parametrize("chances", [(), (1.1,), (0.5, -0.1), (float("nan"),)])
def test_chances_are_probabilities(chances):
    with pytest.raises(ConfigurationError, match="probability"):
        RunSettings(acceptance=chances).check()


def test_no_prompts_is_an_error(drafter):
    with pytest.raises(ConfigurationError, match="no prompts"):
        measure_loops(drafter, [], RunSettings(), lambda _: None)
    with pytest.raises(ConfigurationError, match="context of 1 token"):
        BareMeter(drafter, torch.tensor([[1]]), CHAIN)
