"""The policy gradient of stage 2: exact in expectation, rollouts as they were drawn."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_training import ROW, batch_of, make_documents, make_drafter, make_target
from transformers import LlamaForCausalLM

from eagle31_hf.errors import ConfigurationError
from eagle31_hf.training.data.packing import PackedBatch, PackedDocuments, collate, pack_row
from eagle31_hf.training.data.rendering import Document
from eagle31_hf.training.policy.policy_model import PolicyModel, chain_policy_loss
from eagle31_hf.training.policy.rollouts import Contexts, chain_logits, choose_contexts, roll_out_chains
from eagle31_hf.training.settings import DistillationSettings, PolicySettings
from families import recurrent_target
from helpers import random_drafter, seeded


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return make_target()


def toy_policy(logits: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `(B, K, V)` along chains of a drafter whose distribution depends on the token before."""
    first = logits[0].expand(len(drafted), 1, -1)
    rest = logits[1 + drafted[:, :-1]]
    return torch.cat((first, rest), dim=1).log_softmax(-1)


def test_policy_gradient_is_the_exact_gradient_in_expectation() -> None:
    """All 3^3 chains in groups of two: the weighted mean of the estimates equals the gradient of E[accepted]."""
    torch.manual_seed(0)
    depth, size = 3, 3
    logits = torch.randn(1 + size, size, dtype=torch.float64, requires_grad=True)
    p_table = (torch.randn(1 + size, size + 1, dtype=torch.float64)).log_softmax(-1)[:, :size]  # one token undraftable
    chains = torch.tensor(list(itertools.product(range(size), repeat=depth)))
    target_log_probs = torch.cat((p_table[0].expand(len(chains), 1, -1), p_table[1 + chains[:, :-1]]), dim=1)

    log_q = toy_policy(logits, chains)
    token_log_q = log_q.gather(-1, chains[..., None]).squeeze(-1)
    w = (target_log_probs.gather(-1, chains[..., None]).squeeze(-1) - token_log_q).clamp(max=0).exp()
    accepted = w.cumprod(1).sum(1)  # the definition: every factor sampled
    (exact,) = torch.autograd.grad((token_log_q.sum(1).exp() * accepted).sum(), logits)

    probability = token_log_q.detach().sum(1).exp()
    estimate = torch.zeros_like(logits)
    for first, second in itertools.product(range(len(chains)), repeat=2):
        pair = chains[[first, second]]
        log_probs = toy_policy(logits, pair)
        loss = chain_policy_loss(log_probs, target_log_probs[[first, second]], pair, group=2)
        (gradient,) = torch.autograd.grad(-loss, logits)
        estimate += probability[first] * probability[second] * gradient
    assert torch.allclose(estimate, exact, atol=1e-10)
    assert exact.abs().max() > 1e-2


def test_contexts_end_in_what_the_target_wrote() -> None:
    documents = [Document("a", list(range(3, 20)), [True] * 17, 9, 1.0), Document("b", list(range(30, 36)), [True] * 6)]
    batch = PackedBatch(**collate([pack_row(documents, ROW)]))
    roots = set(choose_contexts(batch, 200).roots.tolist())
    assert roots == set(range(12, 19))  # tokens 9 to 15 of the first; nothing stands behind the 16th
    given = PackedBatch(**collate([pack_row([Document("b", list(range(30, 36)), [True] * 6)], ROW)]))
    assert set(choose_contexts(given, 200).roots.tolist()) == {31, 32, 33, 34}


def test_chain_logits_are_those_the_drafts_were_drawn_from(target) -> None:
    drafter = make_drafter(target)
    batch = batch_of(make_documents())
    contexts = choose_contexts(batch, 3)
    assert contexts is not None
    with seeded(8):
        rollout = roll_out_chains(drafter, contexts, depth=3, samples=2, temperature=0.7)
    with seeded(8):
        noise = torch.empty(6, 3, drafter.config.vocab_size).exponential_()[..., drafter.draft_ids]
    scores = chain_logits(drafter, rollout.contexts, rollout.tokens) / 0.7
    assert torch.equal((scores - noise.log()).argmax(-1), rollout.draft_ids)
    # And the target judged them as it would in a forward of its own.
    row = torch.cat((contexts.tokens[1, : contexts.lengths[1]], contexts.roots[1:2], rollout.tokens[2]))
    logits = target(row[None]).logits[0, contexts.lengths[1] : contexts.lengths[1] + 3] / 0.7
    assert torch.allclose(logits.log_softmax(-1)[:, drafter.draft_ids], rollout.target_log_probs[2], atol=1e-4)


def test_policy_model_has_gradients_and_keeps_its_anchor(target) -> None:
    drafter = make_drafter(target)
    policy = PolicySettings(depth=3, contexts=3, group=2)
    model = PolicyModel(drafter, DistillationSettings(steps=2), policy)
    before = {name: tensor.clone() for name, tensor in model._anchor[0].state_dict().items()}
    output = model(**collate([PackedDocuments(make_documents(), ROW, seed=0)[0]]))
    output.loss.backward()
    assert output.figures["anchor_kl"] == pytest.approx(0, abs=1e-5)  # it starts as the stage-1 drafter
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(parameter.grad if parameter.grad is not None else 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model._anchor[0].state_dict().items())
    assert not any(name.startswith("_anchor") for name, _ in model.named_parameters())


def test_policy_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 2 samples"):
        PolicySettings(group=1).check()
    with pytest.raises(ConfigurationError, match="reward='text'"):
        PolicySettings(temperature=0.0).check()
    with pytest.raises(ConfigurationError, match=r"reward is 'tree'; wanted one of \('text', 'chain'\)"):
        PolicySettings(reward="tree").check()


def test_rollouts_on_a_target_with_states_are_its_own_words() -> None:
    """Contexts of unlike length: what the target says along a chain is what it says of the whole text."""
    model = recurrent_target("qwen3_5_text")
    drafter = random_drafter(model, aux_layers=[1, 2, 3])
    dice = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (length,), generator=dice).tolist() for length in (9, 4)]
    tokens = torch.tensor([row + [0] * (9 - len(row)) for row in rows])
    contexts = Contexts(tokens=tokens, lengths=[9, 4], roots=torch.tensor([5, 7]))
    with seeded(0):
        rollout = roll_out_chains(drafter, contexts, depth=3, samples=2, temperature=1.0)
    for number, chain in enumerate(rollout.tokens.tolist()):
        row = number // 2
        text = torch.tensor([[*rows[row], int(contexts.roots[row]), *chain[:-1]]])
        with torch.no_grad():
            alone = model(text).logits[0, -3:].log_softmax(-1)
        torch.testing.assert_close(rollout.target_log_probs[number], alone, atol=1e-4, rtol=1e-4)
