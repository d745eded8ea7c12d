"""Recurrent and convolution states in the cache: what is committed, handed out and taken back.

How they are selected, counted, resumed and moved with rows of a pool is asked of texts: tests/contract, tests/serving.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from eagle31_hf.cache.spans import LayerKind, LayerKinds
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.cache.state_tape import Recorded
from eagle31_hf.cache.states import CONVOLUTION, RECURRENT
from eagle31_hf.errors import IncompatibleTargetError

SIZES: dict[str, Any] = {"capacity": 32, "block": 8}
CONV, REC = (CONVOLUTION, 0), (RECURRENT, 0)


@dataclass(frozen=True)
class Sum:
    """A recurrence that adds tokens up."""

    reads: ClassVar[tuple[int, ...]] = (0,)

    def final_states(self, inputs: Any, states: Tensor, kept: Tensor | None) -> Tensor:
        tokens = inputs[0][:, :, 0]  # (L, B, T)
        return states + (tokens if kept is None else tokens * kept).sum(-1, keepdim=True)


def cache_of(rows: int) -> SpeculativeCache:
    """Of two layers: states alone, and attention."""
    kinds = LayerKind(attends=False, num_states=1), LayerKind()
    return SpeculativeCache(LayerKinds(kinds, ("linear_attention", "full_attention")), batch_size=rows, **SIZES)


def forward(cache: SpeculativeCache, tokens: Tensor) -> None:
    """A layer whose recurrent state is the sum of `tokens` `(B, T)` so far, and whose convolution keeps the last two;
    both are written in place, as kernels do. Chains are recorded."""
    layer, placement = cache.with_states[0], cache.placement
    for group in placement.groups:
        rows = group.rows_on(tokens.device)
        read = tokens if rows is None else tokens[rows]
        layer.begin(group)
        columns = read[:, : group.count].reshape(len(read), 1, -1)
        cache.update_conv_state(columns, 0, conv_kernel_size=2)
        held = cache.get_recurrent_state(0)
        if held is None:
            cache.update_recurrent_state(columns.sum(-1), 0)
        else:
            held.add_(columns.sum(-1))
        layer.end(Recorded(Sum(), (read[:, :, None],)) if placement.is_chain else None)
    keys = tokens[:, None, :, None].float()
    cache.update(keys, keys, 1)


def read(cache: SpeculativeCache, tokens: list[list[float]], **placing: Any) -> None:
    given = torch.tensor(tokens)
    cache.place(given.shape[1], **placing)
    forward(cache, given)


def states(cache: SpeculativeCache) -> tuple[list[float], list[list[float]]]:
    held = cache.with_states[0].held_states()
    return held[REC].flatten().tolist(), held[CONV][:, 0].tolist()


def test_each_row_keeps_the_state_of_its_last_kept_node() -> None:
    cache = cache_of(3)
    read(cache, [[1.0, 2, 0], [3, 0, 0], [4, 5, 6]], counts=[2, 1, 3])
    cache.commit([2, 1, 3])
    assert states(cache) == ([3, 3, 15], [[1, 2], [0, 3], [5, 6]])
    read(cache, [[10.0, 20, 40]] * 3, is_draft=True)
    assert states(cache) == ([3, 3, 15], [[1, 2], [0, 3], [5, 6]]), "nothing is committed by a forward"
    cache.commit([0, 1, 3])
    assert states(cache) == ([3, 13, 85], [[1, 2], [3, 10], [20, 40]])
    assert cache.lengths == [2, 2, 6]


def test_a_state_that_no_mixer_writes_is_an_error() -> None:
    cache = cache_of(1)
    read(cache, [[1.0, 2]])
    cache.commit(2)
    cache.place(1, is_draft=True)
    with pytest.raises(IncompatibleTargetError, match=r"layer 0 .* did not write its states .*conv_states"):
        cache.commit(1)
    cache.place(1)
    with pytest.raises(IncompatibleTargetError, match=r"layer 0 .* replaced after the drafter was attached"):
        cache.get_recurrent_state(0)
