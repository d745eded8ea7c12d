"""Heads on their own, and heads put back where they were lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import files, read_checkpoint
from eagle31_hf.checkpoints.graft import graft_head
from eagle31_hf.errors import CheckpointError, CheckpointFormatError, ConfigurationError
from helpers import assert_same_text
from mtp_targets import FAMILIES, target_with_head


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    target_with_head("qwen3_5_text", folder)
    return folder


@pytest.fixture(params=["one file", "shards"])
def fine_tune(base: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The base as transformers saves it after loading: without its head."""
    folder = tmp_path / "tuned"
    model = hf.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
    model.save_pretrained(folder, **({"max_shard_size": "100KB"} if request.param == "shards" else {}))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_saved_by_itself_and_read_again(family, tmp_path):
    target = target_with_head(family, tmp_path / "target")
    drafter = Eagle31Drafter.from_pretrained(tmp_path / "target", target=target)
    drafter.save_pretrained(tmp_path / "head")
    again = Eagle31Drafter.from_pretrained(tmp_path / "head", target=target)
    ours, wanted = again.canonical_tensors(), drafter.canonical_tensors()
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in ours.items())
    assert again.config.to_dict() == drafter.config.to_dict() | {"architectures": again.config.architectures}


def test_no_other_layout_can_say_what_a_head_is(base, tmp_path):
    drafter = Eagle31Drafter.from_pretrained(base)
    with pytest.raises(ConfigurationError, match="its layout is mtp"):
        drafter.save_pretrained(tmp_path / "out", format="plain")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": None}, "block, the text configuration"),
        ({"block": {"model_type": "no such model"}}, "no such model"),
        ({"hidden_size": "wide"}, "no possible MTP head"),
        ({"hidden_size": 128, "target_hidden_size": 128}, "fc.weight"),
    ],
)
def test_a_damaged_configuration_is_refused(base, tmp_path, change, message):
    Eagle31Drafter.from_pretrained(base).save_pretrained(tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointFormatError, match=message):
        Eagle31Drafter.from_pretrained(tmp_path / "head")


# --- put back ---------------------------------------------------------------------------------------------------------


def test_a_grafted_head_is_the_bases_byte_for_byte(base, fine_tune):
    before = {name: raw for name, raw in content(fine_tune).items() if name != "model.safetensors.index.json"}
    names = graft_head(base, fine_tune)
    wanted = {name: tensor for name, tensor in load_file(base / "model.safetensors").items() if name in names}
    index = json.loads((fine_tune / "model.safetensors.index.json").read_text())["weight_map"]
    for name in names:
        assert torch.equal(load_file(fine_tune / index[name])[name], wanted[name])
    head, ours = read_checkpoint(base).tensors, read_checkpoint(fine_tune).tensors
    assert all(torch.equal(ours[name], tensor) for name, tensor in head.items())
    assert set(before.values()) <= set(content(fine_tune).values()), "weights and config are as they were"


def test_a_norm_that_head_and_target_share_is_not_put_there_twice(tmp_path):
    target_with_head("ernie4_5_moe", tmp_path / "base").save_pretrained(tmp_path / "tuned")
    names = graft_head(tmp_path / "base", tmp_path / "tuned")
    assert names
    assert all(name.startswith("model.mtp_") for name in names)
    wanted = read_checkpoint(tmp_path / "base").tensors
    assert all(torch.equal(wanted[n], tensor) for n, tensor in read_checkpoint(tmp_path / "tuned").tensors.items())


def test_every_reader_finds_target_and_head_afterwards(base, fine_tune):
    wanted = hf.AutoModelForCausalLM.from_pretrained(fine_tune).state_dict()
    graft_head(base, fine_tune)
    model = hf.AutoModelForCausalLM.from_pretrained(fine_tune)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    index = json.loads((fine_tune / "model.safetensors.index.json").read_text())
    held = {name: path.name for path in fine_tune.glob("*.safetensors") for name in load_file(path)}
    assert held == index["weight_map"], "what vLLM, SGLang and llama.cpp's converter go by"
    eagle = Eagle31Drafter.from_pretrained(fine_tune, target=model)
    assert_same_text(model, eagle, torch.arange(10, 18)[None], max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize(
    "failing",
    ["eagle31_hf.checkpoints.graft.save_file", "eagle31_hf.checkpoints.files.os.replace", "pathlib.Path.write_text"],
)
def test_a_torn_write_leaves_the_folder_as_it_was(base, fine_tune, failing, monkeypatch):
    before = content(fine_tune)

    def torn(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(failing, torn)
    with pytest.raises(CheckpointError, match="no space left"):
        graft_head(base, fine_tune)
    assert content(fine_tune) == before
    monkeypatch.undo()
    graft_head(base, fine_tune)


def test_a_folder_that_has_a_head_or_is_of_another_model_is_left_alone(base, fine_tune, tmp_path):
    other = tmp_path / "copy"
    shutil.copytree(base, other)
    with pytest.raises(CheckpointFormatError, match="holds an MTP head already"):
        graft_head(base, other)
    path = fine_tune / files.CONFIG_FILE
    fields = json.loads(path.read_text())
    before = content(fine_tune)
    path.write_text(json.dumps(fields | {"num_hidden_layers": 5}))
    with pytest.raises(CheckpointFormatError, match="num_hidden_layers 5"):
        graft_head(base, fine_tune)
    path.write_text(json.dumps({name: value for name, value in fields.items() if name != "mtp_num_hidden_layers"}))
    with pytest.raises(CheckpointFormatError, match="lacks mtp_num_hidden_layers"):
        graft_head(base, fine_tune)
    assert {name: raw for name, raw in content(fine_tune).items() if name != path.name} == {
        name: raw for name, raw in before.items() if name != path.name
    }
