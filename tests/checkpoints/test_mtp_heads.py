"""Heads in targets' folders: found wherever they are stored, read whole, or refused by name; kept on their own, and put
back where they were lost."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import read_checkpoint, require_head
from eagle31_hf.checkpoints.graft import graft_head
from eagle31_hf.checkpoints.mtp import promised_head, promises_head
from eagle31_hf.errors import CheckpointError, CheckpointFormatError, ConfigurationError
from helpers import assert_same_text
from mtp_targets import FAMILIES, target_with_head

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = "mtp."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target_with_head("qwen3_5_text", tmp_path / "base")
    return tmp_path / "base"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    stored = load_file(folder / WEIGHTS)
    change(stored)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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
    target_with_head(family, tmp_path / "usual")
    if alias == "model." and family in ("glm4_moe", "glm4_moe_lite", "deepseek_v3"):
        alias = "language_model."
    target_with_head(family, tmp_path / "other", alias=alias, single_experts=True)
    usual, other = (read_checkpoint(tmp_path / name) for name in ("usual", "other"))
    assert_equal(other.tensors, usual.tensors)
    assert usual.format == other.format == "mtp"
    assert usual.config.family == family


def test_of_several_modules_the_first_is_read(tmp_path):
    """MiMo-V2-Flash stores three."""
    target_with_head("mimo_v2_flash", tmp_path)
    wanted = head_of(tmp_path)
    first = "model.mtp.layers.0."

    def add_another(stored: dict[str, Tensor]) -> None:
        others = {name: tensor + 1 for name, tensor in stored.items() if name.startswith(first)}
        stored |= {name.replace(first, "model.mtp.layers.1."): tensor for name, tensor in others.items()}

    rewrite(tmp_path, add_another)
    assert_equal(head_of(tmp_path), wanted)


def split(folder: Path, *, indexed: bool = True) -> tuple[str, str]:
    """The target in one file and its head in another, which the index names or omits; both files' names."""
    stored = load_file(folder / WEIGHTS)
    head = {name: stored.pop(name) for name in list(stored) if name.startswith(PREFIX)}
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors" if indexed else "mtp.safetensors")
    weight_map: dict[str, str] = {}
    for file, tensors in zip(files, (stored, head), strict=True):
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file) if indexed or tensors is stored else {}
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return files


def test_only_the_files_that_hold_it_are_read(folder):
    wanted = head_of(folder)
    others, heads = split(folder)
    (folder / others).unlink()  # was never downloaded
    assert_equal(head_of(folder), wanted)
    (folder / heads).unlink()
    assert heads in refusal(folder)


def test_a_file_beside_an_index_that_omits_it_is_read(folder):
    wanted = head_of(folder)
    split(folder, indexed=False)
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


