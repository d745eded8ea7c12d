"""How `model.generate(..., assistant_model=eagle)` reaches our loops.

`generate` with an assistant of ours is, for transformers, a call without one: it prepares processors, criteria,
streamer, masks and cache as for any text, and then calls the class's `_sample`. There the text is written (`routes`
says by which loop). Other assistants are left to transformers. An assistant given by name, a folder or Hub id, is
loaded first, once: transformers takes names in `pipeline` alone, and would read a drafter there as a small model of the
target's family, with weights it makes up for those that are missing.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.generation.utils import GenerationMixin
from transformers.pipelines import base as pipelines

from ..checkpoints import holds_drafter
from ..drafter.assistant import DEFAULT_AT, Assistant, NotCopiedDict
from ..drafter.drafter import Eagle31Drafter
from ..errors import UnsupportedGenerationError, first_line
from ..stats import SpeculationStats
from .call import AssistedCall, Call
from .own import write_own
from .plain import write_plain
from .routes import ASKED_FOR, check_before_work, why_plain

logger = logging.getLogger(__name__)
_logged: set[str] = set()


_innermost: ContextVar[AssistedCall | None] = ContextVar("_innermost", default=None)
"""The call of the innermost `generate` of a thread, if an assistant of ours is to draft for it."""

KEPT_AT = "_eagle31_named_drafters"
"""Where a target keeps its drafters by name, so that they go when it goes. A copy of the target has none."""
OTHER_DRAFTS = ("use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Settings of `generate` that name another way to draft. A drafter that a call names comes before them, they before a
target's default one."""
_loading_one = threading.Lock()


def install() -> None:
    """Wrap the methods of `GenerationMixin` through which an assistant model is served. Idempotent."""
    if hasattr(GenerationMixin.generate, "_eagle31"):
        return
    GenerationMixin.generate = _assisting(GenerationMixin.generate)  # type: ignore[method-assign]
    GenerationMixin._sample = _dispatching(GenerationMixin._sample)  # type: ignore[method-assign]
    pipelines.load_assistant_model = _loading(pipelines.load_assistant_model)


def _assisting(stock: Callable) -> Callable:
    """`generate` that takes assistants of ours out of its arguments, and adds the target's default one."""
    names = list(inspect.signature(stock).parameters)[1:]

    @functools.wraps(stock)
    def generate(self, *args, **kwargs):
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        setting = functools.partial(_setting, self, arguments)
        assistant, by_default = _assistant_of(self, arguments)
        if assistant is None:
            with _calling(None):
                return stock(self, *args, **kwargs)
        arguments.pop("assistant_model", None)
        arguments |= {name: None for name in OTHER_DRAFTS if setting(name)}  # or `generate` would draft by them
        call = AssistedCall(self, assistant, setting("num_assistant_tokens"), by_default)
        try:
            check_before_work(self, assistant, setting)
        except Exception as error:
            if not by_default:
                raise
            assistant.stats = SpeculationStats(loop="plain", reason=f"cannot be drafted for: {first_line(error)}")
            with _calling(None):
                return stock(self, **arguments)
        with _calling(call):
            output = stock(self, **arguments)
        if not call.has_begun:
            kind = "beam search" if (setting("num_beams") or 1) > 1 else "this way to decode"
            assistant.stats = SpeculationStats(loop="plain", reason=f"{kind} takes no drafts")
        return output

    generate._eagle31 = True  # type: ignore[attr-defined]
    return generate


@contextmanager
def _calling(call: AssistedCall | None) -> Iterator[None]:
    """While a `generate` runs, which a streamer or a processor of another may have called."""
    token = _innermost.set(call)
    try:
        yield
    finally:
        _innermost.reset(token)


def _assistant_of(model: Any, arguments: dict[str, Any]) -> tuple[Assistant | None, bool]:
    """The assistant of ours that a call of `generate` is to draft by, and whether it has not named it."""
    named = arguments.get("assistant_model")
    if isinstance(arguments.get("custom_generate"), str):
        return None, False  # a recipe of the Hub is handed the assistant, and calls `generate` with it or without
    if isinstance(named, (str, os.PathLike)):
        return named_drafter(named, model), False
    if isinstance(named, Assistant):
        return named, False
    default = vars(model).get(DEFAULT_AT, {}).get("assistant")
    asks = (_setting(model, arguments, name) for name in (*OTHER_DRAFTS, "custom_generate", "is_assistant"))
    others = ("assistant_model" in arguments, *asks)
    return (None, False) if default is None or any(others) else (default, True)


def _setting(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """What a call asks for by its arguments, its `generation_config` or the model's; `None` if by none of them."""
    given = arguments.get("generation_config")
    settings = arguments, {} if given is None else vars(given), vars(model.generation_config)
    return next((each[name] for each in settings if each.get(name) is not None), None)


def _dispatching(stock: Callable) -> Callable:
    """`_sample`, to which transformers hands greedy and drawn texts, that writes those we have an assistant for."""

    @functools.wraps(stock)  # `generate` reads the signature
    def sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
        **model_inputs,
    ):  # fmt: skip
        prepared = input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer
        assisted = _innermost.get()
        if assisted is None or assisted.has_begun or assisted.model is not self:
            return stock(self, *prepared, **model_inputs)
        inputs = {name: value for name, value in model_inputs.items() if not name.endswith("tokenizer")}
        return _serve(Call(assisted, *prepared, inputs))

    return sample


# --- serving ----------------------------------------------------------------------------------------------------------


def _serve(call: Call) -> Any:
    """Hand the call to the loop that serves it exactly."""
    why = why_plain(call)
    stats = call.drafter.stats = SpeculationStats(loop="plain" if why else "own", reason=why)
    if why and why != ASKED_FOR and why not in _logged:
        _logged.add(why)
        logger.warning("eagle31: using plain decoding: %s", why)
    call.assisted.has_begun = True
    return write_plain(call, stats) if why else write_own(call, stats)


# --- assistants given by name -----------------------------------------------------------------------------------------


def named_drafter(name: str | os.PathLike[str], model: Any) -> Eagle31Drafter:
    """The drafter of that name, attached to `model`; loaded at the first call.

    Raises:
        UnsupportedGenerationError: another kind of model lies there.
        CheckpointError, IncompatibleTargetError: as `Eagle31Drafter.from_pretrained`.
    """
    key = os.fspath(name)
    if not holds_drafter(name):
        raise UnsupportedGenerationError(
            f"assistant_model={key!r} is a name, and what it names is no EAGLE-3 or EAGLE 3.1 drafter; to use another "
            f"kind of assistant pass the model itself: AutoModelForCausalLM.from_pretrained({key!r})"
        )
    with _loading_one:
        drafters: dict[str, Eagle31Drafter] = vars(model).setdefault(KEPT_AT, NotCopiedDict())
        if key not in drafters:
            drafters[key] = Eagle31Drafter.from_pretrained(key, target=model)
        return drafters[key]


def _loading(stock: Callable) -> Callable:
    """What `pipeline(..., assistant_model="name")` loads an assistant by, that loads a drafter as one."""

    def load_assistant_model(model: Any, assistant_model: Any, assistant_tokenizer: Any) -> tuple[Any, Any]:
        if isinstance(assistant_model, (str, os.PathLike)) and model.can_generate() and holds_drafter(assistant_model):
            return named_drafter(assistant_model, model), None
        return stock(model, assistant_model, assistant_tokenizer)

    return load_assistant_model
