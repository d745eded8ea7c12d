"""Every field of published `config.json` files: read, refused by name, or without effect on what a drafter computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import PLAIN, layout, save, speculators_config, with_field

from eagle31_hf.checkpoints import FORMATS, read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.config_json import CHANGES_THE_DRAFTER
from eagle31_hf.checkpoints.layouts import OTHER_LAYER_IDS, Layout, detect_layout
from eagle31_hf.errors import CheckpointFormatError

IDS = "eagle_aux_hidden_state_layer_ids"
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
# Where another value changes neither tensors nor formulas: tokens, what the tensors tell, what was for training.
NOT_BELIEVED = {"num_hidden_layers", "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id",
                "pad_token_id", "bias", "target_model", "speculators_config.verifier"}  # fmt: skip
OF_OTHER_ATTENTION = {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "kv_lora_rank",
                      "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}  # fmt: skip
SIZES_STATED = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "vocab_size", "draft_vocab_size", "model_type"}  # fmt: skip
FLAGS = {"attention_bias", "mlp_bias", "fc_norm", "use_aux_norm", "norm_before_fc", "norm_output",
         "norm_before_residual", "eagle_config.norm_before_fc",
         "eagle_config.return_hidden_post_norm"}  # fmt: skip
# What has no effect alone comes with what it has one beside.
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {name: "gelu"} for name in ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")},
    **{name: {name: 1e-3} for name in (
        "rms_norm_eps", "norm_eps", "norm_epsilon", "layernorm_epsilon", "layer_norm_epsilon", "layer_norm_eps"
    )},
    "rope_theta": {"rope_theta": 2e4},
    "rope_scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "rope_parameters": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "original_max_position_embeddings": {
        "original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    },
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "sliding_window": {"sliding_window": 7},
    "layer_types": {"layer_types": ["sliding_attention"], "sliding_window": 7},
    "use_sliding_window": {"use_sliding_window": True, "sliding_window": 7},
    "max_window_layers": {"max_window_layers": 0, "use_sliding_window": True, "sliding_window": 7},
    **{name: {name: [1, 2, 4]} for name in (
        IDS, f"eagle_config.{IDS}", "target_layer_ids", "target_hidden_layer_ids",
        "eagle_config.target_hidden_layer_ids",
    )},
}  # fmt: skip


def read(folder: Path, config: dict[str, Any], first: str = "midlayer", prefix: str = "") -> dict[str, Any]:
    return read_checkpoint(save(folder, config, layout(first, prefix))).config.to_dict()


@pytest.mark.parametrize("name", CHANGES_THE_DRAFTER)
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
    assert VALUES.keys() == CHANGES_THE_DRAFTER.keys()


def config_of(format: str) -> dict[str, Any]:
    """A config of that format, sizes and marks only: what has a default is not stated."""
    if format == "speculators":
        config = speculators_config()
        config["transformer_layer_config"] = {
            key: value for key, value in config["transformer_layer_config"].items() if key in SIZES_STATED
        }
        return config
    config = {key: value for key, value in PLAIN.items() if key in SIZES_STATED}
    marks: dict[str, dict[str, Any]] = {
        "plain": {"architectures": ["LlamaForCausalLM"]}, "specforge": {"architectures": ["LlamaForCausalLMEagle3"]},
        "torchspec": {"_torchspec_version": "1"}, "nemo": {"architectures": ["LlamaEagle3DraftModel"]},
        "modelopt": {"eagle_config": {"use_last_layernorm": True}},
    }  # fmt: skip
    return config | marks[format]


OF_ROTATIONS_AND_WINDOWS = (
    "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor",
    "sliding_window", "layer_types", "use_sliding_window", "max_window_layers",
)  # fmt: skip


def read_places(table: Layout) -> list[str]:
    """Dotted paths of all that a layout reads, apart from what it needs to be recognised."""
    places = [path for row in table.fields for path in row.paths]
    places += [path for path, _ in (*table.layer_ids, *OTHER_LAYER_IDS)]
    return [*places, *(table.layer_config + key for key in OF_ROTATIONS_AND_WINDOWS)]


# Its sizes: tests/drafter/test_latent.py. The rest of its table is the others'.
@pytest.mark.parametrize("format", [format for format in FORMATS if format != "mla"])
def test_what_a_format_reads_is_read(format: str, tmp_path) -> None:
    """Another value anywhere is another drafter or a refusal, never the same one."""
    config = config_of(format)
    table = detect_layout(config, {})
    assert table.name == format
    names = ("layers.0", "model.") if format == "nemo" else ("layers.0", "")
    base = read(tmp_path / "base", config, *names)
    passed_over = []
    for place in read_places(table):
        name = place.removeprefix(table.layer_config)
        if name in NOT_BELIEVED or (table.ignores_the_rest and name in OF_OTHER_ATTENTION):
            continue
        changed = config
        for path, value in OTHERS.get(name, {name: not base.get(name) if name in FLAGS else 13}).items():
            path = path if path.startswith("eagle_config.") else place.removesuffix(name) + path
            changed = with_field(changed, path, value)
        try:
            same = read(tmp_path / "other", changed, *names) == base
        except CheckpointFormatError:
            continue
        passed_over += [place] if same else []
    assert not passed_over


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
