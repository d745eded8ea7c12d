"""Stage 1 and 2 of training: losses, the training-time test, the policy gradient, resuming, several processes."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from eagle31_hf import Eagle31Drafter
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.errors import ConfigurationError, TrainingError
from eagle31_hf.training import setup
from eagle31_hf.training.data.packing import PackedBatch, PackedDocuments, collate, pack_row
from eagle31_hf.training.data.rendering import Document
from eagle31_hf.training.distillation import unroll as unrolling
from eagle31_hf.training.distillation.evaluation import AcceptanceCounts, EvaluationPrompt, EvaluationSettings
from eagle31_hf.training.distillation.features import compute_features
from eagle31_hf.training.distillation.known_texts import (
    KnownTexts,
    TextRounds,
    served_error,
    served_length,
    served_processing,
    write_texts,
)
from eagle31_hf.training.distillation.losses import LOSSES, acceptance
from eagle31_hf.training.distillation.objective import DistillationSettings
from eagle31_hf.training.distillation.optimizers import OptimizerSettings
from eagle31_hf.training.distillation.trainer import DistillationTrainer, last_checkpoint
from eagle31_hf.training.distillation.training_model import DistillationModel
from eagle31_hf.training.distillation.unroll import make_teacher, step_losses, supervised_positions, unroll
from eagle31_hf.training.policy.policy_model import (
    PolicyModel,
    PolicySettings,
    best_branch,
    chain_policy_loss,
    node_chances,
    standardised,
    tree_reward,
)
from eagle31_hf.training.policy.rollouts import chain_logits, choose_contexts, roll_out_chains, roll_out_trees
from eagle31_hf.training.processes import leave_process_group
from eagle31_hf.training.progress import LiveProgress
from eagle31_hf.trees.draft_tree import DraftTree, ancestors_from_parents
from warm_processes import finish, start_group

VOCABULARY, DRAFT_VOCABULARY, ROW = 61, 29, 24


def make_target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # a decided target
    return model


def make_drafter(target: LlamaForCausalLM, **fields) -> Eagle31Drafter:
    torch.manual_seed(1)
    drafter = Eagle31Drafter.from_target(target, draft_vocab_size=DRAFT_VOCABULARY, **fields)
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))[:DRAFT_VOCABULARY].sort().values
    drafter.d2t.copy_(ids - torch.arange(DRAFT_VOCABULARY))
    drafter._draft_ids = None
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.2)
    return drafter


def make_documents(count: int = 12, seed: int = 3) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for number in range(count):
        length = int(torch.randint(5, ROW, (1,), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) < 0.8).tolist()
        documents.append(Document(str(number), ids, [*mask[:-1], True]))
    return documents


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return make_target()


def batch_of(documents: list[Document], rows: int = 3) -> PackedBatch:
    data = PackedDocuments(documents, ROW, seed=0)
    return PackedBatch(**collate([data[i] for i in range(min(rows, len(data)))]))


# --- losses -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 1.0, 10.0, 100.0]), missing=st.floats(0.0, 0.9))
def test_losses_are_finite_bounded_and_zero_at_the_target(seed: int, scale: float, missing: float) -> None:
    torch.manual_seed(seed)
    logits = (torch.randn(4, 7) * scale).requires_grad_()
    log_probs = (torch.randn(4, 7) * scale).log_softmax(-1) + torch.log(torch.tensor(1.0 - missing))
    for name, loss in LOSSES.items():
        value = loss(logits, log_probs)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert value.isfinite().all(), name
        assert gradient.isfinite().all(), name
        assert (value >= -1e-5).all(), name
    perfect = log_probs.log_softmax(-1)
    assert torch.allclose(LOSSES["kl"](perfect, log_probs), torch.zeros(4), atol=1e-4)
    assert torch.allclose(acceptance(perfect, log_probs), torch.full((4,), 1.0 - missing), atol=1e-4)


def test_losses_are_their_formulas() -> None:
    p = torch.tensor([0.5, 0.2, 0.1])  # 0.2 of the target's mass cannot be drafted
    q = torch.tensor([0.3, 0.3, 0.4])
    renormalised = p / p.sum()
    alpha = 0.3 + 0.2 + 0.1
    kl = (renormalised * (renormalised / q).log()).sum().item()
    weight = torch.exp(torch.tensor(-3 * alpha)).item()
    expected = {
        "cross_entropy": -(renormalised * q.log()).sum().item(),
        "kl": kl,
        "total_variation": 1 - alpha,
        "lk_alpha": -torch.tensor(alpha).log().item(),
        "lk_hybrid": weight * kl + (1 - weight) * (1 - alpha),
    }
    for name, loss in LOSSES.items():
        assert loss(q.log()[None], p.log()[None]).item() == pytest.approx(expected[name], abs=1e-6), name


def test_a_token_the_target_rules_out_is_no_nan() -> None:
    log_probs = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    for name, loss in LOSSES.items():
        logits = torch.zeros(1, 3, requires_grad=True)
        loss(logits, log_probs).sum().backward()
        assert logits.grad is not None
        assert logits.grad.isfinite().all(), name


# --- training-time test -----------------------------------------------------------------------------------------------


def naive_losses(drafter: Eagle31Drafter, document: Document, steps: int, loss_name: str) -> list[float]:
    """Sum of the losses of each step over one document, position by position, each chain drafted by `DraftSession`."""
    ids, mask = document.input_ids, document.loss_mask
    binding = drafter.require_binding()
    tokens = torch.tensor([ids])
    features = compute_features(binding, tokens, torch.arange(len(ids))[None])
    draft_ids = drafter.draft_ids
    sums = [0.0] * steps
    for row in range(len(ids) - 2):
        session = DraftSession(drafter, batch_size=1, capacity=len(ids) + steps, block=len(ids))
        session.absorb(tokens[:, 1 : row + 2], features.aux[:, : row + 1], [row + 1])
        state = session.root
        for step in range(steps):
            predicted = row + 2 + step
            if predicted >= len(ids):
                break
            z = features.logits[0, predicted - 1]
            if mask[predicted] and int(z.argmax()) in draft_ids.tolist():
                log_p = z.log_softmax(-1)[draft_ids]
                sums[step] += LOSSES[loss_name](state.logits[0], log_p[None]).item()
            if step + 1 < steps:
                state = session.step(tokens[:, predicted : predicted + 1], state.feedback, after=step, depth=step)
    return sums


@pytest.mark.parametrize("fields", [{}, {"norm_output": False, "aux_norm": "none", "norm_before_residual": True}])
@pytest.mark.parametrize("loss", list(LOSSES))
@torch.no_grad()
def test_vectorised_loss_equals_a_loop_over_inference(
    target, fields: dict, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, shifts, packing and blocks: what is trained is exactly what generation drafts, for S = 1..4."""
    drafter = make_drafter(target, **fields)
    monkeypatch.setattr(unrolling, "CACHED_NUMBERS", 3 * len(drafter.draft_ids))  # several blocks, the last one short
    documents = make_documents(4)
    batch = batch_of(documents, rows=9)
    logits = compute_features(drafter.require_binding(), batch.input_ids, batch.position_ids)
    rows = supervised_positions(batch).flatten().nonzero().squeeze(1)
    teacher = make_teacher(logits.logits.flatten(0, 1), rows, drafter.draft_ids)
    wanted = [sum(sums) for sums in zip(*(naive_losses(drafter, d, 4, loss) for d in documents), strict=True)]
    for steps in range(1, 5):
        found = step_losses(drafter, batch, logits.aux, teacher, loss=LOSSES[loss], steps=steps)
        assert found.sums.tolist() == pytest.approx(wanted[:steps], rel=1e-5, abs=1e-5)
    assert min(wanted) > 0


