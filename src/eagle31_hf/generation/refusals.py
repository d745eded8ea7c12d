"""What can never work, said before anything is computed: what was got, what was wanted, what to do."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationConfig

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError, IncompatibleTargetError, NotAttachedError, UnsupportedGenerationError
from ..generation_config import require_count


def check_before_work(model: Any, drafter: Assistant, config: GenerationConfig) -> None:
    """Refuse a `generate` call of `model` by what is known before its inputs are looked at.

    Raises:
        NotAttachedError, IncompatibleTargetError: the drafter is not this model's.
        ConfigurationError: a setting makes no sense.
        UnsupportedGenerationError: a way to generate that drafts cannot follow exactly.
    """
    _check_attached(model, drafter)
    _check_is_still_the_target(drafter)
    _check_settings(drafter, config)
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise UnsupportedGenerationError(
            "assistant_ensemble_weight trades exactness for speed, and this drafter's output is exact; unset it"
        )
    if getattr(config, "dola_layers", None) is not None:
        raise UnsupportedGenerationError(
            "dola_layers decides by the target's early layers, which drafts are not verified against; leave "
            "dola_layers out, or assistant_model"
        )


def _check_attached(model: Any, drafter: Assistant) -> None:
    binding = drafter.binding
    if binding.model is not model:
        raise NotAttachedError(
            f"the drafter is attached to another {type(binding.model).__name__} than the one that generates; call "
            "eagle.attach(model) with this model"
        )


def _check_is_still_the_target(drafter: Assistant) -> None:
    """What may have been done to the target since the drafter was attached."""
    binding = drafter.binding
    sizes = binding.vocabulary_sizes()
    now = binding.model.get_input_embeddings(), binding.model.get_output_embeddings()
    is_replaced = now[0] is not binding.embedding or now[1] is not binding.lm_head
    if is_replaced and all(_is_around(*pair) for pair in zip(now, (binding.embedding, binding.lm_head), strict=True)):
        drafter.attach(binding.model)  # adapters of single tokens (PEFT) were put around them
        return
    if is_replaced or sizes != binding.sizes_attached:
        raise IncompatibleTargetError(
            "the target's vocabulary was resized or its head replaced after the drafter was attached (vocabulary "
            f"{sizes.configured}, embedding {sizes.embedded} rows{_drafters_vocabulary(drafter)}); call "
            "eagle.attach(model) again, which says whether the drafter still fits"
        )
    binding.compute_dtype = binding.model.dtype  # model.double() and the like


def _is_around(outer: Any, inner: Any) -> bool:
    return isinstance(outer, nn.Module) and any(module is inner for module in outer.modules())


def _check_settings(drafter: Assistant, config: GenerationConfig) -> None:
    """The drafter's, and what of them the call itself asks for."""
    drafter.generation_config.check()
    if isinstance(drafter, Eagle31Drafter):
        _check_width(drafter)
    else:
        _check_without_drafter(drafter)
    for name in ("prefill_chunk_size", "num_assistant_tokens"):
        if (value := getattr(config, name, None)) is not None:
            require_count(name, value)


def _check_width(drafter: Eagle31Drafter) -> None:
    top_k = drafter.generation_config.asked_top_k or 1
    size = drafter.config.draft_vocab_size or drafter.config.vocab_size
    if top_k > size:
        raise ConfigurationError(
            f"draft_top_k is {top_k}, more than the {size} tokens this drafter can draft; trees rarely gain from "
            "more than 10"
        )


def _check_without_drafter(assistant: Assistant) -> None:
    """Settings of a network that is not there are not silently left out."""
    settings = assistant.generation_config
    told = {name: getattr(settings, name) for name in ("draft_tree_size", "draft_min_confidence", "draft_window")}
    told["draft_top_k"] = settings.draft_top_k if (settings.draft_top_k or 1) > 1 else None
    if settings.num_assistant_tokens_schedule in ("pid", "heuristic"):
        told["num_assistant_tokens_schedule"] = settings.num_assistant_tokens_schedule
    asked = [f"{name}={value!r}" for name, value in told.items() if value is not None]
    if asked:
        raise ConfigurationError(
            f"got {', '.join(asked)}, but there is no drafter: what the text repeats is drafted as chains, of up to "
            "num_assistant_tokens; leave it out, or attach a drafter"
        )


def _drafters_vocabulary(drafter: Assistant) -> str:
    return f", drafter {drafter.config.vocab_size}" if isinstance(drafter, Eagle31Drafter) else ""
