"""Settings of the draft: those of the drafter and of the call are honoured, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers as hf
from greedy_calls import greedy, one, stats_of

from eagle31_hf import Eagle31GenerationConfig
from eagle31_hf.errors import ConfigurationError, Eagle31Error
from helpers import configured, drafter_of


def test_number_of_assistant_tokens_is_honoured() -> None:
    drafter = drafter_of("llama")
    for depth in (1, 3, 7):
        with configured(drafter, num_assistant_tokens=depth):
            greedy("llama", one(), assistant_model=drafter)
        assert len(stats_of().drafted_at) == depth
        with configured(drafter, num_assistant_tokens=2):
            greedy("llama", one(), assistant_model=drafter, num_assistant_tokens=depth)
        assert len(stats_of().drafted_at) == depth, "what the call asks for comes first"


def test_transformers_default_is_honoured_where_it_is_asked_for() -> None:
    """20 draft tokens, which `generate` fills in where nothing is set."""
    drafter = drafter_of("llama")
    for how in ({"num_assistant_tokens": 20}, {"generation_config": hf.GenerationConfig(num_assistant_tokens=20)}):
        greedy("llama", one(), assistant_model=drafter, max_new_tokens=40, **how)
        assert len(stats_of().drafted_at) == 20
    with configured(drafter, num_assistant_tokens=3):
        greedy("llama", one(), assistant_model=drafter, max_new_tokens=40)
        assert len(stats_of().drafted_at) == 3
        settings = hf.GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=40)
        drafter.binding.model.generate(**one(), generation_config=settings, assistant_model=drafter)
        assert len(stats_of().drafted_at) == 3


def test_trees_have_the_size_asked_for() -> None:
    with configured(drafter_of("llama"), num_assistant_tokens=3, draft_top_k=3, draft_tree_size=9) as drafter:
        greedy("llama", one(), assistant_model=drafter, max_new_tokens=8)
        assert stats_of().drafted <= 8 * stats_of().rounds
        assert stats_of().drafted > 3 * stats_of().rounds, "more than a chain"


def test_a_trees_size_alone_asks_for_a_tree_and_contradicts_a_chain() -> None:
    with configured(drafter_of("llama"), num_assistant_tokens=3, draft_tree_size=7) as drafter:
        greedy("llama", one(), assistant_model=drafter, max_new_tokens=8)
        assert 3 * stats_of().rounds < stats_of().drafted <= 6 * stats_of().rounds
    with (
        configured(drafter_of("llama"), draft_top_k=1, draft_tree_size=7) as drafter,
        pytest.raises(ConfigurationError, match="draft_tree_size is 7 and draft_top_k 1"),
    ):
        greedy("llama", one(), assistant_model=drafter)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_assistant_tokens", 0), ("draft_top_k", 0), ("draft_tree_size", 1),
        ("speculation_loop", "fast"), ("acceleration", "warp"), ("num_assistant_tokens_schedule", "guess"),
        ("draft_min_confidence", 1.5), ("draft_min_confidence", "low"), ("prefill_chunk_size", -3),
        ("prefill_chunk_size", "four"), ("draft_top_k", 97), ("draft_top_k", True),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(field: str, value: Any) -> None:
    with configured(drafter_of("llama"), **{field: value}) as drafter, pytest.raises(ConfigurationError, match=field):
        greedy("llama", one(), assistant_model=drafter)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_assistant_tokens", -1), ("num_assistant_tokens", "x"), ("prefill_chunk_size", 0), ("dola_layers", "high")],
)
def test_settings_of_a_call_that_make_no_sense(field: str, value: Any) -> None:
    """Each would have gone on silently, or died in torch."""
    with pytest.raises(Eagle31Error, match=field):
        greedy("llama", one(), assistant_model=drafter_of("llama"), **{field: value})


def test_fields_that_nothing_would_read_are_refused_by_name() -> None:
    config = drafter_of("llama").generation_config
    with pytest.raises(ConfigurationError, match=r"'draft_topk'.*draft_top_k"):
        config.draft_topk = 4
    with pytest.raises(ConfigurationError, match=r"'zebra'.*our own are draft_top_k"):
        Eagle31GenerationConfig(zebra=1)
    assert not hasattr(config, "draft_topk")
    twin = copy.deepcopy(config)
    twin.temperature = 0.5
    assert Eagle31GenerationConfig.from_dict(twin.to_dict()).to_dict() == twin.to_dict()


def test_a_loop_that_went_says_what_to_do() -> None:
    with (
        configured(drafter_of("llama"), speculation_loop="stock") as drafter,
        pytest.raises(ConfigurationError, match=r"speculation_loop stock went in 0.2.0: leave it at 'auto'"),
    ):
        greedy("llama", one(), assistant_model=drafter)


def test_settings_are_a_generation_config() -> None:
    config = Eagle31GenerationConfig(num_assistant_tokens=5, draft_top_k=4)
    assert isinstance(config, hf.GenerationConfig)
    assert (config.num_assistant_tokens, config.draft_top_k) == (5, 4)
    config.check()


def test_a_field_that_went_is_answered_with_what_to_do_instead() -> None:
    for given in (lambda: Eagle31GenerationConfig(draft_length_bounds=(1, 8)),
                  lambda: setattr(Eagle31GenerationConfig(), "draft_length_bounds", (1, 8))):  # fmt: skip
        with pytest.raises(ConfigurationError, match=r"draft_length_bounds went in 0\.2\.0: "):
            given()
