"""A target that holds an MTP head needs no other drafter."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import PROMPT, TARGET, error_of, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from mtp_targets import target_with_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with a head")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.save_pretrained(folder)
    target_with_head("qwen3_5_text", folder, vocab_size=len(tokenizer))
    return folder


def test_a_plan_counts_the_head_inside_the_target(target, tmp_path):
    figures = {}
    for drafter in ("default", "mtp", "none"):
        option = [] if drafter == "default" else ["--drafter", drafter]
        run("plan", target, *option, "--context", 64, "--card", "RTX 4090", "--json", tmp_path / "plan.json")
        figures[drafter] = json.loads((tmp_path / "plan.json").read_text())
    assert figures["default"] == figures["mtp"]
    assert "MTP head" in figures["mtp"]["drafter"]["name"]
    assert figures["none"]["drafter"] is None
    assert figures["none"]["figures"]["peak_bytes"] < figures["mtp"]["figures"]["peak_bytes"]


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
