"""The door: how `model.generate(..., assistant_model=eagle)` reaches our loops, and which one takes the request.

`generate` prepares processors, criteria, streamer and masks, then calls the class's `_assisted_decoding`. We wrap that
method on `GenerationMixin`: a drafter of ours is served here, any other assistant goes on to transformers.

    own     our loop (`decoding`): trees, batches, chunked prefill. Taken wherever the target passed the self-test.
    stock   transformers' assisted loop with our candidate generator (`assisted`): batch 1, chains.
    plain   token by token, where speculation could not be exact. The reason is logged once and stored in the stats.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import QuantizedCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from ..decoding.carried_cache import CacheResume, CarriedCache
from ..decoding.decoder import SpeculativeDecoder
from ..decoding.memory_ladder import is_out_of_memory
from ..decoding.out_of_memory import RecoveringDecoder, keep_for_next_turn
from ..decoding.pair_history import PairHistory
from ..decoding.policy_choice import choose_policy
from ..decoding.request import DecodingRequest
from ..decoding.text import Sequences, StopRules
from ..drafter.drafter import Eagle31Drafter
from ..errors import IncompatibleTargetError, NotAttachedError, UnsupportedGenerationError
from ..memory.allocator import advise_once
from ..memory.apply_plan import why_not_as_planned
from ..sampling.logits_processing import ScoreProcessing
from ..stats import SpeculationStats
from .call import Call, draft_wish, left_padding, streaming, text_length
from .model_inputs import why_no_draft, why_not_our_loop
from .stock_loop import Eagle31CandidateGenerator

logger = logging.getLogger(__name__)
_logged: set[str] = set()


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with `speculation_stats`."""

    speculation_stats: SpeculationStats | None = None


def install() -> None:
    """Wrap the two methods of `GenerationMixin` through which an assistant model is served. Idempotent."""
    if getattr(GenerationMixin._assisted_decoding, "_eagle31", False):
        return
    GenerationMixin._assisted_decoding = _dispatching(GenerationMixin._assisted_decoding)  # type: ignore[method-assign]
    GenerationMixin._validate_generation_mode = _validating(GenerationMixin._validate_generation_mode)  # type: ignore[method-assign]
    GenerationMixin._get_candidate_generator = _generating(GenerationMixin._get_candidate_generator)  # type: ignore[method-assign]


