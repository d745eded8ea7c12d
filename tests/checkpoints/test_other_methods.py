"""Checkpoints of other methods, and what only looks like one, are called by name."""

import pytest
import torch
from tiny_checkpoints import LAYER_0, PLAIN, layout, random_tensors, save, speculators_config

from eagle31_hf.checkpoints import inspect_checkpoint, read_checkpoint
from eagle31_hf.errors import CheckpointFormatError


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
    assert any("quantization_config" in note for note in inspect_checkpoint(folder).notes)


@pytest.mark.parametrize("name", ["draft.gguf", "Draft.GGUF"])
def test_a_drafter_of_llama_cpp_is_called_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointFormatError, match=r"cannot be read here; pass the drafter it was converted from"):
        read_checkpoint(tmp_path / name)
    if name.islower():
        with pytest.raises(CheckpointFormatError, match=r"holds a GGUF file, which is llama\.cpp's"):
            inspect_checkpoint(tmp_path)
    save(tmp_path, PLAIN, layout("midlayer"))
    assert read_checkpoint(tmp_path).format == "plain", "a GGUF file beside a checkpoint is nothing to it"


def test_a_map_under_its_name_in_memory_is_read(tmp_path):
    tensors = layout("midlayer")
    renamed = {"draft_id_to_target_id" if name == "d2t" else name: tensor for name, tensor in tensors.items()}
    assert torch.equal(read_checkpoint(save(tmp_path, PLAIN, renamed)).tensors["d2t"], tensors["d2t"])
    with pytest.raises(CheckpointFormatError, match="are both d2t"):
        read_checkpoint(save(tmp_path, PLAIN, renamed | {"d2t": tensors["d2t"].clone()}))
