"""Every field of published `config.json` files: read, refused by name, or without effect on what a drafter computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import PLAIN, layout, save, speculators_config, with_field

from eagle31_hf.checkpoints import read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.config_json import harmless_values
from eagle31_hf.config import Eagle31Config
from eagle31_hf.errors import CheckpointFormatError

# Of each field that would change the drafter: values that leave it as it is, and one that does not.
VALUES: dict[str, tuple[list[Any], Any]] = {
    "logit_scale": ([1, 1.0], 0.0625), "logits_scaling": ([1.0], 8.0), "embedding_multiplier": ([1], 12.0),
    "residual_multiplier": ([1.0], 0.22), "attention_multiplier": ([6**-0.5], 0.0078125),
    "softmax_scale": ([6**-0.5], 1.0), "query_pre_attn_scalar": ([6, 6.0], 256),
    "final_logit_softcapping": ([], 30.0), "attn_logit_softcapping": ([], 50.0), "clip_qkv": ([], 8.0),
    "rotary_dim": ([6], 3), "rotary_pct": ([1.0], 0.25), "rope_ratio": ([1], 500), "rope_alpha": ([1.0], 1000.0),
    "rope_base": ([10000], 5e5), "rotary_base": ([10000.0], 25000), "rotary_emb_base": ([10000], 25000),
    "rope_local_base_freq": ([10000.0, 50000.0], ...), "rope_interleave": ([False], True),
    "rope_interleaved": ([False], True), "use_rope": ([True], False), "use_rotary_pos_emb": ([True], False),
    "position_embedding_type": (["rope"], "alibi"), "no_rope_layers": ([[], [1, 0]], [0, 1]),
    "mla_use_nope": ([False], True),
    "attention_chunk_size": ([0], 8192), "attn_temperature_tuning": ([False, 0], 4),
    "llama_4_scaling": ([], {"beta": 0.1}), "is_causal": ([True], False),
    "use_bidirectional_attention": ([False], True),
    "use_cla": ([False], True), "norm_type": (["rms"], "layer"), "parallel_attn": ([False], True),
    "use_parallel_residual": ([False], True), "eagle_config.use_input_layernorm_in_first_layer": ([True], False),
    "eagle_config.use_last_layernorm": ([True], False), "eagle_config.use_mtp_layernorm": ([False], True),
    "eagle_config.parallel_draft_step": ([0, 1], 2),
}  # fmt: skip


def read(folder: Path, config: dict[str, Any], first: str = "midlayer") -> dict[str, Any]:
    return read_checkpoint(save(folder, config, layout(first))).config.to_dict()


@pytest.mark.parametrize("name", VALUES)
def test_a_field_that_would_change_the_drafter_is_refused_by_name(name: str, tmp_path) -> None:
    same, other = VALUES[name]
    config = PLAIN | {"sliding_window": None}
    base = read(tmp_path / "base", config)
    for value in [None, *same]:
        assert read(tmp_path / "same", with_field(config, name, value)) == base
    if other is ...:  # only of layers with a window
        config, other = PLAIN | {"sliding_window": 7}, 50000.0
    with pytest.raises(CheckpointFormatError, match=rf"(?s)config\.json: {name} is .*can(not)? be read"):
        read(tmp_path / "other", with_field(config, name, other))
    if "." not in name:
        nested = with_field(speculators_config(), f"transformer_layer_config.{name}", other)
        nested["transformer_layer_config"] |= {"sliding_window": config.get("sliding_window")}
        with pytest.raises(CheckpointFormatError, match=name):
            read(tmp_path / "nested", nested, "layers.0")


def test_every_such_field_has_values_here() -> None:
    assert VALUES.keys() == harmless_values(Eagle31Config(sliding_window=8)).keys()


SPELLINGS = {
    "hidden_act": ("gelu", ("hidden_activation", "activation_function", "mlp_hidden_act")),
    "rms_norm_eps": (1e-3, ("norm_eps", "norm_epsilon", "layernorm_epsilon", "layer_norm_epsilon", "layer_norm_eps")),
    "num_key_value_heads": (1, ("num_kv_heads",)), "draft_vocab_size": (5, ("truncated_vocab_size",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_spellings_are_read(name: str, tmp_path) -> None:
    value, others = SPELLINGS[name]
    without = {key: entry for key, entry in PLAIN.items() if key != name}
    wanted = read(tmp_path, without | {name: value})
    assert wanted[name] == value
    assert all(read(tmp_path, without | {other: value}) == wanted for other in others)


def test_settings_of_one_value_may_stand_in_any_place(tmp_path) -> None:
    same = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": None}
    assert read(tmp_path, PLAIN | {"rope_parameters": same})["rope_parameters"]["rope_theta"] == 1e6
    rope = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    twice = {"original_max_position_embeddings": 64, "rope_scaling": rope, "eagle_config": {"head_dim": 6}}
    assert read(tmp_path, PLAIN | twice)["rope_parameters"]["original_max_position_embeddings"] == 64


LEFT_BY_A_TARGET = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "final_logit_softcapping": 30.0,
}  # fmt: skip
OF_NEMO = PLAIN | {"architectures": ["LlamaEagle3DraftModel"]} | LEFT_BY_A_TARGET


@pytest.mark.parametrize(
    ("config", "names", "left"),
    [
        (OF_NEMO, ("layers.0", "model."), LEFT_BY_A_TARGET.keys()),  # its classes ignore what the format written obeys
        (
            speculators_config(training_note="9"), ("layers.0", ""),
            {"speculators_config", "speculators_model_type", "transformer_layer_config", "auto_map", "training_note"},
        ),
    ],
)  # fmt: skip
def test_what_is_no_drafters_is_not_written_again(tmp_path, config, names, left) -> None:
    once = read_checkpoint(save(tmp_path / "a", config, layout(*names)))
    write_checkpoint(once, tmp_path / "b")
    assert not left & json.loads((tmp_path / "b" / "config.json").read_text()).keys()
    assert read_checkpoint(tmp_path / "b").config.to_dict() == once.config.to_dict()
