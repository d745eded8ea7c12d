"""A target with two adapters, and all that PEFT lets become of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers import CONFIGS, random_target, seeded

peft = pytest.importorskip("peft")

LORA = peft.LoraConfig(
    task_type="CAUSAL_LM", r=2, lora_alpha=32, init_lora_weights=False, target_modules=["q_proj", "o_proj"]
)


def adapted(base: Any = None) -> Any:
    """Of A and B, A is at work."""
    with seeded(0):
        model = peft.get_peft_model(base or random_target(CONFIGS["llama"]()), LORA, adapter_name="A")
        model.add_adapter("B", LORA)
    model.set_adapter("A")
    return model.eval()


def lora_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)]


def disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def choose_the_other(model: Any) -> None:
    model.set_adapter("B")


def choose_both(model: Any) -> None:
    model.base_model.set_adapter(["A", "B"])


def scale(model: Any) -> None:
    lora_layers(model)[2].scale_layer(2.0)


def set_scale(model: Any) -> None:
    lora_layers(model)[0].set_scale("A", 3.0)


def rescale(model: Any) -> None:
    for layer in lora_layers(model):  # as peft.helpers.rescale_adapter_scale does
        layer.scaling = {name: scale * 0.3 for name, scale in layer.scaling.items()}


def weigh(model: Any) -> None:
    model.add_weighted_adapter(["A", "B"], [0.7, 0.6], "C", combination_type="linear")
    model.set_adapter("C")


def merge(model: Any) -> None:
    model.merge_adapter(["A"])


def delete(model: Any) -> None:
    model.delete_adapter("A")


def train(model: Any) -> None:
    model.train()


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__: change
    for change in (disable, choose_the_other, choose_both, scale, set_scale, rescale, weigh, merge, delete, train)
}
