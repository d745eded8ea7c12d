"""Shards, folders, interrupted writes and the Hub: what is there is read, what is missing is said."""

import json
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub
from safetensors import SafetensorError
from tiny_checkpoints import KEPT_IDS, PLAIN, layout, make, save, sharded, t2d

from eagle31_hf.checkpoints import inspect_checkpoint, read_checkpoint, resolve_checkpoint, write_checkpoint
from eagle31_hf.errors import CheckpointError, CheckpointFormatError, CheckpointNotFoundError

# ---------------------------------------------------------------- files and folders


def test_a_folder_without_weights_and_a_file_in_place_of_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    with pytest.raises(CheckpointFormatError, match="no weights"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        read_checkpoint(tmp_path / "config.json")


class Broken(RuntimeError):
    pass


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
            raise Broken
        Path(source).rename(target)

    if step == "weights":
        monkeypatch.setattr("eagle31_hf.checkpoints.files.save_file", full_disk)
    else:
        monkeypatch.setattr("eagle31_hf.checkpoints.files.os.replace", failing_rename)
    with pytest.raises(CheckpointError if step == "weights" else Broken):
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
    assert not (tmp_path / "new").exists()


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
        (raised(hub.RevisionNotFoundError), r"nor a Hub id .*\(revision 'v9'\)"),
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
    with pytest.raises(CheckpointNotFoundError, match="its folders compressed, full have; pass one of them"):
        read_checkpoint(tmp_path)
