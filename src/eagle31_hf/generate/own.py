"""A `generate` call served by our own loop: what it asks for, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..cache.stock import CACHE_ARGUMENT
from ..loop.decoder import DecodingRequest, SpeculativeDecoder
from ..loop.pair import Drafting
from ..loop.survive import RecoveringDecoder
from ..loop.text import Sequences
from ..sampling.callers_code import CallersCode
from ..stats import SpeculationStats
from .call import Call, SpeculativeOutput


def write_own(call: Call, stats: SpeculationStats) -> Any:
    """Ids or an output, as `generate` returns them.

    Raises:
        OutOfMemoryError: memory ran out, and nothing is left to give up.
    """
    settings, binding, carried = call.drafter.generation_config, call.drafter.binding, call.carried
    if carried is not None and (again := call.cached_length - carried.skip) > 0:
        stats.fall_back(f"{again} tokens of the carried cache do not hold for this prompt")
    if binding.has_states and (settings.asked_top_k or 1) > 1:
        stats.fall_back("trees are drafted as chains of their depth where layers of the target keep states")
    drafts = call.drafting(stats.note_draft)
    request = _request(call, drafts, stats)
    stats.fall_back(drafts.why)
    decoder = SpeculativeDecoder(call.drafter, request)
    recovering = RecoveringDecoder(decoder)
    with torch.no_grad(), binding.masked_attention(), decoder.borrowing():
        ids = recovering.run()
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


def _request(call: Call, drafts: Drafting, stats: SpeculationStats) -> DecodingRequest:
    config, skip = call.generation_config, 0 if call.carried is None else call.carried.skip
    pad, prompts = getattr(config, "_pad_token_tensor", None), call.input_ids
    asks_caller = call.processing.in_order or call.rules.of_the_caller
    code = CallersCode(prompts.shape[1], prompts.device) if asks_caller else None
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
        carried=call.carried,
        stats=stats,
        code=code,
    )


def _streaming(streamer: Any) -> Callable[[int, list[int]], None]:
    # A 1-D block: stock streamers take it whole and count it right.
    return lambda _row, tokens: streamer.put(torch.tensor(tokens)) if tokens else None
