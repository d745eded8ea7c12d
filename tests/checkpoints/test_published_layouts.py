"""Published layouts written down by hand: what is read of them."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import D2T, LAYER_0, PLAIN, SAFEAILAB, SPECFORGE, layout, random_tensors, save, speculators_config

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import expected_shapes, inspect_checkpoint, read_checkpoint
from eagle31_hf.errors import CheckpointFormatError
from families import recurrent_target
from helpers import SHARED


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


def test_nemo_model_prefix(tmp_path):
    tensors = layout("layers.0", "model.", model__embed_tokens__weight=(20, 8))
    tensors |= random_tensors({f"model.fc_norm.{slot}.weight": (8,) for slot in range(3)})
    config = PLAIN | {"architectures": ["LlamaEagle3DraftModel"], "fc_norm": True, "norm_output": True}
    checkpoint = read_checkpoint(save(tmp_path, config, tensors))
    assert checkpoint.format == "nemo"
    assert checkpoint.config.is_eagle31
    assert torch.equal(checkpoint.tensors["norm.weight"], tensors["model.norm.weight"])


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


@pytest.mark.parametrize("place", ["target_layer_ids", "eagle_config.target_hidden_layer_ids"])
def test_ids_that_no_engine_looks_for_are_read_and_told(tmp_path, place):
    *section, name = place.split(".")
    ids = {section[0]: {name: [1, 9, 17]}} if section else {name: [1, 9, 17]}
    summary = inspect_checkpoint(save(tmp_path, SPECFORGE | ids, layout("midlayer")))
    assert (summary.config.aux_layers, summary.aux_layers_as_stored) == ([2, 10, 18], {place: [1, 9, 17]})
    assert not summary.notes, "that key has one meaning"


# --- published for targets of which most layers keep states ----------------------------------------------------------
# Every block counts, whatever it keeps: Nemotron's experts have blocks of their own.

NEMOTRON = ["linear_attention", "moe", "linear_attention", "moe", "linear_attention", "full_attention", "moe"]
HYBRID_DRAFTERS = {
    # Qwen3.6-27B, EAGLE 3.1 by SpecForge, and Qwen3.5-9B and 397B-A17B, which name no layers
    "specdrift": (SPECFORGE | {"fc_norm": True, "norm_output": True}, "layers.0", 64, [2, 32, 61]),
    "sharegpt": (SPECFORGE, "midlayer", 32, [2, 16, 29]),
    # Qwen3.5-MoE, by speculators, whose ids are those of the states that enter layers
    "a1-agents": (speculators_config(eagle_aux_hidden_state_layer_ids=[3, 19, 39]), "layers.0", 40, [3, 19, 39]),
    # Qwen3-Coder-Next, whose taps are the outputs of layers that attend
    "coder-next": (
        SPECFORGE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 23, 47]}},
        "midlayer",
        48,
        [3, 23, 47],
    ),
    # Nemotron-Cascade-2-30B-A3B, whose drafter sees a window
    "cascade": (
        PLAIN
        | {
            "eagle_aux_hidden_state_layer_ids": [2, 26, 48],
            "sliding_window": 4096,
            "layer_types": ["sliding_attention"],
        },
        "midlayer",
        52,
        [2, 26, 48],
    ),
}


@pytest.mark.parametrize("name", HYBRID_DRAFTERS)
def test_drafters_for_hybrids(tmp_path, name):
    config, first_layer, blocks, layers = HYBRID_DRAFTERS[name]
    norms = {f"fc_norm__{slot}__weight": (8,) for slot in range(3)} if config.get("fc_norm") else {}
    checkpoint = read_checkpoint(save(tmp_path, config, layout(first_layer, **norms)))
    assert checkpoint.config.resolve_aux_layers(blocks) == tuple(layers)
    assert checkpoint.config.is_eagle31 == (name == "specdrift")
    assert checkpoint.config.sliding_window == (4096 if name == "cascade" else None)


@pytest.mark.parametrize(
    ("name", "family", "fields"),
    [
        ("a1-agents", "qwen3_5_moe_text", {"num_hidden_layers": 40, "layer_types": None}),
        ("cascade", "nemotron_h", {"layers_block_type": (NEMOTRON * 8)[:52]}),
    ],
)
@pytest.mark.thorough(every=2)
def test_a_drafter_for_a_hybrid_reads_its_blocks_and_writes_its_text(tmp_path, name, family, fields):
    config, first_layer, blocks, layers = HYBRID_DRAFTERS[name]
    sizes = {"hidden_size": 8, "vocab_size": 20, "intermediate_size": 12}
    target = recurrent_target(family, **sizes, **fields)
    drafter = Eagle31Drafter.from_pretrained(save(tmp_path, config, layout(first_layer)), target=target)
    binding = drafter.binding
    assert len(binding.layers) == blocks
    ids = torch.tensor([[3, 5, 7, 11]])
    with torch.no_grad(), binding.capturing():
        out = target(ids, output_hidden_states=True)
        aux = binding.take_aux()
    assert torch.equal(aux, torch.cat([out.hidden_states[layer] for layer in layers], -1))
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    assert torch.equal(target.generate(ids, **how, assistant_model=drafter), target.generate(ids, **how))
    assert drafter.stats.loop == "own", drafter.stats.reason
