"""The drafter network against its formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf import Eagle31Config, Eagle31Drafter
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.errors import CheckpointFormatError
from helpers import GROUPED, random_target, seeded
from reference_drafter import Reference, Yarn, plain_frequencies

HIDDEN, TARGET_HIDDEN, INTERMEDIATE, VOCABULARY, DRAFT_VOCABULARY = 32, 48, 40, 50, 20
HEADS, KV_HEADS, HEAD_DIM, EPS = 8, 2, 6, 1e-5
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0,
    },
}  # fmt: skip


def turning(rope: dict[str, Any]) -> dict[str, Any]:
    """Angles per position and the factor on cosine and sine, as `Reference` takes them."""
    plain, factor = plain_frequencies(rope["rope_theta"], HEAD_DIM), rope.get("factor")
    if rope["rope_type"] == "linear":
        return {"frequencies": plain / factor}
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # short waves stay, long ones are stretched
        return {"frequencies": plain * keep + plain / factor * (1 - keep)}
    if rope["rope_type"] == "yarn":
        yarn = Yarn(factor, rope["original_max_position_embeddings"])
        return {"frequencies": yarn.frequencies(1e4, HEAD_DIM), "rotary_scale": 0.1 * math.log(factor) + 1}
    return {"frequencies": plain}


# --- every variant ----------------------------------------------------------------------------------------------------


CORE = list(itertools.product(("none", "per_slot", "concatenated"), (False, True), (False, True), (1, 4)))
VARIANTS = [  # the four above in every combination, the others in turn
    {
        "aux_norm": aux_norm,
        "norm_output": norm_output,
        "norm_before_residual": before,
        "num_hidden_layers": layers,
        "qk_norm": index % 2 == 1,
        "rope": tuple(ROPES)[index % 4],
        "shares": ("nothing", "embedding", "both")[index % 3],
        "wide": index % 3 == 0 and index % 2 == 0,
        "reduced": index % 5 < 3,
        "fc_bias": index % 7 == 0,
    }
    for index, (aux_norm, norm_output, before, layers) in enumerate(CORE)
] + [
    {
        "aux_norm": "per_slot", "norm_output": True, "norm_before_residual": False, "num_hidden_layers": 1,
        "qk_norm": qk_norm, "rope": rope, "shares": shares, "wide": False, "reduced": reduced, "fc_bias": False,
    }
    for qk_norm, rope, shares, reduced in itertools.product(
        (False, True), ROPES, ("embedding", "both"), (False, True)
    )
]  # fmt: skip


def build(variant: dict[str, Any]) -> tuple[Any, Eagle31Drafter, Reference]:
    width = TARGET_HIDDEN if variant["wide"] else HIDDEN
    sizes = {"hidden_size": width, "vocab_size": VOCABULARY, "head_dim": 8, "initializer_range": 0.3}
    target = random_target(hf.LlamaConfig(**{**GROUPED, **sizes}), seed=2)
    config = Eagle31Config(
        hidden_size=HIDDEN,
        target_hidden_size=width,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=EPS,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFT_VOCABULARY if variant["reduced"] else None,
        max_position_embeddings=256,
        rope_parameters=dict(ROPES[variant["rope"]]),
        own_embedding=variant["shares"] == "nothing",
        own_lm_head=variant["shares"] != "both",
        **{k: v for k, v in variant.items() if k not in ("rope", "shares", "wide", "reduced")},
    )
    drafter = Eagle31Drafter(config).eval()
    with seeded(4), torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
        if variant["reduced"]:
            ids = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
            drafter.d2t.copy_(ids - torch.arange(DRAFT_VOCABULARY))
    drafter.attach(target)
    tensors = {name.removeprefix("layers.0."): t.detach() for name, t in drafter.canonical_tensors().items()}
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    flags = {name: variant[name] for name in ("norm_output", "norm_before_residual")}
    return target, drafter, Reference(tensors, HEADS, KV_HEADS, eps=EPS, **flags, **turning(ROPES[variant["rope"]]))


def assert_agree(got: Tensor, wanted: Tensor) -> None:
    """Equal to a hundred-thousandth of the tensor's largest value: fp32 sums in another order differ by less."""
    torch.testing.assert_close(got.double(), wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=0)


def label(variant: dict[str, Any]) -> str:
    return "-".join(f"{value}" for value in variant.values())


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS, ids=label)
@pytest.mark.thorough(every=3)
def test_one_pass_is_the_formula(variant: dict[str, Any]) -> None:
    target, drafter, formulas = build(variant)
    with seeded(6):
        ids, aux = torch.randint(0, VOCABULARY, (9,)), torch.randn(9, 3 * drafter.config.target_hidden_size)
    table = formulas.w.get("embed_tokens.weight", target.get_input_embeddings().weight).double()
    head = formulas.w.get("lm_head.weight")
    if head is None:
        head = target.lm_head.weight.double()
        head = head[torch.arange(DRAFT_VOCABULARY) + formulas.w["d2t"]] if variant["reduced"] else head
    normed, feedback = formulas.step(table[ids], formulas.fuse(aux.double()))

    got = drafter.decode(drafter.embed(ids[None]), drafter.fuse_aux(aux[None]), drafter.rotary(torch.arange(9)[None]))
    assert_agree(got.normed[0], normed)
    assert_agree(got.feedback[0], feedback)
    logits = drafter.draft_logits(got.normed)[0]
    assert logits.shape == (9, DRAFT_VOCABULARY if variant["reduced"] else VOCABULARY)
    assert_agree(logits, normed @ head.T)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS[::3], ids=label)
