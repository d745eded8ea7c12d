"""PEFT: adapters added, merged, switched off, named by row, prompts that are learned. The text is the tuned model's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.targets.binding import CACHE_ARGUMENT
from families import RECURRENT_FAMILIES, recurrent_target
from helpers import (
    CONFIGS,
    assert_same_text,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
    seeded,
)

peft = pytest.importorskip("peft")

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 4},
    "dynamic": {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 9},
}
WITHOUT_OUT_PROJ = ("nemotron_h", "falcon_h1", "mamba2")
"""PEFT refuses that one of theirs, whose kernel reads its weight."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def target() -> Any:
    return random_target(CONFIGS["llama"](), seed=5)


@pytest.fixture
def drafter(target: Any) -> Eagle31Drafter:
    return random_drafter(target, aux_layers=[1, 2, 4])


def lora() -> Any:
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=64, init_lora_weights=False, target_modules=["q_proj", "o_proj"]
    )


def tuned(model: Any, config: Any, name: str = "default", seed: int = 1) -> Any:
    with seeded(seed):
        return peft.get_peft_model(model, config, adapter_name=name).eval()


GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def assert_plain(model: Any, inputs: dict[str, Any], drafter: Eagle31Drafter, loop: str = "own") -> Tensor:
    for shape in SHAPES.values():
        text = assert_same_text(model, drafter, inputs, loop=loop, oracle=0, settings=shape, **GREEDY)
    return text


def test_lora_added_switched_off_and_merged(target: Any, drafter: Eagle31Drafter) -> None:
    inputs = left_padded(random_prompts(3, seed=4))
    bare = assert_plain(target, inputs, drafter)
    model = tuned(target, lora())
    with_adapter = assert_plain(model, inputs, drafter)
    assert not torch.equal(with_adapter, bare), "or nothing is tested"
    with model.disable_adapter():
        assert torch.equal(assert_plain(model, inputs, drafter), bare)
    model.merge_adapter()
    assert torch.equal(assert_plain(model, inputs, drafter), with_adapter)
    merged = model.merge_and_unload()
    drafter.attach(merged)
    assert torch.equal(assert_plain(merged, inputs, drafter), with_adapter)


def test_two_adapters_by_row(target: Any, drafter: Eagle31Drafter) -> None:
    """In a ragged batch, of which one row ends early."""
    model = tuned(target, lora(), "first")
    with seeded(2):
        model.add_adapter("second", lora())
    inputs: dict[str, Any] = left_padded(random_prompts(3, seed=4))
    by_row = inputs | {"adapter_names": ["first", "second", "__base__"]}
    plain = assert_plain(model, by_row, drafter, loop="plain")
    assert drafter.stats is not None
    assert "adapter_names" in drafter.stats.reason
    assert not torch.equal(plain, model.generate(**inputs, **GREEDY)), "or nothing is tested"
    assert_same_text(model, drafter, by_row, loop="plain", eos_token_id=int(plain[0, -8]), **GREEDY)


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_learned_prompts(target: Any, drafter: Eagle31Drafter, kind: str) -> None:
    config = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind]
    inputs = left_padded(random_prompts(1, seed=4))
    bare = target.generate(**inputs, **GREEDY)
    model = tuned(target, config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.mul_(20)
    plain = assert_plain(model, inputs, drafter, loop="plain")
    assert drafter.stats is not None
    assert "prompt or prefix tuning" in drafter.stats.reason
    if kind == "prefix" and CACHE_ARGUMENT == "cache" and torch.equal(plain, bare):
        pytest.skip(f"peft {peft.__version__} hands its prefix on under the cache's old name: plain generate drops it")
    assert not torch.equal(plain, bare), "or nothing is tested"


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
@pytest.mark.thorough(every=4)
def test_adapters_within_layers_that_keep_states(family: str) -> None:
    """Such layers read trees token by token, and what they project is computed for all at once: an adapter that came
    after the drafter computes something else."""
    model = recurrent_target(family)
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    inputs = left_padded(random_prompts(1, seed=4))
    model.generate(**inputs, **GREEDY, assistant_model=drafter)  # what is projected last is seen while it runs
    config = peft.LoraConfig(
        r=4, lora_alpha=64, init_lora_weights=False, target_modules="all-linear",
        exclude_modules=["out_proj"] if family in WITHOUT_OUT_PROJ else None,
    )  # fmt: skip
    adapted = tuned(model, config)
    with_adapter = assert_plain(adapted, inputs, drafter)
    with adapted.disable_adapter():
        assert not torch.equal(assert_plain(adapted, inputs, drafter), with_adapter), "or nothing is tested"
    drafter.attach(adapted)
    assert torch.equal(assert_plain(adapted, inputs, drafter), with_adapter)
    merged = adapted.merge_and_unload()
    assert_plain(merged, inputs, drafter)


def test_tokens_of_an_adapter_of_their_own() -> None:
    """PEFT puts them around the embedding after the drafter was attached."""
    model = random_target(CONFIGS["llama"]())
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    adapted = peft.get_peft_model(model, config).eval()
    for _ in range(2):
        assert_same_text(adapted, drafter, left_padded([[5, 6, 7, 8, 9]]), **GREEDY)
