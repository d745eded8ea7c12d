"""Texts written side by side: rows join between two rounds, leave as they end, and what they leave behind is reused.

The caches are pools (`cache.row_pool`): one block of rows for the target, one for the drafter, allocated once. A prompt
is read in pieces in caches of its own, one prompt at a time, and then copied to a free row. A row whose text has ended
stays where it is until its place is needed; a new prompt that begins as it did (the same system prompt, the last turn
of the same chat) starts from there, the drafter's keys and values included.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.row_pool import RowPool, wipe_row
from ..cache.speculative import SpeculativeCache
from ..compiled.draft_graphs import ChosenBy, GraphSampling
from ..compiled.draft_session import CompiledDrafting
from ..compiled.verify import CompiledVerification
from ..decoding.draft_policy import DraftPlan
from ..decoding.kept_graphs import captured_graphs
from ..drafter.draft_scores import GrammarDrafts, InGrammar, ScoresByRow
from ..drafter.drafter import Eagle31Drafter
from ..drafter.hindsight import FirstDrafts
from ..drafter.propose import DraftChoice, DraftScores, propose_chain
from ..drafter.session import SLAB, DraftSession
from ..generation_config import DraftLength
from ..stats import PhaseClock, SpeculationStats
from ..target.verify import Verification
from ..trees.draft_tree import DraftTree
from ..trees.host_numbers import on_device
from .batch_drafts import BatchDrafts
from .choosing import ScoreShape, TokenChooser, accept_drafts, noise_of, warp_rows
from .pooled_session import PooledDraftSession
from .prompt_reader import PromptReader
from .requests import TextRequest
from .written_text import NO_TOKEN, RoundOutput, WrittenText, logprobs_of

logger = logging.getLogger(__name__)


class HeldRow(NamedTuple):
    """Tokens that a row of the caches holds; `even` first ones of them were read in whole pieces."""

    tokens: list[int]
    even: int


class TextBatch:
    """The texts that are being written, and the one whose prompt is being read.

    Args:
        drafter: attached; its target writes.
        max_rows: most texts at once.
        context: most tokens of a text, prompt included.
        prefill_chunk: most prompt tokens of one forward.
    """

    def __init__(self, drafter: Eagle31Drafter, *, max_rows: int, context: int, prefill_chunk: int):
        self.drafter, self.binding = drafter, drafter.require_binding()
        self.max_rows, self.context, self.prefill_chunk = max_rows, context, prefill_chunk
        self.texts: list[WrittenText] = []  # by place
        self.stats = SpeculationStats()
        self.clock = PhaseClock(self.stats)
        self.drafts = BatchDrafts(drafter)
        nodes = self.drafts.longest + 1
        self.capacity = context + nodes
        sizes = {"capacity": self.capacity, "block": max(prefill_chunk, nodes)}
        self.cache: RowPool = self.target_cache(RowPool, max_rows, sizes)
        self.session = PooledDraftSession(drafter, batch_size=max_rows, **sizes)
        windows = self.cache.has_windows or self.session.cache.has_windows
        self.graphs = None if windows else captured_graphs(drafter)
        self.verify: Verification | CompiledVerification = Verification(self.binding, self.cache)
        self.drafting: DraftSession | CompiledDrafting = self.session
        if self.graphs is not None:
            self.verify = CompiledVerification(self.binding, self.cache, self.graphs, most_nodes=nodes)
            self.drafting = CompiledDrafting(self.session, self.graphs)
        self._reader = PromptReader(
            drafter,
            self.target_cache(SpeculativeCache, 1, sizes),
            DraftSession(drafter, batch_size=1, **sizes),
            pools=(self.cache, self.session.cache),
            piece=prefill_chunk,
        )
        self._scores = ScoreShape(self.binding.text_config.vocab_size, self.binding.head_device)
        self._parked: dict[int, HeldRow] = {}  # by place
        self._is_exact = self.binding.compute_dtype == torch.float32

    def target_cache(self, kind: type[SpeculativeCache], rows: int, sizes: dict[str, int]) -> Any:
        """An empty cache of this kind for the target."""
        return kind.from_config(
            self.binding.text_config,
            batch_size=rows,
            slab=SLAB if self.capacity > SLAB else None,
            masks_by_type=self.binding.masks_by_type,
            cache_type=self.drafter.generation_config.stored_cache_type,
            device=self.binding.input_device,
            **sizes,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all caches."""
        return self.cache.num_bytes + self.session.cache.num_bytes + self._reader.num_bytes

    # --- reading -------------------------------------------------------------------------------------------------

    def begin(self, text: WrittenText) -> int:
        """Start to read a prompt, from where a row that begins alike ends. Returns how many tokens are left to read."""
        self.session.catch_up()  # a drafter that rests is behind the rows that could be resumed from
        place, length, even = self._longest_shared(text.request)
        text.usage = replace(text.usage, cached_tokens=length)
        text.even_tokens = min(even, self._whole_pieces(length))
        return self._reader.begin(text, place, length)

    def read(self, num_tokens: int) -> None:
        """Read on."""
        with self.clock.phase("prefill"):
            self._reader.read(num_tokens)

    def join(self) -> None:
        """The prompt has been read: its text is written from the next round on."""
        place = self.cache.join(self._reader.cache)
        self.session.join(self._reader.session)
        self._parked.pop(place, None)
        text = self._reader.text
        self.texts.append(text)
        self.drafts.text_joins(by_itself=text.request.is_repeatable and len(self.texts) == 1)

    def drop_reading(self) -> None:
        """Forget the prompt that is being read."""
        self._reader.wipe()

    def _longest_shared(self, request: TextRequest) -> tuple[int, int, int]:
        """The row to resume from: its place, how many of its tokens (0 for none), and how many of it were read evenly.

        One token less than the two share, since the drafter has joined each position with the token after it; and the
        prompt's last two tokens are left to be read, for where drafts start is not kept with a row.

        In half precision a token's keys and values depend a little on how many were computed together. So a text that
        shall be written alike again is resumed behind whole pieces alone, which would be read the same way again.
        """
        prompt, best = request.prompt, (0, 0, 0)
        rows = {place: HeldRow(text.tokens, text.even_tokens) for place, text in enumerate(self.texts)}
        for place, (tokens, even) in (rows | self._parked).items():
            length = min(shared_prefix(tokens, prompt) - 1, len(prompt) - 2, self.cache.row_length(place))
            if request.is_repeatable and not self._is_exact:
                length = min(even, self._whole_pieces(length))
            if length > best[1]:
                if not (self.cache.can_resume(place, length) and self.session.cache.can_resume(place, length)):
                    continue
                best = (place, length, even)
        return best

    def _whole_pieces(self, length: int) -> int:
        """How many of so many tokens lie in whole pieces of a prompt that is read from its beginning."""
        return length // self.prefill_chunk * self.prefill_chunk

    # --- a round -------------------------------------------------------------------------------------------------

    def round(self) -> list[tuple[WrittenText, RoundOutput]]:
        """Draft, verify, accept and commit for all texts; those that have ended leave. What each of them got."""
        with self.clock.phase("draft"):
            plan = self._plan()
            tree = self._draft(plan)
        with self.clock.phase("verify"), self.binding.capturing():
            out = self.verify(tree)
        self.stats.fall_back("" if self.graphs is None else self.graphs.disabled_reason)
        written = [len(text.writer.tokens) for text in self.texts]
        paths, emitted = accept_drafts(tree, out.logits, self._choosers, written, self._prefix)
        outputs = [self._write(b, tree, out.logits, paths[b], emitted[b]) for b in range(len(self.texts))]
        kept = [list(output.tokens) or [0] for output in outputs]  # a row that fails leaves, whatever it holds
        self.cache.keep(paths, [len(tokens) for tokens in kept])
        self._absorb(kept, out.aux, None if tree.is_chain else paths)
        accepted = [len(path) - 1 for path in paths]
        self.drafts.record(plan, tree.max_depth, accepted)
        self.stats.record_round(depth=tree.max_depth, nodes=tree.size - 1, accepted=accepted)
        self.stats.skipped_rounds += plan.skips
        self.stats.new_tokens += sum(len(output.tokens) for output in outputs)
        told = list(zip(list(self.texts), outputs, strict=True))
        for text, output in told:
            if output.finish is not None:
                self.leave(text, trusted=not output.error)
        return told

    def leave(self, text: WrittenText, *, trusted: bool = True) -> None:
        """Let a text go. What was computed for it stays until its place is needed.

        Args:
            trusted: if not, its row may hold what is no number, and is wiped: masked keys and values are multiplied by
                zero, which does not make numbers of them, so they would spoil the next text in this place.
        """
        place = self.texts.index(text)
        if not trusted:
            self.session.catch_up()
            wipe_row(self.cache, place)
            wipe_row(self.session.cache, place)
        parked = self.cache.leave(place)
        self.session.leave(place)
        self._parked[parked] = HeldRow(text.tokens, text.even_tokens) if trusted else HeldRow([], 0)
        self.texts[place] = self.texts[-1]
        self.texts.pop()

    def reset(self) -> None:
        """Forget everything: after a failure nothing of the caches is trusted."""
        self.session.rollback(self.session.cache.lengths)  # nor is what the drafter was to read
        for text in list(self.texts):
            self.leave(text, trusted=False)
        self._parked.clear()
        self._reader.wipe()

    def _plan(self) -> DraftPlan:
        context = max(self.cache.lengths)
        remaining = max(text.writer.remaining for text in self.texts)
        rows = len(self.texts)
        plan = self.drafts.next_draft(rows, context=context, remaining=remaining)
        if plan.looks_back:
            self.drafts.record_hindsight(self.session.look_back(self._first_drafts()))
            plan = self.drafts.next_draft(rows, context=context, remaining=remaining)
        return plan

    def _draft(self, plan: DraftPlan) -> DraftTree:
        roots = on_device([text.last_token for text in self.texts], self.binding.input_device)
        if not plan.shape.depth:
            return DraftTree.chain(roots[:, None])
        self.drafting.catch_up()
        length = DraftLength(plan.shape.depth, plan.shape.min_confidence)
        if (tree := self._draft_at_once(roots, length)) is not None:
            return tree
        choice = DraftChoice(self._draft_scores(), self._noise(0, length.depth))
        return propose_chain(self.drafting, roots, length, choice)

    def _draft_at_once(self, roots: Tensor, length: DraftLength) -> DraftTree | None:
        """A chain of full length by one graph, where every text takes what is likeliest and nobody else asks for
        scores; `None` where there is none."""
        wants_all = length == self.drafts.length(len(self.texts)) and not length.min_confidence
        asked = any(chooser.draws or chooser.processing.can_fork for chooser in self._choosers)
        if not isinstance(self.drafting, CompiledDrafting) or not wants_all or asked:
            return None
        chain = self.drafting.chain(roots, length.depth, GraphSampling(sample=False, warping=None), ChosenBy())
        return None if chain is None else chain.to_tree(length.depth)

    @property
    def _choosers(self) -> list[TokenChooser]:
        return [text.chooser for text in self.texts]

    @property
    def _samples(self) -> bool:
        return any(chooser.draws for chooser in self._choosers)

    def _noise(self, behind: int, count: int) -> Tensor | None:
        """Noise `(B, count, V)` from so many tokens behind each text's end on; `None` if none is sampled."""
        if not self._samples:
            return None
        starts = [len(text.writer.tokens) - behind for text in self.texts]
        return noise_of(self._choosers, starts, count, self._scores)

    def _first_drafts(self) -> FirstDrafts:
        """How the first tokens of drafts would have been chosen lately."""
        if not self._samples:
            return FirstDrafts()

        def warping(logits: Tensor) -> Tensor:
            rows = [warp_rows(logits[:, place].float(), self._choosers) for place in range(logits.shape[1])]
            return torch.stack(rows, 1)

        return FirstDrafts(1, warping, self._noise_behind)

    def _noise_behind(self, count: int) -> Tensor:
        noise = self._noise(count, count)
        assert noise is not None, "some text is sampled"
        return noise

    def _draft_scores(self) -> DraftScores | None:
        """Drafts keep to their text's grammar, to what else it was asked that looks at the text, and to how its tokens
        are sampled."""
        grammar = GrammarDrafts(range(len(self.texts)), frozenset(), self.stats.fall_back)
        scorers = {
            b: InGrammar(text.chooser.processing, partial(self._drafted_prefix, b), 0, grammar)
            for b, text in enumerate(self.texts)
            if text.chooser.processing.can_fork
        }
        by_row = ScoresByRow(self.drafter, scorers) if scorers else None
        if not self._samples:
            return by_row

        def scores(logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
            return warp_rows(logits.float() if by_row is None else by_row(logits, drafted), self._choosers)

        return scores

    def _drafted_prefix(self, place: int, drafted: Tensor) -> Tensor:
        return self._prefix(place, drafted.tolist())

    def _prefix(self, place: int, drafted: Sequence[int]) -> Tensor:
        return on_device([[*self.texts[place].tokens, *drafted]], self.binding.input_device)

    def _write(self, b: int, *round_of: Any) -> RoundOutput:
        """`_add_to_text`; what its tokenizer raises, say, ends this text alone."""
        try:
            return self._add_to_text(b, *round_of)
        except Exception as error:
            logger.exception("eagle31: a text could not be written")
            return RoundOutput("", (), (), "error", f"{type(error).__name__}: {error}")

    def _add_to_text(self, b: int, tree: DraftTree, logits: Tensor, path: list[int], emitted: list[int]) -> RoundOutput:
        """Add a row's tokens to its text, up to where that ends."""
        text = self.texts[b]
        fails = emitted[-1] >= logits.shape[-1]  # the target's own choice was none
        count, shown = text.writer.append(emitted[:-1] if fails else emitted)
        text.usage = replace(
            text.usage,
            completion_tokens=text.usage.completion_tokens + count,
            drafted=text.usage.drafted + tree.size - 1,
            accepted=text.usage.accepted + min(count, len(path) - 1),
            rounds=text.usage.rounds + 1,
        )
        top = text.request.top_logprobs
        logprobs = () if top is None else logprobs_of(logits[b, path[:count]], emitted[:count], top)
        fails = fails and text.writer.finish is None
        finish, error = ("error", text.chooser.failure or NO_TOKEN) if fails else (text.writer.finish, "")
        return RoundOutput(shown, tuple(emitted[:count]), logprobs, finish, error)

    def _absorb(self, written: list[list[int]], aux: Tensor | None, paths: list[list[int]] | None) -> None:
        """Bring the drafter up to date with what was written; `aux` `(B, N, A*Ht)` of the nodes."""
        assert aux is not None
        counts = [len(tokens) for tokens in written]
        width = max(counts)
        if aux.shape[1] == 1 and min(counts) == 1:  # nothing was drafted: perhaps nothing will be for long
            return self.session.put_off(written, aux)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in written]
        if paths is not None:
            nodes = on_device([(path + [0] * width)[:width] for path in paths], aux.device)
            aux = aux.gather(1, nodes[..., None].expand(-1, -1, aux.shape[-1]))
        with self.clock.phase("draft"):
            self.drafting.absorb(on_device(padded, self.binding.input_device), aux[:, :width], counts)


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    width = min(len(one), len(other))
    return next((i for i in range(width) if one[i] != other[i]), width)
