"""Sampled acceptance in one graph: the target's processors and probabilities, and a chain or tree judged by them.

Eager, these are some thirty small operations over `(B, N, V)` scores, a tenth of a round on a small target. Greedy
drafts take so few that a graph does not pay (docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .acceleration import InputBuffers
from .compiled_steps import CompiledSteps, Step
from .processing import DraftWarping
from .sampling import (
    Acceptance,
    AcceptanceRule,
    accept_greedy,
    chain_acceptance,
    draw,
    judge_block,
    rejection_numbers,
    uniform_numbers,
)
from .tree import DraftTree, Proposal


class CompiledAcceptance:
    """One generation's acceptance of drafts of one size: chains by rejection, trees by what the target draws.

    Args:
        steps: this generation's.
        rule: what decides.
        warping: the target's processors, which look at scores alone.
        nodes: of a whole draft, root included; smaller ones are rare and stay eager.
        batch_size: rows to begin with; a batch that loses rows is not worth a graph for each number.
    """

    def __init__(
        self, steps: CompiledSteps, rule: AcceptanceRule, warping: DraftWarping, *, nodes: int, batch_size: int
    ):
        self.rule, self.warping, self.nodes, self.first_rows = rule, warping, nodes, batch_size
        self.steps, self.depth = steps, 0  # of the deepest draft so far
        self.inputs = InputBuffers()

    def __call__(self, tree: DraftTree, logits: Tensor) -> Acceptance | None:
        """What the rule makes of the target's `logits (B, N, V)`; `None` where no graph can do it."""
        rows, size = tree.tokens.shape
        of_chain = tree.is_chain
        self.depth = max(tree.max_depth, self.depth)
        if size != self.nodes or tree.max_depth < self.depth or of_chain != (self.rule is AcceptanceRule.REJECTION):
            return None
        way = (self.rule, self.warping.key)
        shape = ("accept", rows, size, tree.max_depth, tree.max_children, way)
        known = self.steps.has(shape)
        if self.steps.why_not or (not known and not (rows == self.first_rows and self.steps.takes("accept", way))):
            return None
        inputs = self._chain_inputs(tree, logits) if of_chain else self._tree_inputs(tree, logits)
        if not known:
            step = (
                _chain_step(self.warping) if of_chain else _tree_step(tree.max_depth, tree.max_children, self._choose)
            )
            expected = (
                warped_probs(self.warping, logits)
                if of_chain
                else _logits_of(logits, self._choose(logits, inputs[-1]))  # by the same numbers
            )
            self.steps.add(shape, step, inputs, expected)
        outputs = self.steps.run(shape, inputs)
        if outputs is None:
            return None
        return chain_acceptance(tree, *outputs[1:]) if of_chain else Acceptance(*outputs[1:])

    def _chain_inputs(self, tree: DraftTree, logits: Tensor) -> tuple:
        proposal = tree.proposal
        assert proposal is not None, "rejection sampling needs the distribution the drafts were drawn from"
        tensors = (
            *self._filled(logits=logits, tokens=tree.tokens, probs=proposal.probs, choices=proposal.choices),
            None if proposal.support is None else self._filled(support=proposal.support)[0],
        )
        return *tensors, *rejection_numbers(tree)

    def _tree_inputs(self, tree: DraftTree, logits: Tensor) -> tuple:
        fields = {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "ancestors")}
        return *self._filled(logits=logits, **fields), uniform_numbers((*tree.tokens.shape, 1), logits.device)

    def _filled(self, **tensors: Tensor) -> list[Tensor]:
        return [self.inputs.fill(name, tensor, tuple(tensor.shape)) for name, tensor in tensors.items()]

    def _choose(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """The target's token after each node, `(B, N)`."""
        return draw(warped_probs(self.warping, logits), numbers=numbers)


def warped_probs(warping: DraftWarping, logits: Tensor) -> Tensor:
    """The target's distribution `(B, N, V)` after each node, float32, from its logits."""
    return warping(logits.flatten(0, 1)).softmax(-1).view(logits.shape)


def _chain_step(warping: DraftWarping) -> Step:
    def accept(
        logits: Tensor,
        tokens: Tensor,
        probs: Tensor,
        choices: Tensor,
        support: Tensor | None,
        draft_numbers: Tensor,
        bonus_number: Tensor,
    ) -> tuple[Tensor, ...]:
        target_probs = warped_probs(warping, logits)
        proposal = Proposal(probs, choices, support)
        return target_probs, *judge_block(tokens, proposal, target_probs, draft_numbers, bonus_number)

    return accept


def _logits_of(logits: Tensor, choice: Tensor) -> Tensor:
    """Of the chosen tokens, `(B, N)`: what a tree's graph is checked by."""
    return logits.gather(2, choice[..., None]).squeeze(2)


def _tree_step(max_depth: int, max_children: int, choose: Callable[[Tensor, Tensor], Tensor]) -> Step:
    def accept(
        logits: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, ancestors: Tensor, numbers: Tensor
    ) -> tuple[Tensor, ...]:
        tree = DraftTree(tokens, parents, depths, ancestors, max_depth, max_children)
        choice = choose(logits, numbers)
        accepted = accept_greedy(tree, choice)
        return _logits_of(logits, choice), accepted.path, accepted.count, accepted.bonus, accepted.best

    return accept
