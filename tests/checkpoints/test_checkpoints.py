"""Checkpoints written and read again: byte for byte the same in every layout that can say what they are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import KEPT_IDS, LAYER_0, REFUSES, VARIANTS, make

from eagle31_hf.checkpoints import (
    FORMATS,
    WRITTEN_FORMATS,
    Checkpoint,
    inspect_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from eagle31_hf.checkpoints.layouts import COMPLETED_LAYER, HS_INDEX, SGLANG_RULE
from eagle31_hf.errors import ConfigurationError

REPOSITORY = Path(__file__).resolve().parents[2]
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = {"name_or_path": "somebody/a-target", "architectures": ["LlamaForCausalLM"]}


# ---------------------------------------------------------------- round trips


def variant(name: str) -> Checkpoint:
    return make(**VARIANTS[name])


@pytest.mark.parametrize("format", WRITTEN_FORMATS)
@pytest.mark.parametrize("name", VARIANTS)
def test_there_and_back_is_byte_identical(tmp_path, name, format):
    checkpoint = variant(name)
    if name in REFUSES[format]:
        with pytest.raises(ConfigurationError, match=f"the {format} format"):
            write_checkpoint(checkpoint, tmp_path / "refused", format=format)
        assert not (tmp_path / "refused").exists()
        return
    checkpoint.metadata["target_model"] = TARGET
    write_checkpoint(checkpoint, tmp_path / "here", format=format)
    once = read_checkpoint(tmp_path / "here")
    assert (once.format, once.metadata) == (format, {"target_model": TARGET})
    summary = inspect_checkpoint(tmp_path / "here")
    assert summary.method == ("EAGLE 3.1" if checkpoint.config.is_eagle31 else "EAGLE-3")
    stored = load_file(tmp_path / "here" / "model.safetensors").values()
    assert summary.stored_bytes == sum(tensor.nbytes for tensor in stored)
    expected = checkpoint.config.to_dict() | {"dtype": "bfloat16"}
    differing = {key for key in expected if expected[key] != once.config.to_dict()[key]}
    assert differing <= {"architectures", "bos_token_id", "eos_token_id"}
    assert once.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(once.tensors[key], tensor) for key, tensor in checkpoint.tensors.items())
    for other in [other for other in WRITTEN_FORMATS if name not in REFUSES[other]]:  # its own among them
        write_checkpoint(once, tmp_path / other, format=other)
        there = read_checkpoint(tmp_path / other)
        assert (there.format, there.metadata) == (other, once.metadata)
        assert there.config.to_dict() == once.config.to_dict()
        write_checkpoint(there, tmp_path / "back", format=format)
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / "here" / file).read_bytes() == (tmp_path / "back" / file).read_bytes()


def test_refused_variants_are_the_listed_ones_and_the_message_names_a_way_out():
    assert set(REFUSES) == set(WRITTEN_FORMATS)
    for name, way in {"qk_norm": "write it as speculators", "latent": "latent attention.*write it as mla"}.items():
        with pytest.raises(ConfigurationError, match=way):
            write_checkpoint(variant(name), "never-made")
    with pytest.raises(ConfigurationError, match="the mla format cannot express attention with keys and values"):
        write_checkpoint(variant("eagle3"), "never-made", format="mla")
    with pytest.raises(ConfigurationError, match="wanted one of mla, plain, speculators"):
        write_checkpoint(make(), "never-made", format="gguf")
    for format in set(FORMATS) - set(WRITTEN_FORMATS):
        with pytest.raises(
            ConfigurationError, match=f"--format {format} was removed in 0.2.0: .*plain, mla and speculators"
        ):
            write_checkpoint(make(), "never-made", format=format)
    assert not Path("never-made").exists()


WRITTEN = {
    "model_type": "llama", "tie_word_embeddings": False, "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 20,
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
    "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "draft_vocab_size": 5,
    "target_hidden_size": 8, "fc_norm": True, "norm_before_fc": False, "norm_output": True,
    "norm_before_residual": False, "num_aux_hidden_states": 3, "bias": False,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 5e5, "rope_scaling": None,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def test_what_is_written_plain_is_what_engines_look_for(tmp_path):
    write_checkpoint(variant("eagle31"), tmp_path)
    names = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"fc_norm.{i}.weight" for i in range(3))}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == names | {f"midlayer.{name}" for name in LAYER_0}
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(stored["t2d"].nonzero().flatten(), KEPT_IDS)
    assert json.loads((tmp_path / "config.json").read_text()) == WRITTEN


@pytest.mark.parametrize(
    ("hs", "for_sglang"),
    [([2, 18, 36], [1, 17, 35]), ([0, 18, 36], [0, 18, 36]), ([1, 18, 36], None), ([2, 0, 36], [2, 0, 36])],
)
def test_layer_ids_are_written_for_both_engines_where_both_have_words_for_them(tmp_path, hs, for_sglang):
    write_checkpoint(make(aux_layers=hs), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config[IDS] == hs
    assert config.get("eagle_config", {}).get(IDS) == for_sglang
    assert read_checkpoint(tmp_path).config.aux_layers == hs


def test_a_target_is_named_where_each_loader_looks(tmp_path):
    checkpoint = make()
    checkpoint.metadata["target_model"] = TARGET
    for format in ("plain", "speculators"):
        write_checkpoint(checkpoint, tmp_path / format, format=format)
    configs = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "speculators")}
    assert configs["plain"]["target_model"] == TARGET
    assert configs["speculators"]["speculators_config"]["verifier"] == TARGET
    assert "target_model" not in configs["speculators"]


# ---------------------------------------------------------------- documentation


def test_every_format_and_convention_is_documented():
    text = (REPOSITORY / "docs" / "formats.md").read_text()
    assert all(f"`{name}`" in text for name in FORMATS)
    assert all(convention in text for convention in (HS_INDEX, COMPLETED_LAYER, SGLANG_RULE))
