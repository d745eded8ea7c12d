"""A `generate` call served by our own loop: what it asks for, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cache.stock import CACHE_ARGUMENT
from ..errors import UnsupportedGenerationError
from ..loop.carried_cache import CarriedCache
from ..loop.decoder import DecodingRequest, SpeculativeDecoder
from ..loop.pair import Drafting
from ..loop.survive import RecoveringDecoder
from ..loop.text import Sequences
from ..sampling.callers_code import CallersCode, NotFollowedError
from ..sampling.draw import NOT_PLAIN
from ..stats import SpeculationStats
from .call import Call, SpeculativeOutput
from .plain import asked_ahead, begun_again
from .warm_up import warm_up_for


class LeftToPlain(Exception):
    """Our loop has met what it cannot follow: `call` is to be written by plain decoding."""

    def __init__(self, reason: str, call: Call):
        super().__init__(reason)
        self.call = call


def write_own(call: Call, stats: SpeculationStats) -> Any:
    """Ids or an output, as `generate` returns them.

    Raises:
        LeftToPlain: the caller's processors or criteria do what only plain decoding can follow, or a carried cache
            does not fit the prompts of a call that names no drafter.
        UnsupportedGenerationError: it does not fit those of one that names it.
        OutOfMemoryError: memory ran out, and nothing is left to give up.
    """
    try:
        carried = _carried_cache(call, stats)
    except UnsupportedGenerationError as error:
        if not call.assisted.by_default:
            raise
        raise LeftToPlain(str(error), call) from error
    settings, binding = call.drafter.generation_config, call.drafter.binding
    if settings.acceleration == "compile" and (why := warm_up_for(call)):
        stats.fall_back(f"steps are not compiled: {why}")
    if binding.has_states and (settings.asked_top_k or 1) > 1:
        stats.fall_back("trees are drafted as chains of their depth where layers of the target keep states")
    drafts = call.drafting(stats.note_draft)
    request = _request(call, drafts, carried, stats)
    if not any(drafts.why in why for why in stats.fallbacks):  # compiling just now may have said so
        stats.fall_back(drafts.why)
    decoder = SpeculativeDecoder(call.drafter, request)
    recovering = RecoveringDecoder(decoder)
    with torch.no_grad(), binding.masked_attention(), decoder.borrowing():
        try:
            ids = recovering.run()
        except NotFollowedError as noticed:
            if asked_ahead(request):
                stats.fall_back(NOT_PLAIN)
            raise LeftToPlain(str(noticed), begun_again(call, request, decoder.shown)) from noticed
        if request.code is not None and request.code.has_drawn:
            stats.fall_back(NOT_PLAIN)
        cache = None if carried is None else recovering.keep_for_next_turn(carried, ids)
    if call.streamer is not None:
        call.streamer.end()
    if not call.generation_config.return_dict_in_generate:
        return ids
    sequences = request.sequences
    return SpeculativeOutput(
        sequences=ids,  # type: ignore[arg-type]
        scores=sequences.stack_scores(sequences.scores) if request.keep_scores else None,  # type: ignore[arg-type]
        logits=sequences.stack_scores(sequences.logits) if request.keep_logits else None,  # type: ignore[arg-type]
        speculation_stats=stats,
        **{CACHE_ARGUMENT: cache},  # type: ignore[arg-type]
    )


def _request(call: Call, drafts: Drafting, carried: CarriedCache | None, stats: SpeculationStats) -> DecodingRequest:
    config, skip = call.generation_config, 0 if carried is None else carried.skip
    pad, prompts = getattr(config, "_pad_token_tensor", None), call.input_ids
    asks_caller = call.processing.in_order or call.rules.of_the_caller
    code = CallersCode(call.batch_size, prompts.shape[1], prompts.device) if asks_caller else None
    stats.prefilled_tokens = sum(prompts.shape[1] - pads - skip for pads in call.padding)
    return DecodingRequest(
        sequences=Sequences(prompts, call.padding, call.rules, None if pad is None else int(pad), code),
        processing=call.processing,
        shape=drafts.shape,
        policy=drafts.planner,
        graphs=drafts.graphs,
        prompts=call.prompt_forward,
        do_sample=call.is_sampled,
        prefill_chunk=config.prefill_chunk_size or call.drafter.generation_config.prefill_chunk_size,
        on_tokens=None if call.streamer is None else _streaming(call.streamer),
        keep_scores=bool(config.return_dict_in_generate and config.output_scores),
        keep_logits=bool(config.return_dict_in_generate and config.output_logits),
        carried=carried,
        stats=stats,
        code=code,
    )


def _streaming(streamer: Any) -> Callable[[int, list[int]], None]:
    # A 1-D block: stock streamers take it whole and count it right.
    return lambda _row, tokens: streamer.put(torch.tensor(tokens)) if tokens else None


def _carried_cache(call: Call, stats: SpeculationStats) -> CarriedCache | None:
    """What the cache brings from the last turn and takes to the next; `None` if the caller would not get it.

    Raises:
        UnsupportedGenerationError: the cache has content that cannot be told from padding, or does not fit the prompt.
    """
    cache, mask = call.cache, call.attention_mask
    wanted = call.generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    if cache is None or not wanted or call.batch_size > 1:  # a batch with a cache of the user's is decoded plainly
        return None
    is_padded = any(call.padding) or (mask is not None and not bool(mask.all()))
    if not call.cached_length:
        return None if is_padded else CarriedCache(call.drafter, cache)
    if is_padded:
        raise UnsupportedGenerationError(
            "the cache that was passed has content and the attention mask has pads; a carried cache can be "
            "continued only where all rows are equally long and unpadded: continue them one by one, or pass an empty "
            "cache and the whole text"
        )
    carried = CarriedCache(call.drafter, cache)
    carried.open(call.input_ids)
    again = call.cached_length - carried.skip
    if again > 0:
        stats.fallbacks.append(f"{again} tokens of the carried cache do not hold for this prompt")
    return carried
