"""What plain decoding writes, once for all tests of a process, and whether a loop with a drafter writes the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from helpers import (
    FAMILIES,
    assert_same_or_tie,
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    seeded,
    target_of,
)
from matrix import WHOLE

TARGETS = (*FAMILIES, "stories260K", "demo-target")
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"speculation_loop": "own"},
    "tree": {"speculation_loop": "own", "draft_top_k": 2, "draft_tree_size": 15},
}
COMPILED = {f"{name} compiled": {**shape, "acceleration": "compile"} for name, shape in SHAPES.items()}
OWN = {**SHAPES, **COMPILED}
NEW_TOKENS = 24
NOT_WHOLE = [name for name in TARGETS if name not in WHOLE]
GROUPS = (1,) * 8 + (3,) * 4 + (8,) * 5  # batch sizes: 60 prompts for each target,
DEMO_GROUPS = (1,) * 4 + (3,) * 2 + (8,) * 2  # 26 long ones for the demo target


@dataclass(frozen=True)
class Batch:
    """Prompts as `generate` takes them, and what plain decoding makes of them."""

    inputs: dict[str, Any]
    plain: Tensor

    @property
    def prompt_length(self) -> int:
        return self.inputs["input_ids"].shape[1]


SEED = 11


def greedy(name: str, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    """What `generate` writes: the arg-max, or with `do_sample` among `kwargs` what is sampled by one seed."""
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | kwargs
    with seeded(SEED):
        return target_of(name).generate(**inputs, **kwargs)


PLAIN: dict[tuple[str, ...], Tensor] = {}


def plain_batch(name: str, inputs: dict[str, Tensor], **kwargs: Any) -> Batch:
    """`inputs` and their plain text, which is written once for the same prompts and the same settings."""
    settings = [repr(value) for _, value in sorted(kwargs.items())]
    if any(" at 0x" in setting for setting in settings):  # an object: what it does next time is not known
        return Batch(inputs, greedy(name, inputs, **kwargs))
    key = (name, str(inputs["input_ids"].tolist()), *sorted(kwargs), *settings)
    if key not in PLAIN:
        PLAIN[key] = greedy(name, inputs, **kwargs)
    return Batch(inputs, PLAIN[key])


@cache
def inputs_of(name: str) -> list[dict[str, Tensor]]:
    groups = DEMO_GROUPS if name == "demo-target" else GROUPS
    prompts = prompts_for(name, sum(groups))
    return [left_padded([prompts.pop() for _ in range(size)]) for size in groups]


def batch_of(name: str, size: int, **kwargs: Any) -> Batch:
    return plain_batch(name, left_padded(prompts_for(name, size, seed=17)), **kwargs)


def assert_loop_agrees(name: str, batch: Batch, loop: dict[str, Any], *, oracle: bool = True, **kwargs: Any) -> int:
    """Our text equals `batch.plain`; `kwargs` go to `generate`. Returns the rows that ended in a proven tie."""
    with configured(drafter_of(name), **({"num_assistant_tokens": 5} | loop)) as drafter:
        if oracle:
            with oracle_drafts(batch.plain, batch.prompt_length, seed=batch.prompt_length):
                ours = greedy(name, batch.inputs, assistant_model=drafter, **kwargs)
        else:
            ours = greedy(name, batch.inputs, assistant_model=drafter, **kwargs)
    assert drafter.stats is not None
    assert drafter.stats.loop == loop["speculation_loop"]
    assert drafter.stats.fallbacks == []
    return assert_same_or_tie(target_of(name), batch.plain, ours, batch.inputs["attention_mask"])
