"""`eagle31 inspect` and `eagle31 convert`: every layout that is written, and lines to paste; and a target that holds an
MTP head, which needs no other drafter."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from command_line import DRAFTER, PROMPT, TARGET, error_of, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Config, Eagle31Drafter
from eagle31_hf.checkpoints import TARGET_MODEL, Checkpoint, read_checkpoint, write_checkpoint
from eagle31_hf.checkpoints.eagle_network import expected_shapes
from mtp_targets import target_with_head


def test_inspect_tells_what_a_checkpoint_is(tmp_path):
    out = run("inspect", DRAFTER, "--json", tmp_path / "facts.json").stdout
    assert all(fact in out for fact in ("EAGLE 3.1", "plain", "4,096 of 8,192"))
    assert "midlayer.self_attn.q_proj.weight" in out
    assert json.loads((tmp_path / "facts.json").read_text())["draft_vocab_size"] == 4096


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
    assert "Convert again with --target" in " ".join(shown.split())
    assert "vllm serve" not in shown
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


# --- heads inside targets ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with a head")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.save_pretrained(folder)
    target_with_head("qwen3_5_text", folder, vocab_size=len(tokenizer))
    return folder


def test_a_text_is_written_by_the_head_with_and_without_a_plan(target, tmp_path):
    kept = tmp_path / "text.json"
    options = ("--prompt", PROMPT, "--max-new-tokens", 8, "--no-compare", "--json", kept)
    assert "drafting by its own MTP head" in run("generate", "--target", target, *options).stdout
    assert json.loads(kept.read_text())["stats"]["drafted"] > 0, "no drafter is named"
    planned = ("--drafter", "mtp", "--memory", "auto", "--context", 128)
    assert "drafter in full precision" in run("generate", "--target", target, *planned, *options).output
    assert json.loads(kept.read_text())["plan"]["drafter"] is not None


def test_a_head_is_taken_out_and_put_back(target, tmp_path):
    output = run("mtp", target, "--out", tmp_path / "head").stdout
    assert "pass this folder as the drafter" in output
    run("generate", target, "--drafter", tmp_path / "head", "--prompt", PROMPT, "--max-new-tokens", 4)
    assert "holds a checkpoint already" in error_of("mtp", target, "--out", tmp_path / "head")
    tuned = tmp_path / "tuned"
    AutoModelForCausalLM.from_pretrained(target).save_pretrained(tuned)
    AutoTokenizer.from_pretrained(target).save_pretrained(tuned)
    assert "15 tensors" in run("mtp", target, "--into", tuned).stdout
    run("generate", "--target", tuned, "--drafter", "mtp", "--prompt", PROMPT, "--max-new-tokens", 4)
    assert "holds an MTP head already" in error_of("mtp", target, "--into", tuned)


def test_a_head_is_written_with_the_states_it_is_to_read(target, tmp_path):
    before = (target / "config.json").read_bytes()
    run("mtp", target, "--out", tmp_path / "head", "--state", "raw", "--feedback", "raw")
    assert (target / "config.json").read_bytes() == before
    output = " ".join(run("inspect", tmp_path / "head").stdout.split())
    assert "the target's, before the final norm" in output
    assert "its own output, before the final norm" in output
    drafter = Eagle31Drafter.from_pretrained(tmp_path / "head")
    assert (drafter.config.normed_state, drafter.config.norm_output) == (False, False)


def test_doctor_says_which_states_a_head_is_for(target, tmp_path):
    kept = tmp_path / "seen.json"
    output = run("doctor", "--target", target, "--limit", 2, "--max-new-tokens", 16, "--json", kept).stdout
    assert "MTP head" in output
    readings = {tuple(score["reading"]["fields"].values()) for score in json.loads(kept.read_text())["readings"]}
    assert readings == {(True, False), (False, True), (False, False)}


def test_draft_rows_are_counted_on_ones_own_texts(target, tmp_path):
    chats = tmp_path / "chats.jsonl"
    answer = "the weather in Portland will be rainy"
    chats.write_text(
        json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]})
    )
    output = run("mtp", target, "--out", tmp_path / "head", "--draft-vocab", 64, "--prompts", chats).stdout
    assert "100.0% of those" in output
    drafter = Eagle31Drafter.from_pretrained(tmp_path / "head")
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert len(drafter.draft_ids) == 64
    assert set(tokenizer(answer)["input_ids"]) <= set(drafter.draft_ids.tolist())
    alone = shutil.copytree(target, tmp_path / "alone", ignore=shutil.ignore_patterns("tokenizer*"))
    counted = ("--out", tmp_path / "x", "--draft-vocab", 64, "--prompts", chats)
    assert "holds no tokenizer" in error_of("mtp", alone, *counted)
    unlearned = {"role": "assistant", "content": answer, "weight": 0}
    for answers, advice in ([], "give its answer"), ([unlearned], "name conversations with answers"):
        chats.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}, *answers]}))
        error = error_of("mtp", target, *counted)
        assert advice in error
        assert "--max-length" not in error


def test_inspect_says_what_head_a_target_holds(target, tmp_path):
    output = run("inspect", target).stdout
    for fact in ("MTP head", "inside its target (qwen3_5_text)", "float32", "behind the final norm", "mtp.fc.weight"):
        assert fact in output
    run("mtp", target, "--out", tmp_path / "head")
    assert "bfloat16" in run("inspect", tmp_path / "head").stdout
