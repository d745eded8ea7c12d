"""Plain decoding over the compiled target: our loop without drafts, one token a step, nothing read for a drafter.

What a drafter is worth beside a compiler is told by this and by nothing else: a compiled EAGLE against an eager
`generate` has both in one figure.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..compiled.captured import maker_at_hand
from ..compiled.fixed_cache import FixedShapeCache
from ..compiled.graph_makers import GraphKey, Step
from ..compiled.graphs import Graphs
from ..compiled.inputs import GraphInputs
from ..decoding.decoder import SpeculativeDecoder
from ..decoding.eager_round import EagerRound
from ..decoding.request import DecodingRequest
from ..decoding.round import Round, RoundWrapper
from ..decoding.text import Sequences, StopRules
from ..drafter.drafter import Eagle31Drafter
from ..sampling.logits_processing import ScoreProcessing
from ..stats import SpeculationStats
from ..target.binding import TargetBinding, TargetOutput
from ..trees.draft_tree import DraftTree
from ..trees.shape import DraftShape
from .prompt_batches import PromptBatch


def write_plain_compiled(
    drafter: Eagle31Drafter, prompts: PromptBatch, streamer: Any = None, **generate: Any
) -> tuple[Tensor, SpeculationStats]:
    """New tokens `(B, n)` by the drafter's target alone, its steps compiled, and the figures of the call.

    Args:
        drafter: attached; it is not run.
        generate: keyword arguments of `generate`, which prepares processors and stopping rules as ever.
    """
    model: Any = drafter.require_binding().model
    stats = SpeculationStats()

    def decode(
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **_: Any,
    ) -> Tensor:
        rules = StopRules.from_criteria(stopping_criteria, generation_config.max_length)
        pad = getattr(generation_config, "_pad_token_tensor", None)
        request = DecodingRequest(
            sequences=Sequences(input_ids, prompts.padding, rules, None if pad is None else int(pad)),
            processing=ScoreProcessing(logits_processor),
            shape=DraftShape(depth=0),
            do_sample=bool(generation_config.do_sample),
            on_tokens=None if streamer is None else lambda _row, tokens: streamer.put(torch.tensor(tokens)),
            stats=stats,
        )
        with torch.no_grad(), drafter.require_binding().masked_attention():
            return PlainDecoder(drafter, request).run()

    if streamer is not None:
        streamer.put(prompts.input_ids)
    ids = model.generate(**prompts.to_generate(), **generate, custom_generate=decode)
    return ids[:, prompts.input_ids.shape[1] :], stats


class PlainDecoder(SpeculativeDecoder):
    """Our loop with rounds of one token; it has no drafter's cache, and its target's steps are graphs."""

    def __init__(self, drafter: Eagle31Drafter, request: DecodingRequest):
        super().__init__(drafter, request, self._plain)

    def _plain(self, made: Round) -> Round:
        made.caches.drafter = None
        return PlainCompiledRound(self.drafter, EagerRound(self.drafter, made.caches, self.request, self.clock))


class PlainCompiledRound(RoundWrapper):
    """Rounds whose only forward is a graph over one token per row.

    Args:
        drafter: attached; its graphs are shared.
        inner: rounds over caches of a size for graphs.
    """

    def __init__(self, drafter: Eagle31Drafter, inner: EagerRound):
        super().__init__(inner)
        self.binding, self.clock, self.stats = drafter.require_binding(), inner.clock, inner.choosing.stats
        self.graphs = Graphs.of(drafter).made_by(maker_at_hand(self.binding))
        self.inputs = GraphInputs(inner.caches.target)

    def verify(self, tree: DraftTree) -> TargetOutput:
        cache, rows = self.caches.target, len(tree.tokens)
        cache.place(1)
        if (
            cache.has_windows or cache.has_states or not self.inputs.make_room(1)
        ):  # their masks are made outside of graphs
            return self.inner.verify(tree)
        attention = self.binding.attention
        with self.clock.phase("verify"):
            output = self.graphs.run_or_eager(
                GraphKey("plain", rows, 1, (*self.inputs.mask_widths.items(), attention)),
                partial(_step, self.binding) if self.inputs.rows_pay else None,
                lambda: self._filled(tree),
                lambda: self._eager(tree),
            )
        self.stats.fall_back(self.graphs.disabled_reason)
        return TargetOutput(output.logits, None)

    def _filled(self, tree: DraftTree) -> tuple:
        self.inputs.fixed.block.slots = self.inputs.slots(1)
        return self.inputs.fill("tokens", tree.tokens), self.inputs.fixed

    def _eager(self, tree: DraftTree) -> TargetOutput:
        cache = self.caches.target
        mask = cache.attention_mask(None, None, self.binding.compute_dtype)
        return self.binding.forward(tree.tokens, cache.position_ids(tree.positions), mask, cache)


def _step(binding: TargetBinding) -> Step:
    dtype = binding.compute_dtype

    def plain(tokens: Tensor, cache: FixedShapeCache) -> TargetOutput:
        slots = cache.block.slots
        masks = cache.by_type(cache.at(slots).mask(dtype, None))
        return binding.forward(tokens, slots, masks, cache)

    return plain
