"""What is trained is exactly what generation drafts: stage 1 in losses and in gradients, stage 2 in closed form by
hand, and what cannot be learned from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_training import ROW, batch_of, drafted_along, make_documents, make_drafter, make_target
from torch import Tensor
from torch.utils.data import default_collate

from eagle31_hf import Eagle31Drafter
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.training import objectives
from eagle31_hf.training.data import Document, PackedBatch, PackedDocuments
from eagle31_hf.training.objectives import (
    TOKEN_WEIGHT,
    AcceptanceModel,
    DistillationModel,
    answering,
    compute_features,
    cross_entropy,
    require_stage_two,
    unroll,
)
from helpers import CONFIGS, random_drafter, random_target, seeded

# --- stage 1 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decided() -> Any:
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
def test_vectorised_loss_equals_a_loop_over_inference(decided, fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, shifts, packing and blocks: what is trained is exactly what generation drafts, for S = 1..4."""
    drafter = make_drafter(decided, **fields)
    monkeypatch.setattr(objectives, "CACHED_NUMBERS", 3 * len(drafter.draft_ids))  # several blocks, the last one short
    documents = make_documents(4)
    batch = batch_of(documents, rows=9)
    wanted = [sum(sums) for sums in zip(*(naive_losses(drafter, d, 4) for d in documents), strict=True)]
    for steps in range(1, 5):
        found = DistillationModel(drafter, steps=steps)(**vars(batch))
        assert found.sums.tolist() == pytest.approx(wanted[:steps], rel=1e-5, abs=1e-5)
    assert min(wanted) > 0


