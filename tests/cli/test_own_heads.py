"""A target that holds an MTP head needs no other drafter."""

from pathlib import Path

import pytest
from command_line import DRAFTER, PROMPT, TARGET, error_of, run
from transformers import AutoTokenizer

from mtp_targets import target_with_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with a head")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.save_pretrained(folder)
    target_with_head("qwen3_5_text", folder, vocab_size=len(tokenizer))
    return folder


@pytest.mark.parametrize("drafter", [[], ["--drafter", "mtp"]])
def test_the_head_drafts_where_no_drafter_is_named(target, drafter, tmp_path):
    kept = tmp_path / "text.json"
    run("generate", "--target", target, *drafter, "--prompt", PROMPT, "--max-new-tokens", 8, "--json", kept)
    assert kept.exists()


def test_a_target_without_a_head_still_needs_a_drafter():
    assert "--drafter" in error_of("generate", "--target", TARGET, "--prompt", "x")
    message = error_of("generate", "--target", TARGET, "--drafter", "mtp", "--prompt", "x")
    assert "holds no MTP head that can be read" in message
    assert "qwen3_5" in message


def test_the_embedded_target_has_no_head():
    assert "holds no MTP head" in error_of("generate", "--drafter", "mtp", "--prompt", "x")


def test_a_head_of_another_target_does_not_fit(target):
    message = error_of(
        "generate", "--target", DRAFTER.replace("drafter", "target"), "--drafter", target, "--prompt", "x"
    )
    assert "hidden size" in message
