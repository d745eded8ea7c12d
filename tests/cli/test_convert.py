"""`eagle31 inspect` and `eagle31 convert`: every layout that is written, and lines to paste."""

import json
import shlex

import pytest
import torch
from command_line import DRAFTER, TARGET, error_of, run
from transformers import AutoModelForCausalLM

from eagle31_hf import Eagle31Config
from eagle31_hf.checkpoints import TARGET_MODEL, Checkpoint, read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.eagle_network import expected_shapes


def test_inspect_tells_what_a_checkpoint_is(tmp_path):
    out = run("inspect", DRAFTER, "--json", tmp_path / "facts.json").stdout
    assert "EAGLE 3.1" in out
    assert "4,096 of 8,192" in out
    assert "midlayer.self_attn.q_proj.weight" in out
    assert json.loads((tmp_path / "facts.json").read_text())["draft_vocab_size"] == 4096


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_convert_and_inspect_every_layout_that_can_hold_the_drafter(tmp_path, layout):
    converted = tmp_path / "converted"
    run("convert", DRAFTER, converted, "--format", layout)
    assert layout in run("inspect", converted).stdout
    before, after = read_checkpoint(DRAFTER), read_checkpoint(converted)
    assert after.format == layout
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())


def test_latent_attention_is_written_in_the_layout_that_has_it(tmp_path):
    sizes = {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 4, "v_head_dim": 4, "own_embedding": True}
    config = Eagle31Config(hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=8, **sizes)
    tensors = {name: torch.ones(shape) for name, shape in expected_shapes(config).items()}
    write_checkpoint(Checkpoint(config, tensors), tmp_path / "latent", format="mla")
    run("convert", tmp_path / "latent", tmp_path / "out")
    assert read_checkpoint(tmp_path / "out").format == "mla"


def test_convert_overwrites_only_when_told(tmp_path):
    run("convert", DRAFTER, tmp_path)
    before = (tmp_path / "config.json").read_text()
    assert "--force" in error_of("convert", DRAFTER, tmp_path, "--format", "speculators")
    assert (tmp_path / "config.json").read_text() == before
    run("convert", DRAFTER, tmp_path, "--format", "speculators", "--force")
    assert read_checkpoint(tmp_path).format == "speculators"


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


def test_a_folder_of_the_target_leaves_its_name_in_the_file(tmp_path):
    named = read_checkpoint(DRAFTER)
    named.metadata[TARGET_MODEL] = {"name_or_path": "maker/target"}
    write_checkpoint(named, tmp_path / "named", format="plain")
    shown = run("convert", tmp_path / "named", tmp_path / "out", "--target", TARGET).stdout
    assert "vllm serve maker/target" in shown
    assert read_checkpoint(tmp_path / "out").target == "maker/target"


def test_convert_says_that_a_loader_will_ask_for_the_target(tmp_path):
    shown = run("convert", DRAFTER, tmp_path / "out", "--format", "speculators").stdout
    assert "convert it with --target" in shown
    assert "vllm serve TARGET" in shown
    assert "SGLang" not in shown


def test_convert_copies_from_the_target_what_a_layout_cannot_share(tmp_path):
    told = run("convert", DRAFTER, tmp_path / "out", "--format", "speculators", "--target", TARGET).stdout
    assert "with the target's embedding, which speculators files hold themselves" in " ".join(told.split())
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    written = read_checkpoint(tmp_path / "out")
    assert torch.equal(written.tensors["embed_tokens.weight"], target.get_input_embeddings().weight)
    shared = read_checkpoint(DRAFTER)
    shared.config.own_lm_head = False
    del shared.tensors["lm_head.weight"]
    for rows in (4096, 8192):
        if rows == 8192:
            shared.config.draft_vocab_size = rows
            del shared.tensors["d2t"]
        write_checkpoint(shared, tmp_path / f"shared-{rows}")
        command = ("convert", tmp_path / f"shared-{rows}", tmp_path / f"own-{rows}", "--format", "speculators")
        assert "--target" in error_of(*command)
        run(*command, "--target", TARGET)
        own = read_checkpoint(tmp_path / f"own-{rows}").tensors
        ids = torch.arange(rows) + own.get("d2t", 0)
        assert torch.equal(own["lm_head.weight"], target.get_output_embeddings().weight[ids])
