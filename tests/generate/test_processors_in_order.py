"""Processors that keep state are shown the text alone: each prefix once, in order, and nothing behind its end."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf.loop import choosing, survive
from eagle31_hf.loop.decoder import SpeculativeDecoder
from eagle31_hf.loop.round import Round
from helpers import (
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    seeded,
    target_of,
    use_fixed_shapes_only,
)

pytestmark = pytest.mark.contract

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"draft_top_k": 2, "draft_tree_size": 15},
}
LOOPS = SHAPES | {f"{name} compiled": shape | {"acceleration": "compile"} for name, shape in SHAPES.items()}
NEW_TOKENS = 30


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)


class Budget(hf.LogitsProcessor):
    """Lets the text "think" for `tokens` calls, then forces one token: right only if it is called once per token."""

    def __init__(self, tokens: int = 7, forced: int = 42):
        self.left, self.forced = tokens, forced

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left != 0:
            return scores
        return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([self.forced]), 0.0)


class Strict(hf.LogitsProcessor):
    """Keeps a sum over the tokens it has seen, likes what that says, and refuses to be shown anything but the next."""

    def __init__(self, ends: Any = ()):
        self.seen: list[int] = []
        self.ends = set(ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[0].tolist()
        assert not self.seen or (ids[:-1] == self.seen and ids[-1] not in self.ends), "not the next prefix"
        self.seen = ids
        liked = sum(ids) % scores.shape[1]
        return scores.index_add(1, torch.tensor([liked]), torch.full((1, 1), 3.0))


def write(inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | kwargs
    return target_of("llama").generate(**inputs, **kwargs)


@pytest.mark.parametrize("shape", LOOPS)
@pytest.mark.parametrize("kind", [Budget, Strict])
def test_greedy_text_is_the_plain_one(kind: Any, shape: str) -> None:
    for depth, prompt in zip((5, 1), prompts_for("llama", 2), strict=True):
        inputs = left_padded([prompt])
        plain = write(inputs, logits_processor=[kind()])
        with (
            configured(drafter_of("llama"), num_assistant_tokens=depth, **LOOPS[shape]) as eagle,
            oracle_drafts(plain, len(prompt), seed=depth),
        ):
            ours = write(inputs, logits_processor=[kind()], assistant_model=eagle)
        assert eagle.stats is not None
        assert eagle.stats.loop == "own"
        assert torch.equal(ours, plain)
        assert depth == 1 or eagle.stats.accepted > 0, "nothing was tried"


@pytest.mark.parametrize("shape", LOOPS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_nothing_is_shown_behind_the_end(shape: str, do_sample: bool) -> None:
    """Also where drafts hit the end of sequence or the length limit and go on."""
    inputs = left_padded(prompts_for("llama", 1))
    length = inputs["input_ids"].shape[1]
    free = write(inputs, logits_processor=[Strict()])
    for limit in ({"eos_token_id": int(free[0, length + 9])}, {"max_new_tokens": 9}):
        ends = [limit["eos_token_id"]] if "eos_token_id" in limit else []
        shown = Strict(ends)
        with (
            configured(drafter_of("llama"), num_assistant_tokens=6, **LOOPS[shape]) as eagle,
            oracle_drafts(free, length, right=6),
        ):
            text = write(inputs, logits_processor=[shown], assistant_model=eagle, do_sample=do_sample, **limit)
        assert shown.seen == text[0, :-1].tolist(), "the last token's prefix is the last one shown"
        if not do_sample:
            assert torch.equal(text, write(inputs, logits_processor=[Strict()], **limit))


def test_a_function_of_the_users_is_called_as_plain_decoding_calls_it() -> None:
    """`prefix_allowed_tokens_fn` may keep state by row; rows take turns differently, each sees its own text alone."""
    inputs = left_padded(prompts_for("llama", 3))
    calls: dict[str, dict[int, list[int]]] = {}

    def allowed(log: dict[int, list[int]]) -> Any:
        def function(row: int, ids: Tensor) -> list[int]:
            log.setdefault(row, []).append(len(ids))
            return list(range(len(log[row]) % 3, 96, 3))

        return function

    def text(name: str, **kwargs: Any) -> Tensor:
        return write(inputs, prefix_allowed_tokens_fn=allowed(calls.setdefault(name, {})), **kwargs)

    plain = text("plain")
    for name, shape in LOOPS.items():
        with (
            configured(drafter_of("llama"), **shape) as eagle,
            oracle_drafts(plain, inputs["input_ids"].shape[1]),
        ):
            assert torch.equal(text(name, assistant_model=eagle), plain)
        assert eagle.stats is not None
        assert eagle.stats.loop == "own"
        assert calls[name] == calls["plain"]


def test_one_row_of_guidance_is_drafted_for() -> None:
    """Its own forward passes and cache follow the text; several rows share one cache and are left to plain decoding."""
    inputs, how = left_padded(prompts_for("llama", 1)), {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    for shape in LOOPS.values():
        eagle = drafter_of("llama")
        assert_same_text(target_of("llama"), eagle, inputs, oracle=0, settings=shape, guidance_scale=1.5, **how)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.thorough(every=2)
def test_nothing_is_shown_twice_where_memory_runs_out(
    shape: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round is judged again with fewer drafts, and what was said of its prefixes the first time holds."""
    inputs = left_padded(prompts_for("llama", 1))
    length = inputs["input_ids"].shape[1]
    chooses = "choose" if do_sample else "argmax"
    faults = (
        (Round, "accept"),
        (SpeculativeDecoder, "choose_first"),
        (choosing, chooses),
        (hf.TopKLogitsWarper, "__call__"),
    )
    for (owner, name), seed in product(faults, range(4 if do_sample else 1)):
        shown, calls, function = Strict(), 0, getattr(owner, name)
        how: dict[str, Any] = {"do_sample": do_sample, "top_k": None}
        with seeded(seed):
            plain = write(inputs, logits_processor=[Strict(), hf.TopKLogitsWarper(2)], **how)

        def failing(*args: Any, _function: Any = function) -> Any:
            nonlocal calls
            calls += 1
            result = _function(*args)
            if calls in (1, 4):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return result

        with (
            configured(drafter_of("llama"), num_assistant_tokens=5, **SHAPES[shape]) as eagle,
            oracle_drafts(plain, length, right=5),
            seeded(seed),
            monkeypatch.context() as patched,
        ):
            patched.setattr(owner, name, failing)
            patched.setattr(survive, "give_back_memory", lambda _device: None)  # collects garbage, for long
            processors = [shown, hf.TopKLogitsWarper(2)]
            text = write(inputs, assistant_model=eagle, logits_processor=processors, **how)
        assert eagle.stats is not None
        assert eagle.stats.memory_steps, name
        assert shown.seen == text[0, :-1].tolist(), name
        assert torch.equal(text, plain), name