def _dispatching(stock: Callable) -> Callable:
    @functools.wraps(stock)  # `generate` reads the signature
    def assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        drafter = kwargs.get("assistant_model")
        if not isinstance(drafter, Eagle31Drafter):
            return stock(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        call = Call(
            model=self,
            drafter=drafter,
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=bool(kwargs.pop("synced_gpus", False)),
            streamer=kwargs.pop("streamer", None),
            model_kwargs={k: v for k, v in kwargs.items() if k not in NOT_FOR_THE_MODEL},
        )
        return _serve(call, stock)

    assisted_decoding._eagle31 = True  # type: ignore[attr-defined]
    return assisted_decoding


NOT_FOR_THE_MODEL = ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor")


def _validating(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = generation_mode_kwargs.get("assistant_model")
        if not isinstance(drafter, Eagle31Drafter):
            return stock(self, generation_mode, generation_config, generation_mode_kwargs)
        _check_before_work(self, drafter, generation_config)
        without = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
        if generation_config.num_return_sequences not in (None, 1):
            return None  # stock refuses this for assistants of its own; our loop serves it
        return stock(self, generation_mode, generation_config, without)

    return validate_generation_mode


def _generating(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def get_candidate_generator(self, generation_config, **kwargs):
        drafter = kwargs.get("assistant_model")
        if isinstance(drafter, Eagle31Drafter):
            assert drafter.stats is not None, "our door set it"
            return Eagle31CandidateGenerator(drafter, generation_config, kwargs["logits_processor"], drafter.stats)
        return stock(self, generation_config, **kwargs)

    return get_candidate_generator


def _check_before_work(model: Any, drafter: Eagle31Drafter, config: GenerationConfig) -> None:
    """What can never work, said before anything is computed."""
    binding = drafter.binding
    if binding is None:
        raise NotAttachedError(
            "generate got a drafter that is not attached to a target; call eagle.attach(model) first"
        )
    if binding.model is not model:
        raise NotAttachedError(
            f"the drafter is attached to another {type(binding.model).__name__} than the one that generates; call "
            "eagle.attach(model) with this model"
        )
    _check_is_still_the_target(drafter)
    drafter.generation_config.check()
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise UnsupportedGenerationError(
            "assistant_ensemble_weight trades exactness for speed, and this drafter's output is exact; unset it"
        )


def _check_is_still_the_target(drafter: Eagle31Drafter) -> None:
    """What may have been done to the target since the drafter was attached."""
    binding = drafter.require_binding()
    size = binding.text_config.vocab_size
    rows = getattr(binding.embedding, "num_embeddings", size)
    is_replaced = (
        binding.model.get_output_embeddings() is not binding.lm_head
        or binding.model.get_input_embeddings() is not binding.embedding
    )
    if is_replaced or size != drafter.config.vocab_size or rows < drafter.config.vocab_size:
        raise IncompatibleTargetError(
            f"the target's vocabulary was resized or its head replaced after the drafter was attached (vocabulary "
            f"{size}, embedding {rows} rows, drafter {drafter.config.vocab_size}); call eagle.attach(model) again, "
            "which says whether the drafter still fits"
        )
    binding.compute_dtype = binding.model.dtype  # model.double() and the like


# --- which loop -------------------------------------------------------------------------------------------------------


def _serve(call: Call, stock: Callable) -> Any:
    """Hand the call to the loop that serves it exactly."""
    wish = call.drafter.generation_config.speculation_loop
    never = _why_not_speculate(call)
    not_own = never or _why_not_own(call)
    not_stock = never or _why_not_stock(call)
    if (wish == "own" and not_own) or (wish == "stock" and not_stock):
        raise UnsupportedGenerationError(
            f"speculation_loop={wish!r} cannot serve this request: {not_own if wish == 'own' else not_stock}; "
            "set speculation_loop='auto' or change the request"
        )
    stats = call.drafter.stats = SpeculationStats()
    advise_once(call.input_ids.device)
    _compare_with_plan(call, stats)
    if wish == "plain":
        stats.loop, stats.reason = "plain", "asked for"
        return _plain(call)
    if wish == "own" or (wish == "auto" and not not_own):
        return _own(call)
    if call.drafter.generation_config.stored_cache_type != "full":
        not_own += "; cache_type is not used there"
    if not not_stock:
        stats.loop, stats.reason = "stock", "asked for" if wish == "stock" else not_own
        _log_once(stats)
        return _stock(call, stock)
    stats.loop, stats.reason = "plain", not_own
    _log_once(stats)
    return _plain(call)


def _log_once(stats: SpeculationStats) -> None:
    if stats.reason not in _logged and stats.reason != "asked for":
        _logged.add(stats.reason)
        logger.warning("eagle31: using the %s loop: %s", stats.loop, stats.reason)


def _compare_with_plan(call: Call, stats: SpeculationStats) -> None:
    """Say so if the request is larger than what was planned: it may well fit, and the text is the same if not."""
    plan = call.drafter.memory_plan
    rows, length = call.input_ids.shape[0], call.generation_config.max_length
    why = "" if plan is None else why_not_as_planned(plan, rows=rows, length=length)
    if why:
        stats.fallbacks.append(why)
        if why not in _logged:
            _logged.add(why)
            logger.warning("eagle31: %s; if memory runs out, drafts get shorter first", why)


def _why_not_speculate(call: Call) -> str:
    """Why no draft may be tried at all; empty if one may."""
    config, kwargs = call.generation_config, call.model_kwargs
    if not kwargs.get("use_cache", True):
        return "use_cache=False leaves nothing to verify against"
    if call.input_ids.shape[1] == 0 or kwargs.get("inputs_embeds") is not None:
        return "the prompt is given as inputs_embeds"
    if config.output_attentions or config.output_hidden_states:
        return "output_attentions / output_hidden_states want one forward per token"
    if call.synced_gpus:
        return "synced_gpus"
    return why_no_draft(call)


def _why_not_own(call: Call) -> str:
    binding = call.drafter.require_binding()
    if reason := binding.why_no_trees:
        return reason
    if reason := _foreign_cache(call) or why_not_our_loop(call):
        return reason
    if call.input_ids.shape[0] > 1 and (names := ScoreProcessing(call.logits_processor).bound_to_the_batch):
        return f"{', '.join(names)} may keep one state for all rows of a batch"
    return ""


def _why_not_stock(call: Call) -> str:
    if call.input_ids.shape[0] > 1:
        return "transformers' assisted loop serves one row at a time"
    if shown := ScoreProcessing(call.logits_processor).in_order:
        return f"transformers' assisted loop would show {', '.join(shown)} drafts that are not accepted"
    rules = StopRules.from_criteria(call.stopping_criteria, call.generation_config.max_length)
    if rules.others:
        names = ", ".join(type(rule).__name__ for rule in rules.others)
        return f"{names} may end inside an accepted block, which transformers' assisted loop would miss"
    if int(call.input_ids[0, -1]) in rules.eos_ids:
        # Before the first draft it asks whether the candidate, the bare prompt, is done (transformers 5.17).
        return "the prompt ends with an end-of-sequence token, which transformers' assisted loop takes for the end"
    if call.generation_config.prefill_chunk_size is not None:
        return "transformers' assisted loop ignores prefill_chunk_size"
    cache = call.model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        return "transformers' assisted loop writes wrong text with a pre-filled cache"
    return _foreign_cache(call)


def _foreign_cache(call: Call) -> str:
    cache = call.model_kwargs.get("past_key_values")
    implementation = call.generation_config.cache_implementation
    if cache is not None and type(cache) is not DynamicCache:
        ours = " (eagle.generation_config.cache_type='int8' can)" if isinstance(cache, QuantizedCache) else ""
        return f"a {type(cache).__name__} cannot be rolled back exactly when drafts are rejected{ours}"
    if getattr(cache, "offloading", False):
        return "an offloaded cache moves its layers around during the forward pass"
    if implementation not in (None, "dynamic"):
        return f"cache_implementation={implementation!r} cannot be rolled back exactly when drafts are rejected"
    return ""


# --- the three loops --------------------------------------------------------------------------------------------------


def _plain(call: Call) -> Any:
    output = GenerationMixin._sample(
        call.model,
        call.input_ids,  # type: ignore[arg-type]
        logits_processor=call.logits_processor,
        stopping_criteria=call.stopping_criteria,
        generation_config=call.generation_config,
        synced_gpus=call.synced_gpus,
        streamer=call.streamer,
        **call.model_kwargs,
    )
    return _with_stats(output, call.drafter.stats)


def _stock(call: Call, stock: Callable) -> Any:
    with _advising(), call.drafter.require_binding().capturing():
        output = stock(
            call.model,
            call.input_ids,
            call.logits_processor,
            call.stopping_criteria,
            call.generation_config,
            synced_gpus=call.synced_gpus,
            streamer=call.streamer,
            assistant_model=call.drafter,
            **call.model_kwargs,
        )
    return _with_stats(output, call.drafter.stats)


@contextmanager
def _advising() -> Iterator[None]:
    """This loop is transformers': where it runs out of memory outside the draft, nothing can be given up in time."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            logger.warning(
                "eagle31: memory ran out in the stock loop, which reads the prompt at once and cannot go on; shorten "
                "the prompt, or use a target that our own loop can serve"
            )
        raise


def _own(call: Call) -> Any:
    config, stats = call.generation_config, call.drafter.stats
    assert stats is not None
    pad = getattr(config, "_pad_token_tensor", None)
    rules = StopRules.from_criteria(call.stopping_criteria, config.max_length)
    padding = left_padding(call)
    sequences = Sequences(call.input_ids, padding, rules, None if pad is None else int(pad))
    carried = _carried_cache(call, padding)
    skipped = 0 if carried is None else carried.start.skip
    stats.prefilled_tokens = sum(call.input_ids.shape[1] - pads - skipped for pads in padding)
    wish = draft_wish(call)
    request = DecodingRequest(
        sequences=sequences,
        processing=ScoreProcessing(call.logits_processor),
        shape=wish.shape,
        policy=choose_policy(call.drafter, wish, stats),
        do_sample=bool(config.do_sample),
        prefill_chunk=config.prefill_chunk_size or call.drafter.generation_config.prefill_chunk_size,
        on_tokens=streaming(call.streamer),
        keep_scores=bool(config.return_dict_in_generate and config.output_scores),
        keep_logits=bool(config.return_dict_in_generate and config.output_logits),
        start=CacheResume() if carried is None else carried.start,
        end=None if carried is None else carried.end,
        stats=stats,
    )
    with torch.no_grad(), call.drafter.require_binding().masked_attention():
        ids = RecoveringDecoder(SpeculativeDecoder(call.drafter, request)).run()
        cache = None if carried is None else keep_for_next_turn(carried, ids, stats)
    PairHistory.of(call.drafter).record(stats, sampled=wish.sampled)
    if call.streamer is not None:
        call.streamer.end()
    if not config.return_dict_in_generate:
        return ids
    return SpeculativeOutput(
        sequences=ids,  # type: ignore[arg-type]
        scores=sequences.stack_scores(sequences.scores) if request.keep_scores else None,  # type: ignore[arg-type]
        logits=sequences.stack_scores(sequences.logits) if request.keep_logits else None,  # type: ignore[arg-type]
        past_key_values=cache,  # type: ignore[arg-type]
        speculation_stats=stats,
    )


def _carried_cache(call: Call, padding: list[int]) -> CarriedCache | None:
    """What the cache brings from the last turn and takes to the next; `None` if nobody would get it.

    Raises:
        UnsupportedGenerationError: the cache has content that cannot be told from padding, or does not fit the prompt.
    """
    cache: Any = call.model_kwargs.get("past_key_values")
    wanted = call.generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    if cache is None or not wanted:
        return None
    mask = call.model_kwargs.get("attention_mask")
    is_padded = any(padding) or (mask is not None and not bool(mask.all()))
    if cache.get_seq_length() == 0:
        return None if is_padded else CarriedCache(call.drafter, cache)
    if is_padded:
        raise UnsupportedGenerationError(
            "the cache passed as past_key_values has content and the attention mask has pads; a carried cache can be "
            "continued only where all rows are equally long and unpadded: continue them one by one, or pass an empty "
            "cache and the whole text"
        )
    carried = CarriedCache(call.drafter, cache)
    start = carried.open(call.input_ids, text_length(call))
    again = cache.get_seq_length() - start.skip - start.before_prompts
    if again > 0:
        assert call.drafter.stats is not None, "our door set it"
        call.drafter.stats.fallbacks.append(f"{again} tokens of the carried cache do not hold for this prompt")
    return carried


def _with_stats(output: Any, stats: SpeculationStats | None) -> Any:
    if isinstance(output, GenerateDecoderOnlyOutput):
        values = {field.name: getattr(output, field.name) for field in fields(output)}
        return SpeculativeOutput(**values, speculation_stats=stats)
    return output
