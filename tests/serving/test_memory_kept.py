"""What a running batch takes stays within the plan that `serve` makes for it: all rows full, one prompt being read."""

import torch

from eagle31_hf.benchmark.memory_peaks import StorageMeter
from eagle31_hf.cli.pairs import Drafting, PairSource, load_pair
from eagle31_hf.cli.serve import READING_ROWS
from eagle31_hf.serving.batch import TextBatch, WrittenText
from eagle31_hf.serving.choosing import TokenChooser
from eagle31_hf.serving.requests import Sampling, TextRequest
from eagle31_hf.serving.text import TextWriter

ROWS, CONTEXT, NEW_TOKENS = 2, 1024, 16


@torch.inference_mode()
def fill(pair, chunk):
    """Write texts that fill every row; bytes of all caches then."""
    batch = TextBatch(pair.drafter, max_rows=ROWS, context=CONTEXT, prefill_chunk=chunk)
    for row in range(ROWS):
        prompt = tuple(torch.randint(10, 8000, (CONTEXT - NEW_TOKENS,), generator=torch.manual_seed(row)).tolist())
        request = TextRequest(prompt, NEW_TOKENS, Sampling(temperature=0), ignore_eos=True)
        writer = TextWriter(pair.tokenizer, max_new_tokens=NEW_TOKENS, eos_ids=frozenset(), stops=())
        text = WrittenText(request, writer, TokenChooser(request.sampling, len(prompt)))
        batch.read(batch.begin(text))
        batch.join()
    while batch.texts:
        batch.round()
    return batch.num_bytes


def test_full_rows_and_the_one_that_reads_are_planned_for():
    plans, kept = [], []
    source = PairSource(memory="auto", context=CONTEXT)
    pair = load_pair(source, Drafting(), batch=ROWS + READING_ROWS, on_plan=plans.append)
    meter = StorageMeter()
    meter.loaded(pair.target)
    meter.loaded(pair.drafter)
    peak = meter.peak(lambda: kept.append(fill(pair, plans[0].settings.prefill_chunk)))
    caches = sum(term.num_bytes for term in plans[0].ledger if "cache" in term.name)
    assert 0.98 * kept[0] < caches, "a row to read in is one of the plan's"
    assert peak <= plans[0].peak_bytes
