"""Plain decoding by graphs stands beside a drafter in benchmarks: what the drafter is worth, and what the compiler."""

import pytest
import torch

from eagle31_hf.measure.calls import PLAIN, PLAIN_COMPILED
from eagle31_hf.measure.pair import measure_loops
from eagle31_hf.measure.run_settings import RunSettings
from helpers import drafter_of, random_prompts, use_fixed_shapes_only


def test_the_loop_benchmark_tells_compiler_and_drafter_apart(monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    wanted = RunSettings(
        new_tokens=6, batch_sizes=(1, 2), repeats=1, depth=3, compiled=True, ignore_eos=True, as_configured=True,
        methods=(PLAIN, PLAIN_COMPILED, "chain", "chain compiled"),
    )  # fmt: skip
    prompts = [torch.tensor(ids) for ids in random_prompts(2)]
    _, found = measure_loops(drafter_of("llama"), prompts, wanted, lambda _: None)
    records = {(record.summary.method, record.batch_size): record.to_dict() for record in found}
    for size in (1, 2):
        alone, chain = records[PLAIN_COMPILED, size], records["chain compiled", size]
        assert alone["acceptance_length"] == 1.0
        assert alone["equal_texts"] == alone["texts"]
        assert chain["by_compiler"] == pytest.approx(alone["speedup"])
        assert chain["by_drafter"] * chain["by_compiler"] == pytest.approx(chain["speedup"])
        assert records["chain", size]["by_drafter"] is None
        assert records[PLAIN, size]["by_compiler"] is None
