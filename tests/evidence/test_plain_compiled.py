"""Plain decoding over the compiled target writes plain decoding's text, and reads nothing for a drafter."""

import pytest
import torch

from eagle31_hf.compiled.graphs import Graphs
from eagle31_hf.evidence.calls import PLAIN, PLAIN_COMPILED
from eagle31_hf.evidence.pair import measure_loops
from eagle31_hf.evidence.plain_compiled import write_plain_compiled
from eagle31_hf.evidence.prompt_batches import batches_of
from eagle31_hf.evidence.run_settings import RunSettings
from helpers import FAMILIES, configured, drafter_of, random_prompts, target_of, use_fixed_shapes_only

GREEDY = {"max_new_tokens": 12, "do_sample": False}


def batch_of(rows):
    (batch,) = batches_of([torch.tensor(ids) for ids in random_prompts(rows)], rows, 0)
    return batch


def plain(name, batch, **generate):
    return target_of(name).generate(**batch.to_generate(), **generate)[:, batch.input_ids.shape[1] :]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_is_plain_decodings(name, rows, monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    drafter, batch = drafter_of(name), batch_of(rows)
    monkeypatch.setattr(drafter, "decode", lambda *_: pytest.fail("the drafter is not run"))
    with configured(drafter, acceleration="compile"):
        tokens, stats = write_plain_compiled(drafter, batch, **GREEDY)
    assert torch.equal(tokens, plain(name, batch, **GREEDY))
    assert (stats.passes, stats.drafted, stats.acceptance_length) == (11, 0, 1.0)
    windows = name in ("mistral", "gemma3")  # whose masks are made outside of graphs
    kinds = [(key.kind, key.rows) for key in Graphs.of(drafter).keys if key.kind == "plain"]
    assert (("plain", rows) in kinds) != windows


def test_ends_and_processors_are_those_of_generate(monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    drafter, batch = drafter_of("llama"), batch_of(2)
    wanted = {**GREEDY, "repetition_penalty": 1.3, "min_new_tokens": 3, "pad_token_id": 0}
    wanted["eos_token_id"] = int(plain("llama", batch, **wanted)[0, 5])
    with configured(drafter, acceleration="compile"):
        tokens, _ = write_plain_compiled(drafter, batch, **wanted)
    assert torch.equal(tokens, plain("llama", batch, **wanted))


def test_drawn_tokens_follow_the_seed(monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    drafter, batch, texts = drafter_of("llama"), batch_of(1), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with configured(drafter, acceleration="compile"):
            texts.append(write_plain_compiled(drafter, batch, max_new_tokens=12, do_sample=True, temperature=1.0)[0])
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_the_loop_benchmark_tells_compiler_and_drafter_apart(monkeypatch):
    use_fixed_shapes_only(monkeypatch)
    wanted = RunSettings(
        new_tokens=6, batch_sizes=(1, 2), repeats=1, depth=3, compiled=True, ignore_eos=True, as_configured=True,
        methods=(PLAIN, PLAIN_COMPILED, "chain", "chain compiled"),
    )  # fmt: skip
    prompts = [torch.tensor(ids) for ids in random_prompts(2)]
    _, found = measure_loops(drafter_of("llama"), prompts, wanted, lambda _: None)
    records = {(record.name, record.batch_size): record.to_dict() for record in found}
    for size in (1, 2):
        alone, chain = records[PLAIN_COMPILED, size], records["chain compiled", size]
        assert alone["acceptance_length"] == 1.0
        assert alone["equal_texts"] == alone["texts"]
        assert chain["by_compiler"] == pytest.approx(alone["speedup"])
        assert chain["by_drafter"] * chain["by_compiler"] == pytest.approx(chain["speedup"])
        assert records["chain", size]["by_drafter"] is None
        assert records[PLAIN, size]["by_compiler"] is None
