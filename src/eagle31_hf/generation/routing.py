"""Which loop serves a `generate` call, and why it is not ours.

    own     our loop (`decoding`): trees, batches, chunked prefill. Taken wherever the target passed the self-test.
    plain   token by token, where speculation could not be exact.

A loop that would write another text, or drop something it was given, does not get the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from transformers import DynamicCache
from transformers.cache_utils import QuantizedCache

from ..errors import UnsupportedGenerationError
from ..sampling.draw import why_noise_is_unknown
from ..target.attention_functions import why_attention_is_unknown
from .call import Call
from .continuation import why_not_continued
from .model_inputs import left_padding, why_no_draft, why_not_our_loop
from .own_loop import requested_draft

Loop = Literal["own", "plain"]
# Why our loop must not have a call; `None` if it may.
Objection = Callable[[Call], str | None]

ASKED_FOR = "asked for"


@dataclass(frozen=True)
class Route:
    """Which loop, and the `reason` it is not ours; empty if it is."""

    loop: Loop
    reason: str = ""


def choose_route(call: Call) -> Route:
    """Our loop where it serves the call exactly, or the one that was asked for.

    Raises:
        UnsupportedGenerationError: our loop was asked for and cannot serve the call exactly.
    """
    settings = call.drafter.generation_config
    if settings.speculation_loop == "plain":
        return Route("plain", ASKED_FOR)
    why = next((why for objection in AGAINST_OWN if (why := objection(call)) is not None), None)
    if why is None:
        return Route("own")
    if settings.speculation_loop == "own":
        raise UnsupportedGenerationError(not_served(why))
    unused = "" if settings.stored_cache_type == "full" else "; cache_type is not used there"
    return Route("plain", why + unused)


def not_served(why: str) -> str:
    """What is said where our loop was asked for by name and cannot write the text."""
    return f"speculation_loop='own' cannot serve this request: {why}; set speculation_loop='auto' or change the request"


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


def _unknown_noise(call: Call) -> str | None:
    return why_noise_is_unknown(call.input_ids.device) if call.generation_config.do_sample else None


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
    return None


def _attention_of_its_own(call: Call) -> str | None:
    return why_attention_is_unknown(call.drafter.binding.model)


def _rotations_that_change(call: Call) -> str | None:
    limit = call.drafter.binding.rotates_alike_up_to
    if not limit or not call.may_rotate_otherwise:
        return None if limit != 0 else "it could not be found out whether the target rotates long texts otherwise"
    return (
        f"the text may come to {call.longest_text} tokens, and behind {limit} the target rotates all positions in "
        "another way (rope scaling), so that it must be read token by token"
    )


def _more_positions_than_there_are(call: Call) -> str | None:
    most = call.drafter.binding.most_positions
    if most is None or call.longest_text <= most:
        return None
    return f"the text may come to {call.longest_text} tokens, and the target has {most} positions"


def _drafts_beyond_what_rotates_alike(call: Call) -> str | None:
    """Rows of a batch are drafted as far as the one that has most to write; graphs look deeper than a text's end."""
    binding, settings = call.drafter.binding, call.drafter.generation_config
    if binding.rotates_alike_up_to is None:
        return None
    is_eager = binding.head_device.type == "cpu" and settings.acceleration != "compile"
    requested, _ = requested_draft(call)
    room = binding.rotates_alike_up_to - call.longest_text
    if (is_eager and call.batch_size == 1) or requested.shape.depth <= room:
        return None
    return f"drafts of {requested.shape.depth} tokens may pass the {binding.rotates_alike_up_to} that are rotated alike"


def _target_without_trees(call: Call) -> str | None:
    binding = call.drafter.binding
    return binding.tree_unsupported_reason or (binding.batch_unsupported_reason if call.batch_size > 1 else "") or None


def _pads_that_are_counted(call: Call) -> str | None:
    why = call.drafter.binding.padding_unsupported_reason
    return why if why and any(left_padding(call.input_ids, call.attention_mask)) else None


def _chunks_that_begin_anew(call: Call) -> str | None:
    chunk = call.generation_config.prefill_chunk_size
    if call.drafter.binding.reads_on or not chunk or call.input_ids.shape[1] <= chunk:
        return None
    return "the target's states begin anew with every chunk of prefill_chunk_size, and our loop reads its prompts whole"


def _what_sees_a_batch_as_one(call: Call) -> str | None:
    """Plain decoding shows all rows at once to processors, criteria and streamers, token by token."""
    if call.batch_size == 1:
        return None
    if names := call.processing.bound_to_the_batch:
        return f"{', '.join(names)} may keep one state for all rows of a batch"
    if names := call.rules.names:
        return f"{', '.join(names)} may end a row of the batch by what other rows hold"
    if call.streamer is not None and not getattr(call.streamer, "takes_rows_apart", False):
        return f"{type(call.streamer).__name__} is shown all rows of the batch at once, token by token"
    return None


AGAINST_OWN: tuple[Objection, ...] = (
    _one_forward_per_token,
    _unknown_noise,
    why_no_draft,
    _attention_of_its_own,
    _rotations_that_change,
    _more_positions_than_there_are,
    _drafts_beyond_what_rotates_alike,
    _target_without_trees,
    _foreign_cache,
    why_not_our_loop,
    _pads_that_are_counted,
    _chunks_that_begin_anew,
    _what_sees_a_batch_as_one,
    why_not_continued,
)
