"""Which loop serves a `generate` call, why it is not ours, and what is refused before anything is computed.

    own     our loop (`loop`): trees, batches, chunked prefill. Taken wherever the target passed the self-test.
    plain   token by token, where speculation could not be exact.

A loop that would write another text, or drop something it was given, does not get the call. Our loop places tokens,
masks and positions on its own. What else belongs to the prompt (a picture) the model reads in its own first forward
(`PromptForward`), and whether our rounds go on from there is tried (`continuation`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import QuantizedCache

from ..cache.grouped_attention import why_attention_is_unknown
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError, IncompatibleTargetError, NotAttachedError, UnsupportedGenerationError
from ..sampling.draw import why_noise_is_unknown
from ..settings import require_count
from .call import READ_WITH_THE_PROMPT, Call, beside_tokens, has_positions_of_its_own
from .continuation import why_not_continued

ASKED_FOR = "asked for"


def why_plain(call: Call) -> str:
    """Why plain decoding writes a text; empty where our loop serves the call exactly, unless it was not wanted.

    Raises:
        UnsupportedGenerationError: our loop was asked for by name, and cannot serve the call exactly; or mask or cache
            do not fit the prompts of a call that names its drafter.
    """
    settings = call.drafter.generation_config
    if settings.speculation_loop == "plain":
        return ASKED_FOR
    try:
        why = next((why for objection in AGAINST_OWN if (why := objection(call)) is not None), None)
    except UnsupportedGenerationError as error:
        if not call.assisted.by_default:
            raise
        why = str(error)
    if why is None:
        return ""
    if settings.speculation_loop == "own" and not call.assisted.by_default:
        raise UnsupportedGenerationError(
            f"speculation_loop='own' cannot serve this request: {why}; set speculation_loop='auto' or change the call"
        )
    return why if settings.stored_cache_type == "full" else f"{why}; cache_type is not used there"


# --- what only plain decoding does exactly ----------------------------------------------------------------------------


def _one_forward_per_token(call: Call) -> str | None:
    config = call.generation_config
    if not call.model_inputs.get("use_cache", True):
        return "use_cache=False leaves nothing to verify against"
    if call.input_ids.shape[1] == 0 or call.model_inputs.get("inputs_embeds") is not None:
        return "the prompt is given as inputs_embeds"
    if config.output_attentions or config.output_hidden_states:
        return "output_attentions / output_hidden_states want one forward per token"
    return "synced_gpus" if call.synced_gpus else None


def _inputs_of_one_forward_per_token(call: Call) -> str | None:
    """Inputs that only one forward per token, prepared by the model, treats right."""
    if has_positions_of_its_own(call.position_ids, call.attention_mask):
        return "position_ids are not those of the text"
    if not call.is_left_padded:
        return (
            "the attention mask has pads behind or between tokens (or a row without any token); pad prompts on the "
            "left: tokenizer.padding_side = 'left'"
        )
    if call.text_length > call.input_ids.shape[1]:
        return "the attention mask is longer than the prompts; pass the whole text, of which a cache may hold a part"
    if "prepare_inputs_for_generation" in vars(call.model):  # PEFT's prefix and prompt tuning
        return "the model's inputs are prepared by an adapter (prompt or prefix tuning)"
    if call.batch_size > 1 and _has_adapters_by_row(call.model):
        return "adapter_names gives each row of the batch its adapter"
    return None


def _has_adapters_by_row(model: Any) -> bool:
    """PEFT names them in pre-hooks that are planted for the call."""
    return any(
        isinstance(hook, functools.partial) and "adapter_names" in hook.keywords
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


def _what_the_target_cannot(call: Call) -> str | None:
    binding = call.drafter.binding
    if why := why_attention_is_unknown(binding.model):
        return why
    if why := _rotations_that_change(call):
        return why
    if binding.most_positions is not None and call.longest_text > binding.most_positions:
        return f"the text may come to {call.longest_text} tokens, and the target has {binding.most_positions} positions"
    unrecorded = "" if binding.mixers is None else binding.mixers.unrecorded
    return binding.tree_unsupported_reason or unrecorded or None


def _rotations_that_change(call: Call) -> str | None:
    """Rows of a batch are drafted as far as the one that has most to write; graphs look deeper than a text's end."""
    binding, settings = call.drafter.binding, call.drafter.generation_config
    limit = binding.rotates_alike_up_to
    if limit is None:
        return None
    if limit == 0:
        return "it could not be found out whether the target rotates long texts otherwise"
    behind = f"behind {limit} the target rotates all positions in another way (rope scaling)"
    if call.may_rotate_otherwise:
        return f"the text may come to {call.longest_text} tokens, and {behind}, so that it must be read token by token"
    is_eager = binding.head_device.type == "cpu" and settings.acceleration != "compile"
    depth = 0 if is_eager and call.batch_size == 1 else call.drafting().shape.depth
    if call.longest_text + depth <= limit:
        return None
    return f"drafts of {depth} tokens may pass the text's end, and {behind}"


