"""Memory that runs out where and as often as a test says, and generations that have to survive it.

Faults are injected: a forward hook or a method raises what CUDA's allocator raises, at its n-th call, a given number of
times or for as long as its cause is there.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache.layers import SlotLayer
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.loop import round as rounds
from eagle31_hf.loop.accept import Acceptor
from eagle31_hf.loop.round import Round
from eagle31_hf.loop.survive import FallbackStep
from eagle31_hf.loop.text import Sequences
from helpers import configured, drafter_of, oracle_drafts, prompts_of, stats_of, target_of, write

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
FREED, CHUNKED, DROPPED = (step.value for step in FallbackStep)
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 3},
    "tree": {"num_assistant_tokens": 3, "draft_top_k": 2, "draft_tree_size": 8},
}
NEW_TOKENS = 10
LENGTHS = {1: (13,), 3: (13, 9, 4)}


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """Raises `error` at call number `first` (1-based) and the `times - 1` after it, as long as `holds(*call)`."""

    first: int = 1
    times: int = 1
    error: BaseException = field(default_factory=lambda: OUT_OF_MEMORY)
    holds: Callable[..., bool] = lambda *_: True
    calls: int = 0
    raised: int = 0

    def __call__(self, *call: Any) -> None:
        if not self.holds(*call):
            return
        self.calls += 1
        if self.first <= self.calls < self.first + self.times:
            self.raised += 1
            raise self.error

    @contextmanager
    def in_module(self, module: nn.Module) -> Iterator[Fault]:
        handle = module.register_forward_pre_hook(self)
        try:
            yield self
        finally:
            handle.remove()

    def before(self, owner: Any, name: str) -> AbstractContextManager[Fault]:
        return self._around(owner, name, self, lambda *_: None)

    def after(self, owner: Any, name: str) -> AbstractContextManager[Fault]:
        return self._around(owner, name, lambda *_: None, self)

    @contextmanager
    def _around(
        self, owner: Any, name: str, before: Callable[..., None], after: Callable[..., None]
    ) -> Iterator[Fault]:
        function = getattr(owner, name)

        @functools.wraps(function)
        def failing(*args: Any, **kwargs: Any) -> Any:
            before(*args)
            result = function(*args, **kwargs)
            after(*args)
            return result

        with mock.patch.object(owner, name, failing):
            yield self


def modules_of(name: str) -> dict[str, nn.Module]:
    """Where a forward pass of target or drafter may run out of memory."""
    target, drafter = target_of(name), drafter_of(name)
    decoder = target.get_decoder()
    places: dict[str, nn.Module] = {"embedding": decoder.embed_tokens, "norm": decoder.norm, "head": target.lm_head}
    places |= {f"layer {index}": layer for index, layer in enumerate(decoder.layers)}
    places |= {"attention": decoder.layers[1].self_attn, "mlp": decoder.layers[2].mlp}
    drafting = {"fc": drafter.fc, "layer": drafter.layers[0], "attention": drafter.layers[0].self_attn,
                "norm": drafter.norm}  # fmt: skip
    return places | {f"drafter {place}": module for place, module in drafting.items()}


METHODS: dict[str, tuple[Any, str]] = {
    "place": (SpeculativeCache, "place"),
    "mask": (SpeculativeCache, "attention_mask"),
    "first write": (SlotLayer, "lazy_initialization"),
    "growth": (SlotLayer, "_grow"),
    "write": (SlotLayer, "update"),
    "commit": (SpeculativeCache, "commit"),
    "keep": (SpeculativeCache, "keep"),
    "copy": (SlotLayer, "copy"),
    "rows of the cache": (SpeculativeCache, "select_rows"),
    "rows of the drafter": (DraftSession, "select_rows"),
    "draft step": (DraftSession, "step"),
    "absorb": (DraftSession, "_absorb"),
    "draft logits": (Eagle31Drafter, "draft_logits"),
    "verify": (Round, "verify"),
    "accept": (Round, "accept"),
    "first token": (Acceptor, "accept"),
    "text": (Sequences, "append"),
    "stop": (Sequences, "_must_stop"),
    "time": (Sequences, "stop_if_out_of_time"),
    "path": (rounds, "aux_of_path"),
}


# --- runs -------------------------------------------------------------------------------------------------------------


def inputs_of(batch: int) -> dict[str, Tensor]:
    return prompts_of(LENGTHS[batch], seed=5)


@functools.cache
def truth_of(name: str, batch: int, end: bool = False) -> Tensor:
    """What the target writes alone; with `end`, some token of row 0 ends a row."""
    return write(name, inputs_of(batch), **how(name, batch, end))


def how(name: str, batch: int, end: bool) -> dict[str, Any]:
    ends = {"eos_token_id": int(truth_of(name, batch)[0, -5])} if end else {}
    return {"max_new_tokens": NEW_TOKENS, "prefill_chunk_size": 5, **ends}


def speculative(name: str, batch: int, *, end: bool = False, **more: Any) -> Any:
    """The same with drafts that are right by lot."""
    with oracle_drafts(truth_of(name, batch, end), max(LENGTHS[batch]), seed=3):
        return write(name, inputs_of(batch), assistant_model=drafter_of(name), **how(name, batch, end) | more)


def steps_of(name: str) -> dict[str, int]:
    assert stats_of(name).loop == "own"
    return stats_of(name).memory_steps


def assert_survives(name: str, shape: str, batch: int, fault: Any, *, end: bool = False) -> dict[str, int]:
    """With the fault and after it, the text is the undisturbed one. Returns the steps that were taken."""
    truth = truth_of(name, batch, end)
    with configured(drafter_of(name), **SHAPES[shape]):
        with fault as raised:
            assert torch.equal(speculative(name, batch, end=end), truth)
            steps = dict(steps_of(name))
        assert bool(steps) == bool(raised.raised), (steps, raised.raised)
    return steps


def assert_undisturbed(name: str, shape: str, batch: int) -> None:
    with configured(drafter_of(name), **SHAPES[shape]):
        assert torch.equal(speculative(name, batch), truth_of(name, batch))
        assert not steps_of(name)


def live_storages() -> set[int]:
    """Of dense tensors: ours are, and a sparse one that another test left has no storage to count."""
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    tensors = [tensor for tensor in alive if tensor.device.type != "meta" and tensor.layout == torch.strided]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
