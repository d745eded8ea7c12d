"""Checkpoints written and read again, byte for byte the same in every layout that can say what they are.

And shards, folders, interrupted writes and the Hub: what is there is read, what is missing is said.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_checkpoints import (
    KEPT_IDS,
    LAYER_0,
    PLAIN,
    PLAIN_LATENT,
    REFUSES,
    VARIANTS,
    latent_layout,
    layout,
    make,
    save,
    sharded,
)

from eagle31_hf.checkpoints import (
    FORMATS,
    WRITTEN_FORMATS,
    Checkpoint,
    inspect_checkpoint,
    read_checkpoint,
    resolve_checkpoint,
    write_checkpoint,
)
from eagle31_hf.checkpoints.layouts import COMPLETED_LAYER, HS_INDEX, SGLANG_RULE
from eagle31_hf.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError, ConfigurationError

REPOSITORY = Path(__file__).resolve().parents[2]
IDS = "eagle_aux_hidden_state_layer_ids"
TARGET = {"name_or_path": "somebody/a-target", "architectures": ["LlamaForCausalLM"]}


def variant(name: str) -> Checkpoint:
    checkpoint = make(**VARIANTS[name])
    checkpoint.metadata["target_model"] = TARGET
    return checkpoint


@pytest.mark.parametrize("format", WRITTEN_FORMATS)
@pytest.mark.parametrize("name", VARIANTS)
def test_there_and_back_is_byte_identical(tmp_path, name, format):
    checkpoint = variant(name)
    if name in REFUSES[format]:
        with pytest.raises(ConfigurationError, match=f"the {format} format"):
            write_checkpoint(checkpoint, tmp_path / "refused", format=format)
        assert not (tmp_path / "refused").exists()
        return
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
    with pytest.raises(ConfigurationError, match="the mla format cannot express attention that is not latent"):
        write_checkpoint(variant("eagle3"), "never-made", format="mla")
    with pytest.raises(ConfigurationError, match="wanted one of mla, plain, speculators"):
        write_checkpoint(make(), "never-made", format="gguf")
    for format in set(FORMATS) - set(WRITTEN_FORMATS):
        with pytest.raises(
            ConfigurationError, match=f"--format {format} was removed in 0.2.0: .*plain, mla and speculators"
        ):
            write_checkpoint(make(), "never-made", format=format)
    assert not Path("never-made").exists()


def test_latent_attention_has_no_biases_whatever_its_file_says(tmp_path):
    once = read_checkpoint(save(tmp_path, PLAIN_LATENT | {"attention_bias": True}, latent_layout()))
    write_checkpoint(once, tmp_path / "again", format="mla")
    assert read_checkpoint(tmp_path / "again").tensors.keys() == once.tensors.keys()


WRITTEN = {
    "model_type": "llama", "tie_word_embeddings": False, "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 20,
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 6, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048, "initializer_range": 0.02, "attention_bias": False, "attention_dropout": 0.0,
    "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "draft_vocab_size": 5,
    "target_hidden_size": 8, "fc_norm": True, "norm_before_fc": False, "norm_output": True,
    "norm_before_residual": False, "num_aux_hidden_states": 3, "bias": False,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 5e5, "rope_scaling": None,
    "torch_dtype": "bfloat16", "target_model": TARGET,
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


def test_every_format_and_convention_is_documented():
    text = (REPOSITORY / "docs" / "formats.md").read_text()
    assert all(f"`{name}`" in text for name in FORMATS)
    assert all(convention in text for convention in (HS_INDEX, COMPLETED_LAYER, SGLANG_RULE))


def test_an_identity_map_of_the_whole_vocabulary_is_dropped(tmp_path):
    whole, of_zeros = PLAIN | {"draft_vocab_size": 20}, torch.zeros(20, dtype=torch.int64)
    tensors = layout("midlayer", lm_head__weight=(20, 8)) | {"d2t": of_zeros, "t2d": of_zeros == 0}
    assert "d2t" not in read_checkpoint(save(tmp_path, whole, tensors)).tensors
    with pytest.raises(CheckpointFormatError, match="no identity map"):
        read_checkpoint(save(tmp_path, whole, tensors | {"d2t": of_zeros + 1}))


def test_dtype_is_converted_but_not_the_map(tmp_path):
    checkpoint = read_checkpoint(save(tmp_path, PLAIN, layout("midlayer")), dtype=torch.bfloat16)
    kinds = {tensor.dtype for name, tensor in checkpoint.tensors.items() if name != "d2t"}
    assert kinds == {torch.bfloat16} == {checkpoint.config.dtype}
    assert checkpoint.tensors["d2t"].dtype == torch.int64


def full_disk(_tensors, path, **_how):
    """What safetensors raises there is no OSError."""
    path.write_bytes(b"half of it")
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("step", ["weights", "first rename", "second rename"])
def test_an_interrupted_write_never_leaves_a_mixed_checkpoint(tmp_path, monkeypatch, step):
    write_checkpoint(make(), tmp_path)
    (tmp_path / "README.md").write_text("kept")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    renames = []

    def failing_rename(source, target):
        renames.append(target)
        if len(renames) == (1 if step == "first rename" else 2):
            raise RuntimeError("torn")
        Path(source).rename(target)

    if step == "weights":
        monkeypatch.setattr("eagle31_hf.checkpoints.files.save_file", full_disk)
    else:
        monkeypatch.setattr("eagle31_hf.checkpoints.files.os.replace", failing_rename)
    with pytest.raises(CheckpointError if step == "weights" else RuntimeError, match=r"No space left|torn"):
        write_checkpoint(make(norm_output=True), tmp_path)
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    if step == "weights":
        assert left == before
    else:
        assert left.keys() <= before.keys() - {"config.json"}
        assert left["README.md"] == b"kept"


def test_where_nothing_can_be_written_is_told_in_a_line_and_left_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        write_checkpoint(make(), tmp_path / "file" / "drafter")
    monkeypatch.setattr("eagle31_hf.checkpoints.files.save_file", full_disk)
    with pytest.raises(CheckpointError, match=r"could not be written to .*No space left.*another\s+folder"):
        write_checkpoint(make(), tmp_path / "new" / "drafter")
    assert not any((tmp_path / "new" / "drafter").iterdir())


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path):
    write_checkpoint(make(), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


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


def raised(kind: type[Exception]) -> Exception:
    """An error of the Hub client without the HTTP response its constructor asks for."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raised(hub.RepositoryNotFoundError), "neither a local folder nor a Hub id"),
        (raised(hub.GatedRepoError), "is gated"),
        (raised(hub.RevisionNotFoundError), r"nor a Hub id .*\(revision 'v9'\): RevisionNotFoundError"),
        (hub.LocalEntryNotFoundError("no"), "check the spelling and the network"),
        (hub.OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE"),
        (ConnectionError("no"), "ConnectionError"),
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
    assert wanted_pickle == ([False, False] if has_safetensors else [False, False, True])
    assert all(rest == ["main", "t"] for _, *rest in asked)


def test_a_folder_of_a_repository_is_a_drafter_of_its_own(tmp_path, monkeypatch):
    """Two drafters of one target, of the whole vocabulary and of a part of it."""
    folders = {"compressed": layout("midlayer"), "full": layout("midlayer", lm_head__weight=(20, 8))}
    asked = []

    def snapshot(repo_id, *, allow_patterns, ignore_patterns, **options):
        asked.append((repo_id, tuple(allow_patterns), tuple(ignore_patterns)))
        for name, tensors in folders.items():
            if f"{name}/config.json" in allow_patterns:
                whole = {key: tensor for key, tensor in tensors.items() if name != "full" or key not in ("d2t", "t2d")}
                save(tmp_path / name, PLAIN | {"draft_vocab_size": 20 if name == "full" else 5}, whole)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(CheckpointNotFoundError, match=r"has no config\.json on the Hub; .*'someone/drafter/FOLDER'"):
        read_checkpoint("someone/drafter")
    assert read_checkpoint("someone/drafter/full").config.draft_vocab_size == 20
    assert read_checkpoint("someone/drafter/compressed").config.draft_vocab_size == 5
    assert {repo for repo, *_ in asked} == {"someone/drafter"}
    assert asked[-1][1:] == (
        ("compressed/config.json", "compressed/model.safetensors.index.json", "compressed/*.safetensors"),
        ("compressed/*/*",),
    )
    with pytest.raises(CheckpointNotFoundError, match=r"no config\.json on the Hub; check the folder's name"):
        read_checkpoint("someone/drafter/half")
    with pytest.raises(CheckpointFormatError, match=r"has no config\.json; pass the folder that holds it"):
        read_checkpoint(tmp_path)
