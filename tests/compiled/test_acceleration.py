"""Compiled steps write the text of the eager ones, with few graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from compiled_pairs import SHORT_CHAIN, SHORT_TREE, assert_judged_alike, pair_of, write

from eagle31_hf.compiled import graphs
from helpers import (
    GROUPED,
    assert_same_or_tie,
    configured,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
    seeded,
)
from matrix import WHOLE

pytestmark = pytest.mark.usefixtures("unpacked_weights")


@pytest.mark.slow
@pytest.mark.parametrize("frozen_bytes", [0, 2**30])
def test_packed_weights_write_the_plain_text_before_and_after_they_change(
    frozen_bytes: int, packed_weights: None, compile_only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed once for all graphs, or into each. Of the drafter what reads, which holds every product of it; the
    target's again, after its weights changed.

    Trying products for every shape takes long: all matrices of this target have one, and as many rows as are read.
    """
    monkeypatch.setattr(graphs, "FROZEN_BYTES", frozen_bytes)
    layers = 1 if frozen_bytes else 3
    sides = {"vocab_size": 64, "intermediate_size": 64, "num_key_value_heads": 4, "num_hidden_layers": layers}
    drafter = random_drafter(random_target(hf.LlamaConfig(**GROUPED | sides)), aux_layers=[0, 1, min(2, layers)])
    for scale, steps in ((1.0, ("verify", "absorb")), (1.5, ("verify",))):
        compile_only(*steps)
        torch._dynamo.utils.counters.clear()
        drafter.require_binding().model.model.layers[0].mlp.down_proj.weight.data *= scale
        plain, ours = write(drafter, random_prompts(1, vocabulary=64), **SHORT_CHAIN)
        assert assert_same_or_tie(drafter.require_binding().model, plain, ours) == 0
        assert drafter.stats.fallbacks == []
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(steps)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_compiled_text_is_the_plain_text(family: str, compile_only: Callable[..., None]) -> None:
    """Of gemma3 all that trees need and chains but the first, of llama the verification of both (trees in a batch).

    Few layers: compile time grows with their number, what could go wrong does not. The drafter's graphs are the same
    for every family, so one is enough to compile them for; a first chain is compiled below. What graphs of the other
    families compute is tested without the compiler (tests/contract, tests/generation/test_captured_steps.py).
    """
    compile_only(*(("verify", "absorb", "tree", "advance") if family == "gemma3" else ("verify",)))
    torch._dynamo.utils.counters.clear()
    whole = family in WHOLE
    drafter = pair_of(family, layers=2 if whole else 1)  # of gemma3 a windowed and a full layer
    for seed, fields in enumerate((SHORT_CHAIN, SHORT_TREE) * 3 if whole else (SHORT_TREE,) * 3):
        prompts = random_prompts(3 if family == "llama" and fields is SHORT_TREE else 1, seed=seed)
        plain, ours = write(drafter, prompts, oracle_seed=seed, **fields)
        mask = left_padded(prompts)["attention_mask"]
        assert assert_same_or_tie(drafter.require_binding().model, plain, ours, mask) == 0
        assert drafter.stats.fallbacks == []
    shapes = drafter.require_binding().compiled.keys
    # One of each way to draft, its verification (unless masks come from outside) and its end; of each batch size.
    # Whether anything is absorbed alone depends on where texts end.
    kinds = {"tree": 1, "verify": 1, "advance": 1}
    if whole:
        kinds |= {"chain": 1, "advance": 2}
    if family == "llama":
        kinds |= {"verify": 2}
    assert Counter(kind for kind, *_ in shapes if kind != "absorb") == kinds
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert made == (len(shapes) - 1 if family == "gemma3" else kinds["verify"]), "a shape was compiled again"


@pytest.mark.slow
def test_compiled_chains_of_a_batch_are_judged_by_the_rule(judged: list, compile_only: Callable[..., None]) -> None:
    """And the text is the one that plain `generate` samples."""
    compile_only("chain", "advance")
    drafter = pair_of("qwen3", layers=2, draft_vocab_size=40)
    target, inputs = drafter.require_binding().model, left_padded(random_prompts(3))
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_new_tokens": 30}
    with configured(drafter, speculation_loop="own", acceleration="compile", **SHORT_CHAIN):
        with seeded(4):
            plain = target.generate(**inputs, **sampling)
        with seeded(4):
            assert torch.equal(target.generate(**inputs, assistant_model=drafter, **sampling), plain)
    assert drafter.stats.fallbacks == []
    assert_judged_alike(judged)
