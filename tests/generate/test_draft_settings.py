"""Settings of the draft: those of the drafter and of the call are honoured, or refused by name."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import transformers as hf

from eagle31_hf import Eagle31GenerationConfig
from eagle31_hf.errors import ConfigurationError, Eagle31Error
from helpers import configured, drafter_of, one, stats_of, write


def test_number_of_assistant_tokens_is_honoured() -> None:
    """What the call asks for comes first; transformers' 20, which `generate` fills in where nothing is set, only where
    they are asked for."""
    drafter, unset = drafter_of("llama"), hf.GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=40)
    asked = hf.GenerationConfig(num_assistant_tokens=20)
    for own, how, length in (
        (1, {}, 1), (7, {}, 7), (2, {"num_assistant_tokens": 3}, 3), (3, {"num_assistant_tokens": 20}, 20),
        (3, {"generation_config": asked}, 20), (3, {"generation_config": unset}, 3),
    ):  # fmt: skip
        with configured(drafter, num_assistant_tokens=own):
            write("llama", one(), assistant_model=drafter, max_new_tokens=40, **how)
        assert len(stats_of().drafted_at) == length


def test_trees_have_the_size_asked_for_which_alone_asks_for_a_tree() -> None:
    for size, fields in ((9, {"draft_top_k": 3}), (7, {})):
        with configured(drafter_of("llama"), num_assistant_tokens=3, draft_tree_size=size, **fields) as drafter:
            write("llama", one(), assistant_model=drafter, max_new_tokens=8)
        assert 3 * stats_of().rounds < stats_of().drafted <= (size - 1) * stats_of().rounds, "more than a chain"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_assistant_tokens", 0), ("draft_top_k", 0), ("draft_tree_size", 1),
        ("speculation_loop", "fast"), ("acceleration", "warp"), ("num_assistant_tokens_schedule", "guess"),
        ("draft_min_confidence", 1.5), ("draft_min_confidence", "low"), ("prefill_chunk_size", -3),
        ("prefill_chunk_size", "four"), ("draft_top_k", True), ("draft_top_k", -1), ("draft_window", 0),
        ("draft_window", 2.5), ("draft_window", "wide"), ("draft_window", True), ("cache_type", "int2"),
        ("cache_type", None), ("speculation_loop", "stock"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_where_they_are_set(field: str, value: Any) -> None:
    config = drafter_of("llama").generation_config
    before = getattr(config, field)
    for made in (lambda: Eagle31GenerationConfig(**{field: value}), lambda: setattr(config, field, value)):
        with pytest.raises(ConfigurationError, match=field):
            made()
    assert getattr(config, field) == before


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"draft_top_k": 1, "draft_tree_size": 7}, "draft_tree_size is 7 and draft_top_k 1"),
        ({"draft_top_k": 97}, "draft_top_k is 97, more than the 96 tokens"),
        ({"cache_type": "int8", "speculation_loop": "plain"}, "only our own loop"),
    ],
)
def test_settings_that_contradict_each_other_or_the_drafter(fields: dict[str, Any], said: str) -> None:
    with configured(drafter_of("llama"), **fields) as drafter, pytest.raises(ConfigurationError, match=said):
        write("llama", one(), assistant_model=drafter)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_assistant_tokens", -1), ("num_assistant_tokens", "x"), ("prefill_chunk_size", 0), ("dola_layers", "high")],
)
def test_settings_of_a_call_that_make_no_sense(field: str, value: Any) -> None:
    """Each would have gone on silently, or died in torch."""
    with pytest.raises(Eagle31Error, match=field):
        write("llama", one(), assistant_model=drafter_of("llama"), **{field: value})


def test_fields_that_nothing_would_read_are_refused_by_name() -> None:
    config = drafter_of("llama").generation_config
    for made in (lambda: Eagle31GenerationConfig(zebra=1), lambda: setattr(config, "zebra", 4)):
        with pytest.raises(ConfigurationError, match=r"'zebra'.*our own are draft_top_k"):
            made()
    with pytest.raises(ConfigurationError, match=r"'draft_topk'.*draft_top_k"):
        config.draft_topk = 4
    assert not hasattr(config, "draft_topk")
    removed = {"draft_length_bounds": ((1, 8), "draft_length_bounds was"), "cache_type": ("fp8", "cache_type fp8 was")}
    for name, (value, said) in removed.items():
        with pytest.raises(ConfigurationError, match=rf"{said} removed in 0\.2\.0: "):
            Eagle31GenerationConfig(**{name: value})
        with pytest.raises(ConfigurationError, match=rf"{said} removed in 0\.2\.0: "):
            setattr(config, name, value)
    twin = copy.deepcopy(config)
    twin.temperature, twin.cache_type = 0.5, "int8"
    assert isinstance(twin, hf.GenerationConfig)
    again = Eagle31GenerationConfig.from_dict(twin.to_dict())
    assert (again.to_dict(), again.cache_type) == (twin.to_dict(), "int8")


def test_fields_of_version_0_1_are_ignored_with_a_line_and_refused_when_they_are_set(tmp_path, caplog) -> None:
    Eagle31GenerationConfig(draft_confidence_floor=None, draft_tree="dynamic")
    assert not caplog.records, "they were never set"
    old = {"draft_confidence_floor": 0.1, "draft_tree": "dynamic", "draft_top_k": 3, "cache_type": "int8"}
    (tmp_path / "generation_config.json").write_text(json.dumps(old))
    config = Eagle31GenerationConfig.from_pretrained(tmp_path)
    assert (config.draft_min_confidence, config.draft_top_k, config.cache_type) == (None, 3, "int8")
    renamed = "draft_confidence_floor was removed in 0.2.0: it is called draft_min_confidence"
    assert renamed in caplog.text
    config.check()
    assert "draft_confidence_floor" not in config.to_dict()
    with pytest.raises(ConfigurationError, match=renamed):
        config.draft_confidence_floor = 0.3
