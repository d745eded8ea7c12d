"""Targets that rotate long texts otherwise, and those whose positions end (GPT-2, OPT, GPT-J, ...).

On both sides of that length, and up to the last position, the text is plain's, by a loop that can.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle31_hf.loop.pair import largest_shape
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.engine import Engine
from eagle31_hf.targets.rotation import rotates_alike_up_to
from families import ENDING, LAST
from helpers import (
    GROUPED,
    assert_same_text,
    demo_tokenizer,
    left_padded,
    prompts_of,
    random_drafter,
    random_target,
    use_fixed_shapes_only,
    write,
)
from matrix import pairwise

LIMIT = 40
FACTORS = {"short_factor": [1 + 0.3 * i for i in range(8)], "long_factor": [2 + 1.7 * i for i in range(8)]}
ORIGINAL = {"original_max_position_embeddings": LIMIT}
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "longrope": {"factor": 8.0, **FACTORS, **ORIGINAL},
    "llama3": {"factor": 4.0, **ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
KINDS = [kind for kind in ROPE if kind == "default" or kind in ROPE_INIT_FUNCTIONS] + ["phi3"]
"""Some are those of newer versions of transformers alone."""
DEPENDS = {"dynamic", "longrope", "phi3"}


def target(kind: str) -> Any:
    sizes = {name: value for name, value in GROUPED.items() if name != "head_dim"}
    if kind == "phi3":
        rope: dict[str, Any] = {"rope_scaling": {"rope_type": "longrope", "type": "longrope", **FACTORS}, **ORIGINAL}
        return random_target(hf.Phi3Config(**sizes, **rope))
    sizes["max_position_embeddings"] = LIMIT if kind == "dynamic" else 512
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPE[kind]}
    return random_target(hf.LlamaConfig(**sizes, rope_parameters=rope))


def test_every_rope_type_of_transformers_is_tried() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_is_found(kind: str) -> None:
    model = target(kind)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert rotates_alike_up_to(model) == (LIMIT if kind in DEPENDS else None)
    after = dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thorough(every=4)
def test_on_both_sides_of_it_the_text_is_plain(kind: str) -> None:
    model = target(kind)
    drafter, depends = random_drafter(model, aux_layers=[1, 2, 3]), kind in DEPENDS

    def read_a_short_text() -> dict[str, Any]:
        model(torch.tensor([[5, 6]]))  # "dynamic" goes by the longest text so far until it has read one
        return {}

    for length, new, chunk in [(8, 32, None), (30, 10, 4), (30, 24, None), (60, 12, 16), *[(8, 60, None)] * depends]:
        crosses = depends and length + new > LIMIT
        loop, why = ("plain", "rotates all positions in another way") if crosses else ("own", "")
        how: dict[str, Any] = {"max_new_tokens": new, "prefill_chunk_size": chunk}
        assert_same_text(model, drafter, prompts_of([length]), loop=loop, why=why, fresh=read_a_short_text, **how)


@pytest.mark.parametrize("new_drafter", [True, False])
@pytest.mark.parametrize("earlier", [None, 10, 60])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.thorough(every=4)
def test_a_text_depends_on_earlier_ones_as_plain_text_does(kind: str, earlier: int | None, new_drafter: bool) -> None:
    """ "dynamic" goes by the longest text so far: plain `generate` writes another text behind a long one, and so must
    we, no more and no less, whether the drafter comes before that long text or behind it."""
    ways = []
    for drafted in (False, False, True):
        model = target(kind)
        drafter = random_drafter(model, aux_layers=[1, 2, 3]) if drafted and not new_drafter else None
        if earlier is not None:
            write(model, prompts_of([earlier]), max_new_tokens=40)
        texts = []
        for length in (50, LIMIT, LIMIT - 1, 8):
            if drafted and new_drafter:
                drafter = random_drafter(model, aux_layers=[1, 2, 3])
            texts.append(write(model, prompts_of([length], seed=3), max_new_tokens=8, assistant_model=drafter))
        ways.append(texts)
    plain, again, ours = ways
    assert all(map(torch.equal, plain, again)), "plain text itself goes by something else, too"
    assert all(map(torch.equal, plain, ours))


def test_rows_of_a_batch_keep_away_from_it() -> None:
    """A row that is nearly done is drafted as far as the one that has most to write."""
    model = target("longrope")
    drafter = random_drafter(model, aux_layers=[1, 2, 3])
    for new, loop in ((20, "own"), (30, "plain"), (60, "plain")):
        assert_same_text(model, drafter, prompts_of([10] * 3), loop=loop, max_new_tokens=new)


def test_served_texts_stay_below_it(caplog: pytest.LogCaptureFixture) -> None:
    drafter = random_drafter(target("longrope"), aux_layers=[1, 2, 3])
    with caplog.at_level(logging.WARNING, logger="eagle31_hf"):
        engine = Engine(drafter, demo_tokenizer(), EngineSettings(context=512))
    engine.close(0)
    assert engine.settings.context == LIMIT - largest_shape(drafter, rows=2, by_graphs=False).depth
    assert "another way" in caplog.text
    assert engine.batch.settings == engine.settings


# --- positions that end ---------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"draft_top_k": 2, "draft_tree_size": 12}}


def pair(family: str) -> tuple[Any, Any]:
    model = random_target(ENDING[family]())
    return model, random_drafter(model, aux_layers=[1, 2, 3])


@pytest.mark.parametrize(
    ("family", "rows", "shape", "do_sample"), pairwise([*ENDING], (1, 2, 3), [*SHAPES], (False, True))
)
def test_a_text_may_reach_the_last_position(family: str, rows: int, shape: str, do_sample: bool) -> None:
    """Rows get there one after the other: those that have little left are drafted as far as the others."""
    model, drafter = pair(family)
    inputs = left_padded([list(range(5 + row, 14 + row)) for row in range(rows)])
    settings = {"num_assistant_tokens": 6, **SHAPES[shape]}
    for oracle in range(3):
        assert_same_text(
            model, drafter, inputs, oracle=oracle, settings=settings, do_sample=do_sample, max_new_tokens=LAST - 9
        )
        assert drafter.stats.reason == ""


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_graphs_keep_to_it_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs look deeper than a text's end."""
    use_fixed_shapes_only(monkeypatch)
    model, drafter = pair(family)
    for rows in (1, 3):
        inputs = left_padded([list(range(5 + row, 14 + row)) for row in range(rows)])
        settings = {"num_assistant_tokens": 6, "acceleration": "compile", "num_assistant_tokens_schedule": "planned"}
        assert_same_text(model, drafter, inputs, oracle=1, settings=settings, max_new_tokens=LAST - 9)
        assert drafter.stats.fallbacks == []


def test_what_may_pass_it_is_left_to_plain_decoding() -> None:
    """It raises where the text gets there, and writes where the text ends before."""
    model, drafter = pair("gpt2")
    inputs = left_padded([list(range(5, 14))])
    free = model.generate(**inputs, do_sample=False, max_new_tokens=LAST - 9)[0].tolist()
    with pytest.raises(IndexError):
        model.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=60)
    assert "the target has 40 positions" in drafter.stats.reason
    assert_same_text(model, drafter, inputs, loop="plain", eos_token_id=free[-2], max_new_tokens=60)
