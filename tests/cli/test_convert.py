"""`eagle31 inspect` and `eagle31 convert`: every layout, what it would lose, and lines to paste."""

import json
import shlex

import pytest
import torch
from command_line import DRAFTER, TARGET, error_of, run
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from eagle31_hf.checkpoints import read_checkpoint
from eagle31_hf.cli import app


def test_inspect_tells_what_a_checkpoint_is(tmp_path):
    out = run("inspect", DRAFTER, "--json", tmp_path / "facts.json").stdout
    assert "EAGLE 3.1" in out
    assert "4,096 of 8,192" in out
    assert "midlayer.self_attn.q_proj.weight" in out
    assert json.loads((tmp_path / "facts.json").read_text())["draft_vocab_size"] == 4096


@pytest.mark.parametrize("layout", ["plain", "specforge", "speculators", "torchspec"])
def test_convert_and_inspect_every_layout_that_can_hold_the_drafter(tmp_path, layout):
    converted = tmp_path / "converted"
    run("convert", DRAFTER, converted, "--format", layout)
    assert layout in run("inspect", converted).stdout
    before, after = read_checkpoint(DRAFTER), read_checkpoint(converted)
    assert after.format == layout
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_convert_says_what_a_layout_would_lose_and_goes_on_only_when_told(tmp_path):
    arguments = ("convert", DRAFTER, tmp_path / "out", "--format", "modelopt")
    message = error_of(*arguments)
    assert all(words in message for words in ("speculators", "--allow-loss", "aux_norm", "norm_output"))
    assert not (tmp_path / "out").exists()
    shown = run(*arguments, "--allow-loss").stdout
    assert "left out, so train it again" in shown
    assert not read_checkpoint(tmp_path / "out").config.is_eagle31


def test_convert_overwrites_only_when_told(tmp_path):
    run("convert", DRAFTER, tmp_path)
    before = (tmp_path / "config.json").read_text()
    assert "--force" in error_of("convert", DRAFTER, tmp_path, "--format", "specforge")
    assert (tmp_path / "config.json").read_text() == before
    run("convert", DRAFTER, tmp_path, "--format", "specforge", "--force")
    assert read_checkpoint(tmp_path).format == "specforge"


@pytest.mark.parametrize(("answer", "code", "layout"), [("n\n", 1, "plain"), ("y\n", 0, "specforge")])
def test_convert_asks_on_a_terminal(tmp_path, monkeypatch, answer, code, layout):
    run("convert", DRAFTER, tmp_path)
    monkeypatch.setattr("eagle31_hf.cli.convert._can_ask", lambda: True)
    command = ["convert", DRAFTER, str(tmp_path), "--format", "specforge"]
    assert CliRunner().invoke(app, command, input=answer).exit_code == code
    assert read_checkpoint(tmp_path).format == layout


def test_convert_writes_the_target_down_and_prints_lines_to_paste(tmp_path):
    folder = tmp_path / "a drafter's folder"
    shown = run("convert", DRAFTER, folder, "--target", TARGET).stdout.splitlines()
    (vllm,) = [shlex.split(line) for line in shown if line.strip().startswith("vllm serve")]
    (sglang,) = [shlex.split(line) for line in shown if "sglang.launch_server" in line]
    assert vllm[2] == TARGET
    assert json.loads(vllm[4])["model"] == str(folder)
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == str(folder)
    assert any("not run by us" in line for line in shown)
    run("convert", folder, tmp_path / "speculators", "--format", "speculators")
    verifier = json.loads((tmp_path / "speculators" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": TARGET, "architectures": ["LlamaForCausalLM"]}


def test_convert_says_that_a_loader_will_ask_for_the_target(tmp_path):
    shown = run("convert", DRAFTER, tmp_path / "out", "--format", "speculators").stdout
    assert "convert it with --target" in shown
    assert "vllm serve TARGET" in shown
    assert "SGLang does not read it" in shown
    assert "no target at" in error_of("convert", DRAFTER, tmp_path / "other", "--target", "nobody/nothing")


def test_convert_copies_from_the_target_what_a_layout_cannot_share(tmp_path):
    message = error_of("convert", DRAFTER, tmp_path / "out", "--format", "nemo")
    assert "--target" in message
    assert "--allow-loss" not in message
    run("convert", DRAFTER, tmp_path / "out", "--format", "nemo", "--target", TARGET)
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    written = read_checkpoint(tmp_path / "out")
    assert torch.equal(written.tensors["embed_tokens.weight"], target.get_input_embeddings().weight)


def test_an_unknown_layout_is_named_before_anything_is_read(tmp_path):
    message = error_of("convert", "nobody/nothing", tmp_path / "out", "--format", "gguf")
    assert "gguf" in message
    assert "speculators" in message
