"""The compatible path: our drafter as candidate generator of transformers' own assisted decoding (batch 1, chains)."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from ..decoding.memory_ladder import FallbackStep, give_back_memory, is_out_of_memory
from ..drafter.draft_scores import draft_scores
from ..drafter.drafter import Eagle31Drafter
from ..drafter.propose import DraftChoice, propose_chain
from ..drafter.session import DraftSession, positions_read_at_once
from ..generation_config import DraftLength
from ..sampling.draw import PositionNoise
from ..sampling.logits_processing import ScoreProcessing
from ..stats import NOT_A_NUMBER, DraftEvent, SpeculationStats
from .draft_length import draft_length

logger = logging.getLogger(__name__)


class SampledScores(LogitsProcessor):
    """The last processor of a sampled text: the arg-max of its scores is what plain `generate` would draw.

    So transformers' loop need not sample, and its text is plain's whatever it is shown.

    Args:
        prompt: `(1, L)` that the text begins with.
    """

    def __init__(self, prompt: Tensor):
        self.prompt_length, self.noise = prompt.shape[1], None

    noise: PositionNoise | None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Perturbed scores `(1, V)` after `input_ids` `(1, t)`."""
        if self.noise is None:
            self.noise = PositionNoise(1, scores.shape[-1], scores.device)
        return scores.softmax(-1) / self.ahead(input_ids, 1)[:, 0]

    def ahead(self, input_ids: Tensor, count: int) -> Tensor:
        """Noise `(1, count, V)` of the tokens that follow `input_ids` `(1, t)`."""
        assert self.noise is not None, "the first token comes before any draft"
        return self.noise.window([0], [input_ids.shape[1] - self.prompt_length], count)


class Eagle31CandidateGenerator(CandidateGenerator):
    """Drafts a chain per round from the hidden states of the target's last forward pass.

    A sampled text is written by a loop that takes the arg-max of scores perturbed by `SampledScores`; drafts are chosen
    by the same noise.

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
        self.binding = drafter.binding
        self.generation_config = generation_config
        self.sampled = next((each for each in logits_processor if isinstance(each, SampledScores)), None)
        own = [each for each in logits_processor if each is not self.sampled]
        self.processing = ScoreProcessing(LogitsProcessorList(own))
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
    ) -> tuple[Tensor, None]:
        """Candidates `(1, t + K)` for `input_ids` `(1, t)`, without the logits they came from.

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

    def _draft_if_it_fits(self, input_ids: Tensor, depth: int) -> tuple[Tensor, None]:
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

    def _draft(self, input_ids: Tensor, depth: int) -> tuple[Tensor, None]:
        assert self._session is not None
        if bool(self._session.root.logits.isnan().any()):
            return self._stop(input_ids)
        length = DraftLength(depth, self.length.min_confidence)
        tree = propose_chain(self._session, input_ids[:, -1], length, self._choice(input_ids, depth))
        tokens = tree.tokens[0, 1:]
        self._drafted = self._length_up_to_eos(tokens)
        return torch.cat((input_ids, tokens[None, : self._drafted].to(input_ids.device)), dim=1), None

    def _choice(self, input_ids: Tensor, depth: int) -> DraftChoice:
        """How the drafts behind `input_ids` are chosen."""

        def prefix(_row: int, drafted: Tensor) -> Tensor:
            return torch.cat((input_ids[0], drafted))[None]

        noise = None if self.sampled is None else self.sampled.ahead(input_ids, depth)
        scores = draft_scores(self.drafter, self.processing, prefix, [0], do_sample=noise is not None)
        return DraftChoice(scores, noise)

    def _stop(self, input_ids: Tensor) -> tuple[Tensor, None]:
        """The drafter's scores are no numbers: nothing more is drafted."""
        self._session, self._has_given_up, self._drafted = None, True, 0
        self.stats.events.append(DraftEvent(self.stats.new_tokens, "stop", NOT_A_NUMBER))
        logger.warning("eagle31: %s", NOT_A_NUMBER)
        return input_ids, None

    def _length_up_to_eos(self, tokens: Tensor) -> int:
        """Drafts after an end-of-sequence token are worthless, and the loop of 5.17 would keep them."""
        eos = getattr(self.generation_config, "_eos_token_tensor", None)
        if eos is None:
            return len(tokens)
        hits = torch.isin(tokens, eos.to(tokens.device)).nonzero()
        return int(hits[0]) + 1 if len(hits) else len(tokens)
