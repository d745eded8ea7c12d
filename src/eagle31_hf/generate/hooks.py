"""How `model.generate(..., assistant_model=eagle)` reaches our loops.

`generate` prepares processors, criteria, streamer and masks, then calls the class's `_assisted_decoding`. We wrap that
method on `GenerationMixin`, and two it calls on the way: a drafter of ours is served here (`routes` says by which
loop), any other assistant goes on to transformers. An assistant given by name, a folder or
Hub id, is loaded first, once: transformers takes names in `pipeline` alone, and would read a drafter there as a small
model of the target's family, with weights it makes up for those that are missing.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.pipelines import base as pipelines

from ..checkpoints import holds_drafter
from ..drafter.assistant import DEFAULT_AT, Assistant, NotCopiedDict
from ..drafter.drafter import Eagle31Drafter
from ..errors import UnsupportedGenerationError, first_line
from ..memory.apply_plan import plan_mismatch_reason
from ..memory.cards import advise_once
from ..stats import SpeculationStats
from .call import Call, remember_draft_tokens
from .own import LeftToPlain, write_own
from .plain import write_plain
from .routes import ASKED_FOR, Route, check_before_work, choose_route, not_served

logger = logging.getLogger(__name__)
_logged: set[str] = set()

_default_call = threading.local()
"""Of a call that an assistant was put into by default: `has_begun`, once something was written."""

KEPT_AT = "_eagle31_named_drafters"
"""Where a target keeps its drafters by name, so that they go when it goes. A copy of the target has none."""
OTHER_DRAFTS = ("use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate")
"""Arguments of `generate` that name another way to draft, or to decode."""
_loading_one = threading.Lock()


def install() -> None:
    """Wrap the methods of `GenerationMixin` through which an assistant model is served. Idempotent."""
    if getattr(GenerationMixin._assisted_decoding, "_eagle31", False):
        return
    GenerationMixin.generate = _defaulting(GenerationMixin.generate)  # type: ignore[method-assign]
    GenerationMixin._assisted_decoding = _dispatching(GenerationMixin._assisted_decoding)  # type: ignore[method-assign]
    GenerationMixin._prepare_generation_config = _preparing(GenerationMixin._prepare_generation_config)  # type: ignore[method-assign]
    GenerationMixin._validate_generation_mode = _validating(GenerationMixin._validate_generation_mode)  # type: ignore[method-assign]
    teach_pipelines()


def _defaulting(stock: Callable) -> Callable:
    """`generate` that is given the target's default assistant (`Assistant.use_by_default`) where it is given none."""
    place = list(inspect.signature(stock).parameters).index("assistant_model")

    @functools.wraps(stock)
    def generate(self, *args, **kwargs):
        assistant = vars(self).get(DEFAULT_AT, {}).get("assistant")
        asks = functools.partial(_setting, model=self, args=args, kwargs=kwargs)
        if assistant is None or len(args) > place or "assistant_model" in kwargs or any(map(asks, OTHER_DRAFTS)):
            return stock(self, *args, **kwargs)
        if asks("num_beams") not in (None, 1):  # transformers would warn of an assistant that the call has not named
            assistant.stats = SpeculationStats(loop="plain", reason="beam search takes no drafts")
            return stock(self, *args, **kwargs)
        outer, _default_call.has_begun = getattr(_default_call, "has_begun", None), False
        try:
            return stock(self, *args, **kwargs, assistant_model=assistant)
        except Exception as error:
            if _default_call.has_begun:
                raise
            assistant.stats = SpeculationStats(loop="plain", reason=f"cannot be drafted for: {first_line(error)}")
        finally:
            _default_call.has_begun = outer
        return stock(self, *args, **kwargs)  # raises what is wrong without an assistant, too

    return generate


