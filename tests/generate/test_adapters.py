"""PEFT: adapters added, merged, switched off, named by row, prompts that are learned. The text is the tuned model's.

Graphs that were made before write none of its texts.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_pairs import assert_plain, keep_graphs, kinds, settle
from torch import Tensor
from transformers import LlamaConfig

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.graphs import captured
from eagle31_hf.graphs.ahead import kept as kept_folder
from families import RECURRENT_FAMILIES, recurrent_target
from helpers import (
    CONFIGS,
    GREEDY,
    GROUPED,
    assert_same_text,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
    seeded,
)
from recorder import Recorder, record_operations

peft = pytest.importorskip("peft")

TREE: dict[str, Any] = {"draft_top_k": 2, "draft_tree_size": 9}
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


def tuned(model: Any, config: Any, name: str = "default") -> Any:
    with seeded(1):
        return peft.get_peft_model(model, config, adapter_name=name).eval()


def assert_tuned(model: Any, inputs: dict[str, Any], drafter: Eagle31Drafter, **how: Any) -> Tensor:
    for shape in ({}, TREE):
        settings = shape | {"num_assistant_tokens": 4}
        text = assert_same_text(model, drafter, inputs, oracle=0, settings=settings, **how)
    return text


def test_lora_added_switched_off_and_merged(target: Any, drafter: Eagle31Drafter) -> None:
    inputs = left_padded(random_prompts(3, seed=4))
    bare = assert_tuned(target, inputs, drafter)
    model = tuned(target, lora())
    with_adapter = assert_tuned(model, inputs, drafter)
    assert not torch.equal(with_adapter, bare), "or nothing is tested"
    with model.disable_adapter():
        assert torch.equal(assert_tuned(model, inputs, drafter), bare)
    model.merge_adapter()
    assert torch.equal(assert_tuned(model, inputs, drafter), with_adapter)
    merged = model.merge_and_unload()
    drafter.attach(merged)
    assert torch.equal(assert_tuned(merged, inputs, drafter), with_adapter)


def test_two_adapters_by_row(target: Any, drafter: Eagle31Drafter) -> None:
    """In a ragged batch, of which one row ends early."""
    model = tuned(target, lora(), "first")
    with seeded(2):
        model.add_adapter("second", lora())
    inputs: dict[str, Any] = left_padded(random_prompts(3, seed=4))
    by_row = inputs | {"adapter_names": ["first", "second", "__base__"]}
    plain = assert_tuned(model, by_row, drafter, loop="plain", why="adapter_names")
    assert not torch.equal(plain, model.generate(**inputs, **GREEDY)), "or nothing is tested"
    assert_same_text(model, drafter, by_row, loop="plain", eos_token_id=int(plain[0, -8]))


@pytest.mark.parametrize("kind", ["prefix", "prompt"])
def test_learned_prompts(target: Any, drafter: Eagle31Drafter, kind: str) -> None:
    config = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind]
    inputs = left_padded(random_prompts(1, seed=4))
    bare = target.generate(**inputs, **GREEDY)
    model = tuned(target, config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.mul_(20)
    plain = assert_tuned(model, inputs, drafter, loop="plain", why="prompt or prefix tuning")
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
    model = tuned(model, config)
    with_adapter = assert_tuned(model, inputs, drafter)
    with model.disable_adapter():
        assert not torch.equal(assert_tuned(model, inputs, drafter), with_adapter), "or nothing is tested"
    drafter.attach(model)
    assert torch.equal(assert_tuned(model, inputs, drafter), with_adapter)
    assert_tuned(model.merge_and_unload(), inputs, drafter)


def test_tokens_of_an_adapter_of_their_own(target: Any, drafter: Eagle31Drafter) -> None:
    """PEFT puts them around the embedding after the drafter was attached."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[5, 6])
    model = peft.get_peft_model(target, config).eval()
    for _ in range(2):
        assert_same_text(model, drafter, left_padded([[5, 6, 7, 8, 9]]))


def lora_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)]


def rescale(model: Any) -> None:
    for layer in lora_layers(model):  # as peft.helpers.rescale_adapter_scale does
        layer.scaling = {name: scale * 0.3 for name, scale in layer.scaling.items()}


def weigh(model: Any) -> None:
    model.add_weighted_adapter(["A", "B"], [0.7, 0.6], "C", combination_type="linear")
    model.set_adapter("C")


CHANGES: dict[str, Callable[[Any], object]] = {
    "disable": lambda model: model.base_model.disable_adapter_layers(),
    "choose the other": lambda model: model.set_adapter("B"),
    "choose both": lambda model: model.base_model.set_adapter(["A", "B"]),
    "scale": lambda model: lora_layers(model)[2].scale_layer(2.0),
    "set a scale": lambda model: lora_layers(model)[0].set_scale("A", 3.0),
    "rescale": rescale,
    "weigh": weigh,
    "merge": lambda model: model.merge_adapter(["A"]),
    "delete": lambda model: model.delete_adapter("A"),
    "train": lambda model: model.train(),
}


def adapted_pair() -> tuple[Any, Eagle31Drafter]:
    """Of adapters A and B, A is at work."""
    with seeded(0):
        small = random_target(LlamaConfig(**GROUPED | {"num_hidden_layers": 2}))
        model = peft.get_peft_model(small, lora(), adapter_name="A")
        model.add_adapter("B", lora())
    model.set_adapter("A")
    model.eval()
    drafter = settle(random_drafter(model.get_base_model(), aux_layers=[0, 1, 2]))
    drafter.generation_config.num_assistant_tokens = 1  # to record an operation takes a second
    return model, drafter


@pytest.fixture(scope="module")
def kept_for_the_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with graphs of the pair while its first adapter is at work."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("kept") / "cache"
        return keep_graphs(folder, patch, lambda: adapted_pair()[1], [{"do_sample": False}])


@pytest.fixture
def by_kept_graphs(kept_for_the_first: Path, no_compiler: None) -> None:
    shutil.copytree(kept_for_the_first, kept_folder.cache_folder())


@pytest.fixture
def by_recordings(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(captured.CAPTURES, "cpu", record_operations)


@pytest.mark.parametrize("way", ["by_kept_graphs", "by_recordings"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.thorough(every=3)
def test_whatever_becomes_of_adapters(change: str, way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(way)
    model, drafter = adapted_pair()
    before = assert_plain(drafter, target=model, max_new_tokens=24)
    assert "advance" in kinds(drafter), "graphs wrote it"
    CHANGES[change](model)
    model.train(change == "train")
    after = assert_plain(drafter, target=model, max_new_tokens=24)
    assert torch.equal(before, after) == (change in ("merge", "train")), "or a stale graph would not be noticed"
