"""What `eagle31 bench` counts, draws and prints. No figure here depends on how fast anything is."""

import functools
import json
import math
from dataclasses import replace

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from eagle31_hf.benchmark import loop_tables
from eagle31_hf.benchmark.bare import drafted_depths, requested_shape
from eagle31_hf.benchmark.growth import AttentionClock, GrowthRecord, measure_growth
from eagle31_hf.benchmark.loop import LoopBenchmark, PassCounter, Tally, ends_off, typical_context
from eagle31_hf.benchmark.methods import LoopSettings, Output, all_methods, early_exit_refusal
from eagle31_hf.benchmark.prompt_batches import batches_of
from eagle31_hf.benchmark.records import LoopRecord, LoopReport, RoundSplit, Sample
from eagle31_hf.benchmark.storages import count_storages
from eagle31_hf.benchmark.synthetic import (
    SyntheticRequest,
    random_target,
    synthetic_decoder,
    target_config,
    write_synthetic,
)
from eagle31_hf.cli import app
from eagle31_hf.decoding.calibration.bare_meter import BareCosts, BareMeter, quantiles
from eagle31_hf.decoding.decoder import SpeculativeDecoder
from eagle31_hf.decoding.draft_policy import DraftPlan
from eagle31_hf.decoding.round import RoundBatch
from eagle31_hf.drafter.propose import propose_dynamic_tree
from eagle31_hf.errors import ConfigurationError, UnsupportedGenerationError
from eagle31_hf.stats import SpeculationStats
from eagle31_hf.target.verify import Verification
from eagle31_hf.trees.shape import DraftShape
from helpers import configured, drafter_of, random_drafter, random_prompts, target_of, use_fixed_shapes_only

SPEC = "hidden=32,layers=4,heads=2,kv=1,intermediate=48,vocab=96"
CHAIN, TREE = DraftShape(4), DraftShape(4, top_k=3, size=14)
BARE = BareCosts(0.010, verify_s=0.012, drafter_step_s=0.001, absorb_s=0.002, verified_tokens=5, drafter_steps=4)


