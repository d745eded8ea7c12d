"""Memory runs out on targets whose layers keep states: what cannot go back is read again, as it was decoded."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache import states
from eagle31_hf.drafter.session import DraftSession
from families import clamped_target, recurrent_target
from helpers import configured, left_padded, oracle_drafts, random_drafter, random_prompts
from memory_faults import Fault

NEW_TOKENS = 14


@cache
def pair(family: str) -> tuple[Any, Eagle31Drafter]:
    model = clamped_target(family) if family == "nemotron_h" else recurrent_target(family)
    return model, random_drafter(model, aux_layers=[1, 2, 3])


def written(family: str, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
    model, _ = pair(family)
    return model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, **kwargs)


@pytest.mark.parametrize(
    ("family", "batch"), [("qwen3_5_text", 1), ("qwen3_5_text", 3), ("nemotron_h", 1), ("lfm2", 3)]
)
@pytest.mark.thorough(every=4)
def test_text_is_what_it_would_have_been(family: str, batch: int) -> None:
    model, drafter = pair(family)
    inputs = left_padded(random_prompts(batch, seed=batch, longest=20))
    plain = written(family, inputs)
    layer = model.get_decoder().layers[-1]
    faults = {
        "a layer, in the prompt": Fault(1).in_module(layer),
        "a layer, in a round": Fault(3).in_module(layer),
        "states are kept": Fault(3).before(states, "state_moves"),
        "some states are kept": Fault(2).before(states, "make_moves"),
        "all states are kept": Fault(3).after(states, "make_moves"),
        "the drafter reads on": Fault(2).before(DraftSession, "put_off"),
    }
    for where, failing in faults.items():
        settings = {"num_assistant_tokens": 3, "prefill_chunk_size": 8}
        oracle = oracle_drafts(plain, inputs["input_ids"].shape[1], seed=batch)
        with configured(drafter, **settings), oracle, failing as fault:
            ours = written(family, inputs, assistant_model=drafter)
        assert torch.equal(ours, plain), where
        assert drafter.stats is not None
        if fault.raised:
            assert drafter.stats.memory_steps, where
        assert drafter.stats.loop == "own"
        assert fault.raised or where == "the drafter reads on", where
