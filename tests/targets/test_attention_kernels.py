"""cuDNN's attention is set aside while drafted texts are written, and only then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.backends import cuda

from eagle31_hf.targets import binding
from eagle31_hf.targets.shared_changes import SharedChanges, leave_cudnn_out
from helpers import CONFIGS, random_drafter, random_target


@pytest.fixture(autouse=True)
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedChanges]:
    """One of these tests' own: a server that other tests share holds the process's open as long as it runs."""
    found, own = cuda.cudnn_sdp_enabled(), SharedChanges()
    monkeypatch.setattr(binding, "CHANGES", own)
    cuda.enable_cudnn_sdp(True)
    yield own
    cuda.enable_cudnn_sdp(found)


@pytest.mark.parametrize("before", [True, False])
def test_texts_may_overlap(before: bool, switch: SharedChanges) -> None:
    cuda.enable_cudnn_sdp(before)
    switch.hold("cudnn", leave_cudnn_out)
    switch.hold("cudnn", leave_cudnn_out)
    assert not cuda.cudnn_sdp_enabled()
    switch.let_go("cudnn")  # of either text: the other one is still written
    assert not cuda.cudnn_sdp_enabled()
    switch.let_go("cudnn")
    assert cuda.cudnn_sdp_enabled() == before


def test_a_drafted_text_does_without() -> None:
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
