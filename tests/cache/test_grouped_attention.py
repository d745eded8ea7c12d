"""Attention without copies of keys: the same as with them, for every kind of mask, and what a target calls.

What is registered from outside is never exchanged for it silently, and cuDNN's is set aside for drafts alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle31_hf.cache import attention_in_parts as in_parts
from eagle31_hf.cache import grouped_attention as grouped
from eagle31_hf.cache.attention_in_parts import attention_in_parts, finite
from eagle31_hf.cache.grouped_attention import GROUPED, grouped_attention, why_attention_is_unknown
from eagle31_hf.cache.shared_changes import SharedChanges
from eagle31_hf.errors import UnsupportedGenerationError
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.engine import within_what_the_target_can
from eagle31_hf.targets import binding
from eagle31_hf.targets.binding import TargetBinding
from helpers import (
    CONFIGS,
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    prompts_for,
    random_drafter,
    random_target,
    target_of,
    write,
)

WIDTH, CLOSE = 16, {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def states(batch: int, groups: int, length: int, slots: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values as a model makes them and as a cache lends them: the first slots of longer buffers."""
    torch.manual_seed(groups * 1000 + length)
    kv_heads = 2
    query = torch.randn(batch, length, kv_heads * groups, WIDTH, dtype=dtype).transpose(1, 2)
    buffers = torch.randn(2, batch, kv_heads, slots + 7, WIDTH, dtype=dtype)
    return [query, *(buffer[:, :, :slots] for buffer in buffers)]


def tree_mask(rows: int, heads: int, length: int, slots: int, *, window: int | None = None) -> Tensor:
    """Additive: nodes of a tree behind a prefix, in a window; of each row and each head its own."""
    visible = torch.ones(rows, heads, length, slots, dtype=torch.bool)
    generator = torch.Generator().manual_seed(5)
    block = torch.rand(rows, heads, length, length, generator=generator) < 0.5
    visible[..., slots - length :] = (block & torch.ones(length, length).tril().bool()) | torch.eye(length).bool()
    if window is not None:
        visible[..., : slots - length - window] = False
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)


def with_copies(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(
        query, repeat_kv(key, groups), repeat_kv(value, groups), attn_mask=mask, scale=scale
    )


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 6, 40])  # the last by one head of a group after the other
@pytest.mark.parametrize("mask", ["shared", "of rows", "of heads", "window", "bool", "of narrow values"])
def test_it_gives_what_attention_with_copied_keys_gives(mask, length, batch, groups, dtype):
    query, key, value = states(batch, groups, length, 50, dtype)
    value = value[..., :8] if mask == "of narrow values" else value
    rows, heads = (batch if mask == "of rows" else 1), (2 * groups if mask == "of heads" else 1)
    made = tree_mask(rows, heads, length, 50, window=9 if mask == "window" else None).to(dtype)
    made = made == 0 if mask == "bool" else made.clamp(min=torch.finfo(dtype).min)
    out = grouped_attention(query, key, value, made, scale=0.3)
    expected = with_copies(query, key, value, made, scale=0.3)
    assert out.shape == expected.shape == (batch, 2 * groups, length, value.shape[3])
    torch.testing.assert_close(out, expected, rtol=0, atol=CLOSE[dtype])


def test_without_a_mask_one_query_sees_everything_and_several_are_a_chain():
    query, key, value = states(2, 4, 1, 50)
    torch.testing.assert_close(grouped_attention(query, key, value), with_copies(query, key, value, None))
    query, key, value = states(2, 4, 20, 20)
    chain = torch.full((20, 20), torch.finfo(torch.float32).min).triu(1)[None, None]
    torch.testing.assert_close(grouped_attention(query, key, value), with_copies(query, key, value, chain))


@pytest.mark.parametrize("length", [6, 40])
@torch.enable_grad()
def test_gradients_are_those_of_attention_with_copied_keys(length):
    mask, gradients = tree_mask(1, 1, length, 60), []
    for attend in (grouped_attention, with_copies):
        leaves = [each.detach().clone().requires_grad_() for each in states(1, 4, length, 60)]
        (attend(*leaves, mask) ** 2).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def exact_kernel(query, key, value, mask, scale):
    """In the kernel's place: softmax and its log-sum-exp in full precision, padded as the kernel pads it."""
    scores = query.double() @ key.double().transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else scores + mask.double()
    sums = F.pad(scores.logsumexp(-1), (0, -query.shape[2] % 32), value=float("inf"))
    return (scores.softmax(-1) @ value.double()).to(query.dtype), sums.float()


