"""Attention registered from outside is never exchanged for SDPA silently, and cuDNN's is set aside for drafts alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.backends import cuda
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle31_hf.cache.grouped_attention import why_attention_is_unknown
from eagle31_hf.cache.shared_changes import SharedChanges
from eagle31_hf.errors import UnsupportedGenerationError
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.engine import within_what_the_target_can
from eagle31_hf.targets import binding
from helpers import CONFIGS, assert_same_text, configured, left_padded, prompts_for, random_drafter, random_target


def sharper(module: Any, query: Tensor, *rest: Any, scaling: float | None = None, **more: Any) -> Any:
    """Attention with scores three times as large."""
    usual = scaling if scaling is not None else query.shape[-1] ** -0.5
    return sdpa_attention_forward(module, query, *rest, scaling=3 * usual, **more)


def recent(*args: Any, **kwargs: Any) -> Any:
    """A mask that lets no token see further back than four others."""
    mask = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    queries, keys = mask.shape[-2:]
    far = torch.arange(keys)[None] < torch.arange(keys - queries, keys)[:, None] - 4
    return mask & ~far


REGISTERED: dict[str, tuple[str, Any, Any]] = {
    "a name of one's own": ("mine", sharper, sdpa_mask),
    "no mask of its own": ("mine", sharper, None),
    "a mask of one's own": ("mine", sdpa_attention_forward, recent),
    "sdpa's name": ("sdpa", sharper, sdpa_mask),
    "flash attention's name": ("flash_attention_2", sharper, sdpa_mask),
    "eager's mask": ("eager", None, recent),
}


@pytest.fixture
def registries() -> Iterator[None]:
    """What is registered meanwhile is forgotten."""
    with (
        mock.patch.dict(AttentionInterface._global_mapping),
        mock.patch.dict(AttentionMaskInterface._global_mapping),
    ):
        yield


def register(name: str, attention: Any, mask: Any) -> None:
    if attention is not None:
        AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


@pytest.mark.contract
@pytest.mark.parametrize("case", REGISTERED)
def test_registered_attention_is_decoded_plainly(case: str, registries: None) -> None:
    target = random_target(CONFIGS["llama"]())
    eagle = random_drafter(target)
    rows = 1 if case == "no mask of its own" else 2
    inputs = left_padded(prompts_for("llama", rows))
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = target.generate(**inputs, **how)
    name, attention, mask = REGISTERED[case]
    register(name, attention, mask)
    if attention is not sharper or name != "flash_attention_2":
        target.set_attn_implementation(name)
    else:
        target.config._attn_implementation_internal = name  # the package need not be there
    assert not torch.equal(target.generate(**inputs, **how), before), "or nothing was registered"
    assert_same_text(target, eagle, inputs, loop="plain", **how)
    assert repr(name) in eagle.stats.reason
    refusal = pytest.raises(UnsupportedGenerationError, match="registered from outside")
    with configured(eagle, speculation_loop="own"), refusal:
        target.generate(**inputs, **how, assistant_model=eagle)
    with pytest.raises(UnsupportedGenerationError, match="registered from outside"):
        within_what_the_target_can(eagle, EngineSettings())


@pytest.mark.contract
def test_transformers_own_attention_makes_way(registries: None) -> None:
    """All that attends as SDPA does, also where a kernel from the Hub is bound to it; what is sparse does not."""
    target = random_target(CONFIGS["llama"]())
    register("somebody/flash-kernel", partial(flash_attention_forward, implementation="x"), sdpa_mask)
    register("somebody/sparse-kernel", mock.Mock(), sdpa_mask)
    own = sorted(ALL_ATTENTION_FUNCTIONS.keys() & ALL_MASK_ATTENTION_FUNCTIONS.keys())
    assert {"sdpa", "flash_attention_2", "flex_attention"} <= set(own)
    for name in ["eager", *own]:
        target.config._attn_implementation_internal = name
        assert (why_attention_is_unknown(target) is None) == (name != "somebody/sparse-kernel"), name


# --- cuDNN ----------------------------------------------------------------------------------------------------------


def test_a_drafted_text_does_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    # Changes of this test's own: a server that other tests share holds the process's open as long as it runs.
    found = cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(binding, "CHANGES", SharedChanges())
    cuda.enable_cudnn_sdp(True)
    target, seen = random_target(CONFIGS["llama"]()), []
    drafter = random_drafter(target, aux_layers=[1, 2, 4])
    handle = target.lm_head.register_forward_pre_hook(lambda *_: seen.append(cuda.cudnn_sdp_enabled()))
    ids = torch.arange(3, 9)[None]
    try:
        target.generate(ids, assistant_model=drafter, max_new_tokens=6, do_sample=False)
        assert not any(seen)
        seen.clear()
        target.generate(ids, max_new_tokens=2, do_sample=False)
        assert all(seen)
    finally:
        handle.remove()
        cuda.enable_cudnn_sdp(found)
