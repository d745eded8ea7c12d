"""Random targets, and drafts that are accepted by lot."""

import functools
import math
from dataclasses import replace

import pytest
import torch
import transformers as hf
from eagle31_hf.evidence.methods import left_padded
from eagle31_hf.evidence.synthetic import (
    SyntheticRequest,
    random_target,
    synthetic_decoder,
    target_config,
    write_synthetic,
)
from small_loops import CHAIN, SPEC, TREE, tensors

from eagle31_hf.decoding.decoder import SpeculativeDecoder
from eagle31_hf.decoding.pair import Pair
from eagle31_hf.decoding.round import RoundBatch
from eagle31_hf.drafter.propose import grow_tree
from eagle31_hf.drafting.plan import DraftPlan
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.target.verify import Verification
from helpers import configured, random_drafter, random_prompts, use_fixed_shapes_only

# --- acceptance by lot ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_acceptance_is_what_was_asked_for(drafter, shape, samples):
    asked = (0.9, 0.7, 0.5)
    prompts = left_padded(tensors(random_prompts(8)), 0)
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
    prompts = left_padded(tensors(random_prompts(1)), 0)
    _, stats = write_synthetic(drafter, prompts, SyntheticRequest(51, shape, (chance,)))
    assert stats.acceptance_length == pytest.approx(length)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_graphs_that_judge_are_overruled_by_the_lot(shape, samples, monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    drafter = random_drafter(random_target(target_config(SPEC), dtype=torch.float32, device="cpu"))
    prompts = left_padded(tensors(random_prompts(1)), 0)
    with configured(drafter, acceleration="compile"):
        for chance, length in ((0.0, 1.0), (1.0, 5.0)):
            _, stats = write_synthetic(drafter, prompts, SyntheticRequest(51, shape, (chance,), samples=samples))
            assert stats.acceptance_length == pytest.approx(length)
    kinds = {kind for kind, *_ in Pair.of(drafter).graphs.keys}
    first = {"absorb", "chain" if shape is CHAIN else "tree"}  # what a text's first round does before it verifies
    assert kinds == {*first, "verify", "advance"}


def test_the_lot_follows_its_seed(drafter):
    prompts = left_padded(tensors(random_prompts(2)), 0)
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
    prompts = left_padded(tensors(random_prompts(1)), 0)
    by_lot = functools.partial(synthetic_decoder, acceptance=(0.0,), seed=0)
    for make_decoder in (SpeculativeDecoder, by_lot):
        request = SyntheticRequest(40, TREE, (0.0,)).to_decoding(prompts)
        decoder = make_decoder(drafter, request)
        with torch.no_grad(), drafter.binding.capturing():
            decoder.prefill()
            decoder.step()
    real, synthetic = widths
    assert real == synthetic == TREE.size
    half = len(steps) // 2
    # One pass over the prompt and the first token comes first.
    assert steps[1:half] == steps[half + 1 :] == [TREE.top_k] * (TREE.depth - 1)


def test_a_comb_is_a_tree_with_one_deep_path(drafter):
    prompts = left_padded(tensors(random_prompts(2, seed=4)), 0)
    request = SyntheticRequest(20, TREE, (1.0,)).to_decoding(prompts)
    decoder = synthetic_decoder(drafter, request, acceptance=(1.0,), seed=0)
    with torch.no_grad(), drafter.binding.capturing():
        decoder.prefill()
        decoder.caches.drafter.catch_up()
        batch = RoundBatch(request.sequences, [0, 1], [0, 1], DraftPlan(TREE))
        session = decoder.caches.drafter
        plain = grow_tree(session.root, session.step, session.draft_ids, batch.roots, TREE)
        tree = decoder.round.draft(batch)
    assert torch.equal(tree.tokens, plain.tokens), "the same drafts"
    assert tree.depths[0].tolist() == [0, 1, 2, 3, 4] + [1] * 9
    assert tree.ancestors[1, 4].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert tree.parents[0, 1:].eq(0).sum() == 10, "children of the root"


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