NORM, QUERY = "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.q_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "lost": (
        lambda stored: [stored.pop(name) for name in list(stored) if name.startswith(PREFIX)],
        ("config.json says that there is an MTP head", "transformers drops them", "eagle31 mtp BASE --into FOLDER"),
    ),
    "without fc": (lambda stored: stored.pop("mtp.fc.weight"), ("lacks fc.weight", "fetch it again")),
    "without a norm": (lambda stored: stored.pop("mtp.norm.weight"), ("lacks norm.weight",)),
    "without another norm": (lambda stored: stored.pop(NORM), ("lacks hnorm.weight",)),
    "in integers": (
        lambda stored: stored.update({QUERY: stored[QUERY].to(torch.int8)}),
        ("layers.0.self_attn.q_proj.weight is stored as int8", "take the head from the unpacked model"),
    ),
    "not numbers": (lambda stored: stored["mtp.fc.weight"][0].fill_(float("nan")), ("values in fc.weight",)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_with_a_head_is_named(folder, damage):
    change, facts = DAMAGES[damage]
    rewrite(folder, change)
    message = refusal(folder)
    assert all(fact in message for fact in facts), message


def test_a_configuration_that_transformers_refuses_is_refused_in_one_line(folder):
    reconfigure(folder, vocab_size="many")
    assert refusal(folder).endswith("cannot be read by transformers: vocab_size is 'many'; wanted a whole number")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.mlp.down_proj.weight", (64, 8), r"layers\.0\.mlp\.down_proj\.weight is \[64, 8\], wanted"),
        ("embed_tokens.weight", (8, 64), r"spare: embed_tokens\.weight"),  # other families' are the target's
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_when_the_head_is_built(folder, name, shape, message):
    rewrite(folder, lambda stored: stored.update({PREFIX + name: torch.ones(shape)}))
    with pytest.raises(CheckpointFormatError, match=message):
        Eagle31Drafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mimo", "no class for MiMo-7B"), ("step3p5", "inside its picture model"), ("qwen4_exp", "several streams"),
     ("llama", "those of qwen3_5, ")],
)  # fmt: skip
def test_heads_that_cannot_be_run_right_are_refused_by_name(folder, family, reason):
    (folder / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": {"model_type": family}}))
    with pytest.raises(CheckpointFormatError, match=rf"holds no MTP head that can be read \(.*{reason}.*name an EAGLE"):
        require_head(folder)


def test_a_promise_beside_the_text_configuration_is_one(tmp_path):
    """EXAONE 4.5 says outside of it how many modules there are."""
    text = hf.Exaone4Config(num_hidden_layers=4).to_dict() | {"model_type": "exaone4_5_text"}
    config = {"model_type": "exaone4_5", "num_nextn_predict_layers": 1, "text_config": text}
    assert promises_head(config)
    assert not promises_head(config | {"num_nextn_predict_layers": 0})
    head = promised_head(hf.AutoConfig.for_model(**config))
    assert head is not None
    assert head.family == "exaone4"


def test_of_a_target_on_the_hub_only_the_head_is_downloaded(folder, tmp_path, monkeypatch):
    wanted = head_of(folder)
    shards = split(folder)
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


# --- on their own -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one file", "shards"])
def fine_tune(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The base as transformers saves it after loading: without its head."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(0.01)
    model.save_pretrained(tmp_path / "tuned", **({"max_shard_size": "100KB"} if request.param == "shards" else {}))
    return tmp_path / "tuned"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_saved_by_itself_and_read_again(family, tmp_path):
    target = target_with_head(family, tmp_path / "target")
    drafter = Eagle31Drafter.from_pretrained(tmp_path / "target", target=target)
    drafter.save_pretrained(tmp_path / "head")
    again = Eagle31Drafter.from_pretrained(tmp_path / "head", target=target)
    assert_equal(again.canonical_tensors(), drafter.canonical_tensors())
    assert again.config.to_dict() == drafter.config.to_dict() | {"architectures": again.config.architectures}


def test_no_other_layout_can_say_what_a_head_is(folder, tmp_path):
    drafter = Eagle31Drafter.from_pretrained(folder)
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
def test_a_damaged_configuration_is_refused(folder, tmp_path, change, message):
    Eagle31Drafter.from_pretrained(folder).save_pretrained(tmp_path / "head")
    reconfigure(tmp_path / "head", **change)
    with pytest.raises(CheckpointFormatError, match=message):
        Eagle31Drafter.from_pretrained(tmp_path / "head")


# --- put back ---------------------------------------------------------------------------------------------------------


def test_a_grafted_head_is_the_bases_byte_for_byte(folder, fine_tune):
    before = {name: raw for name, raw in content(fine_tune).items() if name != INDEX}
    names = graft_head(folder, fine_tune)
    wanted = {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if name in names}
    index = json.loads((fine_tune / INDEX).read_text())["weight_map"]
    for name in names:
        assert torch.equal(load_file(fine_tune / index[name])[name], wanted[name])
    assert_equal(head_of(fine_tune), head_of(folder))
    assert set(before.values()) <= set(content(fine_tune).values()), "weights and config are as they were"


def test_a_norm_that_head_and_target_share_is_not_put_there_twice(tmp_path):
    target_with_head("ernie4_5_moe", tmp_path / "base").save_pretrained(tmp_path / "tuned")
    names = graft_head(tmp_path / "base", tmp_path / "tuned")
    assert names
    assert all(name.startswith("model.mtp_") for name in names)
    assert_equal(head_of(tmp_path / "tuned"), head_of(tmp_path / "base"))


def test_every_reader_finds_target_and_head_afterwards(folder, fine_tune):
    wanted = hf.AutoModelForCausalLM.from_pretrained(fine_tune).state_dict()
    graft_head(folder, fine_tune)
    model = hf.AutoModelForCausalLM.from_pretrained(fine_tune)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    index = json.loads((fine_tune / INDEX).read_text())
    held = {name: path.name for path in fine_tune.glob("*.safetensors") for name in load_file(path)}
    assert held == index["weight_map"], "what vLLM, SGLang and llama.cpp's converter go by"
    eagle = Eagle31Drafter.from_pretrained(fine_tune, target=model)
    assert_same_text(model, eagle, torch.arange(10, 18)[None], max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize(
    "failing",
    ["eagle31_hf.checkpoints.graft.save_file", "eagle31_hf.checkpoints.files.os.replace", "pathlib.Path.write_text"],
)
def test_a_torn_write_leaves_the_folder_as_it_was(folder, fine_tune, failing, monkeypatch):
    before = content(fine_tune)

    def torn(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(failing, torn)
    with pytest.raises(CheckpointError, match="no space left"):
        graft_head(folder, fine_tune)
    assert content(fine_tune) == before
    monkeypatch.undo()
    graft_head(folder, fine_tune)


def test_a_folder_that_has_a_head_or_is_of_another_model_is_left_alone(folder, fine_tune, tmp_path):
    other = tmp_path / "copy"
    shutil.copytree(folder, other)
    with pytest.raises(CheckpointFormatError, match="holds an MTP head already"):
        graft_head(folder, other)
    path = fine_tune / "config.json"
    fields = json.loads(path.read_text())
    before = content(fine_tune) | {path.name: b""}
    reconfigure(fine_tune, num_hidden_layers=5)
    with pytest.raises(CheckpointFormatError, match="num_hidden_layers 5"):
        graft_head(folder, fine_tune)
    path.write_text(json.dumps({name: value for name, value in fields.items() if name != "mtp_num_hidden_layers"}))
    with pytest.raises(CheckpointFormatError, match="lacks mtp_num_hidden_layers"):
        graft_head(folder, fine_tune)
    assert content(fine_tune) | {path.name: b""} == before
