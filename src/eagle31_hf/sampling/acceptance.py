"""Lossless acceptance: which drafted tokens to keep so that the output is the target's own. Pure and seeded.

Three rules, each a function of one round's `DraftTree` and what the target said at its nodes:

    accept_greedy                follow the target's arg-max                        (temperature 0)
    accept_sampled_target        draw the target's token first, keep it if drafted  (children chosen in any way)
    rejection.accept_rejection   as much as `p / q` allows, then draw what is left  (children drawn from a known `q`)

`choose_rule` says which accepts most where. Random numbers come from `generator` (`None`: torch's global one), on the
device of the probabilities. Nothing waits for the device.

`B` batch, `N` nodes with the root, `D` longest path without the root, `V` / `Vd` target / draft vocabulary, `S` tokens
that could be drafted after a node, `p` / `q` target / draft distribution. Probabilities are float32, warped
(temperature, top-p, ...) as the user asked.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..trees.draft_tree import DraftTree
from .draw import draw


class Acceptance(NamedTuple):
    """What one round yields.

    Attributes:
        path: `(B, D+1)` accepted nodes from the root down; entries from `length` on are padding: valid node numbers
            that mean nothing.
        length: `(B,)` accepted nodes, root included.
        bonus: `(B,)` the token the target adds after the last accepted node, the next round's root.
        best: `(B,)` last accepted node.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    best: Tensor

    def along(self, states: Tensor, width: int | None = None) -> Tensor:
        """Of the nodes' states `(B, N, X)` those of the first `width` nodes of each path, `(B, width, X)`."""
        nodes = self.path[:, :width, None]
        return states.gather(1, nodes.expand(-1, -1, states.shape[-1]))


def accept_greedy(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    """Keep the longest path whose every token is what the target chose at its parent.

    Args:
        tree: drafts of the round.
        target_choice: `(B, N)` the target's token after each node: its arg-max, or its sample.
    """
    return _follow_chain(tree, target_choice) if tree.is_chain else _follow_tree(tree, target_choice)


def accept_sampled_target(
    tree: DraftTree, target_probs: Tensor, *, generator: torch.Generator | None = None
) -> Acceptance:
    """Draw the target's token at every node, then keep the longest path that agrees.

    A child `x` is accepted with probability `p(x)`, and what is emitted instead follows `p` restricted to tokens that
    are no children: the reference `evaluate_posterior` in one draw. The draws do not look at the drafts, so this is
    lossless however the tree was made, pruned dynamic trees included.

    Args:
        tree: drafts of the round.
        target_probs: `(B, N, V)` the target's distribution after each node.
        generator: source of random numbers.
    """
    return accept_greedy(tree, draw(target_probs, generator))


def _follow_chain(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    if tree.size == 1:
        return chain_acceptance(tree, tree.depths[:, 0], target_choice[:, 0])
    return chain_acceptance(tree, *match_prefix(tree.tokens, target_choice))


def match_prefix(tokens: Tensor, target_choice: Tensor) -> tuple[Tensor, Tensor]:
    """`accept_greedy` of a chain on tensors alone: the last accepted node and the bonus, `(B,)` each."""
    matches = tokens[:, 1:] == target_choice[:, :-1]
    best = matches.cumprod(1).sum(1)
    return best, target_choice.gather(1, best[:, None]).squeeze(1)


def chain_acceptance(tree: DraftTree, best: Tensor, bonus: Tensor) -> Acceptance:
    """A chain accepted down to node `best (B,)`, with the token `bonus (B,)` after it."""
    return Acceptance(path=tree.depths, length=best + 1, bonus=bonus, best=best)  # in a chain, node = depth


def _follow_tree(tree: DraftTree, target_choice: Tensor) -> Acceptance:
    mismatch = tree.tokens != target_choice.gather(1, tree.parents)  # (B, N)
    # A node is refused if any node above it, itself included but not the root, is not what the target chose.
    refused = (tree.ancestors[:, :, 1:] & mismatch[:, None, 1:]).any(2)
    if tree.valid is not None:
        refused |= ~tree.valid
    best = tree.depths.masked_fill(refused, -1).argmax(1)
    path, length = tree.path_to(best)
    return Acceptance(path, length, target_choice.gather(1, best[:, None]).squeeze(1), best)


# --- which rule -------------------------------------------------------------------------------------------------------


class AcceptanceRule(Enum):
    """How drafts are chosen and accepted; see `choose_rule`."""

    GREEDY = "greedy"
    SAMPLED_TARGET = "sampled_target"
    REJECTION = "rejection"


def choose_rule(*, do_sample: bool, dynamic_tree: bool = False, in_order: bool = False) -> AcceptanceRule:
    """The lossless rule that accepts most.

    - Temperature 0: `GREEDY`, whatever the tree.
    - Sampling, chain or static tree: `REJECTION` with children drawn from `q`, the drafter's distribution at the
      target's temperature; chains are judged as blocks, trees child by child.
    - Sampling, dynamic tree: `SAMPLED_TARGET`. Its shape is chosen by the drafts' probabilities, so its children
      are no draws from `q` and rejection sampling would not be lossless.
    - Sampling under processors that are asked `in_order`: `SAMPLED_TARGET`. Rejection would show them drafts.

    Chance that one position accepts a draft, deterministic top-k children (`SAMPLED_TARGET`) against sampled ones
    (`REJECTION`); synthetic logits over 512 tokens, `z = 4 * N(0, 1)` for the target and `z + s * N(0, 1)` for the
    drafter, 40000 positions (`test_choose_rule_table` measures it again on 4000):

        temperature   s        chain: target / rejection   4 children: target / rejection
        0.5           0.5            0.68 / 0.83                     0.94 / 0.98
        0.5           2.0            0.36 / 0.42                     0.69 / 0.73
        1.0           0.5            0.45 / 0.85                     0.73 / 0.97
        1.0           2.0            0.27 / 0.48                     0.55 / 0.74
        1.0           flat           0.47 / 0.32                     0.75 / 0.57

    The last row is the exception: a drafter with the right order but three times the temperature, `z / 3`.
    """
    if not do_sample:
        return AcceptanceRule.GREEDY
    return AcceptanceRule.SAMPLED_TARGET if dynamic_tree or in_order else AcceptanceRule.REJECTION