def tensors(prompts):
    return [torch.tensor(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def drafter():
    return random_drafter(random_target(target_config(SPEC), dtype=torch.float32, device="cpu"))


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


def test_depth_shares_follow_where_chains_ended():
    stats = SpeculationStats()
    stats.record_round(depth=3, nodes=3, accepted=[1, 1])
    stats.record_round(depth=1, nodes=1, accepted=[0])
    stats.record_round(depth=0, nodes=0, accepted=[0])
    assert drafted_depths(stats) == {0: 0.25, 1: 0.25, 3: 0.5}
    assert drafted_depths(SpeculationStats()) is None


@given(st.dictionaries(st.integers(0, 12), st.integers(1, 50), min_size=1), st.integers(1, 12))
def test_quantiles_stand_for_shares(counts, count):
    shares = {key: each / sum(counts.values()) for key, each in counts.items()}
    chosen = quantiles(shares, count)
    assert len(chosen) == count
    assert all(abs(chosen.count(key) - share * count) < 1 + 1e-9 for key, share in shares.items())


@torch.no_grad()
def test_bare_costs_weigh_the_widths_that_occurred(drafter, monkeypatch):
    seen = []
    forward = drafter.require_binding().forward
    monkeypatch.setattr(
        drafter.require_binding(), "forward", lambda ids, *rest, **_: seen.append(ids.shape) or forward(ids, *rest)
    )
    meter = BareMeter(drafter, torch.arange(9)[None], CHAIN)
    seen.clear()  # the context
    costs = meter.measure({4: 0.5, 2: 0.5})
    assert {tuple(shape) for shape in seen} == {(1, 1), (1, 5), (1, 3)}
    assert (costs.verified_tokens, costs.drafter_steps) == (4.0, 3.0)
    assert meter.cache.lengths == [9], "nothing is committed: the context stays as long as it was"


@torch.no_grad()
@pytest.mark.parametrize(("compiled", "nodes", "steps"), [(False, 1 + 3 + 8, 1 + 4), (True, 1 + 8 + 8, 4 + 4)])
def test_trees_may_be_shallow_or_missing(compiled, nodes, steps, drafter, monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    meter = BareMeter(drafter, torch.arange(9)[None], DraftShape(4, top_k=2, size=8), compiled=compiled)
    costs = meter.measure({0: 1 / 3, 1: 1 / 3, 4: 1 / 3})
    assert costs.verified_tokens == pytest.approx(nodes / 3)
    assert costs.drafter_steps == pytest.approx(steps / 3)


@torch.no_grad()
def test_bare_costs_are_means_of_what_was_timed_since_the_last(drafter, monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr("eagle31_hf.decoding.calibration.bare_meter.now", lambda device: next(ticks))
    ticks = (total for second in seconds for total in (0.0, float(second)))  # forward n takes n seconds
    meter = BareMeter(drafter, torch.arange(9)[None], CHAIN)
    meter.time_rounds({2: 1.0}, 1)  # 0 1 target steps | 2 3 4, 5 6 7 uncounted | 8 verify, 9 absorb, 10 step
    meter.time_rounds({2: 1.0}, 1)  # 11 12 | 13 14 15 uncounted | 16 17 18
    assert meter.costs({2: 1.0}) == BareCosts(6.5, 12.0, 14.0, 13.0, verified_tokens=3.0, drafter_steps=2.0)
    meter.time_rounds({2: 1.0}, 1)  # 19 20 | 21 22 23 | 24 25 26
    assert meter.costs({2: 1.0}).verify_s == 24.0


@torch.no_grad()
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_bare_costs_of_compiled_loops_are_those_of_compiled_forwards(drafter, shape, monkeypatch):
    monkeypatch.setattr("eagle31_hf.compiled.graphs._compile", lambda step, device: step)
    meter = BareMeter(drafter, torch.arange(9)[None], shape, compiled=True)
    costs = meter.measure()
    graphs = {kind for kind, *_ in drafter.require_binding().compiled.keys}
    assert graphs == {"verify", "absorb", "step"}
    assert drafter.require_binding().compiled.disabled_reason == ""
    assert min(costs.verify_s, costs.drafter_step_s, costs.absorb_s) > 0
    assert meter.cache.lengths == [9]
    assert meter.session.cache.lengths == [8]


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


# --- acceptance by lot ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_acceptance_is_what_was_asked_for(drafter, shape, samples):
    asked = (0.9, 0.7, 0.5)
    (prompts,) = batches_of(tensors(random_prompts(8)), 8, 0)
    request = SyntheticRequest(150, shape, asked, seed=3, samples=samples)
    tokens, stats = write_synthetic(drafter, prompts, request)
    assert tokens.shape == (8, 150)
    assert (stats.drafted_at[3], stats.rounds) != (0, 0)
    for position, wanted in enumerate((*asked, 0.5)):  # the last chance holds for what lies deeper
        reached = stats.reached_at[position]
        got = stats.accepted_at[position] / reached
        assert reached > 60
        assert abs(got - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / reached)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(("chance", "length"), [(0.0, 1.0), (1.0, 5.0)])
def test_certain_acceptance_takes_all_or_nothing(drafter, shape, chance, length):
    (prompts,) = batches_of(tensors(random_prompts(1)), 1, 0)
    _, stats = write_synthetic(drafter, prompts, SyntheticRequest(51, shape, (chance,)))
    assert stats.acceptance_length == pytest.approx(length)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_graphs_that_judge_are_overruled_by_the_lot(shape, samples, monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    drafter = random_drafter(random_target(target_config(SPEC), dtype=torch.float32, device="cpu"))
    (prompts,) = batches_of(tensors(random_prompts(1)), 1, 0)
    with configured(drafter, acceleration="compile"):
        for chance, length in ((0.0, 1.0), (1.0, 5.0)):
            _, stats = write_synthetic(drafter, prompts, SyntheticRequest(51, shape, (chance,), samples=samples))
            assert stats.acceptance_length == pytest.approx(length)
    kinds = {kind for kind, *_ in drafter.require_binding().compiled.keys}
    assert kinds == {"verify", "absorb", "chain" if shape is CHAIN else "tree", "advance"}


def test_the_lot_follows_its_seed(drafter):
    (prompts,) = batches_of(tensors(random_prompts(2)), 2, 0)
    request = SyntheticRequest(60, CHAIN, (0.5,), seed=1)
    first, again = (write_synthetic(drafter, prompts, request)[1].accepted_at for _ in range(2))
    other = write_synthetic(drafter, prompts, replace(request, seed=2))[1].accepted_at
    assert first == again != other


def test_synthetic_rounds_run_the_forwards_of_real_ones(drafter, monkeypatch):
    """Same number of nodes in every verification, one drafter step per level: only the verdict is replaced."""
    widths, steps = [], []
    verify, step = Verification.__call__, type(drafter).decode
    monkeypatch.setattr(Verification, "__call__", lambda self, tree: widths.append(tree.size) or verify(self, tree))
    monkeypatch.setattr(type(drafter), "decode", lambda self, *a: steps.append(a[0].shape[1]) or step(self, *a))
    (prompts,) = batches_of(tensors(random_prompts(1)), 1, 0)
    by_lot = functools.partial(synthetic_decoder, acceptance=(0.0,), seed=0)
    for make_decoder in (SpeculativeDecoder, by_lot):
        request = SyntheticRequest(40, TREE, (0.0,)).to_decoding(prompts)
        decoder = make_decoder(drafter, request)
        with torch.no_grad(), drafter.require_binding().capturing():
            decoder.prefill()
            decoder.step()
    real, synthetic = widths
    assert real == synthetic == TREE.size
    half = len(steps) // 2
    # Two passes over the prompt come first, one over what was accepted last.
    assert steps[2 : half - 1] == steps[half + 2 : -1] == [TREE.top_k] * (TREE.depth - 1)


def test_a_comb_is_a_tree_with_one_deep_path(drafter):
    (prompts,) = batches_of(tensors(random_prompts(2, seed=4)), 2, 0)
    request = SyntheticRequest(20, TREE, (1.0,)).to_decoding(prompts)
    decoder = synthetic_decoder(drafter, request, acceptance=(1.0,), seed=0)
    with torch.no_grad(), drafter.require_binding().capturing():
        decoder.prefill()
        batch = RoundBatch(request.sequences, [0, 1], [0, 1], decoder.roots, DraftPlan(TREE))
        plain = propose_dynamic_tree(decoder.caches.drafter, decoder.roots, TREE)
        tree = decoder.round.draft(batch)
    assert torch.equal(tree.tokens, plain.tokens), "the same drafts"
    assert tree.depths[0].tolist() == [0, 1, 2, 3, 4] + [1] * 9
    assert tree.ancestors[1, 4].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert tree.children()[0, 0].count_nonzero() == 10


# --- random targets ---------------------------------------------------------------------------------------------------


def test_a_random_target_is_whole_and_as_asked():
    model = random_target(target_config(SPEC), dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    rotary = model.model.rotary_emb.inv_freq
    assert torch.allclose(rotary, type(model)(model.config).model.rotary_emb.inv_freq)
    assert torch.equal(model.model.norm.weight, torch.ones(32, dtype=torch.bfloat16))
    assert 0.01 < float(model.lm_head.weight.float().std()) < 0.03


def test_tied_embeddings_stay_tied():
    config = hf.Qwen3Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                            num_key_value_heads=1, head_dim=16, vocab_size=64, tie_word_embeddings=True)  # fmt: skip
    model = random_target(config, dtype=torch.float32, device="cpu")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_four_bit_targets_keep_their_head():
    bnb = pytest.importorskip("bitsandbytes")
    config = target_config("hidden=64,layers=2,heads=1,kv=1,intermediate=128,vocab=96")
    model = random_target(config, dtype=torch.bfloat16, device="cpu", four_bit=True)
    packed = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(packed) == 2 * 7
    assert type(model.lm_head) is torch.nn.Linear
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_words_stand_for_configurations(tmp_path):
    assert target_config("llama-8b").num_hidden_layers == 32
    assert target_config("Qwen3 32B").model_type == "qwen3"
    assert target_config("hidden=256,layers=3").num_key_value_heads == 1
    hf.Qwen2Config(num_hidden_layers=5).save_pretrained(tmp_path)
    assert target_config(str(tmp_path / "config.json")).num_hidden_layers == 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llama", "Llama 3.1 8B, Llama 3.1 70B"),
        ("nothing", "no known model"),
        ("", "no known model"),
        ("hidden=64", "lack hidden or layers"),
        ("hidden=64,depth=3", "'depth=3'"),
        ("hidden=64,layers=0", "positive whole number"),
        ("hidden=66,layers=2,heads=4", "divide"),
        ("missing.json", "no configuration"),
    ],
)
def test_other_words_are_errors(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        target_config(spec)


@pytest.mark.parametrize("chances", [(), (1.1,), (0.5, -0.1), (float("nan"),)])
def test_chances_are_probabilities(chances):
    with pytest.raises(ConfigurationError, match="probability"):
        LoopSettings(acceptance=chances).check()


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


def test_no_prompts_is_an_error(drafter):
    with pytest.raises(ConfigurationError, match="no prompts"):
        LoopBenchmark(drafter, [], LoopSettings())
    with pytest.raises(ConfigurationError, match="context of 1 token"):
        BareMeter(drafter, torch.tensor([[1]]), CHAIN)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.none() | st.integers(2, 40))
def test_requested_trees_hold_no_more_than_their_candidates(depth, top_k, size):
    class Requested:
        device = torch.device("cpu")
        generation_config = type(drafter_of("llama").generation_config)(
            num_assistant_tokens=depth, draft_top_k=top_k, draft_tree_size=size
        )

    shape = requested_shape(Requested, batch_size=1)
    assert shape.depth == depth
    assert 2 <= shape.nodes <= (depth + 1 if top_k == 1 else 1 + top_k + top_k**2 * (depth - 1))


# --- growth -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_rounds_keep_nothing_and_attention_is_found(drafter, shape):
    (first, longer) = measure_growth(drafter, shape, (8, 70), rounds=2)
    assert (first.context, longer.context) == (8, 70)
    assert first.allocates_steadily
    assert longer.allocates_steadily
    # The same after any context, but for a rotary table, which not every round makes.
    assert longer.round_bytes == pytest.approx(first.round_bytes, rel=0.05)
    assert first.round_bytes > 0
    assert first.attention_s > 0


def test_a_round_that_hoards_is_noticed():
    hoard = []
    steady = count_storages(lambda: torch.ones(1000).sum(), 4)
    assert steady.round_bytes >= 4000
    assert steady.kept_bytes == 0
    hoarding = count_storages(lambda: hoard.append(torch.ones(1000)), 4)
    assert hoarding.kept_bytes == 4 * 4000 > hoarding.round_bytes


def test_attention_of_target_and_drafter_is_caught(drafter):
    (prompts,) = batches_of(tensors(random_prompts(1)), 1, 0)
    clock, kernel = AttentionClock(torch.device("cpu")), torch.nn.functional.scaled_dot_product_attention
    with clock.running():
        write_synthetic(drafter, prompts, SyntheticRequest(2, CHAIN, (1.0,)))
    assert torch.nn.functional.scaled_dot_product_attention is kernel, "it is put back"
    assert clock.seconds > 0
    # prefill by target and drafter (twice: the token after the prompt comes later), one round without drafts
    assert clock.calls == 4 + 2 + 4


def test_rounds_can_be_taken_without_attention(drafter, monkeypatch):
    (prompts,) = batches_of(tensors(random_prompts(1)), 1, 0)
    kernel, asked = torch.nn.functional.scaled_dot_product_attention, []
    watched = lambda *args, **kwargs: asked.append(1) or kernel(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    clock = AttentionClock(torch.device("cpu"), absent=True)
    with clock.running():
        write_synthetic(drafter, prompts, SyntheticRequest(2, CHAIN, (1.0,)))
    assert clock.calls == 4 + 2 + 4
    assert not asked


def test_growth_is_against_the_first_context():
    first, later = GrowthRecord(8, 0.010, 0.002, 0.008, 1, 0), GrowthRecord(80, 0.020, 0.010, 0.010, 1, 2)
    assert loop_tables.growth(first, later) == pytest.approx(0.25)
    assert (first.allocates_steadily, later.allocates_steadily) == (True, False)
    with pytest.raises(ConfigurationError):
        measure_growth(drafter_of("llama"), CHAIN, ())


# --- command line -----------------------------------------------------------------------------------------------------


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_bench_loop_prints_the_ceiling_first_and_json_last(tmp_path):
    path = tmp_path / "figures.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is the weather in Portland?"}\n{"question": "How many apples?"}\n')
    out = run("loop", "--prompts", prompts, "--limit", 1, "--new-tokens", 6, "--batch", 1, "--repeats", 1, "--dtype",
              "fp32", "--json", path).stdout  # fmt: skip
    assert out.index("Theoretical ceiling") < out.index("plain generate") < out.index("round/bare")
    last = json.loads(out.splitlines()[-1])
    assert last == json.loads(path.read_text())
    assert (last["prompts"], last["dtype"], last["bench"]) == (1, "float32", "loop")
    assert {"command", "written", "commit", "eagle31_hf", "torch", "transformers", "processor"} <= last.keys()
    assert all(r["equal_texts"] == 1 for r in last["records"])


def test_bench_loop_on_a_random_target():
    out = run("loop", "--synthetic", SPEC, "--acceptance", "1.0", "--limit", 2, "--new-tokens", 15, "--batch", "1,2",
              "--repeats", 1, "--draft-tokens", 6, "--tree-size", 9).stdout  # fmt: skip
    assert "the text means nothing" in " ".join(out.split())
    records = json.loads(out.splitlines()[-1])["records"]
    assert [r["name"] for r in records] == ["plain generate", "chain", "tree"] * 2
    assert {r["acceptance_length"] for r in records} == {1.0, 7.0}


def test_bench_growth():
    out = run("growth", "--contexts", "6,9", "--rounds", 1, "--tree-width", 2, "--tree-size", 8).stdout
    last = json.loads(out.splitlines()[-1])
    assert [r["context"] for r in last["records"]] == [6, 9]
    assert last["records"][0]["growth"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loop", "--prompts", "nowhere.jsonl"], "cannot be read"),
        (["loop", "--synthetic", "llama"], "is any of"),
        (["loop", "--synthetic", "llama-8b", "--target", "x"], "--synthetic makes"),
        (["loop", "--synthetic", SPEC, "--acceptance", "2"], "probability"),
        (["loop", "--acceptance", "0.5"], "pass --synthetic"),
        (["loop", "--four-bit"], "for random targets"),
        (["loop", "--synthetic", SPEC, "--device", "mps"], "no mps"),
        (["growth", "--contexts", "1"], "wanted 2 tokens"),
    ],
)
def test_bad_input_is_one_line_before_any_work(arguments, message):
    result = run(*arguments, code=1)
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    "arguments", [["--batch", "1,x"], ["--batch", "0"], ["--dtype", "int8"], ["--acceptance", "a"]]
)
def test_malformed_options_are_usage_errors(arguments):
    run("loop", *arguments, code=2)