def _what_is_drawn(call: Call) -> str | None:
    return why_noise_is_unknown(call.input_ids.device) if call.is_sampled else None


def _foreign_cache(call: Call) -> str | None:
    """Caches that only the model's own forwards, one token at a time, may write."""
    cache, implementation = call.cache, call.generation_config.cache_implementation
    if cache is not None and type(cache) is not DynamicCache:
        ours = " (eagle.generation_config.cache_type='int8' can)" if isinstance(cache, QuantizedCache) else ""
        return f"a {type(cache).__name__} cannot be rolled back exactly when drafts are rejected{ours}"
    if getattr(cache, "offloading", False):
        return "an offloaded cache moves its layers around during the forward pass"
    if implementation not in (None, "dynamic"):
        return f"cache_implementation={implementation!r} cannot be rolled back exactly when drafts are rejected"
    if call.batch_size > 1 and getattr(cache, "_is_user_defined", False):
        return "a cache is carried for one row at a time, and this one is a batch's"
    if call.cached_length and call.attention_mask is not None and not bool(call.attention_mask.all()):
        return "the cache that was passed holds text, and the attention mask has pads"
    return None


def _a_chunk_of_one_token(call: Call) -> str | None:
    """Plain decoding reads it by the target's code for one token, which may leave another state."""
    chunk = call.generation_config.prefill_chunk_size
    if chunk is None or not call.drafter.binding.has_states or (call.text_length - call.cached_length - 1) % chunk:
        return None
    return f"prefill_chunk_size={chunk} leaves a single token for a last chunk, and layers of the target keep states"


def _inputs_beside_tokens(call: Call) -> str | None:
    """Inputs that our loop would not hand on, or could not go on from; whether it can is tried last."""
    given = beside_tokens(call)
    names = ", ".join(given)
    if not given:
        if call.cached_length and _has_placeholders(call):
            return "the prompt's pictures are in the cache that was passed, and our loop might have to read them again"
        return None
    if others := [name for name in given if name not in {*READ_WITH_THE_PROMPT, "position_ids"}]:
        return f"the model is given {', '.join(others)}, which our loop does not hand on"
    if call.cached_length:
        return f"the model is given {names} behind a cache that holds text already"
    if call.generation_config.prefill_chunk_size is not None:
        return f"the model is given {names}, which our loop does not read in chunks"
    return why_not_continued(call)


def _what_the_cache_holds(call: Call) -> None:
    """Reading it refuses what our loop cannot go on from."""
    _ = call.carried


