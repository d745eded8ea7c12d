"""Checkpoints: published layouts written down by hand, round trips, and everything that must be refused."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eagle31_hf.checkpoints import (
    FORMATS,
    Checkpoint,
    expected_shapes,
    inspect_checkpoint,
    read_checkpoint,
    resolve_checkpoint,
    write_checkpoint,
)
from eagle31_hf.checkpoints.formats import COMPLETED_LAYER, HS_INDEX, SGLANG_RULE, from_hs_indices, to_hs_indices
from eagle31_hf.configuration_eagle31 import Eagle31Config
from eagle31_hf.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConfigurationError,
    Eagle31Error,
    UnsafeCheckpointError,
)
from helpers import SHARED

REPOSITORY = Path(__file__).resolve().parents[2]

# One tiny drafter, spelled out: H = Ht = 8, 2 query heads and 1 key head of width 6, MLP 12, V = 20, Vd = 5, A = 3.
LAYER_0 = {
    "hidden_norm.weight": (8,),
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (12, 16),
    "self_attn.k_proj.weight": (6, 16),
    "self_attn.v_proj.weight": (6, 16),
    "self_attn.o_proj.weight": (8, 12),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}
KEPT_IDS = torch.tensor([0, 1, 5, 6, 19])
D2T = torch.tensor([0, 0, 3, 3, 15])
LLAMA = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "vocab_size": 20,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}


def t2d() -> torch.Tensor:
    mask = torch.zeros(20, dtype=torch.bool)
    mask[KEPT_IDS] = True
    return mask


def random_tensors(shapes: dict, dtype=torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def layout(first_layer: str, wrapper: str = "", **more: tuple) -> dict[str, torch.Tensor]:
    """Stored tensors of the tiny drafter, `d2t` and `t2d` included."""
    shapes = {f"{wrapper}fc.weight": (8, 24), f"{wrapper}norm.weight": (8,), "lm_head.weight": (5, 8)}
    shapes |= {f"{wrapper}{first_layer}.{name}": shape for name, shape in LAYER_0.items()}
    shapes |= {name.replace("__", "."): shape for name, shape in more.items()}
    return random_tensors(shapes) | {"d2t": D2T.clone(), "t2d": t2d()}


def save(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


SAFEAILAB = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 5, **LLAMA}
PLAIN = SAFEAILAB | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "num_aux_hidden_states": 3,
    "tie_word_embeddings": False,
}
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 5, **LLAMA}


# ---------------------------------------------------------------- published layouts


@pytest.mark.parametrize(
    ("name", "method", "aux_norm"), [("eagle31", "EAGLE 3.1", "per_slot"), ("eagle3", "EAGLE-3", "none")]
)
def test_reads_the_trained_demo_drafters(name, method, aux_norm):
    folder = SHARED / "models" / f"demo-drafter-{name}"
    checkpoint, summary = read_checkpoint(folder), inspect_checkpoint(folder)
    config = checkpoint.config
    assert (config.hidden_size, config.vocab_size, config.draft_vocab_size) == (256, 8192, 4096)
    assert (config.aux_norm, config.norm_output, config.num_hidden_layers) == (aux_norm, name == "eagle31", 1)
    assert checkpoint.format == "plain"
    assert checkpoint.tensors["d2t"].dtype == torch.int64
    assert checkpoint.tensors["fc.weight"].dtype == config.dtype == torch.bfloat16
    assert {n: tuple(t.shape) for n, t in checkpoint.tensors.items()} == expected_shapes(config)
    assert summary.method == method
    assert [verdict.reads for verdict in summary.engines] == [True, True]
    assert summary.stored_bytes == sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    json.dumps(summary.to_dict())


def test_safeailab_pickle_with_an_untrustworthy_layer_count_and_no_rope(tmp_path):
    stored = layout("midlayer")
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in stored.items()}
    folder = save(tmp_path, SAFEAILAB | {"num_hidden_layers": 40}, tensors, "pytorch_model.bin")
    checkpoint = read_checkpoint(folder)
    assert checkpoint.format == "plain"
    assert checkpoint.config.num_hidden_layers == 1
    assert checkpoint.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert checkpoint.config.head_dim == 6
    assert not checkpoint.config.norm_before_residual
    assert not checkpoint.config.own_embedding
    assert torch.equal(
        checkpoint.tensors["layers.0.self_attn.q_proj.weight"], tensors["midlayer.self_attn.q_proj.weight"]
    )
    vllm, sglang = inspect_checkpoint(folder).engines
    assert any("num_hidden_layers 40" in reason for reason in vllm.reasons)
    assert any("architecture" in reason for reason in sglang.reasons)


def test_nebius_names_and_int32_map(tmp_path):
    config = {key: value for key, value in SAFEAILAB.items() if key != "draft_vocab_size"}
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    tensors = layout("midlayer") | {"d2t": D2T.int()}
    folder = save(tmp_path, config | {"truncated_vocab_size": 5, "rope_scaling": rope, "rope_theta": 5e5}, tensors)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config.draft_vocab_size == 5
    assert checkpoint.tensors["d2t"].dtype == torch.int64
    assert checkpoint.config.rope_parameters["rope_type"] == "yarn"
    assert checkpoint.config.rope_parameters["rope_theta"] == 5e5
    assert not any(verdict.reads for verdict in inspect_checkpoint(folder).engines)


@pytest.mark.parametrize(("stored", "meant"), [([1, 17, 33], [2, 18, 34]), ([2, 30, 58], [2, 30, 58])])
def test_specforge_layer_ids_follow_the_first_id(tmp_path, stored, meant):
    config = SPECFORGE | {"num_hidden_layers": 36, "eagle_config": {"eagle_aux_hidden_state_layer_ids": stored}}
    checkpoint = read_checkpoint(save(tmp_path, config, layout("midlayer")))
    assert (checkpoint.format, checkpoint.config.aux_layers) == ("specforge", meant)
    summary = inspect_checkpoint(tmp_path)
    assert summary.aux_layers_as_stored == {"eagle_config.eagle_aux_hidden_state_layer_ids": stored}
    assert any("near chance" in note for note in summary.notes)


@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
def test_specforge_eagle_31_with_legacy_norm_names(tmp_path, prefix):
    tensors = layout(prefix, aux_norm_low__weight=(8,), aux_norm_mid__weight=(8,), aux_norm_high__weight=(8,))
    checkpoint = read_checkpoint(save(tmp_path, SPECFORGE | {"use_aux_norm": True, "norm_output": True}, tensors))
    assert checkpoint.config.is_eagle31
    for slot, name in enumerate(("low", "mid", "high")):
        assert torch.equal(checkpoint.tensors[f"fc_norm.{slot}.weight"], tensors[f"aux_norm_{name}.weight"])


def test_specforge_norm_output_alone_is_called_doubtful(tmp_path):
    folder = save(tmp_path, SPECFORGE | {"norm_output": True}, layout("midlayer"))
    assert read_checkpoint(folder).config.norm_output
    assert any("#879" in note for note in inspect_checkpoint(folder).notes)


def speculators_config(model_type: str = "llama", **top) -> dict:
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {**LLAMA, "model_type": model_type, "num_hidden_layers": 1, "rope_theta": 1e6},
        "draft_vocab_size": 5,
        "target_hidden_size": None,
        **top,
    }


def test_speculators_defaults_and_metadata(tmp_path):
    config = speculators_config(eagle_aux_hidden_state_layer_ids=[1, 9, 36], norm_before_fc=True, norm_output=True)
    tensors = layout("layers.0", input_norm__weight=(24,), embed_tokens__weight=(20, 8), verifier_norm__weight=(8,))
    checkpoint = read_checkpoint(save(tmp_path, config, tensors))
    assert checkpoint.format == "speculators"
    assert checkpoint.config.norm_before_residual  # the default when the file is silent
    assert checkpoint.config.aux_norm == "concatenated"
    assert checkpoint.config.aux_layers == [1, 9, 36]
    assert checkpoint.config.own_embedding
    assert checkpoint.config.rope_parameters["rope_theta"] == 1e6
    assert checkpoint.metadata["target_model"]["name_or_path"] == "Qwen/Qwen3-8B"
    assert "auto_map" not in checkpoint.metadata
    assert "verifier_norm.weight" not in checkpoint.tensors


def test_speculators_qwen3_has_head_norms(tmp_path):
    norms = {"layers__0__self_attn__q_norm__weight": (6,), "layers__0__self_attn__k_norm__weight": (6,)}
    config = speculators_config("qwen3", norm_before_residual=False)
    assert read_checkpoint(save(tmp_path / "whole", config, layout("layers.0", **norms))).config.qk_norm
    with pytest.raises(CheckpointFormatError, match=r"missing: .*k_norm"):
        read_checkpoint(save(tmp_path / "bare", config, layout("layers.0")))


@pytest.mark.parametrize(("stored", "meant"), [([24, 30, 36], [24, 30, 36]), ([1, 17, 32], [2, 18, 33]), ([], None)])
def test_modelopt_with_a_shared_head(tmp_path, stored, meant):
    tensors = layout("midlayer")
    for name in ("d2t", "t2d", "lm_head.weight"):
        del tensors[name]
    tensors["hidden_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    tensors["input_embeds_norm.weight"] = tensors.pop("midlayer.input_layernorm.weight")
    eagle_config = {
        "eagle_aux_hidden_state_layer_ids": stored,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
    }
    config = SAFEAILAB | {"draft_vocab_size": None, "eagle_config": eagle_config}
    checkpoint = read_checkpoint(save(tmp_path, config, tensors))
    assert (checkpoint.format, checkpoint.config.aux_layers) == ("modelopt", meant)
    assert not checkpoint.config.own_lm_head
    assert checkpoint.config.draft_vocab_size == 20
    config["eagle_config"]["use_last_layernorm"] = False
    with pytest.raises(CheckpointFormatError, match="use_last_layernorm is False"):
        read_checkpoint(save(tmp_path, config, tensors))


def test_torchspec_ids_are_completed_layers(tmp_path):
    config = PLAIN | {"_torchspec_version": "0.1.0", "eagle_aux_hidden_state_layer_ids": [5, 20, 30]}
    checkpoint = read_checkpoint(save(tmp_path, config, layout("layers.0", embed_tokens__weight=(20, 8))))
    assert (checkpoint.format, checkpoint.config.aux_layers) == ("torchspec", [6, 21, 31])
    vllm, _ = inspect_checkpoint(tmp_path).engines
    assert any("[5, 20, 30]" in reason for reason in vllm.reasons)


def test_nemo_model_prefix(tmp_path):
    tensors = layout("layers.0", "model.", model__embed_tokens__weight=(20, 8))
    tensors |= random_tensors({f"model.fc_norm.{slot}.weight": (8,) for slot in range(3)})
    config = PLAIN | {"architectures": ["LlamaEagle3DraftModel"], "fc_norm": True, "norm_output": True}
    checkpoint = read_checkpoint(save(tmp_path, config, tensors))
    assert checkpoint.format == "nemo"
    assert checkpoint.config.is_eagle31
    assert torch.equal(checkpoint.tensors["norm.weight"], tensors["model.norm.weight"])
    assert not any(verdict.reads for verdict in inspect_checkpoint(tmp_path).engines)


def test_sglang_further_layers_and_a_wider_target(tmp_path):
    tensors = layout("midlayer", embed_tokens__weight=(20, 8)) | {"fc.weight": torch.randn(8, 30)}
    second = {name: shape for name, shape in LAYER_0.items() if name != "input_layernorm.weight"}
    second |= {f"self_attn.{p}_proj.weight": (rows, 8) for p, rows in (("q", 12), ("k", 6), ("v", 6))}
    tensors |= random_tensors({f"layers.1.{name}": shape for name, shape in second.items()})
    checkpoint = read_checkpoint(save(tmp_path, PLAIN | {"target_hidden_size": 10, "num_hidden_layers": 2}, tensors))
    assert checkpoint.config.num_hidden_layers == 2
    assert checkpoint.config.target_hidden_size == 10
    assert torch.equal(checkpoint.tensors["layers.1.input_layernorm.weight"], tensors["layers.1.hidden_norm.weight"])
    assert "layers.1.hidden_norm.weight" not in checkpoint.tensors


def test_an_identity_map_of_the_whole_vocabulary_is_dropped(tmp_path):
    tensors = layout("midlayer", lm_head__weight=(20, 8))
    identity = {"d2t": torch.zeros(20, dtype=torch.int64), "t2d": torch.ones(20, dtype=torch.bool)}
    folder = save(tmp_path, PLAIN | {"draft_vocab_size": 20}, tensors | identity)
    assert "d2t" not in read_checkpoint(folder).tensors
    save(tmp_path, PLAIN | {"draft_vocab_size": 20}, tensors | {"d2t": torch.ones(20, dtype=torch.int64)})
    with pytest.raises(CheckpointFormatError, match="no identity map"):
        read_checkpoint(folder)


def test_dtype_is_converted_but_not_the_map(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, PLAIN, layout("midlayer")), dtype=torch.bfloat16)
    kinds = {tensor.dtype for name, tensor in checkpoint.tensors.items() if name != "d2t"}
    assert kinds == {torch.bfloat16} == {checkpoint.config.dtype}
    assert checkpoint.tensors["d2t"].dtype == torch.int64


def test_new_and_legacy_rope_mean_the_same(tmp_path):
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    legacy = PLAIN | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}}
    new = PLAIN | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **llama3}, "rope_theta": 1e4}
    ropes = [read_checkpoint(save(tmp_path, c, layout("midlayer"))).config.rope_parameters for c in (legacy, new)]
    assert ropes[0] == ropes[1]
    assert ropes[0]["rope_theta"] == 5e5


# ---------------------------------------------------------------- round trips

BASE = {**LLAMA, "draft_vocab_size": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
VARIANTS = {
    "eagle3": {},
    "eagle31": {"aux_norm": "per_slot", "norm_output": True},
    "concatenated": {"aux_norm": "concatenated", "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "wider_target": {"target_hidden_size": 10, "own_embedding": True},
    "four_layers": {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8},
    "qk_norm": {"qk_norm": True},
    "full_vocabulary": {"draft_vocab_size": 20},
    "own_embedding": {"own_embedding": True},
    "shared_head": {"draft_vocab_size": 20, "own_lm_head": False},
    "shared_head_rows": {"own_lm_head": False},
    "explicit_layers": {"aux_layers": [2, 18, 36]},
    "layers_at_the_ends": {"aux_layers": [0, 18, 36]},
    "layers_from_one": {"aux_layers": [1, 18, 36]},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "fc_bias": {"fc_bias": True},
    "four_aux_states": {"num_aux_hidden_states": 4, "aux_layers": [2, 9, 18, 33]},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
        }
    },
}
PLAIN_SAYS_ALL_BUT = {"qk_norm"}
GROUPED_FORMATS = [name for name in FORMATS if name != "mla"]  # that one has a network of its own: test_latent.py
REFUSES = {
    "plain": PLAIN_SAYS_ALL_BUT,
    "speculators": {"wider_target", "shared_head", "shared_head_rows", "fc_bias"},
    "specforge": {"concatenated", "norm_before_residual", "four_layers", "qk_norm", "shared_head", "shared_head_rows",
                  "layers_from_one", "biases", "fc_bias"},
    "torchspec": {"concatenated", "norm_before_residual", "four_layers", "qk_norm", "shared_head", "shared_head_rows",
                  "layers_at_the_ends", "biases", "fc_bias"},
    "modelopt": {"eagle31", "concatenated", "norm_before_residual", "wider_target", "qk_norm", "shared_head_rows",
                 "layers_from_one", "fc_bias"},
    "nemo": {"concatenated", "norm_before_residual", "four_layers", "qk_norm", "shared_head", "shared_head_rows",
             "layers_at_the_ends", "fc_bias"},
}  # fmt: skip


def make(**changes) -> Checkpoint:
    config = Eagle31Config(**{**BASE, **changes})
    tensors = random_tensors(expected_shapes(config), torch.bfloat16)
    if "d2t" in tensors:
        tensors["d2t"] = D2T.clone()
    return Checkpoint(config, tensors)


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


# ---------------------------------------------------------------- refusals

IDS = "eagle_aux_hidden_state_layer_ids"


def mutated(**changes) -> dict[str, torch.Tensor]:
    tensors = layout("midlayer")
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (mutated(fc__weight=None), r"missing: fc\.weight"),
        (mutated(midlayer__hidden_norm__weight=None), r"missing: layers\.0\.hidden_norm\.weight"),
        (mutated(d2t=None, t2d=None), "missing: d2t"),
        (mutated(extra__weight=torch.ones(2)), r"spare: extra\.weight"),
        (mutated(fc_norm__0__weight=torch.ones(8)), r"lack fc_norm: true"),
        (mutated(norm__weight=torch.ones(9)), r"norm\.weight is \[9\], wanted \[8\]"),
        (mutated(norm__weight=torch.ones(8, dtype=torch.int8)), "norm.weight has dtype int8"),
        (mutated(norm__weight=torch.full((8,), float("nan"))), r"NaN or infinite values in norm\.weight"),
        (mutated(midlayer__mlp__up_proj__weight=torch.full((12, 8), float("inf"))), r"values in layers\.0\.mlp\.up"),
        (mutated(d2t=KEPT_IDS.clone()), "absolute target ids"),
        (mutated(d2t=KEPT_IDS.clone(), t2d=None), "absolute target ids"),
        (mutated(d2t=torch.tensor([0, 0, 3, 3, 16]), t2d=None), "no vocabulary map"),
        (mutated(d2t=torch.tensor([0, -1, 3, 3, 15]), t2d=None), "1 repeated"),
        (mutated(d2t=torch.tensor([0, 0, 3, 3, 14])), "t2d disagrees with d2t"),
        (mutated(t2d=torch.ones(19, dtype=torch.bool)), r"t2d is \[19\], wanted \[20\]"),
        (mutated(**{"layers__0__hidden_norm__weight": torch.ones(8)}), "are both layers.0.hidden_norm.weight"),
    ],
)
def test_unsound_tensors_are_named(tmp_path, tensors, message):
    with pytest.raises(CheckpointFormatError, match=message):
        read_checkpoint(save(tmp_path, PLAIN, tensors))


def test_all_missing_and_spare_tensors_are_listed_at_once(tmp_path):
    tensors = mutated(fc__weight=None, norm__weight=None, other=torch.ones(1), more=torch.ones(1))
    with pytest.raises(CheckpointFormatError, match=r"missing: fc\.weight, norm\.weight; spare: more, other"):
        inspect_checkpoint(save(tmp_path, PLAIN, tensors))


def eagle_1() -> dict[str, torch.Tensor]:
    shapes = {f"layers.0.{name}": shape for name, shape in LAYER_0.items() if "norm" not in name}
    return random_tensors(shapes | {"fc.weight": (8, 16), "layers.0.post_attention_layernorm.weight": (8,)})


WHOLE_MODEL = random_tensors({f"model.layers.{n}.{name}": s for n in (0, 1) for name, s in LAYER_0.items() if "hidden_norm" not in name})  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, eagle_1(), "EAGLE-1/2"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, layout("midlayer"), "EAGLE-1/2"),
        ({"architectures": ["LlamaForCausalLM"]}, WHOLE_MODEL, "whole language model"),
        ({}, {"0.0.linear.weight": torch.ones(8, 8), "0.1.weight": torch.ones(20, 8)}, "Medusa"),
        ({"medusa_num_heads": 3}, layout("midlayer"), "Medusa"),
        ({"hydra_num_heads": 3}, layout("midlayer"), "Hydra"),
        ({"architectures": ["DFlashDraftModel"]}, layout("layers.0"), "DFlash"),
        ({"target_layer_ids": [1, 9, 17]}, layout("layers.0"), "DFlash"),
        ({"architectures": ["DeepSeekMTPModel"]}, layout("layers.0"), "multi-token-prediction"),
        ({}, {"model.layers.61.eh_proj.weight": torch.ones(8, 16)}, "multi-token-prediction"),
        ({"parallel_drafting": True}, layout("layers.0"), "P-EAGLE.*in one pass from mask tokens.*serve it with vLLM"),
        ({"ptd_token_id": 19}, layout("layers.0"), "P-EAGLE"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, layout("layers.0"), "P-EAGLE"),
        (speculators_config(speculators_model_type="peagle"), layout("layers.0"), "P-EAGLE"),
        ({}, layout("midlayer") | {"mask_hidden": torch.ones(1, 24)}, "P-EAGLE"),
        ({"quantization_config": {"quant_method": "fp8"}}, layout("midlayer"), "quantised"),
    ],
)
def test_other_methods_are_called_by_name(tmp_path, config, tensors, message):
    with pytest.raises(CheckpointFormatError, match=message):
        read_checkpoint(save(tmp_path, PLAIN | config, tensors))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": None}, r"lacks \['hidden_size'\]"),
        ({"hidden_size": "eight"}, "no possible drafter"),
        ({"draft_vocab_size": 21}, "no possible drafter.*larger than vocab_size"),
        ({"num_attention_heads": 0, "head_dim": None}, "no possible drafter"),
        ({"rope_scaling": "yarn"}, "rope is 'yarn'"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"fc_norm": True, "norm_before_fc": True}, "both fc_norm and norm_before_fc"),
        ({"fc_norm": True}, r"missing: fc_norm\.0\.weight"),
        ({IDS: [2, 5]}, "no possible drafter.*aux_layers"),
        ({IDS: "2,5,9"}, "wanted a list of layer ids"),
        ({IDS: [1, 5, 9], "eagle_config": {IDS: [1, 5, 9]}}, "different target layers in two places"),
        ({"eagle_config": 3}, "eagle_config is of the wrong kind"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is of the wrong kind"),
        ({"target_hidden_size": 10}, "no possible drafter.*own_embedding"),
    ],
)  # fmt: skip
def test_contradictory_configs_are_refused(tmp_path, config, message):
    with pytest.raises(CheckpointFormatError, match=message):
        read_checkpoint(save(tmp_path, PLAIN | config, layout("midlayer")))


ODD = st.one_of(st.none(), st.booleans(), st.integers(-3, 50), st.floats(), st.text(max_size=3), st.just([1]), st.just({"a": 1}))  # fmt: skip  # noqa: E501


@settings(max_examples=80, deadline=None)
@given(key=st.sampled_from(sorted({*PLAIN, "eagle_config", "rope_scaling", "rope_parameters", "fc_norm"})), value=ODD)
def test_a_wrong_config_entry_is_read_or_refused_but_never_crashes(tmp_path_factory, key, value):
    folder = tmp_path_factory.getbasetemp() / "odd"
    save(folder, PLAIN | {key: value}, layout("midlayer"))
    try:
        checkpoint = read_checkpoint(folder)
    except Eagle31Error:
        return
    assert {name: tuple(t.shape) for name, t in checkpoint.tensors.items()} == expected_shapes(checkpoint.config)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 3000), flip=st.integers(0, 400), bit=st.integers(0, 255))
def test_truncated_or_altered_headers_never_load(tmp_path_factory, cut, flip, bit):
    folder = tmp_path_factory.getbasetemp() / "altered"
    whole = save(folder, PLAIN, layout("midlayer")) / "model.safetensors"
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) - 1 - cut % (len(content) - 1)])
    with pytest.raises(CheckpointFormatError, match="damaged"):
        read_checkpoint(folder)
    whole.write_bytes(content[:flip] + bytes([bit]) + content[flip + 1 :])
    try:
        checkpoint = read_checkpoint(folder)
    except Eagle31Error:
        return
    assert {name: tuple(t.shape) for name, t in checkpoint.tensors.items()} == expected_shapes(checkpoint.config)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 not a zip"])
def test_damaged_pickles(tmp_path, content):
    save(tmp_path, PLAIN, {}, "pytorch_model.bin")
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="damaged"):
        read_checkpoint(tmp_path)


class Payload:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("how", ["torch", "bare pickle", "old torch"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, how):
    proof, file = tmp_path / "ran", tmp_path / "pytorch_model.bin"
    content = layout("midlayer") | {"fc.weight": Payload(proof)}
    save(tmp_path, PLAIN, {}, "pytorch_model.bin")
    if how == "bare pickle":
        file.write_bytes(pickle.dumps(content["fc.weight"]))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=how == "torch")
    for use in (read_checkpoint, inspect_checkpoint):
        with pytest.raises(UnsafeCheckpointError, match="nothing was run"):
            use(tmp_path)
    assert not proof.exists()
    torch.load(file, weights_only=False) if how != "bare pickle" else pickle.loads(file.read_bytes())
    assert proof.exists()  # the payload is live: only the refusal kept it still


def test_old_style_pickle_of_tensors_is_read_and_other_content_is_not(tmp_path):
    tensors = layout("midlayer")
    save(tmp_path, PLAIN, {}, "pytorch_model.bin")
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read_checkpoint(tmp_path).tensors["fc.weight"], tensors["fc.weight"])
    torch.save({"epoch": 3, "model": tensors}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match="plain state dict"):
        read_checkpoint(tmp_path)


def test_safetensors_win_over_a_pickle(tmp_path):
    save(tmp_path, PLAIN, layout("midlayer"))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    read_checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- files and folders


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = layout("midlayer")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, part in shards.items():
        save(folder, PLAIN, {name: tensors[name] for name in part}, file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_shards_are_joined(tmp_path):
    tensors = sharded(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert torch.equal(checkpoint.tensors["fc.weight"], tensors["fc.weight"])
    assert len(checkpoint.tensors) == len(tensors) - 1  # t2d is implied


@pytest.mark.parametrize("how", ["missing shard", "outside", "no index", "wrong shard", "empty"])
def test_broken_shards(tmp_path, how):
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    if how == "missing shard":
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
    elif how == "outside":
        content["weight_map"]["d2t"] = "../elsewhere.safetensors"
    elif how == "wrong shard":
        content["weight_map"]["d2t"] = "model-00002-of-00002.safetensors"
    elif how == "empty":
        content["weight_map"] = {}
    index.write_text(json.dumps(content))
    if how == "no index":
        index.unlink()
    messages = {
        "missing shard": r"lacks the shards \['model-00002",
        "outside": "wanted names of safetensors files beside it",
        "no index": "no model.safetensors.index.json",
        "wrong shard": r"puts \['d2t'\] in shards that do not hold them",
        "empty": "no weight_map",
    }
    with pytest.raises(CheckpointFormatError, match=messages[how]):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no config.json"), ("{", "not valid JSON"), ("[]", "holds a list"), ("\xff", "not valid JSON")],
)
def test_bad_config_files(tmp_path, content, message):
    save(tmp_path, PLAIN, layout("midlayer"))
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointFormatError, match=message):
        read_checkpoint(tmp_path)


def test_a_folder_without_weights_and_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    with pytest.raises(CheckpointFormatError, match="no weights"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        read_checkpoint(tmp_path / "config.json")


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("step", ["weights", "first rename", "second rename"])
def test_an_interrupted_write_never_leaves_a_mixed_checkpoint(tmp_path, monkeypatch, step):
    write_checkpoint(make(), tmp_path)
    (tmp_path / "README.md").write_text("kept")
    old = read_checkpoint(tmp_path)
    renames = []

    def half_written(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise Broken

    def failing_rename(source, target):
        renames.append(target)
        if len(renames) == (1 if step == "first rename" else 2):
            raise Broken
        Path(source).rename(target)

    if step == "weights":
        monkeypatch.setattr("eagle31_hf.checkpoints.files.save_file", half_written)
    else:
        monkeypatch.setattr("eagle31_hf.checkpoints.files.os.replace", failing_rename)
    with pytest.raises(Broken):
        write_checkpoint(make(norm_output=True), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"README.md", "config.json", "model.safetensors"}
    if step == "weights":
        assert read_checkpoint(tmp_path).config.to_dict() == old.config.to_dict()
    else:
        with pytest.raises(CheckpointFormatError, match=r"has no config\.json"):
            read_checkpoint(tmp_path)
    assert (tmp_path / "README.md").read_text() == "kept"


def test_writing_over_shards_removes_them(tmp_path):
    sharded(tmp_path)
    write_checkpoint(make(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": torch.ones(8, 23)}, r"fc\.weight is \[8, 23\]"),
        ({"norm.weight": torch.full((8,), float("nan"))}, "NaN"),
        ({"d2t": KEPT_IDS.clone()}, "absolute target ids|no vocabulary map"),
        ({"t2d": t2d()}, "spare: t2d"),
    ],
)
def test_unsound_tensors_are_not_written(tmp_path, change, message):
    checkpoint = make()
    broken = replace(checkpoint, tensors=checkpoint.tensors | change)
    with pytest.raises(CheckpointFormatError, match=message):
        write_checkpoint(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tied_and_strided_tensors_are_written(tmp_path):
    checkpoint = make(draft_vocab_size=20, own_embedding=True)
    checkpoint.tensors["embed_tokens.weight"] = checkpoint.tensors["lm_head.weight"]
    checkpoint.tensors["layers.0.mlp.up_proj.weight"] = torch.ones(8, 12).T
    write_checkpoint(checkpoint, tmp_path)
    read = read_checkpoint(tmp_path)
    assert torch.equal(read.tensors["embed_tokens.weight"], read.tensors["lm_head.weight"])


# ---------------------------------------------------------------- the Hub


def raised(kind: type[Exception]) -> Exception:
    """An error of the Hub client without the HTTP response its constructor asks for."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raised(hub.RepositoryNotFoundError), "neither a local folder nor a Hub id"),
        (raised(hub.GatedRepoError), "is gated"),
        (raised(hub.RevisionNotFoundError), "no revision 'v9'"),
        (hub.LocalEntryNotFoundError("no"), "the Hub could not be asked"),
        (hub.OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE"),
        (ConnectionError("no"), "no network"),
    ],
)
def test_hub_failures_say_what_to_do(monkeypatch, error, message):
    def failing(*args, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing)
    for use in (resolve_checkpoint, read_checkpoint, inspect_checkpoint):
        with pytest.raises(CheckpointNotFoundError, match=message) as caught:
            use("someone/drafter", revision="v9")
        assert "local folder" in str(caught.value)


