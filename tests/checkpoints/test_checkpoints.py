"""Checkpoints written and read again: byte for byte the same in every layout that can say what they are."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_checkpoints import (
    GROUPED_FORMATS,
    KEPT_IDS,
    LAYER_0,
    REFUSES,
    VARIANTS,
    layout,
    make,
    save,
    speculators_config,
)

from eagle31_hf.checkpoints import FORMATS, Checkpoint, inspect_checkpoint, read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.formats import COMPLETED_LAYER, HS_INDEX, SGLANG_RULE, from_hs_indices, to_hs_indices
from eagle31_hf.errors import ConfigurationError

REPOSITORY = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- round trips


def variant(name: str, format: str) -> Checkpoint:
    changes = dict(VARIANTS[name])
    if format == "nemo" and "own_lm_head" not in changes:
        changes["own_embedding"] = True  # this layout always holds one
    return make(**changes)


@pytest.mark.parametrize("format", GROUPED_FORMATS)
@pytest.mark.parametrize("name", VARIANTS)
def test_write_read_write_is_byte_identical(tmp_path, name, format):
    checkpoint = variant(name, format)
    if name in REFUSES[format]:
        with pytest.raises(ConfigurationError, match=f"the {format} format"):
            write_checkpoint(checkpoint, tmp_path / "refused", format=format)
        assert not (tmp_path / "refused").exists()
        return
    write_checkpoint(checkpoint, tmp_path / "a", format=format)
    once = read_checkpoint(tmp_path / "a")
    write_checkpoint(once, tmp_path / "b", format=format)
    twice = read_checkpoint(tmp_path / "b")
    assert once.format == twice.format == format
    assert once.config.to_dict() == twice.config.to_dict()
    assert once.metadata == twice.metadata
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    expected = checkpoint.config.to_dict() | {"dtype": "bfloat16"}
    differing = {key for key in expected if expected[key] != once.config.to_dict()[key]}
    assert differing <= {"architectures", "bos_token_id", "eos_token_id"}
    assert once.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(once.tensors[key], tensor) for key, tensor in checkpoint.tensors.items())


def test_refused_variants_are_the_listed_ones_and_the_message_names_a_way_out():
    assert set(REFUSES) == set(GROUPED_FORMATS)
    with pytest.raises(ConfigurationError, match="write it as speculators"):
        write_checkpoint(make(qk_norm=True), "never-made")
    with pytest.raises(ConfigurationError, match="wanted one of"):
        write_checkpoint(make(), "never-made", format="gguf")
    assert not Path("never-made").exists()


def test_what_is_written_plain_is_what_engines_look_for(tmp_path):
    write_checkpoint(variant("eagle31", "plain"), tmp_path)
    names = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"fc_norm.{i}.weight" for i in range(3))}
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == names | {f"midlayer.{name}" for name in LAYER_0}
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(stored["t2d"].nonzero().flatten(), KEPT_IDS)
    config = json.loads((tmp_path / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": 6,
        "vocab_size": 20,
        "draft_vocab_size": 5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": 5e5,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "fc_norm": True,
        "norm_output": True,
        "num_aux_hidden_states": 3,
    }
    assert {key: config.get(key) for key in wanted} == wanted
    assert "eagle_aux_hidden_state_layer_ids" not in config
    assert "eagle_config" not in config


@pytest.mark.parametrize(
    ("name", "vllm", "sglang"),
    [
        ("eagle3", True, True),
        ("eagle31", True, True),
        ("explicit_layers", True, True),
        ("layers_at_the_ends", True, True),
        ("layers_from_one", True, False),  # SGLang would shift a list that begins with 1
        ("norm_before_residual", True, False),
        ("four_layers", True, False),
        ("shared_head", True, True),
        ("shared_head_rows", False, False),
        ("biases", True, False),
        ("fc_bias", False, True),
    ],
)
def test_engine_verdicts_on_plain_files(tmp_path, name, vllm, sglang):
    write_checkpoint(variant(name, "plain"), tmp_path)
    verdicts = inspect_checkpoint(tmp_path).engines
    assert [verdict.reads for verdict in verdicts] == [vllm, sglang]
    assert all(verdict.reads or verdict.reasons for verdict in verdicts)


def test_conversion_leaves_foreign_markers_behind(tmp_path):
    tensors = layout("layers.0")
    read = read_checkpoint(save(tmp_path / "a", speculators_config(training_note="kept"), tensors))
    write_checkpoint(read, tmp_path / "b")
    converted = read_checkpoint(tmp_path / "b")
    assert converted.format == "plain"
    stored = json.loads((tmp_path / "b" / "config.json").read_text())
    assert not {"speculators_config", "speculators_model_type", "transformer_layer_config"} & stored.keys()
    assert stored["training_note"] == "kept"
    assert converted.config.to_dict() == read.config.to_dict()
    write_checkpoint(read, tmp_path / "c", format="speculators")
    assert read_checkpoint(tmp_path / "c").metadata == read.metadata


@given(
    hs=st.lists(st.integers(0, 80), min_size=1, max_size=5),
    convention=st.sampled_from([HS_INDEX, COMPLETED_LAYER, SGLANG_RULE]),
)
def test_layer_ids_that_can_be_written_read_back(hs, convention):
    stored = from_hs_indices(hs, convention)
    if stored is None:
        assert convention != HS_INDEX
        assert 0 in hs or (convention == SGLANG_RULE and hs[0] == 1)
    else:
        assert to_hs_indices(stored, convention) == hs
        assert min(stored) >= 0


# ---------------------------------------------------------------- documentation


def test_every_format_and_convention_is_documented():
    text = (REPOSITORY / "docs" / "formats.md").read_text()
    assert all(f"`{name}`" in text for name in FORMATS)
    assert all(convention in text for convention in (HS_INDEX, COMPLETED_LAYER, SGLANG_RULE))
