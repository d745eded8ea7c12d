"""cuDNN's attention is set aside while drafted texts are written, and only then."""

from __future__ import annotations

import pytest
import torch
from torch.backends import cuda

from eagle31_hf.target.attention_kernels import WithoutCudnn
from helpers import CONFIGS, random_drafter, random_target


@pytest.mark.parametrize("before", [True, False])
def test_texts_may_overlap(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.enable_cudnn_sdp(before)
    switch = WithoutCudnn()
    try:
        switch.__enter__()
        switch.__enter__()
        assert not cuda.cudnn_sdp_enabled()
        switch.__exit__(None, None, None)  # of either text: the other one is still written
        assert not cuda.cudnn_sdp_enabled()
        switch.__exit__(None, None, None)
        assert cuda.cudnn_sdp_enabled() == before
    finally:
        cuda.enable_cudnn_sdp(True)


def test_a_drafted_text_does_without() -> None:
    target, seen = random_target(CONFIGS["llama"]()), []  # others' tests change the shared one
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
