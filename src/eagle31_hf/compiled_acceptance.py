"""A sampled chain's acceptance in one graph: the target's processors, its probabilities, rejection and the next draw.

Eager, these are some thirty small operations over `(B, N, V)` scores, a tenth of a round on a small target.
"""

from __future__ import annotations

from torch import Tensor

from .acceleration import InputBuffers
from .compiled_steps import CompiledSteps, Step
from .drafter import Eagle31Drafter
from .processing import DraftWarping
from .sampling import Acceptance, chain_acceptance, judge_block, rejection_numbers
from .tree import DraftTree, Proposal


class CompiledAcceptance:
    """Rejection sampling of one generation's whole chains.

    Args:
        drafter: attached to the target.
        steps: this generation's.
        warping: the target's processors, which look at scores alone.
        nodes: of a whole chain, root included; shorter ones are rare and stay eager.
        batch_size: rows to begin with; a batch that loses rows is not worth a graph for each number.
    """

    def __init__(
        self, drafter: Eagle31Drafter, steps: CompiledSteps, warping: DraftWarping, *, nodes: int, batch_size: int
    ):
        self.draft_ids, self.warping, self.nodes, self.first_rows = drafter.draft_ids, warping, nodes, batch_size
        self.steps = steps
        self.inputs = InputBuffers()

    def __call__(self, tree: DraftTree, logits: Tensor) -> Acceptance | None:
        """As `accept_rejection` on the probabilities of `logits (B, N, V)`; `None` where no graph can do it."""
        rows, size = tree.tokens.shape
        shape = ("accept", rows, size, self.warping.key)
        if self.steps.why_not or size != self.nodes or not tree.is_chain or tree.proposal is None:
            return None
        known = self.steps.has(shape)
        if not known and (rows != self.first_rows or not self.steps.takes("accept", shape[-1])):
            return None
        fill, proposal = self.inputs.fill, tree.proposal
        named = {"logits": logits, "tokens": tree.tokens, "probs": proposal.probs, "draft_ids": proposal.draft_ids}
        inputs = tuple(fill(name, tensor, tuple(tensor.shape)) for name, tensor in named.items())
        inputs += rejection_numbers(tree)
        if not known:
            probs = warped_probs(self.warping, logits)
            self.steps.add(shape, _acceptance_step(self.warping, self.draft_ids), inputs, probs)
        outputs = self.steps.run(shape, inputs)
        return None if outputs is None else chain_acceptance(tree, *outputs[1:])


def warped_probs(warping: DraftWarping, logits: Tensor) -> Tensor:
    """The target's distribution `(B, N, V)` after each node, float32, from its logits."""
    return warping(logits.flatten(0, 1)).softmax(-1).view(logits.shape)


def _acceptance_step(warping: DraftWarping, draft_ids: Tensor | None) -> Step:
    def accept(
        logits: Tensor, tokens: Tensor, probs: Tensor, drafted: Tensor, draft_numbers: Tensor, bonus_number: Tensor
    ) -> tuple[Tensor, ...]:
        target_probs = warped_probs(warping, logits)
        proposal = Proposal(probs, drafted, draft_ids)
        return target_probs, *judge_block(tokens, proposal, target_probs, draft_numbers, bonus_number)

    return accept
