"""A round's end in one graph: judge the drafts, read what was accepted into the drafter, draft again.

The host looks once, after it. So a compiled round is two graphs, the target's verification and this one. It is for
drafts of fixed size, chains and dynamic trees, and for processors that look at scores alone; any other end of a round
is several calls (`decoding`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from .compiled_drafting import Ahead, CompiledDraftSession, grown_tree, whole_chain
from .draft_graphs import Advance, chain_advance, tree_advance
from .drafting import DraftSession, DraftState, WholeChain
from .processing import DraftWarping
from .proposing import chain_numbers
from .sampling import Acceptance, chain_acceptance, rejection_numbers, uniform_numbers
from .tree import DraftTree, num_candidates


class RoundEnd(ABC):
    """Judges a round's drafts, reads what was accepted and drafts again.

    To be asked in every round: `session.absorb` then only commits what was read, and the session's next draft is the
    one made here, unless rows leave or are rolled back, which forgets both.

    Args:
        session: drafts, and keeps the graphs.
        advance: what the graph computes.
        warping: the target's processors, which look at scores alone.
        sample: whether tokens are drawn.
        nodes: of the drafts it is for, root included; others are judged elsewhere.
        shape: what else tells this graph from others.
    """

    def __init__(
        self,
        session: CompiledDraftSession,
        advance: Advance,
        *,
        sample: bool,
        warping: DraftWarping,
        nodes: int,
        shape: tuple[int, ...] = (),
    ):
        self.session, self.advance, self.nodes, self.shape = session, advance, nodes, shape
        self.sample, self.warping = sample, warping
        self.way = (sample, warping.key)  # to choose tokens: see `CompiledSteps.takes`

    @abstractmethod
    def _inputs(self, tree: DraftTree) -> tuple[tuple, Tensor | None]:
        """What the graph takes of the tree, and random numbers for the next one."""

    @abstractmethod
    def _outcome(self, tree: DraftTree, outputs: tuple[Tensor, ...]) -> tuple[Acceptance, WholeChain | DraftTree]:
        """From `Judgement.outputs` and what was drafted."""

    def __call__(self, tree: DraftTree, logits: Tensor, aux: Tensor | None) -> Acceptance | None:
        """What the target makes of a round's drafts; `None` where no graph can say it.

        Args:
            tree: the drafts.
            logits: the target's `(B, N, V)`.
            aux: its hidden states `(B, N, A*Ht)`.
        """
        session, advance, rows = self.session, self.advance, len(tree.tokens)
        session.ahead = None
        if session.steps.why_not or aux is None or tree.size != self.nodes or tree.max_depth + 1 != advance.width:
            return None
        session.cache.place(advance.width)
        if not session.placed.make_room(advance.width + advance.slots):
            return None
        (slots,) = session.cache.mask_widths.values()
        shape = ("advance", rows, self.nodes, *self.shape, slots, self.way)
        known = session.steps.has(shape)
        if not known and (rows != session.first_rows or not session.steps.takes("advance", self.way)):
            return None
        rotary = session.rotary_ahead(advance.width + advance.levels)
        judged, numbers = self._inputs(tree)
        aux = aux.to(device=session.device, dtype=session.dtype)
        expected = None if known else self._expected(logits, judged, aux, rotary)
        inputs = self._filled(logits, judged, aux, rotary, numbers)
        if not known:
            session.steps.add(shape, advance.as_step(), inputs, expected)
        outputs = session.steps.run(shape, inputs)
        if outputs is None:
            return None
        root, feedback, *rest = outputs
        acceptance, draft = self._outcome(tree, tuple(rest))
        session.ahead = Ahead(DraftState(root, feedback), rotary, advance.width, draft)
        return acceptance

    def _expected(self, logits: Tensor, judged: tuple, aux: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """The drafter's logits after the bonus as eager code has them, by which the graph is checked."""
        judgement = self.advance.judge(logits, judged)
        cos, sin = (table[:, : self.advance.width] for table in rotary)
        counts = (judgement.last + 1).tolist()
        read = DraftSession.read(self.session, judgement.following(), judgement.along(aux), (cos, sin), counts)
        return read.logits

    def _filled(
        self, logits: Tensor, judged: tuple, aux: Tensor, rotary: tuple[Tensor, Tensor], numbers: Tensor | None
    ) -> tuple:
        fill, advance = self.session.placed.inputs.fill, self.advance
        cos, sin = (table[:, : advance.width + advance.levels] for table in rotary)
        self.session.placed.point_at(0, advance.width + advance.slots)
        return (
            fill("judged logits", logits, tuple(logits.shape)),
            judged,
            fill("aux ahead", aux, tuple(aux.shape)),
            (fill("cos", cos, tuple(cos.shape)), fill("sin", sin, tuple(sin.shape))),
            None if numbers is None else fill("numbers", numbers, tuple(numbers.shape)),
            self.session.placed.fixed,
        )


