"""Trees judged by drawing, in one graph: the target's processors and probabilities, a draw at every node, and the path.

Eager, these are some thirty small operations over `(B, N, V)` scores, a tenth of a round on a small target. Greedy
trees take so few that a graph does not pay (docs/LOG.md); chains are judged where the drafter goes on
(`CompiledDraftSession.advance`).
"""

from __future__ import annotations

from torch import Tensor

from .acceleration import InputBuffers
from .compiled_steps import CompiledSteps, Step
from .processing import DraftWarping
from .sampling import Acceptance, accept_greedy, draw, uniform_numbers
from .tree import DraftTree


class CompiledTreeAcceptance:
    """One generation's acceptance of trees of one size by what the target draws.

    Args:
        steps: this generation's.
        warping: the target's processors, which look at scores alone.
        nodes: of a whole draft, root included; smaller ones are rare and stay eager.
        batch_size: rows to begin with; a batch that loses rows is not worth a graph for each number.
    """

    def __init__(self, steps: CompiledSteps, warping: DraftWarping, *, nodes: int, batch_size: int):
        self.steps, self.warping, self.nodes, self.first_rows = steps, warping, nodes, batch_size
        self.depth = 0  # of the deepest tree so far
        self.inputs = InputBuffers()

    def __call__(self, tree: DraftTree, logits: Tensor, _aux: Tensor | None = None) -> Acceptance | None:
        """What the target's `logits (B, N, V)` make of a tree; `None` where no graph can say it."""
        rows, size = tree.tokens.shape
        self.depth = max(tree.max_depth, self.depth)
        if self.steps.why_not or tree.is_chain or size != self.nodes or tree.max_depth < self.depth:
            return None
        shape = ("accept", rows, size, tree.max_depth, tree.max_children, self.warping.key)
        known = self.steps.has(shape)
        if not known and not (rows == self.first_rows and self.steps.takes("accept", self.warping.key)):
            return None
        inputs = self._inputs(tree, logits)
        if not known:
            expected = _logits_of(logits, draw(self.warping.probs(logits), numbers=inputs[-1]))  # by the same numbers
            self.steps.add(shape, _accept_step(self.warping, tree.max_depth, tree.max_children), inputs, expected)
        outputs = self.steps.run(shape, inputs)
        return None if outputs is None else Acceptance(*outputs[1:])

    def _inputs(self, tree: DraftTree, logits: Tensor) -> tuple:
        fields = {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "ancestors")}
        tensors = {"logits": logits, **fields}
        filled = [self.inputs.fill(name, tensor, tuple(tensor.shape)) for name, tensor in tensors.items()]
        return *filled, uniform_numbers((*tree.tokens.shape, 1), logits.device)


def _accept_step(warping: DraftWarping, max_depth: int, max_children: int) -> Step:
    def accept(
        logits: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, ancestors: Tensor, numbers: Tensor
    ) -> tuple[Tensor, ...]:
        tree = DraftTree(tokens, parents, depths, ancestors, max_depth, max_children)
        choice = draw(warping.probs(logits), numbers=numbers)
        accepted = accept_greedy(tree, choice)
        return _logits_of(logits, choice), accepted.path, accepted.count, accepted.bonus, accepted.best

    return accept


def _logits_of(logits: Tensor, choice: Tensor) -> Tensor:
    """Of the chosen tokens, `(B, N)`: what the graph is checked by."""
    return logits.gather(2, choice[..., None]).squeeze(2)
