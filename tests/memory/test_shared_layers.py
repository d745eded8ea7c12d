"""Layers that attend to another layer's keys and values keep none: Gemma 4 E2B and E4B."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.memory.dry_run import Forward, dry_run_of
from eagle31_hf.memory.weights import SCHEMES
from families import GEMMA_4


@pytest.mark.parametrize("shared", [0, 2])
def test_the_cache_of_a_run_is_planned_to_the_byte(shared: int) -> None:
    config = Gemma4TextConfig(**GEMMA_4 | {"num_kv_shared_layers": shared, "hidden_size_per_layer_input": 8})
    target = AutoModelForCausalLM.from_config(config).eval()
    drafter = Eagle31Drafter.from_target(target, aux_layers=[0, 1, 2]).eval()
    made: list[SpeculativeCache] = []
    from_config = SpeculativeCache.from_config

    def make(*args: Any, **kwargs: Any) -> SpeculativeCache:
        made.append(from_config(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeCache, "from_config", make)
        ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))
        target.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert drafter.stats.loop == "own"
    cache = max(made, key=lambda each: each.num_bytes)
    taken = sum(layer.num_bytes for layer in cache.layers)
    forwards, capacity = dry_run_of(config, SCHEMES["fp32"]), cache.capacity
    assert taken == forwards.count(Forward(8, capacity, block=cache.block)).cache
