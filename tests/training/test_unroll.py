"""The training-time test: what is trained is exactly what generation drafts, in losses and in gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_training import ROW, batch_of, drafted_along, make_documents, make_drafter, make_target
from torch.utils.data import default_collate

from eagle31_hf import Eagle31Drafter
from eagle31_hf.training import objectives
from eagle31_hf.training.data import Document, PackedDocuments
from eagle31_hf.training.objectives import DistillationModel, answering, compute_features, cross_entropy, unroll


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target()


def naive_losses(drafter: Eagle31Drafter, document: Document, steps: int) -> list[float]:
    """Sum of the losses of each step over one document, position by position, each chain drafted by `DraftSession`."""
    sums = [0.0] * steps
    for root in range(1, len(document.input_ids) - 1):
        for step, (place, z, logits) in enumerate(drafted_along(drafter, document, root, steps)):
            if document.loss_mask[place] and int(z.argmax()) in drafter.draft_ids.tolist():
                sums[step] += cross_entropy(logits, z.log_softmax(-1)[drafter.draft_ids][None]).item()
    return sums


@pytest.mark.parametrize("fields", [{}, {"norm_output": False, "aux_norm": "none", "norm_before_residual": True}])
@torch.no_grad()
def test_vectorised_loss_equals_a_loop_over_inference(target, fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, shifts, packing and blocks: what is trained is exactly what generation drafts, for S = 1..4."""
    drafter = make_drafter(target, **fields)
    monkeypatch.setattr(objectives, "CACHED_NUMBERS", 3 * len(drafter.draft_ids))  # several blocks, the last one short
    documents = make_documents(4)
    batch = batch_of(documents, rows=9)
    wanted = [sum(sums) for sums in zip(*(naive_losses(drafter, d, 4) for d in documents), strict=True)]
    for steps in range(1, 5):
        found = DistillationModel(drafter, steps=steps)(**vars(batch))
        assert found.sums.tolist() == pytest.approx(wanted[:steps], rel=1e-5, abs=1e-5)
    assert min(wanted) > 0


def test_logits_computed_twice_and_blocks_change_no_gradient(target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(target)
    model = DistillationModel(drafter, steps=3)
    inputs = default_collate([PackedDocuments(make_documents(), ROW, seed=0)[0]])
    gradients = []
    for kept, rows_of_a_block in ((False, 10_000), (False, 2), (True, 10_000)):
        model.zero_grad()
        if kept:
            monkeypatch.setattr(objectives, "checkpoint", lambda judge, *states, **options: judge(*states))
        monkeypatch.setattr(objectives, "CACHED_NUMBERS", rows_of_a_block * len(drafter.draft_ids))
        model(**inputs).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    assert all(torch.allclose(gradients[0], other, rtol=1e-5, atol=1e-6) for other in gradients[1:])
    assert gradients[0].abs().sum() > 0


def test_gradients_flow_through_earlier_steps(target) -> None:
    """The last step's loss must reach `fc`, which only step 0 applies."""
    drafter = make_drafter(target)
    batch = batch_of(make_documents())
    aux = compute_features(drafter.binding, batch.input_ids, batch.position_ids).aux
    *_, last = unroll(drafter, batch, aux, 4)
    (gradient,) = torch.autograd.grad(last.square().sum() + last.sum(), drafter.fc.weight)
    assert gradient.abs().max() > 1e-6


@torch.no_grad()
def test_hits_are_the_targets_likeliest_tokens(target) -> None:
    drafter = make_drafter(target)
    batch = batch_of(make_documents(), rows=9)
    features = compute_features(drafter.binding, batch.input_ids, batch.position_ids)
    rows = answering(batch, batch.loss_mask[:, 1:]).flatten().nonzero().squeeze(1)
    logits = features.logits.flatten(0, 1)
    model = DistillationModel(drafter, steps=1)
    teacher = model.teach(batch, logits, rows)
    likeliest, learned = logits[rows].argmax(-1), teacher.best >= 0
    assert torch.equal(learned, torch.isin(likeliest, drafter.draft_ids))
    assert torch.equal(drafter.draft_ids[teacher.best[learned]], likeliest[learned])
    # Drafting from the teacher's own states: every hit is one, and no other.
    first = next(unroll(drafter, batch, features.aux, 1)).flatten(0, 1)[rows - 1]
    hits = drafter.draft_logits(first).argmax(-1) == teacher.best
    found = model(**vars(batch))
    assert (found.correct.tolist(), found.counts.tolist()) == ([int(hits.sum())], [int(learned.sum())])
    drafter._draft_ids = drafter.draft_ids.flip(0)  # a published mapping need not ascend
    flipped = model.teach(batch, logits, rows).best[learned]
    assert torch.equal(flipped, len(drafter.draft_ids) - 1 - teacher.best[learned])


def test_the_loss_is_its_formula() -> None:
    p = torch.tensor([0.5, 0.2, 0.1])  # 0.2 of the target's mass cannot be drafted
    q = torch.tensor([0.3, 0.3, 0.4])
    expected = -(p / p.sum() * q.log()).sum().item()
    assert cross_entropy(q.log()[None], p.log()[None]).item() == pytest.approx(expected, abs=1e-6)
    ruled_out = cross_entropy(torch.zeros(1, 3), torch.tensor([[0.0, float("-inf"), float("-inf")]]))
    assert ruled_out.isfinite().all()