def test_gradient_checkpointing_and_blocks_change_no_gradient(target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(target)
    model = DistillationModel(drafter, DistillationSettings(steps=3))
    inputs = collate([PackedDocuments(make_documents(), ROW, seed=0)[0]])
    gradients = []
    for enabled, rows_of_a_block in ((False, 10_000), (True, 10_000), (False, 2)):
        model.zero_grad()
        model.gradient_checkpointing = enabled
        monkeypatch.setattr(unrolling, "CACHED_NUMBERS", rows_of_a_block * len(drafter.draft_ids))
        model(**inputs).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters() if p.grad is not None]))
    assert all(torch.allclose(gradients[0], other, rtol=1e-5, atol=1e-6) for other in gradients[1:])
    assert gradients[0].abs().sum() > 0


def test_gradients_flow_through_earlier_steps(target) -> None:
    """The last step's loss must reach `fc`, which only step 0 applies."""
    drafter = make_drafter(target)
    batch = batch_of(make_documents())
    aux = compute_features(drafter.require_binding(), batch.input_ids, batch.position_ids).aux
    *_, last = unroll(drafter, batch, aux, 4)
    (gradient,) = torch.autograd.grad(last.square().sum() + last.sum(), drafter.fc.weight)
    assert gradient.abs().max() > 1e-6