class ChainEnd(RoundEnd):
    """Of chains of `depth` tokens.

    Args:
        sample: chains are drawn, and judged by rejection.
        warping: the target's processors, which look at scores alone.
    """

    def __init__(self, session: CompiledDraftSession, depth: int, *, sample: bool, warping: DraftWarping):
        advance = chain_advance(session.drafter, depth, sample=sample, warping=warping)
        super().__init__(session, advance, sample=sample, warping=warping, nodes=depth + 1)
        self.depth = depth

    def _inputs(self, tree: DraftTree) -> tuple[tuple, Tensor | None]:
        fill, proposal = self.session.placed.inputs.fill, tree.proposal
        tokens = fill("judged", tree.tokens, tuple(tree.tokens.shape))
        if not self.sample:
            return (tokens, (), ()), None
        assert proposal is not None, "rejection sampling needs the distribution the drafts were drawn from"
        drawn_from = {"probs": proposal.probs, "choices": proposal.choices, "support": proposal.support}
        judge_numbers = rejection_numbers(tree)  # first, as when judging and drafting are apart
        numbers = chain_numbers(self.session.root.logits, self.depth, self.warping)
        return (
            tokens,
            tuple(None if each is None else fill(name, each, tuple(each.shape)) for name, each in drawn_from.items()),
            tuple(fill(f"judge {n.shape[1]}", n, tuple(n.shape)) for n in judge_numbers),
        ), numbers

    def _outcome(self, tree: DraftTree, outputs: tuple[Tensor, ...]) -> tuple[Acceptance, WholeChain]:
        best, bonus, *chain = outputs
        return chain_acceptance(tree, best, bonus), whole_chain(tuple(chain), self.session.draft_ids)


class TreeEnd(RoundEnd):
    """Of dynamic trees.

    Args:
        depth, top_k, size: as in `propose_dynamic_tree`.
        sample: the target's token is drawn at every node.
        warping: as in `ChainEnd`.
    """

    def __init__(
        self,
        session: CompiledDraftSession,
        depth: int,
        *,
        top_k: int,
        size: int,
        sample: bool,
        warping: DraftWarping,
    ):
        size = min(size, 1 + num_candidates(depth, top_k))
        advance = tree_advance(session.drafter, depth, top_k=top_k, size=size, warping=warping)
        super().__init__(session, advance, sample=sample, warping=warping, nodes=size, shape=(depth, top_k))
        self.depth, self.top_k = depth, top_k

    def _inputs(self, tree: DraftTree) -> tuple[tuple, None]:
        fill = self.session.placed.inputs.fill
        fields = {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "ancestors")}
        filled = (fill(f"judged {name}", each, tuple(each.shape)) for name, each in fields.items())
        numbers = uniform_numbers((*tree.tokens.shape, 1), tree.tokens.device) if self.sample else None
        return (*filled, None if numbers is None else fill("judge", numbers, tuple(numbers.shape))), None

    def _outcome(self, tree: DraftTree, outputs: tuple[Tensor, ...]) -> tuple[Acceptance, DraftTree]:
        return Acceptance(*outputs[:4]), grown_tree(outputs[4:], self.depth, top_k=self.top_k)
