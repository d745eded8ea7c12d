"""The compatible path: our drafter as candidate generator of transformers' own assisted decoding (batch 1, chains)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from ..decoding.memory_ladder import FallbackStep, give_back_memory, is_out_of_memory
from ..drafter.draft_scores import draft_scores, over_vocabulary
from ..drafter.drafter import Eagle31Drafter
from ..drafter.propose import DraftScores, propose_chain
from ..drafter.session import DraftSession, positions_read_at_once
from ..generation_config import DraftLength
from ..sampling.logits_processing import ScoreProcessing
from ..stats import NOT_A_NUMBER, DraftEvent, SpeculationStats
from .draft_length import draft_length

logger = logging.getLogger(__name__)


class Eagle31CandidateGenerator(CandidateGenerator):
    """Drafts a chain per round from the hidden states of the target's last forward pass.

    Under sampling the drafter draws from its own distribution, processed as the target's is, and hands over exactly
    the logits it drew from, which is what makes the loop's acceptance rule lossless (arXiv 2211.17192).

    The target's hidden states are collected by the drafter's binding, which must be capturing while the loop runs.

    Args:
        drafter: attached to the target that generates.
        generation_config: of the running `generate` call.
        logits_processor: as `generate` prepared them.
        stats: filled while the loop runs.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}  # noqa: RUF012 (transformers' interface)

    def __init__(
        self,
        drafter: Eagle31Drafter,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stats: SpeculationStats,
    ):
        self.drafter = drafter
        self.binding = drafter.require_binding()
        self.generation_config = generation_config
        self.processing = ScoreProcessing(logits_processor)
        self.stats = stats
        self.length = draft_length(drafter, generation_config, batch_size=1)
        self._session: DraftSession | None = None
        self._has_given_up = False
        self._drafted = 0
        self._forward_started = time.perf_counter()

    def get_candidates(  # type: ignore[override]  # transformers' own generators widen it too
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = True,
        n_last_matches: int | Tensor = 0,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Candidates `(1, t + K)` for `input_ids` `(1, t)`, and under sampling the logits `(1, K, V)` they came from.

        The first call has nothing to draft from and returns `input_ids` alone.
        """
        started = time.perf_counter()
        self._drafted = 0
        try:
            if is_first_iteration:
                return input_ids, None
            self.binding.one_token_arithmetic.start()  # the prompt is read, what follows is verified
            if self._has_given_up or not self._absorbed(input_ids, int(n_last_matches)):
                return input_ids, None
            depth = min(self.length.depth, self.generation_config.max_length - input_ids.shape[1] - 1)
            if depth < 1:
                return input_ids, None
            return self._draft_if_it_fits(input_ids, depth)
        finally:
            self._forward_started = time.perf_counter()
            if not is_first_iteration:
                self.stats.draft_s += self._forward_started - started

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int | Tensor) -> None:
        """Called by the loop after each verification: count the round."""
        seconds = time.perf_counter() - self._forward_started
        accepted = int(num_matches)
        self.stats.new_tokens += accepted + 1
        if self._session is None:
            self.stats.prefill_s += seconds
            return
        self.stats.verify_s += seconds
        self.stats.record_round(depth=self._drafted, nodes=self._drafted, accepted=[accepted])

    def _absorb(self, input_ids: Tensor, accepted: int) -> None:
        """Bring the drafter up to date with the rows the target has just computed and kept."""
        aux = self.binding.take_aux()  # (1, T, A*Ht): the whole prompt at first, then root and drafts
        if self._session is None:
            kept = input_ids.shape[1] - 1
            capacity = self.generation_config.max_length + self.length.depth
            block = positions_read_at_once(self.drafter, kept) + self.length.depth + 1
            self._session = DraftSession(self.drafter, batch_size=1, capacity=capacity, block=block)
        else:
            kept = accepted + 1
        self._session.absorb(input_ids[:, -kept:], aux[:, :kept], [kept])

    def _absorbed(self, input_ids: Tensor, accepted: int) -> bool:
        """`_absorb`; where memory runs out the drafter has lost touch with the target and stays silent from then on."""
        try:
            self._absorb(input_ids, accepted)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._session, self._has_given_up = None, True
        self._step_down(FallbackStep.DROP)
        return False

    def _draft_if_it_fits(self, input_ids: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """`_draft`; where memory runs out nothing is proposed, and drafts are half as long from then on."""
        try:
            return self._draft(input_ids, depth)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        assert self._session is not None, "it was drafting"
        self._drafted = 0
        self.length = replace(self.length, depth=max(1, self.length.depth // 2))
        self._session.rollback(self._session.cache.lengths)
        self._session.cache.release()
        self._step_down(FallbackStep.SHORTEN)
        return input_ids, None

    def _step_down(self, step: FallbackStep) -> None:
        steps = self.stats.memory_steps
        steps[step.value] = steps.get(step.value, 0) + 1
        if steps[step.value] == 1:
            logger.warning("eagle31: memory ran out in the drafter: %s; the text goes on unchanged", step.value)
        give_back_memory(self.drafter.device)

    def _draft(self, input_ids: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        assert self._session is not None
        sampled: list[Tensor] = []  # what each token was drawn from: the loop wants logits, acceptance needs them exact
        tree = propose_chain(
            self._session,
            input_ids[:, -1],
            DraftLength(depth, self.length.min_confidence),
            sample=bool(self.generation_config.do_sample),
            scores=self._draft_scores(input_ids, sampled),
        )
        tokens = tree.tokens[0, 1:]
        self._drafted = self._length_up_to_eos(tokens)
        tokens = tokens[None, : self._drafted].to(input_ids.device)
        logits = torch.stack(sampled[: self._drafted], dim=1) if tree.proposal is not None else None
        if bool((self._session.root.logits if logits is None else logits).isnan().any()):
            return self._stop(input_ids)
        return torch.cat((input_ids, tokens), dim=1), logits

    def _stop(self, input_ids: Tensor) -> tuple[Tensor, None]:
        """The drafter's scores are no numbers: nothing more is drafted."""
        self._session, self._has_given_up, self._drafted = None, True, 0
        self.stats.events.append(DraftEvent(self.stats.new_tokens, "stop", NOT_A_NUMBER))
        logger.warning("eagle31: %s", NOT_A_NUMBER)
        return input_ids, None

    def _draft_scores(self, input_ids: Tensor, seen: list[Tensor]) -> DraftScores:
        """Processed draft scores, a copy of which over the whole vocabulary goes to `seen`."""

        def prefix(_row: int, drafted: Tensor) -> Tensor:
            return torch.cat((input_ids[0], drafted))[None]

        sample = bool(self.generation_config.do_sample)
        processed = draft_scores(self.drafter, self.processing, prefix, [0], do_sample=sample)

        def scores(logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
            ranked = logits if processed is None else processed(logits, drafted)
            if sample:
                seen.append(over_vocabulary(self.drafter, ranked.float()))
            return ranked

        return scores

    def _length_up_to_eos(self, tokens: Tensor) -> int:
        """Drafts after an end-of-sequence token are worthless, and the loop of 5.17 would keep them."""
        eos = getattr(self.generation_config, "_eos_token_tensor", None)
        if eos is None:
            return len(tokens)
        hits = torch.isin(tokens, eos.to(tokens.device)).nonzero()
        return int(hits[0]) + 1 if len(hits) else len(tokens)