def test_both_ways_of_attending_agree(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores in memory (CPU) and a mask over the keys of all steps (elsewhere): same states, same gradients."""
    drafter = make_drafter(target)  # grouped keys: 4 heads, 2 of keys
    batch = batch_of(make_documents())
    aux = compute_features(drafter.require_binding(), batch.input_ids, batch.position_ids).aux
    real = batch.document_ids >= 0
    found = []
    for compact in (True, False):
        monkeypatch.setattr(unrolling, "holds_scores", lambda _, compact=compact: compact)
        states = torch.stack(list(unroll(drafter, batch, aux, 4)))[:, real]
        gradients = torch.autograd.grad(states[..., 0].sum() + states[-1].square().sum(), drafter.fc.weight)
        found.append((states.detach(), *gradients))
    assert all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(*found, strict=True))
    assert found[0][0].std() > 0.1


@torch.no_grad()
def test_hits_are_the_targets_likeliest_tokens(target) -> None:
    drafter = make_drafter(target)
    batch = batch_of(make_documents(), rows=9)
    features = compute_features(drafter.require_binding(), batch.input_ids, batch.position_ids)
    rows = supervised_positions(batch).flatten().nonzero().squeeze(1)
    logits = features.logits.flatten(0, 1)
    teacher = make_teacher(logits, rows, drafter.draft_ids)
    draftable = torch.isin(logits[rows].argmax(-1), drafter.draft_ids)
    assert teacher.rows.tolist() == rows[draftable].tolist()
    assert torch.equal(drafter.draft_ids[teacher.best], logits[teacher.rows].argmax(-1))
    assert torch.equal(teacher.best, teacher.log_probs.argmax(-1))
    # Drafting from the teacher's own states: every hit is one, and no other.
    first = next(unroll(drafter, batch, features.aux, 1)).flatten(0, 1)[teacher.rows - 1]
    expected = int((drafter.draft_logits(first).argmax(-1) == teacher.best).sum())
    found = step_losses(drafter, batch, features.aux, teacher, loss=LOSSES["kl"], steps=1)
    assert found.correct.tolist() == [expected]
    unsorted = drafter.draft_ids.flip(0)  # a published mapping need not ascend
    assert torch.equal(make_teacher(logits, rows, unsorted).best, len(unsorted) - 1 - teacher.best)


# --- policy gradient --------------------------------------------------------------------------------------------------


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
        old = log_probs.detach().gather(-1, pair[..., None]).squeeze(-1)
        loss = chain_policy_loss(log_probs, old, target_log_probs[[first, second]], pair, group=2, clip=0.2)
        (gradient,) = torch.autograd.grad(-loss, logits)
        estimate += probability[first] * probability[second] * gradient
    assert torch.allclose(estimate, exact, atol=1e-10)
    assert exact.abs().max() > 1e-2


def test_tree_values_and_reward_by_hand() -> None:
    #        0 -> 1 (token 1, p .5) -> 3 (token 2, p .4);  0 -> 2 (token 2, p .3)
    parents = torch.tensor([[0, 0, 0, 1]])
    ancestors = ancestors_from_parents(parents, 2)
    tree = DraftTree(torch.tensor([[9, 1, 2, 2]]), parents, ancestors.sum(2) - 1, ancestors, 2, 2)
    probs = torch.zeros(1, 4, 10)
    probs[0, 0, 1], probs[0, 0, 2], probs[0, 1, 2] = 0.5, 0.3, 0.4
    chances = node_chances(tree, probs)
    assert chances[0].tolist() == pytest.approx([1.0, 0.5, 0.3, 0.5 * 0.4])
    assert tree_reward(chances).item() == pytest.approx(0.5 + 0.3 + 0.2)
    nodes, valid = best_branch(tree, chances)
    assert nodes[0][valid[0]].tolist() == [1, 3]
    # A branch carries a gradient down to where it may be accepted; where nothing may, nothing does.
    probs[0, 1, 2] = 0
    nodes, valid = best_branch(tree, node_chances(tree, probs))
    assert nodes[0][valid[0]].tolist() == [1]
    probs[:] = 0
    assert not best_branch(tree, node_chances(tree, probs))[1].any()
    assert tree_reward(node_chances(tree, probs)).item() == 0
    cut = dataclasses.replace(tree, valid=torch.tensor([[True, True, False, True]]))
    assert node_chances(cut, torch.ones_like(probs))[0].tolist() == [1, 1, 0, 1]


def test_rewards_that_hardly_differ_are_called_equal() -> None:
    assert standardised(torch.tensor([0.0, 0.0, 0.0, 1e-4]), 4).abs().max() < 1e-3
    assert standardised(torch.tensor([0.0, 2.0]), 2).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_contexts_end_in_what_the_target_wrote() -> None:
    documents = [Document("a", list(range(3, 20)), [True] * 17, 9, 1.0), Document("b", list(range(30, 36)), [True] * 6)]
    batch = PackedBatch(**collate([pack_row(documents, ROW)]))
    roots = set(choose_contexts(batch, 200, 1).roots.tolist())
    assert roots == set(range(12, 19))  # tokens 9 to 15 of the first; nothing stands behind the 16th
    given = PackedBatch(**collate([pack_row([Document("b", list(range(30, 36)), [True] * 6)], ROW)]))
    assert set(choose_contexts(given, 200, 1).roots.tolist()) == {31, 32, 33, 34}
    runs = choose_contexts(batch, 50, 4).roots.view(50, 4)
    assert runs[:, -1].max() <= 18
    assert torch.equal(runs - runs[:, :1], torch.arange(4).expand(50, -1))


def test_chain_logits_are_those_the_drafts_were_drawn_from(target) -> None:
    drafter = make_drafter(target)
    batch = batch_of(make_documents())
    contexts = choose_contexts(batch, 3, 1)
    assert contexts is not None
    rollout = roll_out_chains(drafter, contexts, depth=3, samples=2, temperature=0.7)
    again = (chain_logits(drafter, rollout.contexts, rollout.tokens) / 0.7).log_softmax(-1)
    assert torch.allclose(again, rollout.draft_log_probs, atol=1e-5)
    # And the target judged them as it would in a forward of its own.
    row = torch.cat((contexts.tokens[1, : contexts.lengths[1]], contexts.roots[1:2], rollout.tokens[2]))
    logits = target(row[None]).logits[0, contexts.lengths[1] : contexts.lengths[1] + 3] / 0.7
    assert torch.allclose(logits.log_softmax(-1)[:, drafter.draft_ids], rollout.target_log_probs[2], atol=1e-4)


def test_greedy_tree_reward_is_the_accepted_length(target) -> None:
    """One-hot probabilities: the best branch's value is how many of its tokens the target takes."""
    drafter = make_drafter(target)
    contexts = choose_contexts(batch_of(make_documents()), 4, 1)
    assert contexts is not None
    rollout = roll_out_trees(drafter, contexts, depth=3, top_k=4, size=12, temperature=0)
    from eagle31_hf.sampling.acceptance import accept_greedy

    accepted = accept_greedy(rollout.tree, rollout.target_probs.argmax(-1)).length - 1
    assert tree_reward(node_chances(rollout.tree, rollout.target_probs)).tolist() == accepted.tolist()


@pytest.mark.parametrize("reward", ["chain", "tree"])
def test_policy_model_has_gradients_and_keeps_its_anchor(target, reward: str) -> None:
    drafter = make_drafter(target)
    policy = PolicySettings(reward=reward, depth=3, contexts=3, group=2, temperature=1.0, top_k=2, tree_size=6)
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
    with pytest.raises(ConfigurationError, match="reward='tree'"):
        PolicySettings(temperature=0.0).check()


# --- trainer ----------------------------------------------------------------------------------------------------------


def make_trainer(folder: Path, *, steps: int, batch: int = 2, accumulate: int = 1, name: str = "auto", **arguments):
    drafter = make_drafter(make_target())
    args = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=batch, logging_steps=1, save_steps=2,
        gradient_accumulation_steps=accumulate, report_to="none", disable_tqdm=True, use_cpu=True, seed=5,
        remove_unused_columns=False, lr_scheduler_type="cosine", **arguments,
    )  # fmt: skip
    return DistillationTrainer(
        DistillationModel(drafter, DistillationSettings(steps=3)),
        args,
        PackedDocuments(make_documents(30), ROW, seed=0),
        prompts=[EvaluationPrompt([1, 5, 9], "a"), EvaluationPrompt([1, 7, 8, 4], "b")],
        evaluation=EvaluationSettings(depth=3, max_new_tokens=8),
        optimizer_settings=OptimizerSettings(name, 1e-2, 1e-2),
    )


