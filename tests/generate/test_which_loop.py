"""Which loop takes a `generate` call and why, and what a loop asked for by name refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as hf
from greedy_calls import greedy, one, stats_of
from torch import Tensor

from eagle31_hf.errors import UnsupportedGenerationError
from eagle31_hf.generate import hooks
from helpers import (
    CONFIGS,
    SIZES,
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    random_drafter,
    random_prompts,
    random_target,
    seeded,
    target_of,
)

SHORT: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}


def test_own_loop_is_the_first_choice() -> None:
    greedy("llama", one(), assistant_model=drafter_of("llama"))
    assert (stats_of().loop, stats_of().reason) == ("own", "")


@pytest.mark.parametrize("loop", ["plain", "own"])
def test_new_tokens_are_those_that_were_written(loop: str) -> None:
    """What fills up an ended row was not written."""
    rows = 3
    inputs = left_padded(prompts_for("llama", rows))
    length = inputs["input_ids"].shape[1]
    free = greedy("llama", inputs, max_new_tokens=20)
    end = int(free[0, length + 6])
    text = greedy("llama", inputs, max_new_tokens=20, eos_token_id=end)[:, length:]
    written = sum(row.index(end) + 1 if end in row else len(row) for row in text.tolist())
    with configured(drafter_of("llama"), speculation_loop=loop) as drafter, oracle_drafts(free, length):
        for kwargs in ({}, {"return_dict_in_generate": True}):
            greedy("llama", inputs, max_new_tokens=20, eos_token_id=end, assistant_model=drafter, **kwargs)
            assert (stats_of().loop, stats_of().new_tokens) == (loop, written)
    assert written < 20 * rows, "or no row has ended early"


def test_pads_that_were_written_count() -> None:
    """A row that a criterion ends with the very token that fills it up, beside rows that write on."""
    inputs = left_padded(prompts_for("llama", 3))
    length = inputs["input_ids"].shape[1]
    free = greedy("llama", inputs, max_new_tokens=12)

    def ends(ids: Tensor, _scores: Any) -> Tensor:
        """Row 0 after 5 tokens."""
        first = free[0, : length + 5]
        return torch.tensor([torch.equal(row[: len(first)], first) for row in ids])

    settings = {"stopping_criteria": [ends], "pad_token_id": int(free[0, length + 4]), "max_new_tokens": 12}
    for eos, written in (([95], 5 + 12 + 12), (None, 3 * 12)):
        assert eos is None or not torch.isin(free[:, length:], torch.tensor(eos)).any()
        greedy("llama", inputs, assistant_model=drafter_of("llama"), eos_token_id=eos, **settings)
        assert (stats_of().loop, stats_of().new_tokens) == ("plain", written)


def test_plain_can_be_asked_for() -> None:
    with configured(drafter_of("llama"), speculation_loop="plain") as drafter:
        out = greedy("llama", one(), assistant_model=drafter)
    assert torch.equal(out, greedy("llama", one()))
    assert (stats_of().loop, stats_of().reason) == ("plain", "asked for")


SYNTH_ID = {"watermarking_config": hf.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]), "do_sample": True}
FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "SynthID": (SYNTH_ID, "SynthIDTextWatermarkLogitsProcessor"),
    "hidden_states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "no_cache": ({"use_cache": False}, "use_cache=False"),
    "static_cache": ({"cache_implementation": "static"}, "StaticCache"),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
}


@pytest.mark.contract
@pytest.mark.parametrize("case", FALLBACKS)
def test_plain_fallback_says_why(case: str, caplog: pytest.LogCaptureFixture) -> None:
    kwargs, word = FALLBACKS[case]
    drafter = random_drafter(random_target(CONFIGS["llama"]()))
    model = drafter.binding.model
    rows = 3 if word.startswith(("SynthID", "Unbatched")) else 1  # one row of theirs is served by the own loop
    settings: dict[str, Any] = left_padded(prompts_for("llama", rows)) | {"max_new_tokens": 8, "pad_token_id": 0}
    settings |= {"do_sample": False} | kwargs
    hooks._logged.clear()
    with seeded(3):
        plain = model.generate(**settings)
    with caplog.at_level(logging.WARNING, logger="eagle31_hf.generate.hooks"):
        for _ in range(2):
            with seeded(3):
                ours = model.generate(**settings, assistant_model=drafter)
    assert drafter.stats is not None
    assert drafter.stats.loop == "plain"
    assert word in drafter.stats.reason
    said = [record.getMessage() for record in caplog.records if record.name == "eagle31_hf.generate.hooks"]
    assert len(said) == 1, "once, not at every call"
    assert word in said[0]
    if hasattr(plain, "sequences"):
        assert ours.speculation_stats is drafter.stats
        assert len(ours.hidden_states or ours.attentions) == 8
        plain, ours = plain.sequences, ours.sequences
    assert torch.equal(plain, ours)


def test_a_cache_object_of_another_kind_falls_back() -> None:
    cache = hf.StaticCache(config=target_of("llama").config, max_cache_len=64)
    out = greedy("llama", one(), assistant_model=drafter_of("llama"), past_key_values=cache)
    assert "StaticCache" in stats_of().reason
    assert torch.equal(out, greedy("llama", one()))


def test_a_target_without_trees_is_decoded_plainly() -> None:
    drafter = random_drafter(random_target(CONFIGS["llama"]()))
    drafter.binding.tree_unsupported_reason = "the target failed the tree self-test (tried in a test)"
    for rows in (1, 3):
        inputs = left_padded(prompts_for("llama", rows))
        assert_same_text(drafter.binding.model, drafter, inputs, loop="plain", **SHORT)
        assert "tree self-test" in drafter.stats.reason


class Never(hf.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Pass(hf.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "criteria": (3, {"stopping_criteria": [Never()]}, "Never"),
    "static": (1, {"cache_implementation": "static"}, "StaticCache"),
    "hidden": (1, {"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "unknown_processor": (3, {"logits_processor": [Pass()]}, "Pass"),
}


@pytest.mark.contract
@pytest.mark.parametrize("case", REFUSED)
def test_our_loop_asked_for_by_name_refuses_what_it_cannot_do(case: str) -> None:
    rows, kwargs, word = REFUSED[case]
    inputs = left_padded(prompts_for("llama", rows))
    refusal = pytest.raises(UnsupportedGenerationError, match=r"speculation_loop='own'.*auto")
    with configured(drafter_of("llama"), speculation_loop="own") as drafter, refusal as caught:
        greedy("llama", inputs, assistant_model=drafter, **kwargs)
    assert word in str(caught.value)


@pytest.mark.contract
def test_prompt_that_ends_with_end_of_sequence() -> None:
    inputs = one()
    last = int(inputs["input_ids"][0, -1])
    text = assert_same_text(target_of("llama"), drafter_of("llama"), inputs, eos_token_id=last, **SHORT)
    assert text.shape[1] > inputs["input_ids"].shape[1]


def test_ensemble_weight_is_refused() -> None:
    with pytest.raises((UnsupportedGenerationError, ValueError, TypeError), match="assistant_ensemble_weight"):
        greedy("llama", one(), assistant_model=drafter_of("llama"), assistant_ensemble_weight=0.5)


@pytest.mark.contract
def test_masks_of_another_length_than_the_prompt() -> None:
    """A longer one moves the text's positions; a shorter one is plain's error before ours could be silent."""
    inputs, drafter = one(), drafter_of("llama")
    mask = inputs["attention_mask"]
    for wide in (torch.cat((mask, mask), 1), torch.cat((0 * mask, mask), 1)):
        assert_same_text(target_of("llama"), drafter, inputs | {"attention_mask": wide}, loop="plain", **SHORT)
        assert "mask is longer" in stats_of().reason
    for short in (mask[:, 2:], torch.cat((0 * mask[:, :1], mask[:, 3:]), 1)):
        with pytest.raises(UnsupportedGenerationError, match="attention mask covers"):
            greedy("llama", inputs | {"attention_mask": short}, assistant_model=drafter)


@pytest.mark.skipif(not hasattr(hf, "DeepseekV32Config"), reason="of newer versions of transformers")
def test_layers_that_keep_more_than_keys_and_values_are_decoded_plainly() -> None:
    """An indexer chooses by keys of its own, which no draft could be taken back from."""
    sizes = {**SIZES, "num_key_value_heads": 4, "head_dim": 4}
    config = hf.DeepseekV32Config(
        **sizes, moe_intermediate_size=32, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, index_topk=6, index_n_heads=2, index_head_dim=8,
    )  # fmt: skip
    drafter = random_drafter(random_target(config), aux_layers=[1, 2, 4])
    assert_same_text(drafter.binding.model, drafter, left_padded(random_prompts(1)), loop="plain", **SHORT)
    assert "layers of kind" in drafter.stats.reason


@pytest.mark.contract
@pytest.mark.parametrize("masked", [(1, slice(5, None)), (0, 3), (1, slice(None))], ids=["right", "hole", "empty"])
def test_rows_that_are_not_padded_on_the_left_are_decoded_plainly(masked: Any) -> None:
    with seeded(3):
        ids = torch.randint(2, 96, (2, 9))
    mask = torch.ones_like(ids)
    mask[masked] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert_same_text(target_of("llama"), drafter_of("llama"), inputs, loop="plain", **SHORT)
    assert "pads behind or between tokens" in stats_of().reason


def test_batches_that_a_target_cannot_verify_are_decoded_plainly() -> None:
    """XGLM wants a mask for each row."""
    config = hf.XGLMConfig(
        vocab_size=96, d_model=64, ffn_dim=96, num_layers=4, attention_heads=4, max_position_embeddings=128,
        init_std=0.15, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    drafter = random_drafter(random_target(config), aux_layers=[1, 2, 3])
    for rows, loop in ((1, "own"), (3, "plain")):
        assert_same_text(drafter.binding.model, drafter, left_padded(random_prompts(rows)), loop=loop, **SHORT)
        assert ("self-test of a batch" in drafter.stats.reason) == (rows > 1)
