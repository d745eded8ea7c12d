"""What is put off is read as if it had been read at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle31_hf.cache.graph_sizes import NODE_BUCKET
from eagle31_hf.drafter.session import MOST_UNREAD, MOST_UNREAD_OF_SEVERAL, DraftSession
from eagle31_hf.graphs.captured import CAPTURES, CapturesSteps
from eagle31_hf.graphs.draft_graphs import MOST_PIECES, CompiledDrafting
from eagle31_hf.graphs.graphs import Graphs
from eagle31_hf.loop.pair import Pair
from helpers import VOCABULARY, drafter_of, seeded, use_fixed_shapes_only


def positions(rows: int, count: int) -> tuple[Tensor, Tensor]:
    drafter = drafter_of("llama")
    width = len(drafter.binding.aux_layers) * drafter.config.target_hidden_size
    with seeded(0):
        return torch.randint(3, VOCABULARY, (rows, count)), torch.randn(rows, count, width)


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


@pytest.mark.parametrize("unread", [1, NODE_BUCKET, NODE_BUCKET + 3, MOST_PIECES * NODE_BUCKET, 60])
@torch.no_grad()
def test_graphs_read_what_was_put_off_by_pieces(unread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fixed_shapes_only(monkeypatch)
    tokens, aux = positions(1, 20 + unread)
    graphs, widths = Pair.of(drafter_of("llama")).current_graphs().made_by(CapturesSteps(CAPTURES["cpu"])), []
    eager, graphed = (DraftSession(drafter_of("llama"), batch_size=1, capacity=256, block=64) for _ in range(2))
    drafting, run = CompiledDrafting(graphed, graphs), Graphs.run_or_eager
    monkeypatch.setattr(
        Graphs, "run_or_eager", lambda *args, **kwargs: widths.append(args[1].size) or run(*args, **kwargs)
    )
    for session in (eager, graphed):
        session.absorb(tokens[:, :20], aux[:, :20], [20])
        session.put_off(tokens[:, 20:].tolist(), aux[:, 20:])
    eager.catch_up()
    drafting.catch_up()
    pieces = -(-unread // NODE_BUCKET)
    assert widths == ([NODE_BUCKET] * pieces if pieces <= MOST_PIECES else [])
    assert graphed.cache.lengths == eager.cache.lengths
    torch.testing.assert_close(graphed.root.logits, eager.root.logits)
    torch.testing.assert_close(graphed.root.feedback, eager.root.feedback)
