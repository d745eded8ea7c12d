"""Heads in targets' folders: found wherever they are stored, read whole, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle31_hf.checkpoints import read_checkpoint
from eagle31_hf.errors import CheckpointFormatError
from mtp_targets import FAMILIES, target_with_head

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = "mtp."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target_with_head("qwen3_5_text", tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    stored = load_file(folder / WEIGHTS)
    change(stored)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointFormatError) as refused:
        read_checkpoint(folder)
    message = str(refused.value)
    assert "\n" not in message
    return message


def head_of(folder: Path) -> dict[str, Tensor]:
    return read_checkpoint(folder).tensors


def assert_equal(tensors: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alias", ["", "language_model.", "model."])
def test_names_and_single_experts_make_no_difference(family, alias, tmp_path):
    for name in ("usual", "other"):
        (tmp_path / name).mkdir()
    target_with_head(family, tmp_path / "usual")
    if alias == "model." and family in ("glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        alias = "language_model."
    target_with_head(family, tmp_path / "other", alias=alias, single_experts=True)
    usual = read_checkpoint(tmp_path / "usual")
    other = read_checkpoint(tmp_path / "other")
    assert_equal(other.tensors, usual.tensors)
    assert usual.format == other.format == "mtp"
    assert usual.config.family == family


def test_only_the_files_that_hold_it_are_read(folder):
    wanted = head_of(folder)
    stored = load_file(folder / WEIGHTS)
    head = {name: tensor for name, tensor in stored.items() if name.startswith(PREFIX)}
    save_file(head, folder / "model-00002-of-00002.safetensors")
    (folder / WEIGHTS).unlink()  # the shard with the target's own weights was never downloaded
    files = dict.fromkeys(stored, "model-00001-of-00002.safetensors") | dict.fromkeys(
        head, "model-00002-of-00002.safetensors"
    )
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    assert_equal(head_of(folder), wanted)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(folder)


def test_a_file_beside_an_index_that_omits_it_is_read(folder):
    wanted = head_of(folder)
    stored = load_file(folder / WEIGHTS)
    head = {name: stored.pop(name) for name in list(stored) if name.startswith(PREFIX)}
    save_file(stored, folder / "model-00001-of-00001.safetensors")
    save_file(head, folder / "mtp.safetensors")
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(stored, "model-00001-of-00001.safetensors")}))
    assert_equal(head_of(folder), wanted)


def test_blocks_of_fp8_are_unpacked_with_their_scales(folder):
    wanted = head_of(folder)
    name = "mtp.layers.0.mlp.gate_proj.weight"

    def pack(stored: dict[str, Tensor]) -> None:
        weight = stored[name]
        rows, columns = (size // 32 for size in weight.shape)
        blocks = weight.view(rows, 32, columns, 32)
        scale = blocks.abs().amax((1, 3)) / 448
        stored[name] = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale

    rewrite(folder, pack)
    tensors = head_of(folder)
    ours = "layers.0.mlp.gate_proj.weight"
    assert tensors[ours].dtype == torch.bfloat16
    torch.testing.assert_close(tensors[ours].float(), wanted[ours], rtol=0.08, atol=1e-3)
    assert_equal({n: t for n, t in tensors.items() if n != ours}, {n: t for n, t in wanted.items() if n != ours})


def test_a_head_that_was_lost_is_missed(folder):
    rewrite(folder, lambda stored: [stored.pop(name) for name in list(stored) if name.startswith(PREFIX)])
    message = refusal(folder)
    assert "config.json says that there is an MTP head" in message
    assert "transformers drops them" in message


@pytest.mark.parametrize("name", ["norm.weight", "fc.weight", "pre_fc_norm_hidden.weight"])
def test_a_head_without_one_of_its_parts_is_refused(folder, name):
    rewrite(folder, lambda stored: stored.pop(PREFIX + name))
    message = refusal(folder)
    assert {"pre_fc_norm_hidden.weight": "hnorm.weight"}.get(name, name) in message


def test_a_head_in_integers_is_refused_by_name(folder):
    name = "mtp.layers.0.self_attn.q_proj.weight"
    rewrite(folder, lambda stored: stored.update({name: stored[name].to(torch.int8)}))
    message = refusal(folder)
    assert "layers.0.self_attn.q_proj.weight" in message
    assert "int8" in message


def test_a_layer_that_does_not_fit_is_refused_when_it_is_built(folder):
    from eagle31_hf import Eagle31Drafter

    name = "mtp.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda stored: stored.update({name: stored[name][:, :8].contiguous()}))
    with pytest.raises(CheckpointFormatError, match=r"layers\.0\.mlp\.down_proj\.weight: got \(64, 8\)"):
        Eagle31Drafter.from_pretrained(folder)


def test_values_that_are_no_numbers_are_refused(folder):
    name = "mtp.fc.weight"
    rewrite(folder, lambda stored: stored[name][0].fill_(float("nan")))
    assert "fc.weight" in refusal(folder)


def test_of_a_target_on_the_hub_only_the_head_is_downloaded(folder, tmp_path, monkeypatch):
    import fnmatch
    import shutil

    wanted = head_of(folder)
    stored = load_file(folder / WEIGHTS)
    head = {name: stored.pop(name) for name in list(stored) if name.startswith(PREFIX)}
    shards = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    for file, tensors in zip(shards, (stored, head), strict=True):
        save_file(tensors, folder / file)
    (folder / WEIGHTS).unlink()
    files = dict.fromkeys(stored, shards[0]) | dict.fromkeys(head, shards[1])
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    def download(repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        assert repo_id == "Qwen/Qwen3.5-4B"
        for path in folder.glob("*.*"):
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, snapshot)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert_equal(read_checkpoint("Qwen/Qwen3.5-4B").tensors, wanted)
    assert not (snapshot / shards[0]).exists()
    assert (snapshot / shards[1]).exists()
