"""Bare figures: single forwards and nothing else, what every round of a loop is made of.

A loop is judged by them: what it takes beyond the forwards it must compute is its overhead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from ..cache.block_reading import BlockReading
from ..compiled.draft_session import CompiledDrafting
from ..compiled.verify import CompiledVerification
from ..decoding.pair import current_graphs, maker_at_hand
from ..decoding.pair_caches import PairCaches
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError
from ..stats import Acceptance, SpeculationStats
from ..target.binding import TargetBinding
from ..target.device_clock import now
from ..trees.draft_tree import DraftTree
from ..trees.shape import DraftShape

FEW_CALLS = 3  # beside each text of a loop
UNCOUNTED_CALLS = 2  # the first ones of a width pay for allocation and compiling


@dataclass(frozen=True)
class BareCosts:
    """Mean seconds of single forwards.

    Attributes:
        target_step_s: the target over one token per row, with its cache.
        verify_s: the target over the tokens of one round, `verified_tokens` on average.
        drafter_step_s: one drafter step, head included; a round takes `drafter_steps` of them on average.
        absorb_s: the first of them, which reads the accepted tokens' hidden states, here half as many as the depth.
    """

    target_step_s: float
    verify_s: float
    drafter_step_s: float
    absorb_s: float
    verified_tokens: float
    drafter_steps: float

    @property
    def round_s(self) -> float:
        """What one round must compute."""
        first_steps = self.drafter_steps - self.further_steps
        return self.verify_s + first_steps * self.absorb_s + self.further_steps * self.drafter_step_s

    @property
    def further_steps(self) -> float:
        """Drafter steps of a round behind the first, which reads hidden states."""
        return max(self.drafter_steps - 1, 0.0)

    def ceiling(self, acceptance_length: float, plain_step_s: float) -> float:
        """Speedup of loops that cost nothing: tokens per round times a plain step, over what a round must compute.

        Args:
            plain_step_s: seconds per step of the plain decoding to beat.
        """
        return acceptance_length * plain_step_s / self.round_s


class BareMeter:
    """Times the forwards of rounds that follow one context, which stays as long as it is.

    Placement, positions and masks are made before the clock starts, and nothing is committed after it: what is timed
    are the two networks, one forward after another in the order of a round. Timed over and over, a small drafter would
    stay in the processor's cache, from which in a round the target has pushed it out.

    Args:
        drafter: attached to the target.
        context: ids `(B, T)`, `T` of at least 2, without padding.
        shape: what is drafted and verified in a round.
        compiled: time the compiled forwards, copying their inputs into fixed buffers included.
        absorbed: accepted tokens that the drafter reads at once; default: half as many as are drafted.

    Raises:
        ConfigurationError: the context is too short.
    """

    def __init__(
        self,
        drafter: Eagle31Drafter,
        context: Tensor,
        shape: DraftShape,
        *,
        compiled: bool = False,
        absorbed: int | None = None,
    ):
        batch, length = context.shape
        if length < 2:
            raise ConfigurationError(f"got a context of {length} token; bare figures want at least 2")
        self.drafter, self.shape, self.compiled = drafter, shape, compiled
        self.binding: TargetBinding = drafter.binding
        self.context = context.to(self.binding.input_device)
        caches = PairCaches.make(
            drafter,
            shape,
            batch_size=batch,
            length=length,
            chunk=length,
            for_graphs=compiled,
            device=self.context.device,
        )
        assert caches.drafter is not None, "just made"
        self.cache, self.session = caches.target, caches.drafter
        self._timings: dict[str, list[float]] = defaultdict(list)  # seconds by what was timed
        self._met: set[int] = set()  # widths timed before
        self._verification: CompiledVerification | None = None
        self._drafting: CompiledDrafting | None = None
        if compiled:
            graphs = current_graphs(drafter).made_by(maker_at_hand(self.drafter))
            self._verification = CompiledVerification(self.binding, self.cache, graphs, most_nodes=shape.nodes)
            self._drafting = CompiledDrafting(self.session, graphs)
        with torch.no_grad(), self.binding.masked_attention():
            self._read_context(absorbed or max(1, shape.depth // 2))

    def _read_context(self, absorbed: int) -> None:
        batch, length = self.context.shape
        with self.binding.capturing():
            self.cache.place(length)
            mask = self.cache.attention_mask(dtype=self.binding.compute_dtype)
            aux = self.binding.forward(self.context, self.cache.position_ids(), mask, self.cache, logits_to_keep=1).aux
        assert aux is not None, "it was captured"
        self.cache.commit(length)
        self.session.absorb(self.context[:, 1:], aux[:, :-1], [length - 1] * batch)
        self.aux = (
            aux[:, -min(absorbed, length) :].to(self.drafter.device, self.drafter.dtype).clone()
        )  # (B, absorbed, A*Ht)

    @torch.no_grad()
    def time_rounds(self, depths: Mapping[int, float] | None = None, count: int = FEW_CALLS) -> None:
        """Time bare rounds, as deep as rounds were, for the next `costs`.

        Args:
            depths: share of the rounds that drafted so many levels; default: all are as deep as the shape.
            count: how many; so many quantiles stand for all depths.
        """
        with self.binding.masked_attention():
            plain = self._timed(self._target_over(1))
            self._timings["plain"] += [plain() for _ in range(1 + count)][1:]
            for depth in quantiles(self._shares(depths), count):
                self._time_round(depth)

    def costs(self, depths: Mapping[int, float] | None = None) -> BareCosts:
        """Means of all that was timed since the last call, since what a loop's rounds take is a mean, too.

        Args:
            depths: shares of all those rounds.
        """
        timings, self._timings, shares = self._timings, defaultdict(list), self._shares(depths)
        return BareCosts(
            target_step_s=mean(timings["plain"]),
            verify_s=mean(timings["verify"]),
            drafter_step_s=mean(timings["step"] or timings["absorb"]),
            absorb_s=mean(timings["absorb"]),
            verified_tokens=sum(share * self._nodes(depth) for depth, share in shares.items()),
            drafter_steps=sum(share * depth for depth, share in shares.items()),
        )

    def _shares(self, depths: Mapping[int, float] | None) -> Mapping[int, float]:
        if depths is None:
            return {self.shape.depth: 1.0}
        if self.shape.top_k == 1 or not self.compiled:
            return depths
        none = depths.get(0, 0.0)  # a compiled tree is grown as deep as any, and then cut
        return {0: none, self.shape.depth: 1.0 - none}

    def _nodes(self, depth: int) -> int:
        """That a round verifies which drafts so many levels, root included."""
        return self.shape.cut_to(depth).nodes

    def _time_round(self, depth: int) -> None:
        """One round's forwards, after others that pay for allocation, compiling and the processor's cache."""
        width = self._nodes(depth)
        verify = self._timed(self._target_over(width) if self._verification is None else self._compiled_over(width))
        absorb, step = self._timed(self._absorb()), self._timed(self._drafter_step())
        uncounted = 1 if width in self._met else UNCOUNTED_CALLS
        self._met.add(width)
        for _ in range(uncounted + 1):
            with self.binding.capturing():  # a round needs the hidden states, too
                verify_s = verify()
            absorb_s, steps_s = absorb(), [step() for _ in range(depth - 1)]
        for what, seconds in (("verify", [verify_s]), ("absorb", [absorb_s]), ("step", steps_s)):
            self._timings[what] += seconds

    def _timed(self, call: Callable[[], object]) -> Callable[[], float]:
        device = self.binding.head_device

        def seconds() -> float:
            started = now(device)
            call()
            return now(device) - started

        return seconds

    def _compiled_over(self, width: int) -> Callable[[], object]:
        tree = DraftTree.chain(self.context[:, -1:].expand(-1, width))
        if self.shape.top_k > 1:
            tree = replace(tree, max_children=self.shape.top_k)  # taken for a tree, whose graph is another
        assert self._verification is not None, "made for compiled meters"
        return partial(self._verification, tree)

    def _target_over(self, width: int) -> Callable[[], object]:
        cache = self.cache
        tokens = self.context[:, -1:].expand(-1, width)
        # A chain's mask: trees are masked as densely, so they cost the same. Not so layers with states: they read a
        # chain at once where they can, and a tree node by node.
        chain = torch.arange(-1, width - 1, device=tokens.device).clamp(min=0).expand(len(tokens), -1)
        reading = BlockReading.of_drafts(chain if self.shape.top_k > 1 and width > 1 else None)
        cache.place(width, reading=reading)
        positions = cache.position_ids()
        mask = cache.attention_mask(dtype=self.binding.compute_dtype)

        def verify() -> None:
            cache.place(width, reading=reading)
            self.binding.forward(tokens, positions, mask, cache)

        return verify

    def _drafter_step(self) -> Callable[[], object]:
        drafter, width, batch = self.drafter, self.shape.top_k, self.context.shape[0]
        hidden = self.session.root.feedback.expand(-1, width, -1)  # (B, width, H)
        if (drafting := self._drafting) is not None:
            tokens = self.context[:, -1:].to(drafter.device).expand(-1, width)
            alone = torch.eye(width, dtype=torch.bool, device=drafter.device).expand(batch, -1, -1)
            ancestors = None if width == 1 else alone
            return lambda: drafting.step(tokens, hidden, after=0, depth=0, ancestors=ancestors)
        decode = self._drafter_over(width)
        return lambda: drafter.draft_logits(decode(hidden))

    def _absorb(self) -> Callable[[], object]:
        drafter, (batch, width, _) = self.drafter, self.aux.shape
        if (drafting := self._drafting) is not None:
            tokens = self.context[:, -1:].to(drafter.device).expand(-1, width)
            rotary = drafter.rotary(self.session.cache.lengths_tensor[:, None] + torch.arange(width).to(drafter.device))
            return lambda: drafting.read(tokens, self.aux, rotary, [width] * batch)
        decode = self._drafter_over(width)
        return lambda: drafter.draft_logits(decode(drafter.fuse_aux(self.aux))[:, -1:])

    def _drafter_over(self, width: int) -> Callable[[Tensor], Tensor]:
        drafter, cache = self.drafter, self.session.cache
        cache.place(width)
        tokens = self.context[:, -1:].to(drafter.device).expand(-1, width)
        rotary = drafter.rotary(cache.position_ids())
        mask: Any = cache.attention_mask(dtype=drafter.dtype)

        def decode(hidden: Tensor) -> Tensor:
            cache.place(width)
            return drafter.decode(drafter.embed(tokens), hidden, rotary, mask, cache).normed

        return decode


def quantiles(shares: Mapping[int, float], count: int) -> list[int]:
    """`count` keys that stand for all of them: as many of each as its share is worth, shares summing to 1."""
    ordered, reached = sorted(shares), 0.0
    chosen: list[int] = []
    for key in ordered:
        reached += shares[key]
        while len(chosen) < count and (len(chosen) + 0.5) / count <= reached:
            chosen.append(key)
    return chosen + ordered[-1:] * (count - len(chosen))  # shares may sum to a little less


def drafted_depths(stats: SpeculationStats | Acceptance | None) -> dict[int, float] | None:
    """Share of the rounds that drafted so many tokens one after another; doubt and the end of a text shorten drafts.

    `None` if there was no round.
    """
    if stats is None or not stats.rounds:
        return None
    reached = [stats.rounds, *stats.drafted_at, 0]
    ended = {depth: reached[depth] - reached[depth + 1] for depth in range(len(reached) - 1)}
    return {depth: count / stats.rounds for depth, count in ended.items() if count}


def typical_context(prompts: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Ids `(1, T)`: as many as a prompt of median length has half-way through its text."""
    length = sorted(len(prompt) for prompt in prompts)[len(prompts) // 2] + new_tokens // 2
    ids = torch.cat(list(prompts))
    return ids.repeat(-(-length // len(ids)))[None, :length]
