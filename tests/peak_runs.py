"""Runs beside their memory plans: what a plan says of one, and what it takes.

Targets are planned from their configuration alone; then target and drafter are made with random weights, the drafter is
loaded under that very plan, a prompt is read and 32 tokens are written. On CUDA the allocator is asked; elsewhere
storages are counted as they come and go, which does not see workspaces inside kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle31_hf import Eagle31Drafter
from eagle31_hf.memory import MemoryPlan, plan_memory
from eagle31_hf.memory.cards import Card
from eagle31_hf.memory.dry_run import StorageCounter
from eagle31_hf.memory.ledger import RUNNING
from eagle31_hf.memory.plan import PARTS
from eagle31_hf.memory.weights import SCHEMES, storage_bytes
from helpers import left_padded
from random_pair import SIZES, counted_on, counting_drafter, llama_config, random_target

NEW_TOKENS = 32
DRAFT_VOCABULARY = 32_000  # of a drafter that nobody has named, as plans assume it
DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PLANNED = ("context", "batch", "draft_tokens", "tree_size", "tree_width", "cache_type", "drafter_precision")


@dataclass(frozen=True)
class PeakRun:
    """One combination to plan and to run: a size of `random_pair`, what is stored how, and what is drafted."""

    size: str = "8b"
    four_bit: bool = False
    context: int = 8192
    batch: int = 1
    draft_tokens: int = 6
    tree_size: int | None = None
    tree_width: int | None = None
    prefill_chunk: int | None = 1024  # `None`: the prompt at once
    cache_type: str = "full"
    drafter_precision: str = "full"

    @property
    def prompt_tokens(self) -> int:
        return self.context - NEW_TOKENS

    def to_plan(self, dtype: torch.dtype, card: Card) -> MemoryPlan:
        """The plan of this run, and of no other: nothing is left for the planner to choose."""
        plain = DTYPE_NAMES[dtype]
        return plan_memory(
            llama_config(self.size),
            quantization=replace(SCHEMES["bnb-nf4-dq"], dtype=plain) if self.four_bit else plain,
            card=card,
            prefill_chunk=self.prefill_chunk or self.prompt_tokens,
            **{name: getattr(self, name) for name in PLANNED},
        )


RUNS = (
    PeakRun(four_bit=True),
    PeakRun(four_bit=True, context=32768, cache_type="int8"),
    PeakRun(four_bit=True, tree_size=60, tree_width=5, prefill_chunk=None),
    PeakRun(four_bit=True, context=4096, batch=4, draft_tokens=3, drafter_precision="nf4"),
    PeakRun(context=4096, prefill_chunk=None),
    PeakRun(context=32768, drafter_precision="int8"),
    PeakRun(context=4096, batch=4, tree_size=24, prefill_chunk=512, cache_type="int8"),
    PeakRun(four_bit=True, tree_size=60, tree_width=5, cache_type="int8", drafter_precision="nf4"),
)
"""Chains and trees, prompts in chunks and at once, one row and four, both caches, every drafter precision."""


def runs_on(size: str, context: int) -> tuple[PeakRun, ...]:
    """`RUNS` at another size, at one context and with two chunks to a prompt: every distinct combination."""
    chunk = max(1, (context - NEW_TOKENS) // 2)
    runs = (replace(run, size=size, context=context, prefill_chunk=run.prefill_chunk and chunk) for run in RUNS)
    return tuple(dict.fromkeys(runs))


@dataclass(frozen=True)
class PeakRecord:
    """Planned and measured bytes of one run, the runtime's own left out: of the peak once weights are loaded, and of
    target and drafter alone."""

    planned_bytes: int
    measured_bytes: int
    planned_weights: int
    measured_weights: int

    @property
    def ratio(self) -> float:
        """Planned over measured peak."""
        return self.planned_bytes / self.measured_bytes


def measure_peak(run: PeakRun, plan: MemoryPlan, *, dtype: torch.dtype, device: torch.device) -> PeakRecord:
    meter = AllocatorMeter(device) if device.type == "cuda" else StorageMeter()
    target: Any = random_target(run.size, dtype=dtype, device=device, four_bit=run.four_bit)
    meter.loaded(target)
    drafter = planned_drafter(target, plan)
    meter.loaded(drafter)
    prompts = ragged_prompts(run, device)
    out: list[Tensor] = []
    peak = meter.peak(lambda: out.append(write(target, drafter, prompts)))
    assert counted_on(out[0], run.prompt_tokens, SIZES[run.size]["vocab_size"])
    drafter.detach()
    return PeakRecord(
        planned_bytes=max(plan.bytes_by_moment[moment] for moment in RUNNING) - plan.card.context_bytes,
        measured_bytes=peak,
        planned_weights=planned_weights(plan),
        measured_weights=meter.weights,
    )


def write(target: Any, assistant: Any, prompts: dict[str, Tensor]) -> Tensor:
    """The text of a run, by our own loop as the plan has set it."""
    out = target.generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=assistant)
    assert assistant.stats is not None
    assert (assistant.stats.loop, assistant.stats.memory_steps) == ("own", {})
    return out


def planned_weights(plan: MemoryPlan) -> int:
    parts = (*PARTS["target"], *PARTS["drafter"])
    return sum(term.num_bytes for term in plan.ledger if term.name.startswith(parts))


def planned_drafter(target: Any, plan: MemoryPlan) -> Eagle31Drafter:
    """A drafter of the planned shape, loaded from a folder as a user's would be, under the plan."""
    vocabulary = min(target.config.vocab_size, DRAFT_VOCABULARY)
    drafter = counting_drafter(target, draft_vocabulary=vocabulary, right=0.8, memory=plan)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return drafter


def ragged_prompts(run: PeakRun, device: torch.device) -> dict[str, Tensor]:
    """Random ids. All rows but the first are half as long: rows of unlike length need a mask each, as is planned."""
    below = min(SIZES[run.size]["vocab_size"], DRAFT_VOCABULARY) // 2
    ids = torch.randint(1, below, (run.prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [ids, *[ids[len(ids) // 2 :]] * (run.batch - 1)]
    return {name: tensor.to(device) for name, tensor in left_padded(rows).items()}


# --- meters -----------------------------------------------------------------------------------------------------------


class AllocatorMeter:
    """Asks the CUDA allocator, which tells what it handed out, workspaces inside kernels included.

    Counted since it was made: `weights` of what was loaded (before anything runs, for bitsandbytes may repack weights
    then), and the peak of a call, weights included.
    """

    def __init__(self, device: torch.device):
        self.device, self.weights = device, 0
        gc.collect()  # what the last run left behind must not be given back during this one
        self._before = torch.cuda.memory_allocated(device)

    def loaded(self, model: nn.Module) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        self.weights = torch.cuda.memory_allocated(self.device) - self._before

    def peak(self, call: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self._before


class StorageMeter:
    """The same by the models' storages and by those that a computation makes."""

    def __init__(self) -> None:
        self.weights = 0

    def loaded(self, model: nn.Module) -> None:
        self.weights += storage_bytes(model)

    def peak(self, call: Callable[[], object]) -> int:
        with StorageCounter() as counter:
            call()
        return self.weights + counter.peak_bytes
