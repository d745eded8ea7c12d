"""Unsound tensors, other methods, contradictory configurations, damaged files: all are refused by name."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import KEPT_IDS, LAYER_0, PLAIN, layout, random_tensors, save, speculators_config

from eagle31_hf.checkpoints import expected_shapes, inspect_checkpoint, read_checkpoint
from eagle31_hf.errors import CheckpointFormatError, Eagle31Error, UnsafeCheckpointError

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
        ({}, {"0.0.linear.weight": torch.ones(8, 8), "0.1.weight": torch.ones(20, 8)}, "Medusa"),
        ({"medusa_num_heads": 3}, {"heads.weight": torch.ones(8, 8)}, "Medusa"),
        ({"hydra_num_heads": 3}, {"heads.weight": torch.ones(8, 8)}, "Hydra"),
        ({}, {"blocks.0.layers.0.weight": torch.ones(8, 8), "lm_heads.0.weight": torch.ones(20, 8)}, "Medusa"),
        ({"model_type": "medusa"}, {"heads.weight": torch.ones(8, 8)}, "Medusa"),
        ({}, {f"speculator.{part}.0.weight": torch.ones(8, 8) for part in ("emb", "head")}, "MLP spec.*serve it with"),
        ({"model_type": "mlp_speculator"}, {"heads.weight": torch.ones(8, 8)}, "MLP speculator"),
        ({}, {f"{part}_projection.weight": torch.ones(8, 8) for part in ("pre", "post")}, "transformers runs itself"),
        ({"model_type": "gemma4_assistant"}, WHOLE_MODEL, "transformers runs itself.*pass it as assistant_model="),
        ({"architectures": ["Qwen3AssistantForCausalLM"]}, WHOLE_MODEL, "transformers runs itself"),
        ({"architectures": ["DFlashDraftModel"]}, layout("layers.0"), "DFlash"),
        ({"target_layer_ids": [1, 9, 17]}, block_diffusion("norm"), "DFlash"),
        ({}, block_diffusion("hidden_norm"), "DFlash"),
        (
            {},
            layout("layers.0") | {"layers.0.pre_feedforward_layernorm.weight": torch.ones(8)},
            "Gemma's decoder layer",
        ),
        ({}, layout("layers.0") | {"layers.0.self_attn.g_proj.weight": torch.ones(8, 8)}, "an output gate"),
        (
            {"architectures": ["BertModel"]},
            {"embeddings.weight": torch.ones(8, 8)},
            r"no drafter that is known here \(its tensors: embeddings.weight; its architecture: BertModel\)",
        ),
        ({"architectures": ["DeepSeekMTPModel"]}, layout("layers.0"), "multi-token-prediction"),
        ({}, {"model.layers.61.eh_proj.weight": torch.ones(8, 16)}, "multi-token-prediction"),
        ({"parallel_drafting": True}, layout("layers.0"), "P-EAGLE.*in one pass from mask tokens.*serve it with vLLM"),
        ({"ptd_token_id": 19}, layout("layers.0"), "P-EAGLE"),
        ({"architectures": ["PeagleLlamaForCausalLM"]}, layout("layers.0"), "P-EAGLE"),
        (speculators_config(speculators_model_type="peagle"), layout("layers.0"), "P-EAGLE"),
        ({}, layout("midlayer") | {"mask_hidden": torch.ones(1, 24)}, "P-EAGLE"),
        ({}, layout("midlayer") | {"midlayer.mlp.experts.0.up_proj.weight": torch.ones(4, 8)}, "mixture of experts"),
        ({}, layout("midlayer") | {"midlayer.mlp.gate.weight": torch.ones(4, 8)}, "mixture of experts"),
        ({}, layout("midlayer") | {"midlayer.mlp.router.weight": torch.ones(4, 8)}, "mixture of experts"),
        (QUANTISED, in_8_bits("midlayer.mlp.up_proj.weight", torch.int8), "quantised"),
        (QUANTISED, in_8_bits("midlayer.mlp.up_proj.weight", torch.float8_e4m3fn), "quantised"),
        (QUANTISED, layout("midlayer") | {"midlayer.mlp.up_proj.weight_scale": torch.ones(12)}, "quantised"),
    ],
)
def test_other_methods_are_called_by_name(tmp_path, config, tensors, message):
    with pytest.raises(CheckpointFormatError, match=message):
        read_checkpoint(save(tmp_path, PLAIN | config, tensors))


@pytest.mark.parametrize(
    "marks", [{"medusa_num_heads": 3}, {"hydra_num_heads": 3}, {"target_layer_ids": [1, 4, 8]}, {"block_size": 16}]
)
def test_a_key_alone_does_not_make_a_drafter_another_methods(tmp_path, marks):
    """What the first layer reads says what it is: `[embedding ; hidden]`."""
    assert read_checkpoint(save(tmp_path, PLAIN | marks, layout("layers.0"))).format == "plain"


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": None}, r"lacks \['hidden_size'\]"),
        ({"hidden_size": "eight"}, "no possible drafter"),
        ({"draft_vocab_size": 21}, "no possible drafter.*larger than vocab_size"),
        ({"num_attention_heads": 0, "head_dim": None}, "no possible drafter"),
        ({"num_aux_hidden_states": 1.5}, "no possible drafter.*whole number"),
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
