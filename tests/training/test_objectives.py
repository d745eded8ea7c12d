"""Stage 2 in closed form: the objective by hand, along chains that are drafted, and what cannot be learned from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_training import drafted_along
from torch import Tensor
from torch.utils.data import default_collate

from eagle31_hf import Eagle31Drafter
from eagle31_hf.errors import ConfigurationError
from eagle31_hf.training.data import Document, PackedBatch, PackedDocuments
from eagle31_hf.training.objectives import TOKEN_WEIGHT, AcceptanceModel, cross_entropy, require_stage_two
from helpers import CONFIGS, random_drafter, random_target, seeded

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