def test_offline_without_a_cached_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for options in ({}, {"local_files_only": True}):
        with pytest.raises(CheckpointNotFoundError, match="local folder"):
            read_checkpoint("someone/drafter", cache_dir=tmp_path, **options)


def test_a_mistyped_path_is_not_asked_of_the_hub():
    with pytest.raises(CheckpointNotFoundError, match="cannot be a Hub id"):
        read_checkpoint("./no/such/folder")


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_a_pickle_is_downloaded_only_without_safetensors(tmp_path, monkeypatch, has_safetensors):
    asked = []

    def snapshot(repo_id, *, allow_patterns, **options):
        asked.append((tuple(allow_patterns), options["revision"], options["token"]))
        if has_safetensors or "pytorch_model.bin" in allow_patterns:
            file = "model.safetensors" if has_safetensors else "pytorch_model.bin"
            save(tmp_path, PLAIN, layout("midlayer"), file)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    read_checkpoint("someone/drafter", revision="main", token="t")
    wanted_pickle = [any("bin" in pattern for pattern in patterns) for patterns, *_ in asked]
    assert wanted_pickle == ([False] if has_safetensors else [False, True])
    assert all(rest == ["main", "t"] for _, *rest in asked)


# ---------------------------------------------------------------- documentation


def test_every_format_and_convention_is_documented():
    text = (REPOSITORY / "docs" / "formats.md").read_text()
    assert all(f"`{name}`" in text for name in FORMATS)
    assert all(convention in text for convention in (HS_INDEX, COMPLETED_LAYER, SGLANG_RULE))
