"""Our decoding loop: draft, verify in one target forward, accept, keep. Chains and trees, any batch, any prompt.

One round (`SpeculativeDecoder._round`) is the figure in docs/architecture.md. Each row accepts its own number of
tokens; the host waits for the device once a round, to read what was accepted. Rows that have ended leave the batch,
unless graphs were made for its size: then they stand still in it until few are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from .acceleration import NODE_BUCKET, SLOT_BUCKET, CompiledVerification, slot_bucket
from .cache import SpeculativeCache
from .compiled_drafting import CompiledDraftSession
from .compiled_round_end import ChainEnd, RoundEnd, TreeEnd
from .control import Patience
from .conversation import TurnEnd
from .decoding_request import DecodingRequest, DraftShape
from .drafter import Eagle31Drafter
from .drafting import SLAB, DraftSession
from .generation_settings import DraftLength
from .judging import Judge, NodeScores
from .memory.ladder import Stage
from .proposing import DraftScores, propose_chain, propose_dynamic_tree, propose_static_tree
from .reading import ChunkReader, Reading
from .sampling import Acceptance, AcceptanceRule, choose_rule, draw
from .stats import PhaseClock
from .target import TargetBinding
from .tree import DraftTree
from .verification import Verification

__all__ = ["DecodingRequest", "DraftShape", "SpeculativeDecoder"]

LIVE_SHARE = 0.25
"""Share of a compiled batch that must need tokens for the others to stay in it; measured on a small pair only."""


class SpeculativeDecoder:
    """One generation with our own loop.

    Args:
        drafter: attached; its binding's target verifies.
        request: what to write.
    """

    def __init__(self, drafter: Eagle31Drafter, request: DecodingRequest):
        self.drafter = drafter
        self.binding: TargetBinding = drafter.require_binding()
        self.request = request
        self.sequences = request.sequences
        self.rows = list(range(self.sequences.batch_size))  # which row of the batch each row of the caches is
        self.live = list(self.rows)  # places of those rows that need tokens, as this round begins
        self.clock, self.patience = PhaseClock(request.stats), Patience()
        self.stage = Stage.READ
        self.roots = self.sequences.prompts[:, -1]  # (B,) last token of each of them
        self._streamed = [0] * len(self.rows)  # new tokens of each row of the batch that were shown
        prompt = self.sequences.prompts.shape[1] - request.start.skip  # columns still to be read
        self.chunk = min(request.prefill_chunk or prompt, prompt)
        self._set_shape(request.shape)
        self.compiles = drafter.generation_config.acceleration == "compile"
        if self.compiles and drafter.generation_config.stored_cache_type != "full":
            request.stats.fallbacks.append("verification is not compiled over a cache in 8 bits")
        self.session: DraftSession | None
        self._make_caches(len(self.rows))

    def _set_shape(self, shape: DraftShape) -> None:
        self.shape = shape
        self.rule = choose_rule(do_sample=self.request.do_sample, dynamic_tree=shape.top_k > 1 and shape.static is None)
        self.judge = Judge(self.request, self.rule)

    def _make_caches(self, batch_size: int) -> None:
        """Empty caches, which own no memory until something is written."""
        drafter, request, shape, wishes = self.drafter, self.request, self.shape, self.drafter.generation_config
        longest = request.start.before_prompts + self.sequences.rules.max_length + shape.nodes
        compiled, cache_type = self.compiles, wishes.stored_cache_type
        capacity, block, slab = longest, max(self.chunk, shape.nodes), SLAB if longest > SLAB else None
        if compiled:
            capacity, block, slab = slot_bucket(longest + NODE_BUCKET), slot_bucket(block), SLOT_BUCKET
        self.cache = SpeculativeCache.from_config(
            self.binding.text_config,
            batch_size=batch_size,
            capacity=capacity,
            block=block,
            slab=slab,
            masks_by_type=self.binding.masks_by_type,
            cache_type=cache_type,
            device=self.sequences.prompts.device,
        )
        self.session = session = (CompiledDraftSession if compiled else DraftSession)(
            drafter,
            batch_size=batch_size,
            capacity=longest + shape.draft_block,
            block=max(self.chunk, shape.draft_block),
        )
        steps = session.steps if isinstance(session, CompiledDraftSession) else None
        self.verify = (
            CompiledVerification(self.binding, self.cache, steps, most_nodes=shape.nodes, stats=request.stats)
            if steps is not None and cache_type == "full"  # compiled code reads the buffers as they are
            else Verification(self.binding, self.cache)
        )
        self.judge_at_once = self._judge_at_once()
        request.stats.cache_type = cache_type

    def _judge_at_once(self) -> Callable[[DraftTree, Tensor, Tensor | None], Acceptance | None] | None:
        """What judges drafts of one size in a graph, by scores nobody else asks for."""
        request, shape, session = self.request, self.shape, self.session
        if not isinstance(session, CompiledDraftSession) or not request.processing.fits_draft_vocabulary:
            return None
        if request.keep_scores or request.keep_logits:
            return None
        sample, warping = request.do_sample, request.processing.draft_warping
        end: RoundEnd
        if shape.top_k > 1 and shape.static is None and shape.depth > 1:
            end = TreeEnd(session, shape.depth, top_k=shape.top_k, size=shape.size, sample=sample, warping=warping)
        elif not shape.is_tree and shape.floor == 0 and shape.depth > 0:
            end = ChainEnd(session, shape.depth, sample=sample, warping=warping)
        else:
            return None
        return self.clock.phase("draft")(end)

    def run(self) -> Tensor:
        """Write until every row must stop. Returns `(B, L + n)` ids as `generate` does."""
        self._prefill()
        self._stream()
        while self.rows:
            self._round()
            self._stream()
        return self._finish()

    def _finish(self) -> Tensor:
        self.clock.stop()
        self.request.stats.new_tokens = sum(len(new) for new in self.sequences.new)
        return self.sequences.assemble()

    # --- prefill -------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Target and drafter read the prompts; then the target's first token."""
        self.stage = Stage.READ
        skip = self.request.start.skip
        with self.clock.phase("prefill"):
            self.request.start.load(self.cache, self.session)
            texts = [self.sequences.text(row, skip) for row in self.rows]
            self._first_token(self._read(Reading(texts, unread=0, device=self.sequences.prompts.device)))

    def _read(self, reading: Reading) -> Reading:
        ChunkReader(self.binding, self.cache, self.session).read(reading, self.chunk)
        return reading

    def _first_token(self, prompts: Reading) -> None:
        """The token after each prompt, which no draft was made for."""
        self.live = self._staying()
        chosen = self._choose_first(torch.stack(prompts.last_logits))  # type: ignore[arg-type]
        aux = None if self.session is None else torch.stack(prompts.last_aux)[:, None]  # type: ignore[arg-type]
        emitted = [[token] for token in chosen]
        added = self._write(emitted)
        self.stage = Stage.SETTLE
        self._go_on(emitted, added, aux, None)

    def _choose_first(self, logits: Tensor) -> list[int]:
        """First token of each row from `(B, V)`."""
        request = self.request
        scores = request.processing.row_scores(lambda b: self.sequences.prefix(self.rows[b]), logits, self.rows)
        choice = draw(scores.softmax(-1)) if request.do_sample else scores.argmax(-1)
        self._collect({b: [(scores[b], logits[b])] for b in self.live})
        return choice.tolist()

    # --- one round -----------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Draft, verify, accept; from then on the text is longer, and the caches follow."""
        self.stage, self.live = Stage.DRAFT, self._staying()
        with self.clock.phase("draft"):
            tree = self._draft()
        self.stage = Stage.VERIFY
        with self.clock.phase("verify"):
            logits, aux = self._verify(tree)
        acceptance, scores = self._judge(tree, logits, aux)
        path, emitted = self._read_back(tree, acceptance)
        if self.request.keep_scores or self.request.keep_logits:
            self._collect({b: [(scores[b, node], logits[b, node]) for node in path[b]] for b in self.live})
        added = self._write(emitted)
        self.stage = Stage.SETTLE
        accepted = [len(path[b]) - 1 for b in self.live]
        self.request.stats.record_round(depth=tree.max_depth, nodes=tree.size - 1, accepted=accepted)
        self.patience.record_round(accepted)
        self.cache.keep(path, added)
        self._go_on(emitted, added, aux, None if tree.is_chain else acceptance.path)

    def _draft(self) -> DraftTree:
        """This round's drafts, no deeper than the longest row still needs; none while none has been right for long."""
        request, shape = self.request, self.shape
        room = max(self.sequences.room(self.rows[b]) for b in self.live)
        depth = min(shape.depth, room - 1)  # the target adds one token of its own
        sample = self.rule is AcceptanceRule.REJECTION
        if depth < 1 or self.session is None:
            return DraftTree.chain(self.roots[:, None])
        if self.patience.is_at_end:
            request.stats.rests += 1
            return DraftTree.chain(self.roots[:, None])
        if shape.top_k == 1:
            return propose_chain(
                self.session,
                self.roots,
                DraftLength(depth, shape.floor),
                sample=sample,
                scores=self._draft_scores(),
                draws=shape.depth,
            )
        if shape.static is not None:
            scores = self._draft_scores() if request.processing.fits_draft_vocabulary else None
            return propose_static_tree(self.session, self.roots, shape.static, sample=sample, scores=scores)
        return propose_dynamic_tree(self.session, self.roots, depth, top_k=shape.top_k, size=shape.size)

    def _draft_scores(self) -> DraftScores | None:
        processing = self.request.processing
        if processing.is_empty or (processing.fits_draft_vocabulary and not self.request.do_sample):
            return None
        if processing.fits_draft_vocabulary:
            return processing.draft_warping

        def scores(logits: Tensor, drafted: Sequence[Tensor]) -> Tensor:
            taken = torch.stack(list(drafted), 1) if drafted else logits.new_empty(len(self.rows), 0, dtype=torch.long)
            return processing.row_scores(
                lambda b: self.sequences.prefix(self.rows[b], taken[b]), self._over_vocabulary(logits), self.rows
            )

        return scores

    def _over_vocabulary(self, logits: Tensor) -> Tensor:
        """Draft logits `(B, Vd)` over the target's vocabulary, `-inf` where nothing can be drafted."""
        ids = self.drafter.draft_ids
        if ids is None:
            return logits
        spread = logits.new_full((logits.shape[0], self.drafter.config.vocab_size), float("-inf"))
        spread[:, ids] = logits
        return spread

    def _verify(self, tree: DraftTree) -> tuple[Tensor, Tensor | None]:
        """Logits `(B, N, V)` and, for a drafter, hidden states `(B, N, A*Ht)` of every node, in one target forward."""
        with self.binding.capturing() if self.session is not None else nullcontext():
            out = self.verify(tree)
        return out.logits, out.aux

    def _judge(self, tree: DraftTree, logits: Tensor, aux: Tensor | None) -> tuple[Acceptance, NodeScores]:
        """What is accepted, and the scores of the accepted nodes, where somebody may want them."""
        acceptance = None if self.judge_at_once is None else self.judge_at_once(tree, logits, aux)
        return self.judge(tree, logits, self.rows, self.live) if acceptance is None else (acceptance, {})

    def _read_back(self, tree: DraftTree, acceptance: Acceptance) -> tuple[list[list[int]], list[list[int]]]:
        """The round's one wait for the device: accepted nodes and new tokens per row, past the row's end too."""
        packed = torch.cat(
            (acceptance.count[:, None], acceptance.bonus[:, None], acceptance.path, tree.tokens), dim=1
        ).tolist()
        paths: list[list[int]] = []
        emitted: list[list[int]] = []
        for count, bonus, *rest in packed:
            nodes, tokens = rest[:count], rest[acceptance.path.shape[1] :]
            paths.append(nodes)
            emitted.append([*(tokens[node] for node in nodes[1:]), bonus])
        return paths, emitted

    # --- after a round -------------------------------------------------------------------------------------------

    def _write(self, emitted: list[list[int]]) -> list[int]:
        """Add each live row's new tokens to the text. Returns how many of them come before the row's end."""
        added = [0] * len(self.rows)
        for b in self.live:
            added[b] = self.sequences.append(self.rows[b], emitted[b])
        self.sequences.stop_if_out_of_time()
        return added

    def _stream(self) -> None:
        """Show what was written since the last time. Apart from the round: what a streamer raises is not ours."""
        if self.request.on_tokens is None:
            return
        for row, new in enumerate(self.sequences.new):
            if len(new) > self._streamed[row]:
                start, self._streamed[row] = self._streamed[row], len(new)
                self.request.on_tokens(row, new[start:])

    def _go_on(self, emitted: list[list[int]], counts: list[int], aux: Tensor | None, path: Tensor | None) -> None:
        """Let rows go that have ended and bring the drafter up to date with the others.

        Args:
            emitted: new tokens of each row.
            counts: how many of them were written.
            aux: hidden states `(B, N, A*Ht)` of the nodes; `None` without a drafter.
            path: `(B, D)` the nodes the tokens follow; `None`: one after the other.
        """
        staying = self._staying()
        leaving = sorted(set(self.live) - set(staying))
        written = [tokens[:n] for tokens, n in zip(emitted, counts, strict=True)]
        if aux is not None:
            aux = _along_path(aux, path, max(counts))
        end = self.request.end if leaving else None
        if end is not None:
            self._absorb(written, aux)  # the last tokens of the rows that leave, too
            self._hand_over(leaving, end)
        if not staying:
            self.rows = []
            return
        if len(staying) < len(self.rows) and not self._keeps_ended_rows(len(staying)):
            aux = None if aux is None else aux[staying]
            written = [written[b] for b in staying]
            self._let_go(staying)
        if end is None:
            self._absorb(written, aux)
        self._set_roots()

    def _keeps_ended_rows(self, live: int) -> bool:
        """Whether the batch keeps its size for the graphs made for it, though only so many rows need tokens."""
        compiled = isinstance(self.verify, CompiledVerification) and not self.verify.steps.why_not
        return compiled and live >= LIVE_SHARE * len(self.rows)

    def _staying(self) -> list[int]:
        """Places of the rows that need more tokens."""
        live = set(self.sequences.live_rows())
        return [b for b, row in enumerate(self.rows) if row in live]

    def _set_roots(self) -> None:
        last = [self.sequences.new[row][-1] for row in self.rows]
        self.roots = torch.tensor(last, device=self.sequences.prompts.device)

    def _absorb(self, written: list[list[int]], aux: Tensor | None) -> None:
        """Bring the drafter up to date with the tokens written to each row; `aux` `(B, N, A*Ht)` of their path."""
        if self.session is None or aux is None:
            return
        counts = [len(tokens) for tokens in written]
        width = max(counts)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in written]
        with self.clock.phase("draft"):
            tokens = torch.tensor(padded, device=self.sequences.prompts.device)
            self.session.absorb(tokens, aux[:, :width], counts)

    def _hand_over(self, leaving: list[int], end: TurnEnd) -> None:
        """Give away the caches of rows that have ended."""
        self.stage = Stage.HAND_OVER
        end.take(leaving, self.rows, self.cache, None if self.session is None else self.session.cache)
        self.stage = Stage.SETTLE

    def _let_go(self, staying: list[int]) -> None:
        self.rows = [self.rows[b] for b in staying]  # first: caches that do not follow are known by it
        self.cache.select_rows(staying)
        if self.session is not None:
            self.session.select_rows(staying)

    def _collect(self, steps: dict[int, list[tuple[Tensor, Tensor]]]) -> None:
        """Keep `(scores, logits)` of the tokens that live rows are about to get, if asked to."""
        for row, taken in ((self.rows[b], each) for b, each in steps.items()):
            if self.request.keep_scores:
                self.sequences.scores[row].extend(scores for scores, _ in taken)
            if self.request.keep_logits:
                self.sequences.logits[row].extend(logits.float() for _, logits in taken)


def _along_path(aux: Tensor, path: Tensor | None, width: int) -> Tensor:
    """Hidden states `(B, width, A*Ht)` of the first `width` nodes of each path."""
    if path is None:
        return aux
    nodes = path[:, :width, None].expand(-1, -1, aux.shape[-1])
    return aux.gather(1, nodes)
