"""`cache_type`: what is asked for, what is used instead, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle31_hf.cache.quantized import CACHE_TYPES
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.settings import CACHE_TYPES as ALL_CACHE_TYPES
from eagle31_hf.settings import Eagle31GenerationConfig
from helpers import configured, drafter_of, target_of


def test_all_rooms_know_the_same_cache_types(tmp_path: Path) -> None:
    assert ("auto", *CACHE_TYPES) == ALL_CACHE_TYPES
    assert Eagle31GenerationConfig().stored_cache_type == "full"
    Eagle31GenerationConfig(cache_type="int8").save_pretrained(tmp_path)
    assert Eagle31GenerationConfig.from_pretrained(tmp_path).stored_cache_type == "int8"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_type": "int4"}, "cache_type is 'int4'"),
        ({"cache_type": None}, "cache_type is None"),
        ({"cache_type": "int8", "speculation_loop": "plain"}, "only our own loop"),
        ({"cache_type": "fp8"}, "went in 0.2.0: int8"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Eagle31GenerationConfig(**fields).check()
    with (
        configured(drafter_of("llama"), **fields) as eagle,
        pytest.raises(ConfigurationError, match=message),
    ):
        target_of("llama").generate(torch.tensor([[3, 4]]), assistant_model=eagle, max_new_tokens=2)


def test_another_loop_says_that_it_does_not_use_the_cache_type() -> None:
    with configured(drafter_of("llama"), cache_type="int8") as eagle:
        target_of("llama").generate(
            torch.tensor([[3, 4]]), assistant_model=eagle, max_new_tokens=2, cache_implementation="static"
        )
        assert eagle.stats.loop == "plain"
        assert eagle.stats.cache_type == "full"
        assert "cache_type is not used there" in eagle.stats.reason