def losses_of(trainer: DistillationTrainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


@pytest.mark.parametrize("optimizer", ["auto", "adamw"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, optimizer: str) -> None:
    whole = make_trainer(tmp_path / "whole", steps=6, name=optimizer)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    resumed = make_trainer(tmp_path / "whole", steps=6, name=optimizer)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses_of(resumed) == losses_of(whole)
    assert len(set(losses_of(whole).values())) == 6
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    drafter = Eagle31Drafter.from_pretrained(checkpoint)  # a checkpoint is a drafter like any other
    assert drafter.config.draft_vocab_size == DRAFT_VOCABULARY


@pytest.mark.parametrize("optimizer", ["auto", "adamw"])
def test_training_fits_a_small_text(tmp_path: Path, optimizer: str) -> None:
    trainer = make_trainer(tmp_path, steps=30, batch=4, name=optimizer, save_strategy="no")
    trainer.train_dataset = PackedDocuments(make_documents(2), ROW, seed=0)
    trainer.train()
    found = losses_of(trainer)
    assert found[30] < 0.6 * found[1]


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    large = make_trainer(tmp_path / "large", steps=2, batch=4)
    small = make_trainer(tmp_path / "small", steps=2, batch=1, accumulate=4)
    large.train()
    small.train()
    assert losses_of(small)[2] == pytest.approx(losses_of(large)[2], rel=1e-4)


def test_evaluation_reports_served_acceptance(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, steps=4, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="acceptance_length",
    )  # fmt: skip
    trainer.train()
    measured = [entry for entry in trainer.state.log_history if "eval_acceptance_length" in entry]
    assert [entry["step"] for entry in measured] == [2, 4]
    assert all(entry["eval_acceptance_length"] >= 1.0 for entry in measured)
    assert {"eval_acceptance_at_1", "eval_acceptance_length_a", "eval_acceptance_length_b"} <= measured[0].keys()
    assert trainer.measure_best().keys() == {"a", "b"}


@pytest.mark.parametrize(("last", "kept"), [(2.95, "last"), (2.80, "best")])
def test_the_last_drafter_is_kept_if_it_measures_within_an_error_of_the_best(tmp_path: Path, last, kept) -> None:
    trainer = make_trainer(tmp_path, steps=1)
    drafter = trainer.model.drafter
    trainer.save_model(str(tmp_path / "best"))
    best = drafter.fc.weight.detach().clone()
    drafter.fc.weight.data.add_(1.0)
    state = trainer.state
    state.best_model_checkpoint, state.best_metric, state.best_global_step = str(tmp_path / "best"), 3.0, 2
    state.global_step = 4
    state.log_history = [
        {"step": 4, "eval_acceptance_length": last, "eval_acceptance_error": 0.1}, {"step": 4, "train_runtime": 1.0},
    ]  # fmt: skip
    trainer._load_best_model()
    assert torch.equal(drafter.fc.weight, best) == (kept == "best")
    assert state.best_global_step == (4 if kept == "last" else 2)


def test_checkpoints_are_chosen_by_known_texts_at_every_temperature(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, steps=4, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="served_length",
    )  # fmt: skip
    binding = trainer.model.drafter.require_binding()
    trainer.known = [write_texts(binding, trainer.prompts, warmth, max_new_tokens=8) for warmth in (0.0, 1.0)]
    trainer.train()
    measured = [entry for entry in trainer.state.log_history if "eval_served_length" in entry]
    assert [entry["step"] for entry in measured] == [2, 4]
    for entry in measured:
        lengths = [entry["eval_served_length_at_0"], entry["eval_served_length_at_1"]]
        assert entry["eval_served_length"] == pytest.approx((lengths[0] * lengths[1]) ** 0.5)
        assert entry["eval_acceptance_length"] > 0  # what generate accepts is measured, too
    assert trainer.state.best_metric == max(entry["eval_served_length"] for entry in measured)


@pytest.mark.parametrize(("last", "kept"), [(19.99, "last"), (20.2, "best")])
def test_the_difference_to_the_best_is_judged_text_by_text(tmp_path: Path, last: float, kept: str) -> None:
    """Texts differ by far more than the drafters do: the error of either figure alone would let both pass."""
    trainer = make_trainer(tmp_path, steps=1)
    trainer.known = [KnownTexts(0.0, served_processing(make_target(), 0.0).draft_warping, 8, ())]
    trainer.save_model(str(tmp_path / "best"))
    state = trainer.state
    state.best_model_checkpoint, state.best_global_step, state.global_step = str(tmp_path / "best"), 2, 4
    best = [TextRounds("a", 40, rounds, (), ()) for rounds in (10.0, 20.0, 30.0, 20.0)]
    # One text in ten rounds fewer or more tells nothing; all of them in a hundredth more do.
    worse = [dataclasses.replace(text, rounds=text.rounds * last / 20) for text in best]
    worse[0] = dataclasses.replace(worse[0], rounds=worse[0].rounds + 0.05)
    trainer._rounds = {2: [best], 4: [worse]}
    state.best_metric = served_length([best])
    state.log_history = [
        {"step": 4, "eval_served_length": served_length([worse]), "eval_served_error": served_error([worse])}
    ]
    assert served_error([worse]) > state.best_metric - served_length([worse])
    trainer._load_best_model()
    assert state.best_global_step == (4 if kept == "last" else 2)
    trainer._rounds = {4: [worse]}  # a resumed run knows no more of the best than its figure
    state.best_global_step = 2
    trainer._load_best_model()
    assert state.best_global_step == 4


def test_standard_error_of_acceptance() -> None:
    accepted = [0, 3, 1, 3, 2, 0, 1]  # per round, of 3 drafts
    at = [sum(count > position for count in accepted) for position in range(3)]
    counts = AcceptanceCounts(3, len(accepted), sum(accepted), [len(accepted)] * 3, at)
    expected = torch.tensor(accepted, dtype=torch.float64).std(correction=0).item() / len(accepted) ** 0.5
    assert counts.standard_error == pytest.approx(expected)
    assert AcceptanceCounts(3).standard_error == 0.0


def test_tensorboard_gets_the_figures(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers.integrations import TensorBoardCallback

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = make_trainer(tmp_path, steps=2)
    trainer.add_callback(TensorBoardCallback)
    trainer.train()
    events = EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent))
    events.Reload()
    assert {"train/loss", "train/accuracy_step_0", "train/loss_step_2"} <= set(events.Tags()["scalars"])


def test_a_log_file_is_told_how_far_training_is(tmp_path: Path) -> None:
    written = io.StringIO()
    trainer = make_trainer(tmp_path, steps=3)
    trainer.add_callback(LiveProgress(Console(file=written, width=200), "stage1"))
    trainer.train()
    lines = written.getvalue().splitlines()
    assert [line for line in lines if line.startswith("stage1, step 1 of 3: loss ")], lines
    assert not [line for line in lines if "step 2 of 3" in line], "a line a minute, not one a step"


def test_nan_stops_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=6)
    model = trainer.model

    class Poison(type(trainer.callback_handler.callbacks[0])):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                with torch.no_grad():
                    model.drafter.fc.weight.fill_(float("nan"))

    trainer.add_callback(Poison())
    with pytest.raises(TrainingError, match=r"nan at step 4.*checkpoint-2"):
        trainer.train()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    Eagle31Drafter.from_pretrained(tmp_path / "checkpoint-2")


