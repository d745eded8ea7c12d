"""`assistant_model="folder or Hub id"`: the drafter of that name is loaded for the model that generates, once.

transformers takes names in `pipeline` alone, and would read a drafter there as a small model of the target's family,
with weights it makes up for those that are missing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from transformers.pipelines import base as pipelines

from ..checkpoints import holds_drafter
from ..drafter.assistant import NotCopiedDict
from ..drafter.drafter import Eagle31Drafter
from ..errors import UnsupportedGenerationError

KEPT_AT = "_eagle31_named_drafters"
"""Where a target keeps its drafters by name, so that they go when it goes. A copy of the target has none."""
_loading_one = threading.Lock()


def load_named_assistant(model: Any, generation_mode_kwargs: dict[str, Any]) -> None:
    """Put the drafter in the place of its name, where `generate` got one.

    Raises:
        UnsupportedGenerationError: another kind of model lies there.
        CheckpointError, IncompatibleTargetError: as `Eagle31Drafter.from_pretrained`.
    """
    name = generation_mode_kwargs.get("assistant_model")
    if not isinstance(name, (str, os.PathLike)):
        return
    if not holds_drafter(name):
        raise UnsupportedGenerationError(
            f"assistant_model={os.fspath(name)!r} is a name, and what it names is no EAGLE-3 or EAGLE 3.1 drafter; to "
            f"use another kind of assistant pass the model itself: AutoModelForCausalLM.from_pretrained("
            f"{os.fspath(name)!r})"
        )
    generation_mode_kwargs["assistant_model"] = drafter_called(name, model)


def drafter_called(name: str | os.PathLike[str], model: Any) -> Eagle31Drafter:
    """The drafter of that name, attached to `model`; loaded at the first call."""
    key = os.fspath(name)
    with _loading_one:
        drafters: dict[str, Eagle31Drafter] = vars(model).setdefault(KEPT_AT, NotCopiedDict())
        if key not in drafters:
            drafters[key] = Eagle31Drafter.from_pretrained(key, target=model)
        return drafters[key]


def teach_pipelines() -> None:
    """Let `pipeline(..., assistant_model="name")` load a drafter as one."""
    pipelines.load_assistant_model = _loading(pipelines.load_assistant_model)


def _loading(stock: Callable) -> Callable:
    def load_assistant_model(model: Any, assistant_model: Any, assistant_tokenizer: Any) -> tuple[Any, Any]:
        if isinstance(assistant_model, (str, os.PathLike)) and model.can_generate() and holds_drafter(assistant_model):
            return drafter_called(assistant_model, model), None
        return stock(model, assistant_model, assistant_tokenizer)

    return load_assistant_model
