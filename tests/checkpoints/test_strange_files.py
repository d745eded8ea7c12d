"""Damaged files, pickles and files of any content: read or refused by an error of ours, and nothing in them is run."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import (
    LONGEST_MESSAGE,
    PLAIN,
    PLAIN_LATENT,
    SPECFORGE,
    assert_refused,
    latent_layout,
    layout,
    save,
    speculators_config,
    with_field,
)
from transformers.activations import ACT2FN

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import WRITTEN_FORMATS, inspect_checkpoint, read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.eagle_network import expected_shapes
from eagle31_hf.checkpoints.layouts import detect_layout
from eagle31_hf.config import ROPE_TYPES
from eagle31_hf.errors import CheckpointFormatError, Eagle31Error, UnsafeCheckpointError

IDS = "eagle_aux_hidden_state_layer_ids"


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
    | {path for table in TABLES for row in table.fields for path in row.paths}
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