def test_weights_that_are_no_numbers_are_never_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, steps=1)
    with torch.no_grad():
        trainer.model.drafter.fc.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="cannot be saved"):
        trainer.save_model(str(tmp_path / "bad"))
    assert not (tmp_path / "bad" / "config.json").exists()


def test_a_checkpoint_cut_short_is_passed_over(tmp_path: Path) -> None:
    make_trainer(tmp_path, steps=4).train()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"global_st')
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    assert last_checkpoint(tmp_path) is None


def test_another_drafters_checkpoint_is_refused(tmp_path: Path) -> None:
    other = Eagle31Drafter.from_target(make_target(), draft_vocab_size=11)
    other.save_pretrained(tmp_path / "checkpoint-2")
    trainer = make_trainer(tmp_path, steps=4)
    with pytest.raises(TrainingError, match=r"another drafter's.*d2t"):
        trainer._load_from_checkpoint(str(tmp_path / "checkpoint-2"))


def train_together(folder: Path, batch: int, processes: int) -> None:
    """Two steps in each of so many processes; the first writes down the losses."""
    trainer = make_trainer(folder, steps=2, batch=batch, save_strategy="no")
    trainer.train()
    if trainer.is_world_process_zero():
        assert trainer.args.world_size == processes
        (folder / f"{processes}.json").write_text(json.dumps(losses_of(trainer)))
    del trainer
    leave_process_group()
    threads = [(task / "comm").read_text() for task in Path("/proc/self/task").glob("*")]
    # They would abort the process as it ends, now and then.
    assert not any("gloo" in name for name in threads), threads


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(tmp_path: Path) -> None:
    train_together(tmp_path, 4, 1)
    for process in start_group(2, train_together, tmp_path, 2, 2, log=tmp_path / "log"):
        assert finish(process) == 0, [log.read_text()[-3000:] for log in tmp_path.glob("log.*")]
    one, two = (json.loads((tmp_path / f"{processes}.json").read_text()) for processes in (1, 2))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize(("ratio", "pays"), [(0.5, True), (0.9, False), (1.3, False)])
def test_mixed_precision_is_for_processors_that_are_faster_with_it(
    ratio: float, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    PartialState(cpu=True)
    monkeypatch.setattr(setup, "_product_s", lambda dtype: ratio if dtype == torch.bfloat16 else 1.0)
    assert setup.multiplies_bfloat16(torch.device("cpu")) is pays
    assert setup.multiplies_bfloat16(torch.device("cuda"))
    assert not setup.multiplies_bfloat16(torch.device("mps"))