def test_logits_computed_twice_and_blocks_change_no_gradient(decided, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(decided)
    inputs = default_collate([PackedDocuments(make_documents(), ROW, seed=0)[0]])
    gradients = []
    for kept, rows_of_a_block in ((False, 10_000), (False, 2), (True, 10_000)):
        model = DistillationModel(drafter, steps=3, keeps_logits=kept)
        model.zero_grad()
        monkeypatch.setattr(objectives, "CACHED_NUMBERS", rows_of_a_block * len(drafter.draft_ids))
        with mock.patch.object(drafter, "draft_logits", wraps=drafter.draft_logits) as computed:
            model(**inputs).loss.backward()
        assert computed.call_count == (3 if kept else 6)
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    assert all(torch.allclose(gradients[0], other, rtol=1e-5, atol=1e-6) for other in gradients[1:])
    assert gradients[0].abs().sum() > 0


def test_gradients_flow_through_earlier_steps(decided) -> None:
    """The last step's loss must reach `fc`, which only step 0 applies."""
    drafter = make_drafter(decided)
    batch = batch_of(make_documents())
    aux = compute_features(drafter.binding, batch.input_ids, batch.position_ids).aux
    *_, last = unroll(drafter, batch, aux, 4)
    (gradient,) = torch.autograd.grad(last.square().sum() + last.sum(), drafter.fc.weight)
    assert gradient.abs().max() > 1e-6


@torch.no_grad()
def test_hits_are_the_targets_likeliest_tokens(decided) -> None:
    drafter = make_drafter(decided)
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


# --- stage 2 ----------------------------------------------------------------------------------------------------------

STEPS, TOP_K = 3, 7


@pytest.fixture(scope="module")
def target() -> Any:
    model = random_target(CONFIGS["qwen3"]())
    model.generation_config.top_k = TOP_K
    return model


@pytest.fixture(scope="module")
def drafter(target: Any) -> Eagle31Drafter:
    return random_drafter(target, aux_layers=[1, 2, 4], draft_vocab_size=40)


def document(name: str, length: int, written_from: int | None, temperature: float | None) -> Document:
    with seeded(len(name) + length):
        ids = torch.randint(3, 96, (length,)).tolist()
    return Document(name, ids, [True] * length, written_from, temperature)


def by_hand(drafter: Eagle31Drafter, found: Document) -> tuple[float, list[float]]:
    """Expected drafts over all starts of one document, and cross-entropy by step, each chain by `DraftSession`."""
    expected, losses = 0.0, [0.0] * STEPS
    for root in range(found.written_from, len(found.input_ids) - 1):
        reached = 1.0
        for step, (place, target_logits, logits) in enumerate(drafted_along(drafter, found, root, STEPS)):
            reached *= chance(drafter, target_logits, logits[0], found, found.input_ids[place])
            expected += reached
            if int(target_logits.argmax()) in drafter.draft_ids.tolist():
                losses[step] += cross_entropy(logits, target_logits.log_softmax(-1)[drafter.draft_ids][None]).item()
    return expected, losses


def chance(drafter: Eagle31Drafter, target_logits: Tensor, logits: Tensor, found: Document, token: int) -> float:
    """That the first draft is the text's token, which the target chose by the same noise."""
    best = (drafter.draft_ids == (target_logits.argmax() if found.temperature == 0 else token)).nonzero()
    if not len(best):
        return 0.0
    if found.temperature == 0:
        return float(logits.softmax(-1)[best[0, 0]])
    p, drafted = (top_k_softmax(each / found.temperature) for each in (target_logits, logits))
    q = torch.zeros_like(p).scatter(0, drafter.draft_ids, drafted)
    return float(q[token] / torch.maximum(p * q[token], q * p[token]).sum()) if q[token] > 0 else 0.0


def top_k_softmax(scores: Tensor) -> Tensor:
    kept = scores.topk(TOP_K)
    return torch.zeros_like(scores).scatter(0, kept.indices, kept.values.softmax(0))


def written_by(target: Any, name: str, temperature: float) -> Document:
    """A text that the target continued from its fifth token on."""
    how = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    with seeded(len(name)):
        opening = torch.randint(3, 96, (1, 5))
        ids = target.generate(opening, max_new_tokens=12, min_new_tokens=12, pad_token_id=0, **how)[0].tolist()
    return Document(name, ids, [True] * len(ids), 5, temperature)


def test_the_objective_is_that_of_drafting_from_every_written_token(target: Any, drafter: Eagle31Drafter) -> None:
    model = AcceptanceModel(drafter, steps=STEPS)
    documents = [written_by(target, "sampled", 1.0), written_by(target, "greedy", 0.0)]
    rows = PackedDocuments([*documents, document("given", 6, None, None)], 42, seed=0)
    batch = PackedBatch(**default_collate(list(rows)))
    with torch.no_grad():
        found = model(**vars(batch))
        expected, losses = zip(*(by_hand(drafter, each) for each in documents), strict=True)
    assert min(expected) > 0.01, "chances of both kinds count"
    token_loss = sum(0.8**step * sum(each[step] for each in losses) for step in range(STEPS))
    assert found.loss.item() == pytest.approx(TOKEN_WEIGHT * token_loss - sum(expected) / STEPS, rel=1e-4)
    assert int(model.counted(batch).sum()) == 2 * 11


def test_what_stage_two_cannot_learn_from_is_told(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [document("given", 6, None, None), replace(document("unknown", 6, 2, 1.0), temperature=None)]
    with pytest.raises(ConfigurationError, match="of these texts it wrote none"):
        require_stage_two(target, given, (0.0,))
    written = [*given, document("greedy", 6, 2, 0.0)]
    require_stage_two(target, written, (0.0, 1.0))
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 1.2)
    with pytest.raises(ConfigurationError, match=r"served with RepetitionPenalty.*stage 2 can tell"):
        require_stage_two(target, written, (0.0,))


def test_a_batch_without_a_written_token_gives_no_gradient(drafter: Eagle31Drafter) -> None:
    rows = PackedDocuments([document("given", 9, None, None)], 12, seed=0)
    output = AcceptanceModel(drafter, steps=2)(**default_collate([rows[0]]))
    output.loss.backward()
    assert output.loss.item() == 0
    assert float(drafter.fc.weight.grad.abs().max()) == 0
    drafter.zero_grad()
