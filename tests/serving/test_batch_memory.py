"""What a running batch takes stays within the plan that `serve` makes for it: all rows full, one prompt being read."""

import pytest
import torch
from batches import batch_of, read_in_pieces, text_of

from eagle31_hf.cli.pairs import DraftOptions, PairSource, load_pair
from eagle31_hf.cli.serve import READING_ROWS
from eagle31_hf.memory.dry_run import StorageCounter
from helpers import configured
from peak_runs import StorageMeter

ROWS, CONTEXT, NEW_TOKENS = 2, 1024, 16


@torch.inference_mode()
def fill(pair, chunk):
    """Write texts that fill every row; bytes of all caches then."""
    batch = batch_of(pair.drafter, ROWS, context=CONTEXT, chunk=chunk)
    for row in range(ROWS):
        ids = torch.randint(10, 8000, (CONTEXT - NEW_TOKENS,), generator=torch.manual_seed(row))
        read_in_pieces(batch, text_of(ids.tolist(), NEW_TOKENS), writing=False)
    while batch.texts:
        batch.round()
    return batch.num_bytes


@torch.inference_mode()
@pytest.mark.thorough
def test_texts_that_come_and_go_leave_nothing_behind():
    """Storages counted: after 69 texts as many bytes are alive as after 39, when the same rows are full."""
    pair = load_pair(PairSource())
    alive = []
    drafts = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}  # else by time, which masks tell
    with configured(pair.drafter, **drafts), StorageCounter() as counter:
        batch = batch_of(pair.drafter, ROWS, context=128, chunk=32)
        for number in range(69):
            while len(batch.texts) == ROWS:
                batch.round()
            text = text_of(range(10, 40 + 7 * (number % 5)), 8 + number % 3)
            read_in_pieces(batch, text, writing=False)
            if number in (38, 68):
                alive.append(counter.live_bytes)
    assert alive[0] == alive[1]


def test_full_rows_and_the_one_that_reads_are_planned_for():
    kept = []
    source = PairSource(memory="auto", context=CONTEXT)
    pair = load_pair(source, DraftOptions(), batch=ROWS + READING_ROWS)
    meter = StorageMeter()
    meter.loaded(pair.target)
    meter.loaded(pair.drafter)
    peak = meter.peak(lambda: kept.append(fill(pair, pair.plan.settings.prefill_chunk)))
    caches = sum(term.num_bytes for term in pair.plan.ledger if "cache" in term.name)
    assert 0.98 * kept[0] < caches, "a row to read in is one of the plan's"
    assert peak <= pair.plan.peak_bytes
