"""Engines that others wrote, in an environment of their own: vLLM and economize draft as we do, speculators computes.

`make engines` makes the environment and runs this file; without it everything here is skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import engine_process
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import read_checkpoint
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.training.data import NOT_WRITTEN, PackedBatch
from eagle31_hf.training.objectives import compute_features, unroll
from helpers import MODELS

STUDIES = Path(__file__).resolve().parents[1] / "examples" / "studies"

installed = (engine_process.ENVIRONMENT / ".installed").exists()
skipped = pytest.mark.skipif(not installed, reason=f"no other engines here: `{engine_process.INSTALL}` installs them")
STEPS = 3


def a_text(target) -> torch.Tensor:
    """Ids `(T,)` of a prompt and what the target goes on to write."""
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    ids = tokenizer.apply_chat_template(CONVERSATIONS[0], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    return target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)[0]


def as_speculators(folder: Path) -> Path:
    """The embedded drafter in that project's layout, in float32, by the command a user has."""
    drafter = Eagle31Drafter.from_pretrained(drafter_path(), dtype=torch.float32)
    drafter.save_pretrained(folder / "float32")
    command = [sys.executable, "-c", "from eagle31_hf.cli import main; main()", "convert", str(folder / "float32")]
    options = [str(folder / "speculators"), "--format", "speculators", "--target", str(target_path())]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return folder / "speculators"


def test_an_engine_that_is_not_installed_is_said_to_be(monkeypatch, tmp_path):
    monkeypatch.setattr(engine_process, "ENVIRONMENT", tmp_path / ".engines")
    with pytest.raises(ConfigurationError, match="make engines"):
        engine_process.engine_python()


@pytest.mark.engines
@skipped
def test_speculators_loads_answers_with_our_logits_and_converts_back(tmp_path):
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32).eval()
    drafter = Eagle31Drafter.from_pretrained(drafter_path(), target=target)
    folder, ids = as_speculators(tmp_path), a_text(target)
    aux = compute_features(drafter.binding, ids[None], torch.arange(len(ids))[None]).aux[0]
    save_file({"aux": aux[:-1].contiguous(), "input_ids": ids[1:].contiguous()}, tmp_path / "inputs.safetensors")
    request = {"steps": STEPS, "inputs": str(tmp_path / "inputs.safetensors")}
    request |= {"logits": str(tmp_path / "logits.safetensors"), "save": str(tmp_path / "saved")}
    worker = str(Path(__file__).with_name("speculators_worker.py"))
    with engine_process.start_engine(worker, {"drafter": str(folder)}, tmp_path / "log") as engine:
        assert engine.ask(**request) == {"class": "Eagle3DraftModel", "steps": STEPS}
    theirs = load_file(tmp_path / "logits.safetensors")
    for step, ours in enumerate(our_logits(drafter, ids, aux)):
        reached = len(ids) - 1 - step  # rows whose token lies past the text answer for nothing
        assert torch.allclose(ours[:reached], theirs[f"step{step}"][:reached], atol=1e-4, rtol=0), step
    before, after = read_checkpoint(folder), read_checkpoint(tmp_path / "saved")
    assert after.format == "speculators"
    assert after.metadata["target_model"]["name_or_path"] == str(target_path())
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    assert after.tensors.keys() - before.tensors.keys() <= {"embed_tokens.weight"}, "the target's, copied"


@torch.no_grad()
def our_logits(drafter: Eagle31Drafter, ids: torch.Tensor, aux: torch.Tensor) -> list[torch.Tensor]:
    """Logits `(T, Vd)` of each draft step from every position, teacher-forced."""
    batch = PackedBatch(
        input_ids=ids[None],
        position_ids=torch.arange(len(ids))[None],
        loss_mask=torch.ones_like(ids, dtype=torch.bool)[None],
        written_at=torch.full(ids.shape, NOT_WRITTEN)[None],
    )
    return [drafter.draft_logits(normed)[0] for normed in unroll(drafter, batch, aux[None], STEPS)]


# Long texts: vLLM counts a text's last round past its end, which must weigh little.
COMPARED = {
    "vLLM": ["--new-tokens", "192"],
    # It reads EAGLE-3 drafters, not those of EAGLE 3.1. So few rounds differ by the last ones of texts.
    "economize": ["--target", str(target_path()), "--drafter", str(MODELS / "demo-drafter-eagle3"), "--limit", "4"],
}


@pytest.mark.engines
@skipped
@pytest.mark.parametrize("peer", COMPARED)
def test_engines_write_our_texts_and_accept_as_we_do(peer: str, tmp_path: Path) -> None:
    command = [sys.executable, str(STUDIES / "compare_with_peers.py"), "--peers", peer, "--eager", "--turns", "1"]
    done = subprocess.run([*command, *COMPARED[peer], "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: something was found, which the record names
    record = json.loads((tmp_path / "comparison.json").read_text())
    ways = {way["way"]: way for way in record["ways"]}
    assert {way["equal_texts"] for way in ways.values()} == {record["prompts"]}
    assert record["left_out"] == {}
    ours, theirs = ways["eagle31 eager"]["acceptance"], ways[f"{peer} drafter"]["acceptance"]
    assert min(ours[0], theirs[0]) > 0.5, "a drafter that is never right would prove nothing"
    assert len(ours) == len(theirs) == 5
    if peer == "vLLM":
        assert (record["findings"], record["prompts"]) == ([], len(CONVERSATIONS))
        assert max(abs(here - there) for here, there in zip(ours, theirs, strict=True)) <= 0.02
