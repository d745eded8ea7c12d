"""Every field of published `config.json` files: read, refused by name, or without effect on what a drafter computes.

And checkpoints of other methods, and what only looks like one: they are called by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import (
    LAYER_0,
    PLAIN,
    SPECFORGE,
    layout,
    random_tensors,
    save,
    speculators_config,
    with_field,
)

from eagle31_hf.checkpoints import inspect_checkpoint, read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.config_json import harmless_values
from eagle31_hf.config import Eagle31Config
from eagle31_hf.errors import CheckpointError, CheckpointFormatError

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


def test_layer_ids_are_shown_as_they_are_stored(tmp_path) -> None:
    fields = {"target_layer_ids": [1, 9, 17]}
    summary = inspect_checkpoint(save(tmp_path, SPECFORGE | fields, layout("midlayer")))
    assert (summary.config.aux_layers, summary.aux_layers_as_stored) == ([2, 10, 18], fields)


def test_speculators_metadata_and_what_is_left_of_its_training(tmp_path) -> None:
    config = speculators_config(eagle_aux_hidden_state_layer_ids=[1, 9, 36], norm_before_fc=True)
    tensors = layout("layers.0", input_norm__weight=(24,), embed_tokens__weight=(20, 8), verifier_norm__weight=(8,))
    checkpoint = read_checkpoint(save(tmp_path, config, tensors))
    assert checkpoint.metadata == {"target_model": config["speculators_config"]["verifier"]}
    assert "verifier_norm.weight" not in checkpoint.tensors


# --- other methods ----------------------------------------------------------------------------------------------------


def eagle_1() -> dict[str, torch.Tensor]:
    shapes = {f"layers.0.{name}": shape for name, shape in LAYER_0.items() if "norm" not in name}
    return random_tensors(shapes | {"fc.weight": (8, 16), "layers.0.post_attention_layernorm.weight": (8,)})


def block_diffusion(norm: str) -> dict[str, torch.Tensor]:
    """A drafter whose layers read noise as wide as they are, states of the target being their context."""
    layer = {f"layers.0.self_attn.{p}_proj.weight": (8, 8) for p in "qkvo"}
    return random_tensors(layer | {"fc.weight": (8, 40), f"{norm}.weight": (8,)})


QUANTISED = {"quantization_config": {"quant_method": "fp8"}}


def in_8_bits(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = layout("midlayer")
    return tensors | {name: tensors[name].to(dtype)}


WHOLE_MODEL = random_tensors({f"model.layers.{n}.{name}": s for n in (0, 1) for name, s in LAYER_0.items() if "hidden_norm" not in name})  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, eagle_1(), "EAGLE-1/2"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, layout("midlayer"), "EAGLE-1/2"),
        ({"architectures": ["LlamaForCausalLM"]}, WHOLE_MODEL, "whole language model"),
        ({}, {"backbone.layers.0.mixer.in_proj.weight": torch.ones(8, 8)}, "whole language model"),
        ({}, {"blocks.0.layers.0.weight": torch.ones(8, 8), "lm_heads.0.weight": torch.ones(20, 8)}, "no drafter that"),
        ({}, {f"{part}_projection.weight": torch.ones(8, 8) for part in ("pre", "post")}, "transformers runs itself"),
        ({"model_type": "gemma4_assistant"}, WHOLE_MODEL, "transformers runs itself.*pass it as assistant_model="),
        ({"architectures": ["Qwen3AssistantForCausalLM"]}, WHOLE_MODEL, "transformers runs itself"),
        ({"architectures": ["DFlashDraftModel"]}, layout("layers.0"), "DFlash"),
        ({}, block_diffusion("norm"), "DFlash"),
        ({}, block_diffusion("hidden_norm"), "DFlash"),
        ({}, layout("layers.0") | {"layers.0.pre_feedforward_layernorm.weight": torch.ones(8)}, "another decoder"),
        ({}, layout("layers.0") | {"layers.0.self_attn.g_proj.weight": torch.ones(8, 8)}, "another decoder"),
        ({"architectures": ["BertModel"]}, {"embeddings.weight": torch.ones(8, 8)},
         r"no drafter that is known here \(its tensors: embeddings.weight; its architecture: BertModel\)"),
        ({"architectures": ["DeepSeekMTPModel"]}, layout("layers.0"), "multi-token-prediction"),
        ({}, {"model.layers.61.eh_proj.weight": torch.ones(8, 16)}, "multi-token-prediction"),
        ({"parallel_drafting": True}, layout("layers.0"), "P-EAGLE.*in one pass from mask tokens.*serve it with vLLM"),
        ({"ptd_token_id": 19}, layout("layers.0"), "P-EAGLE"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, layout("layers.0"), "P-EAGLE"),
        (speculators_config(speculators_model_type="peagle"), layout("layers.0"), "P-EAGLE"),
        (speculators_config("qwen3"), layout("layers.0"), r"missing: .*k_norm"),  # whose layers have it
        ({}, layout("midlayer") | {"mask_hidden": torch.ones(1, 24)}, "P-EAGLE"),
        ({}, layout("midlayer") | {"midlayer.mlp.experts.0.up_proj.weight": torch.ones(4, 8)}, "another decoder"),
        ({}, layout("midlayer") | {"midlayer.mlp.gate.weight": torch.ones(4, 8)}, "another decoder"),
        ({}, layout("midlayer") | {"midlayer.mlp.router.weight": torch.ones(4, 8)}, "another decoder"),
        (QUANTISED, in_8_bits("midlayer.mlp.up_proj.weight", torch.int8), "quantised"),
        (QUANTISED, in_8_bits("midlayer.mlp.up_proj.weight", torch.float8_e4m3fn), "quantised"),
        (QUANTISED, layout("midlayer") | {"midlayer.mlp.up_proj.weight_scale": torch.ones(12)}, "quantised"),
    ],
)  # fmt: skip
def test_other_methods_are_called_by_name(tmp_path, config, tensors, message):
    with pytest.raises(CheckpointFormatError, match=message):
        read_checkpoint(save(tmp_path, PLAIN | config, tensors))


@pytest.mark.parametrize(
    "left_over",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        {"quant_method": "compressed-tensors", "ignore": ["re:.*"], "config_groups": {}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_float_weights_beside_the_targets_quantization_config_are_read(tmp_path, left_over, file):
    """Trainers that start from the target's config leave its `quantization_config` there."""
    folder = save(tmp_path, PLAIN | {"quantization_config": left_over}, layout("midlayer"), file)
    assert torch.equal(read_checkpoint(folder).tensors["fc.weight"], layout("midlayer")["fc.weight"])


def test_a_drafter_of_llama_cpp_is_called_by_name(tmp_path):
    file = tmp_path / "draft.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        with pytest.raises(CheckpointError, match="a GGUF file cannot be read"):
            read_checkpoint(path)
    save(tmp_path, PLAIN, layout("midlayer"))
    assert read_checkpoint(tmp_path).format == "plain", "a GGUF file beside a checkpoint is nothing to it"


def test_a_map_under_its_name_in_memory_is_read(tmp_path):
    tensors = layout("midlayer")
    renamed = {"draft_id_to_target_id" if name == "d2t" else name: tensor for name, tensor in tensors.items()}
    assert torch.equal(read_checkpoint(save(tmp_path, PLAIN, renamed)).tensors["d2t"], tensors["d2t"])
    with pytest.raises(CheckpointFormatError, match="are both d2t"):
        read_checkpoint(save(tmp_path, PLAIN, renamed | {"d2t": tensors["d2t"].clone()}))