def _setting(name: str, model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a call asks for by its arguments, its `generation_config` or the model's; `None` if by none of them."""
    config = kwargs.get("generation_config") or next((arg for arg in args if isinstance(arg, GenerationConfig)), None)
    settings = kwargs, {} if config is None else vars(config), vars(model.generation_config)
    return next((each[name] for each in settings if each.get(name) is not None), None)


def _dispatching(stock: Callable) -> Callable:
    @functools.wraps(stock)  # `generate` reads the signature
    def assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **given):
        if isinstance(given.get("assistant_model"), Assistant):
            return _serve(Call.read(self, input_ids, logits_processor, stopping_criteria, generation_config, given))
        return stock(self, input_ids, logits_processor, stopping_criteria, generation_config, **given)

    assisted_decoding._eagle31 = True  # type: ignore[attr-defined]
    return assisted_decoding


def _preparing(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def prepare_generation_config(self, generation_config, *args, **kwargs):
        prepared, others = stock(self, generation_config, *args, **kwargs)
        remember_draft_tokens(prepared, kwargs, generation_config, self.generation_config)
        return prepared, others

    return prepare_generation_config


def _validating(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        load_named_assistant(self, generation_mode_kwargs)
        drafter = generation_mode_kwargs.get("assistant_model")
        if not isinstance(drafter, Assistant):
            return stock(self, generation_mode, generation_config, generation_mode_kwargs)
        check_before_work(self, drafter, generation_config)
        if generation_mode != GenerationMode.ASSISTED_GENERATION:
            mode = generation_mode.value.replace("_", " ")  # of beams, and others that are transformers' business
            drafter.stats = SpeculationStats(loop="plain", reason=f"{mode} takes no drafts")
        without = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
        if generation_config.num_return_sequences not in (None, 1):
            return None  # stock refuses this for assistants of its own; our loop serves it
        if generation_mode == GenerationMode.ASSISTED_GENERATION and self._is_stateful:
            generation_mode = GenerationMode.SAMPLE  # refused for assistants, too, and checked alike otherwise
        return stock(self, generation_mode, generation_config, without)

    return validate_generation_mode


# --- serving ----------------------------------------------------------------------------------------------------------


def _serve(call: Call) -> Any:
    """Hand the call to the loop that serves it exactly.

    An assistant by default insists on no loop: `generate` begun anew would stream the prompt a second time.
    """
    by_default = getattr(_default_call, "has_begun", None) is False
    must_be_own = call.drafter.generation_config.speculation_loop == "own" and not by_default
    route = choose_route(call, must_be_own=must_be_own)
    stats = call.drafter.stats = SpeculationStats(loop=route.loop, reason=route.reason)
    advise_once(call.input_ids.device)
    _compare_with_plan(call, stats)
    _log_once(route)
    _default_call.has_begun = True
    if route.loop == "own":
        try:
            return write_own(call, stats)
        except LeftToPlain as left:
            if must_be_own:
                raise UnsupportedGenerationError(not_served(str(left))) from left
            _log_once(Route("plain", str(left)))
            fallbacks, call = stats.fallbacks, left.call
            stats = call.drafter.stats = SpeculationStats(loop="plain", reason=str(left), fallbacks=fallbacks)
    return write_plain(call, stats)


def _log_once(route: Route) -> None:
    if route.reason not in _logged | {"", ASKED_FOR}:
        _logged.add(route.reason)
        logger.warning("eagle31: using the %s loop: %s", route.loop, route.reason)


def _compare_with_plan(call: Call, stats: SpeculationStats) -> None:
    """Say so if the request is larger than what was planned: it may well fit, and the text is the same if not."""
    plan = call.drafter.memory_plan
    length = call.generation_config.max_length
    why = "" if plan is None else plan_mismatch_reason(plan, rows=call.batch_size, length=length)
    if why:
        stats.fallbacks.append(why)
        if why not in _logged:
            _logged.add(why)
            logger.warning("eagle31: %s; if memory runs out, graphs go first, and then drafts", why)


# --- assistants given by name -----------------------------------------------------------------------------------------


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
