"""Steps by graphs make way for the eager ones where graphs cannot be made."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
from compiled_pairs import CHAIN, pair_of, write

from eagle31_hf.graphs import captured
from eagle31_hf.loop.pair import Pair
from helpers import random_prompts


def test_a_target_on_several_devices_stays_eager(uncompiled: None) -> None:
    drafter = pair_of("llama")
    drafter.binding.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    plain, ours = write(drafter, random_prompts(1), **CHAIN)
    assert torch.equal(plain, ours)
    assert not Pair.of(drafter).graphs.keys


def test_an_interrupt_while_compiling_is_not_swallowed(uncompiled: None) -> None:
    drafter = pair_of("llama")
    interrupted = mock.patch.object(captured.CapturesSteps, "make", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        write(drafter, random_prompts(1), **CHAIN)
    plain, ours = write(drafter, random_prompts(1), **CHAIN)
    assert torch.equal(plain, ours)
    assert drafter.stats.fallbacks == []


def test_graphs_are_not_copied_with_their_target() -> None:
    pair = Pair.of(pair_of("llama"))
    assert copy.deepcopy(pair) is None
    assert pickle.loads(pickle.dumps(pair)) is None
