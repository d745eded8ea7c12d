"""Our drafter as candidate generator of transformers' own assisted decoding (one row, chains)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from ..drafter.drafter import Eagle31Drafter
from ..drafter.propose import BARE_CHOICE, draft_chain
from ..drafter.session import DraftSession, positions_read_at_once
from ..loop.pair import draft_shape
from ..stats import SpeculationStats


class Eagle31CandidateGenerator(CandidateGenerator):
    """Drafts a chain per round from the hidden states of the target's last forward pass, for transformers' loop.

    `generate` with a drafter takes our own loop or plain decoding; this is for who drives transformers' assisted loop.
    A greedy text is the target's own; a sampled one has its distribution, by other random numbers than plain's.

    The target's hidden states are collected by the drafter's binding, which must be capturing while the loop runs.

    Args:
        drafter: attached to the target that generates.
        generation_config: of the running `generate` call.
        logits_processor: as `generate` prepared them; drafts are made without.
        stats: filled while the loop runs.
        num_assistant_tokens: of each chain; default: as the drafter's settings say.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}  # noqa: RUF012 (transformers' interface)

    def __init__(
        self,
        drafter: Eagle31Drafter,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stats: SpeculationStats,
        num_assistant_tokens: int | None = None,
    ):
        self.drafter, self.binding, self.generation_config = drafter, drafter.binding, generation_config
        self.stats = stats
        sampled = bool(generation_config.do_sample)
        shape = draft_shape(drafter, rows=1, sampled=sampled, depth=num_assistant_tokens, by_graphs=False)
        self.shape = shape.as_chain()
        self._session: DraftSession | None = None
        self._drafted = 0

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
        self._drafted = 0
        if not is_first_iteration:
            self.binding.one_token_arithmetic.start()  # the prompt is read, what follows is verified
            drafts = self._draft(input_ids, self._absorb(input_ids, int(n_last_matches)))
            self._drafted = len(drafts)
            input_ids = torch.cat((input_ids, drafts[None].to(input_ids.device)), dim=1)
        return input_ids, None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int | Tensor) -> None:
        """Called by the loop after each verification: count the round."""
        accepted = int(num_matches)
        self.stats.new_tokens += accepted + 1
        if self._session is not None:
            self.stats.record_round(depth=self._drafted, nodes=self._drafted, accepted=[accepted])

    def _absorb(self, input_ids: Tensor, accepted: int) -> DraftSession:
        """Bring the drafter up to date with the rows the target has just computed and kept."""
        aux = self.binding.take_aux()  # (1, T, A*Ht): the whole prompt at first, then root and drafts
        kept = accepted + 1
        if self._session is None:
            kept = input_ids.shape[1] - 1
            capacity = self.generation_config.max_length + self.shape.depth
            block = positions_read_at_once(self.drafter, kept) + self.shape.depth + 1
            self._session = DraftSession(self.drafter, batch_size=1, capacity=capacity, block=block)
        self._session.absorb(input_ids[:, -kept:], aux[:, :kept], [kept])
        return self._session

    def _draft(self, input_ids: Tensor, session: DraftSession) -> Tensor:
        """`(n,)` tokens to come, none where the text is about to end or the drafter's scores are no numbers."""
        depth = min(self.shape.depth, self.generation_config.max_length - input_ids.shape[1] - 1)
        if depth < 1 or bool(session.root.logits.isnan().any()):
            return input_ids.new_empty(0)
        roots, shape = input_ids[:, -1], self.shape.cut_to(depth)
        drafted = draft_chain(session.root, session.step, session.draft_ids, roots, shape, BARE_CHOICE)
        return self._up_to_end(drafted[0, 1:])

    def _up_to_end(self, tokens: Tensor) -> Tensor:
        """Drafts after an end-of-sequence token are worthless, and the loop of 5.17 would keep them."""
        eos = getattr(self.generation_config, "_eos_token_tensor", None)
        hits: Any = [] if eos is None else torch.isin(tokens, eos.to(tokens.device)).nonzero()
        return tokens[: int(hits[0]) + 1] if len(hits) else tokens
