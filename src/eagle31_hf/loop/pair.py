"""What this process keeps of a target and its assistant, and what the two draft: how long, in which shape, by whose
decisions and by which graphs. Asked by `generate`, by the server and by the commands that measure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter, MtpDrafter
from ..drafting.costs import WIDTH, WIDTH_IN_HALF, WIDTH_ON_CPU, RoundCosts
from ..drafting.planner import FIRST_RATE, Planner
from ..drafting.shape import LONGEST_CHAIN, LONGEST_OF_GRAPHS, USUAL_TREE, DraftShape
from ..graphs.captured import CAPTURES
from ..graphs.graphs import Graphs
from ..sampling.logits_processing import ScoreProcessing
from .kept_graphs import PairGraphs, captured_graphs, graphs_for

FEWEST_LEVELS = 3
"""Of a tree of eight nodes that is worth more than a chain of as many steps."""


@dataclass(frozen=True)
class Drafting:
    """All that a text, or a server's batch, needs to know of its drafts.

    Attributes:
        shape: the largest draft of a round; caches are made for it.
        planner: decides before each round, and is told what became of it.
        graphs: that compute rounds; `None`: rounds are eager.
        why: why there are no graphs though they could be had; empty if nothing keeps them away.
    """

    shape: DraftShape
    planner: Planner
    graphs: Graphs | None
    why: str = ""


class Pair(PairGraphs):
    """An assistant and the target it is attached to. What is kept of them goes when the two part.

    Attributes:
        costs: of rounds, as this process has timed them: by graphs or not, by shape, by rows.
    """

    def __init__(self, drafter: Assistant) -> None:
        super().__init__(drafter)
        self.costs: dict[Hashable, RoundCosts] = {}

    @classmethod
    def of(cls, drafter: Assistant) -> Pair:
        """The assistant's, with the target it is attached to.

        Raises:
            NotAttachedError: there is none.
        """
        binding = drafter.binding
        if not isinstance(binding.pair, Pair):
            binding.pair = cls(drafter)
        return binding.pair

    def __deepcopy__(self, memo: dict) -> None:
        """A copied binding has a target of its own, of which nothing is known."""

    def __reduce__(self) -> tuple:
        return type(None), ()

    def drafting(
        self,
        *,
        rows: int,
        sampled: bool,
        processing: ScoreProcessing | None,
        new_tokens: int,
        depth: int | None = None,
        on_event: Callable[[str, str], None] | None = None,
    ) -> Drafting:
        """What a text, or a batch of them, drafts.

        Args:
            rows: texts that share their rounds.
            sampled: whether tokens are drawn.
            processing: the call's logits processors; `None`: texts come and go, greedy and drawn, each with its own.
            new_tokens: that a row may get.
            depth: draft tokens that the call itself asks for; default: by the drafter's settings.
            on_event: as `Planner` takes it.
        """
        drafter = self.drafter
        if processing is None:
            graphs, why = captured_graphs(self)
            shape = largest_shape(drafter, rows=rows, by_graphs=graphs is not None)
        else:
            shape = draft_shape(drafter, rows=rows, sampled=sampled, depth=depth, by_graphs=True)
            graphs, why = graphs_for(self, shape, processing, rows=rows, sampled=sampled, new_tokens=new_tokens)
            if graphs is None:
                shape = draft_shape(drafter, rows=rows, sampled=sampled, depth=depth, by_graphs=False)
                if drafter.generation_config.num_assistant_tokens_schedule == "pid" and not shape.is_tree:
                    shape = replace(shape, depth=max(shape.depth, LONGEST_CHAIN))
        planner = self._planner(shape, by_graphs=graphs is not None, start=depth, on_event=on_event)
        return Drafting(shape, planner, graphs, why)

    def _planner(
        self, shape: DraftShape, *, by_graphs: bool, start: int | None, on_event: Callable[[str, str], None] | None
    ) -> Planner:
        drafter, settings = self.drafter, self.drafter.generation_config
        lengths = range(1, shape.depth + 1)
        if by_graphs:  # another length is another graph, which takes a CPU minutes to make
            on_cpu = drafter.binding.head_device.type not in CAPTURES
            lengths = [shape.depth] if on_cpu else sorted({1, (shape.depth + 1) // 2, shape.depth})  # type: ignore[assignment]

        def costs(rows: int) -> RoundCosts:
            key = by_graphs, shape, rows.bit_length()
            if key not in self.costs:
                self.costs[key] = _costs(drafter, shape, by_graphs=by_graphs)
            return self.costs[key]

        return Planner(
            shape,
            costs,
            schedule=settings.num_assistant_tokens_schedule,
            lengths=lengths,
            start=start or settings.num_assistant_tokens,
            has_drafter=isinstance(drafter, Eagle31Drafter),
            on_event=on_event,
        )


def draft_shape(
    drafter: Assistant, *, rows: int, sampled: bool, depth: int | None = None, by_graphs: bool
) -> DraftShape:
    """The largest draft of a round that graphs, or eager code, compute; other arguments as of `Pair.drafting`.

    Captured chains go by what the pair's weights take to be read; without a drafter chains are looked up.
    """
    settings = drafter.generation_config
    if not isinstance(drafter, Eagle31Drafter):
        is_plain = settings.num_assistant_tokens_schedule == "constant"
        longest = LONGEST_OF_GRAPHS if by_graphs else LONGEST_CHAIN
        return DraftShape(0 if is_plain else depth or settings.num_assistant_tokens or longest)
    usual = _drafted_by_graphs(drafter, sampled=sampled) if by_graphs else None
    shape = settings.draft_shape(device_type=drafter.device.type, rows=rows, asked=depth, by_graphs=usual)
    return shape.as_chain() if drafter.binding.has_states else shape


def _drafted_by_graphs(drafter: Eagle31Drafter, *, sampled: bool) -> DraftShape:
    """What pays where nothing is asked for; on a card by the weights that a step reads.

    Drafts of a sampled text are rejected sooner, so a second guess is worth more than two more steps.
    """
    usual = USUAL_TREE if sampled else DraftShape(LONGEST_OF_GRAPHS)
    if drafter.device.type not in CAPTURES:
        return usual
    plan = drafter.memory_plan
    longest = LONGEST_CHAIN if plan is None else min(LONGEST_CHAIN, plan.settings.draft_tokens)
    depth = longest_worthwhile(step_share(drafter), FIRST_RATE, longest=longest)
    is_packed = getattr(drafter.binding.model, "hf_quantizer", None) is not None
    if depth < FEWEST_LEVELS or is_packed:  # packed weights make a product dearer with its rows
        return DraftShape(depth)
    return replace(usual, depth=depth)


def largest_shape(drafter: Assistant, *, rows: int, by_graphs: bool) -> DraftShape:
    """The largest draft of texts that come and go, greedy or drawn, in up to so many rows.

    Several draft chains; of a single row, where no graph drafts, doubt may end them. One row whose steps are not
    captured drafts as `generate` does, by graphs that are kept or without.
    """
    if rows > 1 or by_graphs:
        shapes = [draft_shape(drafter, rows=count, sampled=False, by_graphs=by_graphs) for count in (1, 2)]
        return DraftShape(max(shape.depth for shape in shapes), min_confidence=shapes[0].min_confidence)
    ways = [(sampled, kept) for sampled in (False, True) for kept in (False, True)]
    shapes = [draft_shape(drafter, rows=1, sampled=sampled, by_graphs=kept) for sampled, kept in ways]
    widest = max(shapes, key=lambda shape: shape.nodes)
    return replace(widest, depth=max(LONGEST_CHAIN, *(shape.depth for shape in shapes)))


def _costs(drafter: Assistant, shape: DraftShape, *, by_graphs: bool) -> RoundCosts:
    """By bytes, of rounds that were not timed yet."""
    share = step_share(drafter) if isinstance(drafter, Eagle31Drafter) else 0.0
    width = WIDTH
    if not by_graphs and drafter.binding.head_device.type == "cpu":
        width = WIDTH_ON_CPU if drafter.binding.model.dtype == torch.float32 else WIDTH_IN_HALF
    return RoundCosts(share, max(shape.depth, shape.nodes - 1), width)


# --- how long drafts pay on a card, before anything was measured there ------------------------------------------------
# Over few tokens a captured forward takes as long as its weights take to be read. So a draft step costs the share of a
# target's pass that its bytes are of the target's, and a chain is worth its steps by that share and by the chance of
# each token to be accepted.


def step_share(drafter: Eagle31Drafter) -> float:
    """Bytes of weights that one draft step reads, over those that the target reads for one token."""
    binding = drafter.binding
    active = _active_experts(binding.text_config)
    target = [*(each for layer in binding.layers for each in layer.parameters()), *binding.lm_head.parameters()]
    own = [*(each for layer in drafter.layers for each in layer.parameters()), *drafter.head_weights]
    if isinstance(drafter, MtpDrafter):
        own += drafter.fc.parameters()  # others go through theirs once a round
    return _num_bytes(own, active) / _num_bytes(target, active)


def longest_worthwhile(share: float, acceptance: float, *, longest: int) -> int:
    """The chain, of 1 to `longest` tokens, that writes fastest where each step costs `share` of a target's pass.

    Args:
        acceptance: chance of each token to be accepted if those before it were.
    """
    tokens = accumulate(range(longest), lambda written, _: 1 + acceptance * written, initial=1.0)
    speeds = [written / (1 + depth * share) for depth, written in enumerate(tokens)]
    return max(range(1, longest + 1), key=speeds.__getitem__)


def _active_experts(config: object) -> float:
    """The share of its experts that a token is sent to."""
    chosen, experts = getattr(config, "num_experts_per_tok", None), None
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = experts or getattr(config, name, None)
    return chosen / experts if chosen and experts else 1.0


def _num_bytes(weights: list[Tensor] | list[nn.Parameter], active: float = 1.0) -> float:
    """Of matrices whole, and of experts, which are stored as one tensor `(E, N, K)`, as many as are `active`."""
    distinct = {weight.data_ptr(): weight for weight in weights}.values()
    return sum(weight.nbytes * (active if weight.dim() == 3 else 1.0) for weight in distinct)
