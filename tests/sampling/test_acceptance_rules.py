"""Acceptance rules: the generator alone decides, none waits for the device, and which is chosen when."""

from __future__ import annotations

import pytest
import torch
from counted_outcomes import (
    DRAFTERS,
    ROWS,
    P,
    V,
    draft_chain,
    draft_chain_of_few,
    draft_dynamic_tree,
    draft_sampled_tree,
    first_tokens,
    random_table,
    rejection_acceptance,
    sampled_star,
    seeded,
    target_acceptance,
    tokens_added,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eagle31_hf.sampling.acceptance import AcceptanceRule, accept_greedy, accept_sampled_target, choose_rule
from eagle31_hf.sampling.draw import draw, draw_without_replacement
from eagle31_hf.sampling.rejection import accept_rejection
from eagle31_hf.trees.draft_tree import Proposal
from eagle31_hf.trees.static import StaticTopology


def test_the_generator_alone_decides() -> None:
    tree = sampled_star(DRAFTERS["good"], 3, seed=15)
    first, again, other = (first_tokens(accept_rejection, tree, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(3)
    from_global = draw(P.expand(100, V))
    torch.manual_seed(3)
    assert torch.equal(from_global, draw(P.expand(100, V)))


class HostSyncs(TorchDispatchMode):
    """Collects operators that make the host wait for values on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool
            for arg in args
            if isinstance(arg, list | tuple)
            for i in arg
        )
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("way_to_draw")
def test_no_rule_waits_for_the_device() -> None:
    last, q_table, p_table = torch.zeros(3, dtype=torch.long), random_table(2), random_table(1)
    support = torch.tensor([5, 0, 3, 1])
    with HostSyncs() as syncs:
        for draft in (draft_chain, draft_chain_of_few, draft_sampled_tree, draft_dynamic_tree):
            tree = draft(last, q_table, seeded())
            probs = p_table[tree.tokens]
            tokens_added(accept_sampled_target(tree, probs), tree)
            accept_greedy(tree, probs.argmax(-1))
            if tree.proposal is not None:
                tokens_added(accept_rejection(tree, probs), tree)
        star = sampled_star(torch.full((4,), 0.25), 2, seed=1, support=support)
        accept_rejection(star, P.expand(ROWS, 3, V))
    assert syncs.found == []


def test_host_sync_detector_can_fail() -> None:
    with HostSyncs() as syncs:
        P[P > 0.1]
        P[0].item()
    assert len(syncs.found) >= 2


def test_choose_rule_by_setting() -> None:
    assert choose_rule(do_sample=False) is AcceptanceRule.GREEDY
    assert choose_rule(do_sample=False, dynamic_tree=True) is AcceptanceRule.GREEDY
    assert choose_rule(do_sample=True) is AcceptanceRule.REJECTION
    assert choose_rule(do_sample=True, dynamic_tree=True) is AcceptanceRule.SAMPLED_TARGET


def measure_rules(p: Tensor, q: Tensor, generator: torch.Generator) -> list[float]:
    """Chain by target-only and by rejection, then four children by target-only and by rejection."""
    top = q.topk(4, dim=-1).indices
    drawn = draw_without_replacement(q, 4, generator)
    ids = torch.nn.functional.pad(drawn, (1, 0))
    tree = StaticTopology.from_paths([(0,), (1,), (2,), (3,)]).tree(ids, Proposal(q[:, None], ids))
    accepted = accept_rejection(tree, p[:, None].expand(-1, 5, -1), generator=generator)
    chances = (
        target_acceptance(p, top[:, :1]),
        rejection_acceptance(p, q),
        target_acceptance(p, top),
        (accepted.length > 1).float(),
    )
    return [float(chance.mean()) for chance in chances]


@pytest.mark.parametrize(
    ("temperature", "noise", "documented"),
    [
        (0.5, 0.5, (0.68, 0.83, 0.94, 0.98)),
        (0.5, 2.0, (0.36, 0.42, 0.69, 0.73)),
        (1.0, 0.5, (0.45, 0.85, 0.73, 0.97)),
        (1.0, 2.0, (0.27, 0.48, 0.55, 0.74)),
        (1.0, "flat", (0.47, 0.32, 0.75, 0.57)),
    ],
)
def test_choose_rule_table(temperature: float, noise: float | str, documented: tuple[float, ...]) -> None:
    generator = seeded(6)
    logits = 4.0 * torch.randn(4000, 512, generator=generator)
    if isinstance(noise, float):
        draft_logits = logits + noise * torch.randn(logits.shape, generator=generator)
    else:
        draft_logits = logits / 3
    p, q = torch.softmax(logits / temperature, -1), torch.softmax(draft_logits / temperature, -1)
    assert measure_rules(p, q, generator) == pytest.approx(documented, abs=0.03)
