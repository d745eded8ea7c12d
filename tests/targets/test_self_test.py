"""What a target cannot do is found out when a drafter is attached, by trying it, and leads to a loop that is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from eagle31_hf.errors import IncompatibleTargetError, UnsupportedGenerationError
from eagle31_hf.measure.doctor import preflight
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.engine import within_what_the_target_can
from helpers import (
    GROUPED,
    SIZES,
    assert_same_text,
    demo_tokenizer,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
)

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
WITHOUT_PAD = {name: value for name, value in SIZES.items() if name != "pad_token_id"}

NO_DRAFTS: dict[str, Callable[[], Any]] = {
    "sees what comes later, keeps no cache": lambda: hf.BertConfig(**WITHOUT_PAD, pad_token_id=0),
    "asserts": lambda: hf.XLMConfig(
        vocab_size=96, emb_dim=64, n_layers=4, n_heads=4, max_position_embeddings=128, bos_token_id=1, eos_token_id=None
    ),
    "sees what comes later": lambda: hf.BigBirdConfig(**WITHOUT_PAD, pad_token_id=0, attention_type="original_full"),
    "takes no positions": lambda: hf.WhisperConfig(
        vocab_size=96, d_model=64, decoder_layers=4, decoder_attention_heads=4, bos_token_id=1, eos_token_id=None,
        pad_token_id=0, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_DRAFTS)
def test_a_target_that_cannot_verify_drafts_is_decoded_plainly(kind: str) -> None:
    target = random_target(NO_DRAFTS[kind]())
    eagle = random_drafter(target)
    binding = eagle.binding
    assert "tree self-test" in binding.tree_unsupported_reason
    assert_same_text(target, eagle, torch.tensor(random_prompts(1, seed=3)), loop="plain", **GREEDY)
    assert "tree self-test" in eagle.stats.reason
    found = {finding.check: finding for finding in preflight(eagle, demo_tokenizer())}
    assert (found["verification"].level, "plain decoding only" in found["verification"].text) == ("problem", True)
    with pytest.raises(UnsupportedGenerationError, match=r"tree self-test.*use generate"):
        within_what_the_target_can(eagle, EngineSettings())


@pytest.mark.parametrize("rows", [1, 3])
def test_windows_under_other_names_are_not_believed(rows: int) -> None:
    """GPT-Neo counts keys where they lie, which shows only in texts that are longer than its window."""
    target = random_target(
        hf.GPTNeoConfig(
            vocab_size=96, hidden_size=64, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]],
            max_position_embeddings=128, window_size=24, initializer_range=0.15, bos_token_id=1, eos_token_id=None,
        )
    )  # fmt: skip
    eagle = random_drafter(target)
    inputs = left_padded(random_prompts(rows, seed=rows))
    assert_same_text(target, eagle, inputs, loop="plain", **GREEDY | {"max_new_tokens": 50})
    assert "window of 24 tokens, window_size" in eagle.stats.reason


def test_a_target_of_several_streams_is_refused() -> None:
    target = random_target(
        hf.Gemma3nTextConfig(
            **GROUPED, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2, laurel_rank=8,
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, num_kv_shared_layers=0,
            activation_sparsity_pattern=[0.0] * 4,
        )
    )  # fmt: skip
    with pytest.raises(IncompatibleTargetError, match=r"\(4, 1, 2, .*one vector a token"):
        random_drafter(target)
    assert not any(module._forward_pre_hooks for module in target.modules()), "it is as it was"


@pytest.mark.skipif(not hasattr(hf, "InklingTextConfig"), reason="of newer versions of transformers")
def test_masks_under_names_of_its_own_are_named_in_the_reason() -> None:
    """Inkling's layer types are not the names that it looks its masks up by."""
    config = hf.InklingTextConfig(
        **{name: value for name, value in GROUPED.items() if name != "sliding_window"}, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, swa_head_dim=16, sliding_window_size=512, d_rel=4, rel_extent=64,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
    )  # fmt: skip
    target = random_target(config)
    eagle = random_drafter(target, aux_layers=[1, 2, 3])
    assert_same_text(target, eagle, torch.tensor(random_prompts(1, seed=3)), loop="plain", **GREEDY)
    assert "looks for 'sliding_attention'" in eagle.stats.reason
    assert "hybrid_sliding" in eagle.stats.reason