@pytest.mark.parametrize("slots", [256, 301])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [0, 1, 2], ids=["no mask", "shared", "of heads"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_of_the_keys_give_together_what_all_keys_give(monkeypatch, parts, heads, batch, slots):
    monkeypatch.setattr(in_parts, "attention_and_sums", exact_kernel)
    query, key, value = states(batch, 1, 24, slots)
    mask = tree_mask(batch, heads, 24, slots, window=100) if heads else None  # the first parts are hidden as a whole
    ours = finite(mask, query.dtype) if mask is not None else None
    out = attention_in_parts(query, key, value, ours, parts, scale=0.4)
    torch.testing.assert_close(out, with_copies(query, key, value, mask, scale=0.4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_hidden_stays_finite_in_the_kernels_arithmetic(dtype):
    for mask in (torch.tensor([0.0, torch.finfo(dtype).min]).to(dtype), torch.tensor([True, False])):
        made = finite(mask, dtype)
        assert made.dtype == dtype
        assert made[0] == 0
        assert torch.isfinite(made.float() * 1.4427).all()
        assert torch.exp(made.float()[1]) == 0


@pytest.mark.parametrize(
    ("found", "works", "said"),
    [(1e-3, True, ""), (0.3, False, "differs by 0.3"), (math.nan, False, "differs by nan"),
     (RuntimeError("no kernel image\nis available"), False, "no kernel image")],
)  # fmt: skip
def test_a_device_is_tried_before_keys_are_shared_out(
    found: Any, works: bool, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured = mock.Mock(side_effect=[found])
    monkeypatch.setattr(in_parts, "_difference_on", measured)
    in_parts.is_right_on.cache_clear()
    assert [in_parts.is_right_on(torch.device("cuda", 0)) for _ in range(2)] == [works, works]
    assert said in caplog.text
    assert bool(caplog.text) != works
    in_parts.is_right_on.cache_clear()


def test_the_trial_tells_right_from_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_parts, "attention_and_sums", exact_kernel)
    assert in_parts._difference_on(torch.device("cpu")) < in_parts.LARGEST_DIFFERENCE

    def in_base_two(*given: Any) -> tuple[Tensor, Tensor]:
        out, sums = exact_kernel(*given)
        return out, sums / math.log(2)

    monkeypatch.setattr(in_parts, "attention_and_sums", in_base_two)
    assert not in_parts._difference_on(torch.device("cpu")) < in_parts.LARGEST_DIFFERENCE


def test_a_target_attends_without_copies_while_drafted_texts_run(monkeypatch):
    target, drafter = target_of("llama"), drafter_of("llama")
    shapes: list[tuple[Any, ...]] = []
    attend = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("attn_mask") is not None:
            shapes.append((query.shape[1], key.shape[1], kwargs.get("enable_gqa", False)))
        return attend(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    ids = torch.tensor([[5, 6, 7, 8]])
    target.generate(ids, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    kv_heads = target.config.num_key_value_heads
    assert shapes
    assert set(shapes) == {(kv_heads, kv_heads, False)}
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("own", ["sdpa", "eager", "flex_attention"])
def test_the_target_has_its_own_attention_back_from_the_last_of_its_drafters(own):
    target, drafter = random_target(CONFIGS["llama"]()), drafter_of("llama")
    target.set_attn_implementation(own)
    one, other = (TargetBinding(target, drafter.config) for _ in range(2))
    first, second = one.masked_attention(), other.masked_attention()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # the other one still drafts, and has masks that flex attention does not take
    assert target.config._attn_implementation == ("eager" if own == "eager" else GROUPED)
    assert other.attention == ("eager" if own == "eager" else "sdpa")
    second.__exit__(None, None, None)
    assert target.config._attn_implementation == other.attention == own
    one.close()
    other.close()


def test_attention_that_is_not_looked_up_by_name_is_left_alone():
    config = hf.FalconConfig(vocab_size=96, hidden_size=64, num_hidden_layers=4, num_attention_heads=4)
    target, drafter = random_target(config), drafter_of("llama")
    attached = TargetBinding(target, drafter.config)
    with attached.masked_attention():
        assert target.config._attn_implementation == "sdpa"
    attached.close()


def test_what_it_does_not_know_goes_to_transformers_own(monkeypatch):
    asked = []
    monkeypatch.setattr(grouped, "sdpa_attention_forward", lambda *args, **kwargs: asked.append(kwargs) or "theirs")
    query, key, value = states(1, 4, 6, 50)
    mask, call = tree_mask(1, 1, 6, 50), grouped.grouped_attention_forward
    module = torch.nn.Module()
    assert call(module, query, key, value, None) == "theirs"
    assert call(module, query, key, value, mask, dropout=0.1) == "theirs"
    assert call(module, query, key, value, mask, position_bias=mask) == "theirs"
    assert call(module, query, key, value, mask[..., :49]) == "theirs"
    assert len(asked) == 4
    out, weights = call(module, query, key, value, mask, scaling=0.2)
    assert weights is None
    assert len(asked) == 4
    torch.testing.assert_close(out.transpose(1, 2), with_copies(query, key, value, mask, scale=0.2))


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
    before = write(target, inputs)
    name, attention, mask = REGISTERED[case]
    register(name, attention, mask)
    if attention is not sharper or name != "flash_attention_2":
        target.set_attn_implementation(name)
    else:
        target.config._attn_implementation_internal = name  # the package need not be there
    assert not torch.equal(write(target, inputs), before), "or nothing was registered"
    assert_same_text(target, eagle, inputs, loop="plain")
    assert repr(name) in eagle.stats.reason
    refusal = pytest.raises(UnsupportedGenerationError, match="registered from outside")
    with configured(eagle, speculation_loop="own"), refusal:
        write(target, inputs, assistant_model=eagle)
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
