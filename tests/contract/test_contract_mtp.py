"""The contract for heads inside targets: the text is plain `generate`'s, whatever the head is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from eagle31_hf import Eagle31Drafter
from helpers import assert_same_text, assert_same_turns, prompts_of, seeded
from mtp_targets import CONFIGS, FAMILIES, target_with_head

pytestmark = pytest.mark.contract

NEW_TOKENS = 24


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Eagle31Drafter]:
    folder = tmp_path_factory.mktemp(request.param)
    target = target_with_head(request.param, folder)
    return target, Eagle31Drafter.from_pretrained(folder, target=target)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafts", [1, 3, 6])
@pytest.mark.parametrize("acceleration", ["eager", "compile"])
def test_text_is_plain(pair, sampled, rows, drafts, acceleration):
    target, drafter = pair
    inputs = prompts_of([5, 17, 11, 8][:rows], seed=drafts)
    how: dict[str, Any] = {"do_sample": sampled} | ({"temperature": 0.8, "top_k": 20} if sampled else {})
    loop = {"num_assistant_tokens": drafts, "num_assistant_tokens_schedule": "constant", "prefill_chunk_size": 8,
            "acceleration": acceleration}  # fmt: skip
    how |= {"seed": drafts, "oracle": drafts, "settings": loop, "max_new_tokens": NEW_TOKENS}
    assert_same_text(target, drafter, inputs, **how)
    if acceleration == "compile" and drafter.config.sliding_window is None:
        assert not drafter.stats.fallbacks, "drafts of a head are graphs like any other's"


def test_turns_that_carry_a_cache_are_plain(pair):
    assert_same_turns(*pair, prompts_of([9], seed=4), max_new_tokens=8)


def test_a_head_that_is_right_has_every_draft_accepted(tmp_path):
    """A target whose next token follows from its last alone, and a head that knows how: more drafts, fewer passes."""
    target = follows_a_cycle(tmp_path)
    drafter = Eagle31Drafter.from_pretrained(tmp_path, target=target)
    inputs = prompts_of([5])
    plain = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    assert len(set(plain[0, 5:].tolist())) > 20, "the text does not stand still"
    for drafts in (1, 3, 5):
        settings = {"num_assistant_tokens": drafts, "num_assistant_tokens_schedule": "constant"}
        assert_same_text(target, drafter, inputs, settings=settings, max_new_tokens=40)
        assert drafter.stats.accepted == drafter.stats.drafted
        assert drafter.stats.acceptance_length > 0.9 * (drafts + 1)


def follows_a_cycle(folder: Path) -> Any:
    """A Qwen3.5-shaped target that says token t + 5 after token t, with a head that does so, too."""
    target = target_with_head("qwen3_5_text", folder)
    stored = load_file(folder / "model.safetensors")
    vocabulary, width = stored["model.embed_tokens.weight"].shape
    with seeded(3):
        codes = torch.nn.functional.normalize(torch.randn(vocabulary, width), dim=1)
    stored["model.embed_tokens.weight"] = codes.clone()
    stored["lm_head.weight"][(torch.arange(vocabulary) + 5) % vocabulary] = codes
    for name, tensor in stored.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()  # layers add nothing to the embedding
        if name in ("model.norm.weight", "mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"):
            tensor.zero_()  # norms of this family multiply by 1 + w
    stored["mtp.fc.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert CONFIGS["qwen3_5_text"]().model_type == target.config.model_type
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("precision", ["int8", "nf4"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "deepseek_v3", "mellum"])
def test_a_packed_head_writes_plains_text(tmp_path, family, precision):
    if family not in FAMILIES:
        pytest.skip("this version of transformers has no such family")
    pytest.importorskip("bitsandbytes")
    target = target_with_head(family, tmp_path)
    packing = {"load_in_8bit": True} if precision == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = hf.BitsAndBytesConfig(**packing)
    drafter = Eagle31Drafter.from_pretrained(tmp_path, target=target, quantization_config=config)
    kinds = {name: type(module).__name__ for name, module in drafter.named_modules()}
    packed = [name for name, kind in kinds.items() if name.endswith("_proj") and kind not in ("Linear", "Identity")]
    assert packed, "where rows are whole blocks"
    assert kinds["fc"] == "Linear", "and fc never"
    settings = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    assert_same_text(target, drafter, prompts_of([7], seed=2), settings=settings, max_new_tokens=NEW_TOKENS)
    assert drafter.stats.drafted > 0
