"""Every published layout to every other and back: nothing is lost where both can say it, and losses are named first."""

import itertools
import json

import pytest
import torch
from safetensors import SafetensorError
from tiny_checkpoints import (
    D2T,
    GROUPED_FORMATS,
    PLAIN,
    REFUSES,
    SAFEAILAB,
    VARIANTS,
    layout,
    make,
    save,
    speculators_config,
)

from eagle31_hf.checkpoints import read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.formats import find_format
from eagle31_hf.checkpoints.losses import find_losses
from eagle31_hf.errors import CheckpointError, ConfigurationError

PAIRS = list(itertools.permutations(GROUPED_FORMATS, 2))
FILES = ("config.json", "model.safetensors")
TARGET = {"name_or_path": "somebody/a-target", "architectures": ["LlamaForCausalLM"]}
NEEDS_THE_TARGET = {"shared_head", "shared_head_rows"}
CANNOT_BE_LEFT_OUT = {"wider_target"}


def variant(name: str, formats: tuple[str, ...]):
    """The tiny drafter of `tiny_checkpoints`; with its own embedding where a layout always holds one."""
    changes = dict(VARIANTS[name])
    if "nemo" in formats and "own_lm_head" not in changes:
        changes["own_embedding"] = True
    return make(**changes)


def contents(folder) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.thorough(every=3)
def test_there_and_back_is_byte_identical_where_both_can_say_it(tmp_path, first, second):
    both = [name for name in VARIANTS if name not in REFUSES[first] | REFUSES[second]]
    assert "eagle3" in both
    for name in both:
        checkpoint = variant(name, (first, second))
        checkpoint.metadata.update(training_note="kept", target_model=TARGET)
        here, there, back = (tmp_path / name / place for place in ("here", "there", "back"))
        write_checkpoint(checkpoint, here, format=first)
        assert write_checkpoint(read_checkpoint(here), there, format=second) == ()
        converted = read_checkpoint(there)
        assert converted.format == second
        assert converted.metadata["target_model"] == TARGET
        assert converted.config.to_dict() == read_checkpoint(here).config.to_dict()
        write_checkpoint(converted, back, format=first)
        assert contents(back) == contents(here), name


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_what_a_layout_cannot_say_stops_the_conversion_or_is_left_out_when_told(tmp_path, first, second):
    for name in REFUSES[second] - REFUSES[first]:
        checkpoint = variant(name, (first, second))
        here, there = tmp_path / name / "here", tmp_path / name / "there"
        write_checkpoint(checkpoint, here, format=first)
        read = read_checkpoint(here)
        losses = find_losses(find_format(second), read.config)
        assert losses
        with pytest.raises(ConfigurationError, match=f"the {second} format cannot express") as stopped:
            write_checkpoint(read, there, format=second)
        assert all(loss.what in str(stopped.value) for loss in losses)
        assert not there.exists()
        if name in NEEDS_THE_TARGET | CANNOT_BE_LEFT_OUT:
            with pytest.raises(ConfigurationError, match="cannot express"):
                write_checkpoint(read, there, format=second, allow_loss=True)
            assert ("--target" in str(stopped.value)) == (name in NEEDS_THE_TARGET)
            continue
        assert "--allow-loss" in str(stopped.value)
        assert write_checkpoint(read, there, format=second, allow_loss=True) == tuple(loss.what for loss in losses)
        left = read_checkpoint(there)
        assert left.format == second
        assert all(torch.equal(tensor, read.tensors[key]) for key, tensor in left.tensors.items())
        assert not find_losses(find_format(second), left.config)
        changed = {key for key, value in left.config.to_dict().items() if value != read.config.to_dict().get(key)}
        expected = {field for loss in losses for field, value in (loss.left or {}).items()}
        assert changed == {field for field in expected if getattr(read.config, field) != getattr(left.config, field)}
        assert changed, name


def published(folder, format: str):
    """A file as its trainer writes it, with entries only that trainer's loaders know."""
    if format == "speculators":
        config = speculators_config(norm_before_residual=False, embed_requires_grad=False)
        return save(folder, config, layout("layers.0"))
    if format == "torchspec":
        return save(folder, PLAIN | {"_torchspec_version": "0.1.0", "run": 7}, layout("midlayer"))
    marks = {"use_aux_hidden_state": True, "use_last_layernorm": True, "next_layer_regular": True, "decay": 0.9}
    return save(folder, SAFEAILAB | {"eagle_config": marks}, layout("midlayer"))


@pytest.mark.parametrize("second", GROUPED_FORMATS)
@pytest.mark.parametrize("first", ["speculators", "torchspec", "modelopt"])
def test_marks_of_a_trainer_survive_a_visit_to_another_layout(tmp_path, first, second):
    read = read_checkpoint(published(tmp_path / "published", first))
    assert read.format == first
    if second == "nemo":
        read.config.own_embedding, read.tensors["embed_tokens.weight"] = True, torch.randn(20, 8)
    write_checkpoint(read, tmp_path / "here", format=first)
    write_checkpoint(read_checkpoint(tmp_path / "here"), tmp_path / "there", format=second)
    write_checkpoint(read_checkpoint(tmp_path / "there"), tmp_path / "round", format="plain")
    write_checkpoint(read_checkpoint(tmp_path / "round"), tmp_path / "back", format=first)
    assert contents(tmp_path / "back") == contents(tmp_path / "here")
    assert read_checkpoint(tmp_path / "back").metadata == read.metadata


def test_a_target_is_named_where_each_loader_looks(tmp_path):
    checkpoint = make()
    checkpoint.metadata["target_model"] = TARGET
    for format in ("plain", "speculators"):
        write_checkpoint(checkpoint, tmp_path / format, format=format)
    configs = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "speculators")}
    assert configs["plain"]["target_model"] == TARGET
    assert configs["speculators"]["speculators_config"]["verifier"] == TARGET
    assert "target_model" not in configs["speculators"]


@pytest.mark.parametrize("kept", ["nonsense", {"plain": 3}, {"plain": {"auto_map": "x", "architectures": ["Evil"]}}])
def test_markers_put_by_bring_nothing_else_back(tmp_path, kept):
    config = PLAIN | {"kept_for_formats": kept}
    write_checkpoint(read_checkpoint(save(tmp_path / "a", config, layout("midlayer"))), tmp_path / "b")
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert not {"auto_map", "kept_for_formats"} & written.keys()


def test_a_reduced_drafter_keeps_its_map(tmp_path):
    write_checkpoint(make(aux_norm="per_slot", norm_output=True), tmp_path, format="modelopt", allow_loss=True)
    left = read_checkpoint(tmp_path)
    assert torch.equal(left.tensors["d2t"], D2T)
    assert not left.config.is_eagle31


@pytest.mark.parametrize("is_there", [True, False])
def test_a_full_disk_is_told_in_a_line_and_leaves_things_as_they_were(tmp_path, monkeypatch, is_there):
    """What safetensors raises there is no OSError."""
    folder = tmp_path / "new" / "drafter"
    if is_there:
        write_checkpoint(make(), folder)
        before = contents(folder)

    def full(_tensors, path, **_how):
        path.write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match=r"could not be written to .*No space left.*another\s+folder"):
        write_checkpoint(make(), folder)
    if is_there:
        assert contents(folder) == before
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    else:
        assert not folder.parent.exists()


def test_a_place_that_cannot_be_made_is_told_in_a_line(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        write_checkpoint(make(), tmp_path / "file" / "drafter")
