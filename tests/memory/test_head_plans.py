"""Plans count the head inside a target: its weights, its keys and values, and what a run with it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

from eagle31_hf import Eagle31Drafter, NoDrafter
from eagle31_hf.checkpoints import read_checkpoint, write_checkpoint
from eagle31_hf.drafter.draft_rows import with_draft_rows, with_rows
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.errors import CheckpointFormatError
from eagle31_hf.memory import plan_memory
from eagle31_hf.memory.cards import GIB, Card
from eagle31_hf.memory.drafter_facts import DrafterFacts, read_drafter
from eagle31_hf.memory.dry_run import Forward, StorageCounter
from eagle31_hf.memory.ledger import RUNNING
from eagle31_hf.memory.target_facts import read_target
from eagle31_hf.memory.weights import SCHEMES, storage_bytes
from mtp_targets import FAMILIES, target_with_head

FP32 = SCHEMES["fp32"]
ROOMY = Card("main memory", "cpu", 64 * GIB, 64 * GIB, measured=True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return target_with_head(request.param, folder), folder


def facts_of(drafter: Any, target: Any) -> DrafterFacts:
    return read_drafter(drafter, read_target(target))


def test_weights_and_cache_are_those_of_the_loaded_head(pair) -> None:
    target, folder = pair
    drafter = Eagle31Drafter.from_pretrained(folder, target=target)
    for given in (folder, drafter):
        facts = facts_of(given, target)
        assert facts.weight_bytes(FP32) == pytest.approx(storage_bytes(drafter), rel=0.02)
        assert facts.head_bytes(FP32) == 0, "the target's LM head is read in place"
    session = DraftSession(drafter, batch_size=1, capacity=64, block=9)
    width = target.config.hidden_size
    session.absorb(torch.arange(9)[None], torch.randn(1, 9, width), [9])
    kept = sum(layer.num_bytes for layer in session.cache.layers)
    assert facts.count(Forward(9, 64, block=session.cache.block)).cache == kept > 0


PACKINGS = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


@pytest.mark.parametrize("precision", PACKINGS)
def test_a_packed_head_is_planned_as_it_is_packed(pair, precision: str) -> None:
    pytest.importorskip("bitsandbytes")
    target, folder = pair
    plan = plan_memory(target, drafter=folder, context=64, drafter_precision=precision, card="RTX 4090")
    packing = BitsAndBytesConfig(**PACKINGS[precision])
    drafter = Eagle31Drafter.from_pretrained(folder, target=target, quantization_config=packing)
    (planned,) = [term.num_bytes for term in plan.ledger if term.name.startswith("drafter weights")]
    assert planned == pytest.approx(storage_bytes(drafter), rel=0.02)


def test_draft_rows_cost_what_is_copied_of_them(tmp_path: Path) -> None:
    target = target_with_head("qwen3_5_text", tmp_path / "target")
    head, width = read_checkpoint(tmp_path / "target"), target.config.hidden_size
    first, chosen = with_draft_rows(head, 40), with_rows(head, torch.arange(1, 81, 2))
    for name, saved, copied in (("first", first, 0), ("chosen", chosen, 40 * width * 4)):
        write_checkpoint(saved, tmp_path / name, format="mtp")
        drafter = Eagle31Drafter.from_pretrained(tmp_path / name, target=target)
        for given in (tmp_path / name, drafter):
            facts = facts_of(given, target)
            assert facts.head_bytes(FP32) == copied
            assert facts.draft_vocab == 40


def test_a_plan_takes_the_head_inside_the_target(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    target = target_with_head("glm4_moe_lite", folder)
    by_itself = plan_memory(folder, context=64, card="RTX 4090")
    asked = plan_memory(folder, drafter="mtp", context=64, card="RTX 4090")
    assert by_itself.drafter.name == asked.drafter.name == facts_of(folder, folder).name
    assert "MTP head" in by_itself.drafter.name
    target.save_pretrained(tmp_path / "tuned")
    assert "MTP head" not in plan_memory(tmp_path / "tuned", context=64, card="RTX 4090").drafter.name
    with pytest.raises(CheckpointFormatError, match="transformers drops them"):
        plan_memory(tmp_path / "tuned", drafter="mtp", context=64)


@pytest.mark.parametrize(
    ("name", "parameters", "cached"),
    # One layer of attention, gated (24 heads of 256, 4 of keys), and its MLP; `fc` of 2H x H. Norms are some thousands.
    [
        ("Qwen3.6 27B", 5120 * 256 * (3 * 24 + 2 * 4) + 3 * 5120 * 17408 + 2 * 5120**2, 2 * 4 * 256),
        # 256 experts, one that all tokens pass, and what chooses them.
        (
            "Qwen3.6 35B-A3B",
            2048 * 256 * (3 * 16 + 2 * 2) + (256 + 1) * 3 * 2048 * 512 + (256 + 1) * 2048 + 2 * 2048**2,
            2 * 2 * 256,
        ),
    ],
)
def test_targets_known_by_name_have_their_familys_head(name: str, parameters: int, cached: int) -> None:
    plan = plan_memory(name, card="RTX 4090", quantization="bnb-nf4-dq", context=8192)
    assert plan.drafter is not None
    assert "MTP head" in plan.drafter.name
    assert plan.drafter.weight_bytes(SCHEMES["bf16"]) == pytest.approx(2 * parameters, rel=0.001)
    assert plan.drafter.count(Forward(8, 1000, block=8)).cache == 1000 * cached * 2
    assert plan_memory(name, drafter="mtp", card="RTX 4090", context=64).drafter.name == plan.drafter.name


LARGER = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 4000, "num_attention_heads": 4, "head_dim": 64,
          "num_key_value_heads": 2, "max_position_embeddings": 2048}  # fmt: skip
LATENT = {**LARGER, "num_key_value_heads": 4, "head_dim": 4}


@pytest.mark.parametrize(("family", "sizes"), [("qwen3_5_text", LARGER), ("glm4_moe_lite", LATENT)])
@pytest.mark.thorough(every=2)
def test_a_head_adds_what_is_planned(family: str, sizes: dict[str, int], tmp_path: Path, monkeypatch) -> None:
    """The same target with its head and without: weights, and the peak of the whole run."""
    monkeypatch.setattr("eagle31_hf.memory.apply_plan.measure_card", lambda _device: ROOMY)
    target = target_with_head(family, tmp_path, **sizes)
    plans = [
        plan_memory(target, drafter=tmp_path, card=ROOMY, context=544, draft_tokens=drafts, prefill_chunk=256)
        for drafts in (6, 0)
    ]
    head, alone = Eagle31Drafter.from_pretrained(tmp_path, target=target, memory=plans[0]), NoDrafter(target)
    alone.generation_config.prefill_chunk_size = 256
    head.generation_config.num_assistant_tokens_schedule = "constant"
    ids = torch.randint(3, 4000, (1, 512), generator=torch.Generator().manual_seed(0))
    peaks = []
    for assistant in (head, alone):
        with StorageCounter() as counter:
            target.generate(ids, max_new_tokens=32, do_sample=False, assistant_model=assistant, pad_token_id=0)
        peaks.append(counter.peak_bytes)
    added = storage_bytes(head) + peaks[0] - peaks[1]
    planned = [max(plan.bytes_by_moment[moment] for moment in RUNNING) for plan in plans]
    assert planned[0] - planned[1] == pytest.approx(added, rel=0.02)
