"""Bad files of any content: they are read or refused by name, in one line, and nothing in them is run."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import (
    KEPT_IDS,
    LONGEST_MESSAGE,
    PLAIN,
    PLAIN_LATENT,
    SPECFORGE,
    assert_refused,
    latent_layout,
    layout,
    save,
    sharded,
    speculators_config,
    with_field,
)
from transformers.activations import ACT2FN

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import WRITTEN_FORMATS, inspect_checkpoint, read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.eagle_network import expected_shapes
from eagle31_hf.checkpoints.layouts import detect_layout
from eagle31_hf.config import ROPE_TYPES, Eagle31Config
from eagle31_hf.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    ConfigurationError,
    Eagle31Error,
    UnsafeCheckpointError,
)

IDS = "eagle_aux_hidden_state_layer_ids"
# --- config.json ------------------------------------------------------------------------------------------------------

BAD_CONFIGS = [
    ({"hidden_size": None}, r"lacks \['hidden_size'\]"),
    ({"hidden_size": "eight"}, "no possible drafter: hidden_size is 'eight'"),
    ({"draft_vocab_size": 21}, "no possible drafter.*larger than vocab_size"),
    ({"num_attention_heads": 0, "head_dim": None}, "no possible drafter"),
    ({"rope_scaling": "yarn"}, "rope is 'yarn'"),
    ({"rope_theta": "big"}, "no rotary tables can be made"),
    ({"fc_norm": True, "norm_before_fc": True}, "both fc_norm and norm_before_fc"),
    ({"fc_norm": True}, r"missing: fc_norm\.0\.weight"),
    ({IDS: [2, 5]}, "no possible drafter.*aux_layers"),
    ({IDS: "2,5,9"}, "wanted a list of layer ids"),
    ({IDS: [1, 5, 9], "eagle_config": {IDS: [1, 5, 9]}}, "different target layers in two places"),
    ({"eagle_config": 3}, "eagle_config is of the wrong kind"),
    ({"architectures": "LlamaForCausalLM"}, "architectures is of the wrong kind"),
    ({"target_hidden_size": 10}, "no possible drafter.*own_embedding"),
    ({"num_aux_hidden_states": 300_000}, "num_aux_hidden_states is 300000; wanted at most 256"),
    ({"num_aux_hidden_states": 1.5}, "num_aux_hidden_states is 1.5; wanted a whole number"),
    ({"num_aux_hidden_states": 2**63 - 1}, "wanted at most 256"),
    ({"vocab_size": 2**40}, "vocab_size is 1099511627776; wanted at most 16777216"),
    ({"head_dim": 2**40}, "head_dim is 1099511627776; wanted at most 16384"),
    ({"intermediate_size": 2**62}, "no possible drafter"),
    ({"hidden_act": "telepathy"}, "hidden_act is 'telepathy'; wanted one that transformers has"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
    ({"max_position_embeddings": 0}, "max_position_embeddings is 0; wanted a whole number, at least 1"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type is 'spiral'; wanted one that transformers has"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "four"}}, "no rotary tables can be made"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "make tables that are not finite"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": None}}, "rope|no possible"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1e18}}, "partial_rotary"),
    ({"rope_theta": 10**400}, "no rotary tables can be made"),
    ({"rope_base": 10**400}, "rope_base is .*, which changes what a drafter computes"),
    ({"max_position_embeddings": 10**400}, "no rotary tables can be made"),
    ({"clip_qkv": []}, r"clip_qkv is \[\], which changes what a drafter computes"),
    ({"softmax_scale": [6**-0.5]}, "softmax_scale is"),
    ({"rope_theta": -5}, "make tables that are not finite"),
    ({"note": "x" * 40_000_000}, "wanted a JSON file of at most"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "x": {"rope_theta": 1e4}}, "sliding_window": 9},
     "rope settings for 'full_attention', 'x', but none for sliding_attention"),
    ({"rope_parameters": {"main": {"rope_theta": 1e6}, "other": {"rope_theta": 1e4}}}, "none for full_attention"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
     "rope_parameters is of type 'default', rope_scaling of type 'linear'"),
    ({"rope_scaling": {"type": "longrope", "short_mscale": 1.2}}, "'short_mscale', which nothing here computes"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
      "original_max_position_embeddings": 128}, "original_max_position_embeddings is 128, and 64"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25; only drafters whose heads are turned whole"),
    ({"fc_norm": False, "use_aux_norm": True}, "contradicts itself: fc_norm false, use_aux_norm true"),
    ({"eagle_config": {"norm_output": True}}, "eagle_config.norm_output true, where norm_output is read"),
    ({"eagle_config": {"head_dim": 12}}, "head_dim 6, eagle_config.head_dim 12"),
    ({"target_layer_ids": [-1, 4, 8]}, "wanted a list of layer ids, none negative"),
    ({"target_layer_ids": [1, 4, 8], IDS: [1, 4, 8]}, "different target layers in two places"),
    ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
    ({"sliding_window": 0}, "sliding_window is 0"),
    ({"sliding_window": True}, "sliding_window is true"),
    ({"hidden_size": True}, "no possible drafter: hidden_size is true; wanted a whole number$"),
    ({"rms_norm_eps": [1]}, "no possible drafter: rms_norm_eps is "),
    ({"layer_types": ["sliding_attention"]}, "names sliding_attention layers, and no sliding_window"),
    ({"sliding_window": 8, "layer_types": ["chunked_attention"]}, "wanted all full_attention or all sliding_attention"),
    ({"sliding_window": 8, "layer_types": [["sliding_attention"]]}, "wanted all full_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS)
def test_a_configuration_that_cannot_be_is_named(tmp_path, config, message):
    assert_refused(save(tmp_path, PLAIN | config, layout("midlayer")), message)


BAD_LATENT = [
    ({"kv_lora_rank": None}, (), "lacks kv_lora_rank"),
    ({"v_head_dim": 0}, (), "no possible drafter.*v_head_dim"),
    ({"kv_lora_rank": 11}, (), r"kv_b_proj\.weight is \[14, 3\], wanted \[14, 11\]"),
    ({"q_lora_rank": None}, (), r"missing: layers\.0\.self_attn\.q_proj\.weight"),
    ({}, ("kv_a_layernorm",), r"missing: layers\.0\.self_attn\.kv_a_layernorm"),
]


@pytest.mark.parametrize(("config", "without", "message"), BAD_LATENT)
def test_sizes_of_latent_attention_that_do_not_fit_are_named(tmp_path, config, without, message):
    kept = {name: t for name, t in latent_layout().items() if not any(part in name for part in without)}
    assert_refused(save(tmp_path, PLAIN_LATENT | config, kept), message)


def test_a_drafter_of_absurd_size_is_refused_before_it_is_built():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    with pytest.raises(ConfigurationError, match="wanted at most 256"):
        Eagle31Drafter(Eagle31Config(**sizes, num_aux_hidden_states=2**63))
    for layers in ([1.5, 2, 3], [True, 2, 3], ["1", 2, 3], [1, 2, -3], [1, 2]):
        with pytest.raises(ConfigurationError, match=r"aux_layers=\[.* wanted 3 whole numbers"):
            Eagle31Config(**sizes, aux_layers=layers)


def holding(content: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(content, encoding="latin-1")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: None, "^(?!.*cannot be read as JSON).*has no config.json"),
        (Path.mkdir, "is a folder"),
        (lambda file: file.symlink_to(file), "cannot be read"),
        (os.mkfifo, "or a device"),
        (holding("{"), "cannot be read as JSON"),
        (holding("[]"), "holds a list"),
        (holding("\xff"), "cannot be read as JSON"),
        (holding('{"hidden_size": ' + "9" * 5000 + "}"), "cannot be read as JSON"),
        (holding('{"hidden_size": ' + "9" * 4000 + "}"), "."),
        (holding('{"rope_theta": ' + '{"deep": ' * 900 + "0" + "}" * 900 + "}"), "."),
        (holding('{"note": ' + "[" * 100_000 + "]" * 100_000 + "}"), "cannot be read as JSON"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path, make, message):
    config = save(tmp_path, PLAIN, layout("midlayer")) / "config.json"
    config.unlink()
    make(config)
    assert_refused(tmp_path, message)


def test_names_that_are_no_folders(tmp_path):
    for name in ("x" * 5000, "a\0b", "~no-such-user-here/drafter", "./no/such/folder"):
        with pytest.raises(CheckpointNotFoundError, match="Hub id"):
            read_checkpoint(name)
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        read_checkpoint(save(tmp_path, PLAIN, layout("midlayer")) / "config.json")


# --- the index --------------------------------------------------------------------------------------------------------

NO_NAMES = [
    3, None, ["a.safetensors"], "s" * 5000 + ".safetensors", "a\0.safetensors", "..", "../x.safetensors", "w.bin",
]  # fmt: skip


@pytest.mark.parametrize("shard", NO_NAMES)
def test_an_index_that_names_no_files(tmp_path, shard):
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["d2t"] = shard
    index.write_text(json.dumps(content))
    assert_refused(tmp_path, "wanted names of safetensors files beside it")


def test_shards_or_an_index_that_are_missing(tmp_path):
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "aside")
    assert_refused(tmp_path, r"lacks the shards \['model-00002")
    (tmp_path / "aside").rename(tmp_path / "model-00002-of-00002.safetensors")
    index.write_text('{"weight_map": {}}')
    assert_refused(tmp_path, "no weight_map")
    index.unlink()
    assert_refused(tmp_path, "no model.safetensors.index.json")


def test_a_folder_without_weights_or_with_a_pipe_in_their_place(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert_refused(tmp_path, "no weights")
    os.mkfifo(tmp_path / "drafter.safetensors")  # which is not waited for
    assert_refused(tmp_path, "no weights")


# --- tensors ----------------------------------------------------------------------------------------------------------


def mutated(**changes) -> dict[str, torch.Tensor]:
    tensors = layout("midlayer")
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return tensors


BAD_TENSORS = [
    (mutated(fc__weight=None), r"missing: fc\.weight"),
    (mutated(midlayer__hidden_norm__weight=None), r"missing: layers\.0\.hidden_norm\.weight"),
    (mutated(d2t=None, t2d=None), "missing: d2t"),
    (mutated(extra__weight=torch.ones(2)), r"spare: extra\.weight"),
    (mutated(**{f"layers__{n}__x": torch.ones(1) for n in range(1, 300)}), "num_hidden_layers is 300; wanted at most"),
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
    (mutated(fc__weight=None, norm__weight=None, other=torch.ones(1), more=torch.ones(1)),
     r"missing: fc\.weight, norm\.weight; spare: more, other"),
    (mutated(**{"x" * 1_000_000: torch.ones(1)}), "spare: x*…"),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "message"), BAD_TENSORS)
def test_unsound_tensors_are_named(tmp_path, tensors, message):
    with pytest.raises(CheckpointFormatError, match=message) as refused:
        read_checkpoint(save(tmp_path, PLAIN, tensors))
    assert len(str(refused.value)) < LONGEST_MESSAGE


@pytest.mark.parametrize(
    ("name", "reduced", "message"),
    [("t2d", True, "t2d has dtype float8_e4m3fn, wanted integers"), ("d2t", True, "d2t has dtype float8_e4m3fn"),
     ("d2t", False, "is no identity map")],
)  # fmt: skip
def test_a_vocabulary_map_of_eight_bit_floats(tmp_path, name, reduced, message):
    tensors = layout("midlayer", **({} if reduced else {"lm_head__weight": (20, 8)}))
    if not reduced:
        tensors |= {"d2t": torch.zeros(20, dtype=torch.int64), "t2d": torch.ones(20, dtype=torch.bool)}
    tensors[name] = tensors[name].float().to(torch.float8_e4m3fn)
    config = PLAIN | {"draft_vocab_size": 5 if reduced else 20}
    assert_refused(save(tmp_path, config, tensors), message)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_names_that_a_terminal_would_obey(tmp_path, file):
    tensors = layout("midlayer") | {"verifier_norm.\x1b]0;owned\x07": torch.ones(1)}
    assert_refused(save(tmp_path, PLAIN, tensors, file), r"names a tensor 'verifier_norm\.\\x1b")


# --- damaged files, and pickles ---------------------------------------------------------------------------------------

ODD_TENSORS = {
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "sparse": torch.eye(8).to_sparse(),
    "meta": torch.empty(8, device="meta"),
    "repeated": torch.ones(1).expand(100_000, 1_000_000),  # 400 GB of one stored number
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_pickled_tensors_that_are_not_plain(tmp_path, kind):
    tensors = layout("midlayer") | {"norm.weight": ODD_TENSORS[kind]}
    folder = save(tmp_path, PLAIN, tensors, "pytorch_model.bin")
    assert_refused(folder, "norm.weight.*wanted plain tensors", Eagle31Error)


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


@pytest.mark.parametrize("shape", [[0, 2**62, 8], [2**63, 0]])
def test_shapes_that_no_tensor_has(tmp_path, shape):
    save(tmp_path, PLAIN, {})
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert_refused(tmp_path, "states a shape that no tensor has|damaged")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 not a zip", "deflated"])
def test_damaged_pickles(tmp_path, content):
    file = save(tmp_path, PLAIN, {"norm.weight": torch.zeros(1_000_000)}, "pytorch_model.bin") / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        with zipfile.ZipFile(file) as stored:
            parts = {name: stored.read(name) for name in stored.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, part in parts.items():
                packed.writestr(name, part)
    assert_refused(tmp_path, "damaged")


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


# --- anything at all --------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 8, 5, 20, 255, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**300,
                           0.0, -0.5, 0.5, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")])  # fmt: skip
TEXTS = st.sampled_from(["", "llama", "qwen3", "float32", "\x1b[2J", "\ud800", "../up", "x" * 3000, "0"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.integers(-4, 40)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["rope_type", "a", "factor"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ROPES = st.fixed_dictionaries(
    {"rope_type": st.one_of(st.sampled_from(ROPE_TYPES), VALUES)},
    optional={
        key: st.one_of(NUMBERS, VALUES)
        for key in ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
                    "mscale_all_dim", "attention_factor", "short_factor", "long_factor", "low_freq_factor",
                    "high_freq_factor", "partial_rotary_factor", "truncate")
    },
)  # fmt: skip
BASES = {
    "mla": (PLAIN_LATENT, latent_layout()),
    "plain": (PLAIN, layout("midlayer")),
    "specforge": (SPECFORGE | {"eagle_config": {IDS: [1, 5, 9]}}, layout("layers.0")),
    "speculators": (speculators_config(norm_before_residual=False), layout("layers.0")),
    "torchspec": (PLAIN | {"_torchspec_version": "1", IDS: [1, 5, 9]}, layout("midlayer")),
    "nemo": (PLAIN | {"architectures": ["LlamaEagle3DraftModel"]}, layout("layers.0", "model.")),
    "modelopt": (PLAIN | {"eagle_config": {"use_last_layernorm": True, IDS: [2, 5, 9]}}, layout("midlayer")),
}
TABLES = [detect_layout(config, tensors) for config, tensors in BASES.values()]
KEYS = sorted(
    {key for config, _ in BASES.values() for key in config}
    | {path for table in TABLES for row in table.fields for path in (row.stored, *row.also)}
    | {table.layer_config + key for table in TABLES for key in ("rope_theta", "rope_scaling", "rope_parameters")}
    | {"eagle_config", f"eagle_config.{IDS}", "transformer_layer_config.model_type", "quantization_config", "auto_map",
       "sliding_window", "layer_types", "dtype", "torch_dtype", "tie_word_embeddings"}
)  # fmt: skip
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8,
          torch.uint8, torch.bool, torch.float8_e5m2, torch.complex64, torch.uint16]  # fmt: skip


@st.composite
def entries(draw):
    """A dotted key of some config, and what a stranger might write there."""
    key = draw(st.sampled_from(KEYS))
    if key.endswith(("rope_parameters", "rope_scaling")):
        return key, draw(ROPES)
    if key == "hidden_act":
        return key, draw(st.one_of(st.sampled_from(sorted(ACT2FN)), VALUES))
    return key, draw(VALUES)


@st.composite
def tensor_changes(draw):
    """One tensor of other values, dtype or shape, or none; whichever of them the file holds is meant by the number."""
    shape = draw(st.lists(st.integers(0, 24), max_size=3))
    values = draw(st.sampled_from([0.0, 1.0, 7.0, 1e30, float("nan")]))
    return draw(st.integers(0, 40)), torch.full(shape, values, dtype=torch.float64).to(draw(st.sampled_from(DTYPES)))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from(sorted(BASES)),
    changes=st.lists(entries(), min_size=1, max_size=3),
    tensor=st.one_of(st.none(), tensor_changes()),
    written=st.sampled_from(WRITTEN_FORMATS),
    file=st.sampled_from(["model.safetensors", "pytorch_model.bin"]),
)
def test_whatever_is_written_there_is_read_or_refused(tmp_path_factory, base, changes, tensor, written, file):
    folder = tmp_path_factory.getbasetemp() / "stranger"
    for stale in folder.glob("*"):
        stale.unlink()
    config, tensors = BASES[base][0], dict(BASES[base][1])
    for path, value in changes:
        config = with_field(config, path, value)
    if tensor is not None:
        tensors[sorted(tensors)[tensor[0] % len(tensors)]] = tensor[1]
    save(folder, config, tensors, file)
    try:
        summary = inspect_checkpoint(folder)
        json.dumps(summary.to_dict())
        checkpoint = read_checkpoint(folder)
        assert {name: tuple(t.shape) for name, t in checkpoint.tensors.items()} == expected_shapes(checkpoint.config)
        drafter = Eagle31Drafter.from_checkpoint(checkpoint).float()
        width = checkpoint.config.hidden_size
        rotary = drafter.rotary(torch.tensor([[0, 1]]))
        drafter.decode(torch.ones(1, 2, width), torch.ones(1, 2, width), rotary)
        write_checkpoint(checkpoint, folder.parent / "rewritten", format=written)
    except Eagle31Error as error:
        assert len(str(error)) < LONGEST_MESSAGE  # noqa: PT017