def _has_placeholders(call: Call) -> bool:
    """Whether the prompts hold tokens that stand for pictures, films or sounds."""
    config = call.model.config
    names = [f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index")]
    ids = {token for name in names if isinstance(token := getattr(config, name, None), int)}
    return bool(ids) and bool(torch.isin(call.input_ids, call.input_ids.new_tensor(sorted(ids))).any())


def _what_sees_a_batch_as_one(call: Call) -> str | None:
    """Plain decoding shows all rows at once to processors, criteria and streamers, token by token."""
    if call.batch_size == 1:
        return None
    if names := call.processing.in_order:
        return f"{', '.join(names)} may keep one state for all rows of a batch"
    if names := call.rules.names:
        return f"{', '.join(names)} may end a row of the batch by what other rows hold"
    config = call.generation_config
    if config.encoder_no_repeat_ngram_size and (config.num_return_sequences or 1) > 1:
        return "encoder_no_repeat_ngram_size knows the n-grams of prompts, of which several rows of the batch share one"
    if call.streamer is not None and not getattr(call.streamer, "takes_rows_apart", False):
        return f"{type(call.streamer).__name__} is shown all rows of the batch at once, token by token"
    return None


AGAINST_OWN: tuple[Callable[[Call], str | None], ...] = (
    _one_forward_per_token,
    _what_is_drawn,
    _inputs_of_one_forward_per_token,
    _what_the_target_cannot,
    _foreign_cache,
    _a_chunk_of_one_token,
    _what_sees_a_batch_as_one,
    _inputs_beside_tokens,
    _what_the_cache_holds,
)
"""Why our loop must not have a call, `None` if it may; the first one is the reason that is given."""


# --- refused before anything is computed ------------------------------------------------------------------------------


def check_before_work(model: Any, drafter: Assistant, setting: Callable[[str], Any]) -> None:
    """Refuse a `generate` call of `model` by what is known before its inputs are looked at.

    Args:
        setting: what the call asks for by this name.

    Raises:
        NotAttachedError, IncompatibleTargetError: the drafter is not this model's.
        ConfigurationError: a setting makes no sense.
        UnsupportedGenerationError: a way to generate that drafts cannot follow exactly.
    """
    if drafter.binding.model is not model:
        raise NotAttachedError(
            f"the drafter is attached to another {type(drafter.binding.model).__name__} than the one that generates; "
            "call eagle.attach(model) with this model"
        )
    _check_is_still_the_target(drafter)
    drafter.check_settings()
    if isinstance(drafter, Eagle31Drafter):
        _check_width(drafter)
    for name in ("prefill_chunk_size", "num_assistant_tokens"):
        if (value := setting(name)) is not None:
            require_count(name, value)
    if setting("assistant_ensemble_weight") is not None:
        raise UnsupportedGenerationError(
            "assistant_ensemble_weight trades exactness for speed, and this drafter's output is exact; unset it"
        )
    if setting("dola_layers") is not None:
        raise UnsupportedGenerationError(
            "dola_layers decides by the target's early layers, which drafts are not verified against; leave "
            "dola_layers out, or assistant_model"
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
        of_drafter = f", drafter {drafter.config.vocab_size}" if isinstance(drafter, Eagle31Drafter) else ""
        raise IncompatibleTargetError(
            "the target's vocabulary was resized or its head replaced after the drafter was attached (vocabulary "
            f"{sizes.configured}, embedding {sizes.embedded} rows{of_drafter}); call eagle.attach(model) again, which "
            "says whether the drafter still fits"
        )
    binding.compute_dtype = binding.model.dtype  # model.double() and the like


def _is_around(outer: Any, inner: Any) -> bool:
    return isinstance(outer, nn.Module) and any(module is inner for module in outer.modules())


def _check_width(drafter: Eagle31Drafter) -> None:
    top_k = drafter.generation_config.asked_top_k or 1
    size = drafter.config.draft_vocab_size or drafter.config.vocab_size
    if top_k > size:
        raise ConfigurationError(
            f"draft_top_k is {top_k}, more than the {size} tokens this drafter can draft; trees rarely gain from "
            "more than 10"
        )