def test_draft_step_is_a_row_of_the_teacher_forced_pass(variant: dict[str, Any]) -> None:
    """Step s of the recurrent chain against one causal pass over prompt and drafts with the same feedback as input."""
    target, drafter, formulas = build(variant)
    prompt, steps = 7, 4
    with seeded(8):
        ids = torch.randint(0, VOCABULARY, (prompt + steps,))
        aux = torch.randn(prompt, 3 * drafter.config.target_hidden_size)
    table = formulas.w.get("embed_tokens.weight", target.get_input_embeddings().weight).double()

    session = DraftSession(drafter, batch_size=1, capacity=32, block=8)
    session.absorb(ids[None, :4], aux[None, :4], [4])  # in two parts, as chunked prefill and later rounds do
    session.absorb(ids[None, 4:prompt], aux[None, 4:], [3])
    states = [session.root]
    for step in range(steps):
        states.append(session.step(ids[None, prompt + step, None], states[-1].feedback, after=step, depth=step))

    g = formulas.fuse(aux.double())
    for step, state in enumerate(states):
        normed, feedback = formulas.step(table[ids[: prompt + step]], g)
        assert_agree(state.feedback[0, -1], feedback[-1])
        assert_agree(state.logits[0, -1], drafter.draft_logits(normed[-1].float()).double())
        g = torch.cat((g, feedback[-1:]))


@torch.no_grad()
def test_drafts_leave_no_trace_in_the_cache() -> None:
    """After a round the drafter reads the true hidden states as if it had never drafted."""
    _, drafter, _ = build(VARIANTS[0])
    with seeded(9):
        ids, aux = torch.randint(0, VOCABULARY, (1, 8)), torch.randn(1, 8, 3 * drafter.config.target_hidden_size)
    with_drafts = DraftSession(drafter, batch_size=1, capacity=32, block=8)
    without = DraftSession(drafter, batch_size=1, capacity=32, block=8)
    for session in (with_drafts, without):
        session.absorb(ids[:, :5], aux[:, :5], [5])
    state = with_drafts.root
    for step in range(4):
        state = with_drafts.step(torch.full((1, 1), step), state.feedback, after=step, depth=step)
    for session in (with_drafts, without):
        session.absorb(ids[:, 5:], aux[:, 5:], [3])
    torch.testing.assert_close(with_drafts.root.logits, without.root.logits, atol=1e-6, rtol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("counts", [[3], [20], [3, 3], [5, 0, 2], [20, 1, 7]], ids=str)
def test_a_round_makes_one_rotary_table_at_most(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What turned the absorbed positions goes on to turn the drafts, to the bit, whatever each row absorbed."""
    _, drafter, _ = build(VARIANTS[0])
    rows, width = len(counts), max(counts)
    session = DraftSession(drafter, batch_size=rows, capacity=64, block=32)
    rotary, tables = drafter.rotary, []
    monkeypatch.setattr(drafter, "rotary", lambda positions: tables.append(positions) or rotary(positions))
    for before in (range(1, rows + 1), counts):  # rows start the round that is looked at with unlike lengths
        tables.clear()
        aux = torch.zeros(rows, max(before), 3 * drafter.config.target_hidden_size)
        session.absorb(torch.zeros(rows, max(before), dtype=torch.long), aux, list(before))
    for depth in range(5):
        session.step(torch.zeros(rows, 1, dtype=torch.long), session.root.feedback, after=depth, depth=depth)
        wanted = rotary(session.cache.lengths_tensor[:, None] + depth)
        assert all(map(torch.equal, session.rotary_at(depth), wanted))
    made = [tuple(positions.shape) for positions in tables]
    assert made == ([] if rows == 1 else [(rows, width + 16)]), "a single row goes on with what is left of its table"


def test_canonical_tensors_are_views() -> None:
    """Splitting the fused matrices copies nothing."""
    _, drafter, _ = build(VARIANTS[0])
    own = {tensor.untyped_storage().data_ptr() for tensor in drafter.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in drafter.canonical_tensors().values()} <= own


def test_load_canonical_is_all_or_nothing() -> None:
    _, drafter, _ = build(VARIANTS[0])
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    tensors = dict(drafter.canonical_tensors())
    removed = tensors.pop("fc.weight")
    tensors["layers.0.mlp.extra"] = removed
    tensors["norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointFormatError, match=r"missing: fc.weight; spare: .*extra; norm.weight is \[3\]"):
        drafter.load_canonical(tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


def test_rotary_tables_stay_fp32_when_the_dtype_changes() -> None:
    drafter = Eagle31Drafter(Eagle31Config(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=96))
    positions = torch.tensor([[5, 4000]])
    wanted = drafter.rotary(positions)
    drafter.to(torch.bfloat16)
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    for got, exact in zip(drafter.rotary(positions), wanted, strict=True):
        assert torch.equal(got, exact.to(torch.bfloat16))
