"""Headers understood without transformers: the same summary as with it, or left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make

from eagle31_hf import Eagle31Config
from eagle31_hf.checkpoints import checkpoint, inspect_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.formats import FORMATS
from eagle31_hf.checkpoints.plain_config import PlainConfig, plain_config
from eagle31_hf.demo import drafter_path

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 128}  # fmt: skip


def both_ways(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Any, Any]:
    quick = inspect_checkpoint(folder)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "plain_config", lambda _: None)
        return quick, inspect_checkpoint(folder)


@pytest.mark.parametrize("layout", [name for name in FORMATS if name != "mla"])
def test_every_layout_has_the_same_summary(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(make(own_embedding=layout == "nemo"), tmp_path, format=layout)
    quick, slow = both_ways(monkeypatch, tmp_path)
    assert isinstance(quick.config, PlainConfig)
    assert quick.to_dict() == slow.to_dict()
    assert {field: getattr(slow.config, field) for field in vars(quick.config)} == vars(quick.config)


def test_the_embedded_drafter_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = both_ways(monkeypatch, drafter_path())
    assert isinstance(quick.config, PlainConfig)
    assert isinstance(slow.config, Eagle31Config)
    assert quick.to_dict() == slow.to_dict()


def test_what_is_certain_is_what_the_configuration_says() -> None:
    config, whole = plain_config(SIZES), Eagle31Config(**SIZES)
    assert config is not None
    same = {field: getattr(whole, field) for field in vars(config)}
    assert same == vars(config) | {"rope_parameters": whole.rope_parameters}
    assert config.resolve_aux_layers(32) == whole.resolve_aux_layers(32)
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = config.no_such_field


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "64"},
        {"hidden_size": True},
        {"num_attention_heads": 3},
        {"head_dim": None},
        {"vocab_size": 1 << 30},
        {"draft_vocab_size": 256},
        {"target_hidden_size": 32},
        {"hidden_act": "no-such"},
        {"aux_norm": "other"},
        {"aux_layers": [1, 2]},
        {"kv_lora_rank": 16},
        {"qk_norm": 1},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rms_norm_eps": float("nan")},
        {"unknown": 1},
    ],
)
def test_anything_else_is_left_to_it(fields: dict[str, Any]) -> None:
    assert plain_config(SIZES | fields) is None
