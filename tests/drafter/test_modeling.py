"""The drafter network and its session at work; formulas are tried in tests/checkpoints/test_published_drafts.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle31_hf import Eagle31Config, Eagle31Drafter
from eagle31_hf.drafter.session import MOST_UNREAD, MOST_UNREAD_OF_SEVERAL, DraftSession
from eagle31_hf.errors import CheckpointFormatError
from helpers import VOCABULARY, drafter_of, seeded


def states(drafter: Eagle31Drafter, rows: int, length: int) -> Tensor:
    """Any hidden states of a target, `(rows, length, A*Ht)`."""
    with seeded(9):
        return torch.randn(rows, length, 3 * drafter.config.target_hidden_size)


@torch.no_grad()
def test_drafts_leave_no_trace_in_the_cache() -> None:
    """After a round the drafter reads the true hidden states as if it had never drafted."""
    drafter = drafter_of("llama")
    ids, aux = torch.arange(40, 48)[None], states(drafter, 1, 8)
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
@pytest.mark.parametrize(
    ("counts", "widths"), [([3], []), ([20], []), ([3, 3], [16]), ([5, 0, 2], [16]), ([20, 1, 7], [20, 16])], ids=str
)
def test_a_rounds_rotary_tables_are_made_once(
    counts: list[int], widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What turned a draft turns the positions absorbed next, and a single row goes on with what is left of its table.
    Several rows that read more than a draft has need one for that, too."""
    drafter = drafter_of("llama")
    rows = len(counts)
    session = DraftSession(drafter, batch_size=rows, capacity=64, block=32)
    rotary, tables = drafter.rotary, []
    monkeypatch.setattr(drafter, "rotary", lambda positions: tables.append(positions) or rotary(positions))
    for before in (range(1, rows + 1), counts):  # rows start the round that is looked at with unlike lengths
        tables.clear()
        aux = states(drafter, rows, max(before))
        session.absorb(torch.zeros(rows, max(before), dtype=torch.long), aux, list(before))
        for depth in range(5):
            session.step(torch.zeros(rows, 1, dtype=torch.long), session.root.feedback, after=depth, depth=depth)
            wanted = rotary(session.cache.placement.lengths_tensor[:, None] + depth)
            assert all(map(torch.equal, session.rotary_at(depth), wanted))
    assert [tuple(positions.shape) for positions in tables] == [(rows, width) for width in widths]


def test_canonical_tensors_are_views() -> None:
    """Splitting the fused matrices copies nothing."""
    drafter = drafter_of("llama")
    own = {tensor.untyped_storage().data_ptr() for tensor in drafter.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in drafter.canonical_tensors().values()} <= own


def test_load_canonical_is_all_or_nothing() -> None:
    drafter = drafter_of("llama")
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


# --- what is put off is read as if it had been read at once ----------------------------------------------------------


def positions(rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and hidden states of any text."""
    with seeded(0):
        return torch.randint(3, VOCABULARY, (rows, count)), states(drafter_of("llama"), rows, count)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("block", [16, 200])
@torch.no_grad()
def test_parts_that_were_put_off_are_read_in_order(rows: int, block: int) -> None:
    """Single tokens, a part that is wider than there is room for, and more of them than may wait."""
    most = MOST_UNREAD if rows == 1 else MOST_UNREAD_OF_SEVERAL
    parts = [1, 1, 5, most + 3, 1, 2, *[1] * most, 1]
    tokens, aux = positions(rows, sum(parts))
    settings = {"batch_size": rows, "capacity": sum(parts) + block, "block": block}
    at_once, later = (DraftSession(drafter_of("llama"), **settings) for _ in range(2))
    at_once.absorb(tokens, aux, [sum(parts)] * rows)
    start = 0
    for width in parts:
        later.put_off(tokens[:, start : start + width].tolist(), aux[:, start : start + width])
        start += width
    later.catch_up()
    assert later.cache.lengths == at_once.cache.lengths
    torch.testing.assert_close(later.root.logits, at_once.root.logits)
    torch.testing.assert_close(later.root.feedback, at_once.root.feedback)
