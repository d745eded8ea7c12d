"""Targets whose positions end (GPT-2, OPT, GPT-J, ...): texts up to the last one, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from batches import batch_of, plain, text_of, write_all

from eagle31_hf.serving.engine import Engine, EngineSettings
from families import IDS
from helpers import (
    configured,
    demo_tokenizer,
    left_padded,
    oracle_drafts,
    random_drafter,
    random_target,
    seeded,
    use_fixed_shapes_only,
)
from matrix import pairwise

LAST = 40
GPT: dict[str, Any] = {
    "vocab_size": 96, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LAST, "initializer_range": 0.15, **IDS,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": LAST, **IDS,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hf.GPT2Config(**GPT),
    "gptj": lambda: hf.GPTJConfig(**GPT, rotary_dim=8),
    "codegen": lambda: hf.CodeGenConfig(**GPT, rotary_dim=8),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**GPT),
    "opt": lambda: hf.OPTConfig(**SIZES, ffn_dim=80, word_embed_proj_dim=64, init_std=0.15),
    "biogpt": lambda: hf.BioGptConfig(**SIZES, intermediate_size=80, initializer_range=0.15),
    "ctrl": lambda: hf.CTRLConfig(vocab_size=96, n_positions=LAST, n_embd=64, dff=80, n_layer=4, n_head=4, **IDS),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"draft_top_k": 2, "draft_tree_size": 12}}


def pair(family: str) -> tuple[Any, Any]:
    model = random_target(FAMILIES[family]())
    return model, random_drafter(model, aux_layers=[1, 2, 3])


@pytest.mark.parametrize(
    ("family", "rows", "shape", "do_sample"), pairwise([*FAMILIES], (1, 2, 3), [*SHAPES], (False, True))
)
def test_a_text_may_reach_the_last_position(family: str, rows: int, shape: str, do_sample: bool) -> None:
    """Rows get there one after the other: those that have little left are drafted as far as the others."""
    model, drafter = pair(family)
    prompts = [list(range(5 + row, 14 + row)) for row in range(rows)]
    inputs, length = left_padded(prompts), 9
    how = {"do_sample": do_sample, "max_new_tokens": LAST - length, "pad_token_id": 0}
    with seeded(3):
        wanted = model.generate(**inputs, **how)
    for seed in range(3):
        settings = {"num_assistant_tokens": 6, "num_assistant_tokens_schedule": "constant", **SHAPES[shape]}
        with configured(drafter, **settings), oracle_drafts(wanted, length, seed), seeded(3):
            assert torch.equal(wanted, model.generate(**inputs, assistant_model=drafter, **how))
        assert drafter.stats is not None
        assert (drafter.stats.loop, drafter.stats.reason) == ("own", "")


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_graphs_keep_to_it_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs look deeper than a text's end."""
    use_fixed_shapes_only(monkeypatch)
    model, drafter = pair(family)
    for rows in (1, 3):
        inputs = left_padded([list(range(5 + row, 14 + row)) for row in range(rows)])
        how = {"do_sample": False, "max_new_tokens": LAST - 9, "pad_token_id": 0}
        wanted = model.generate(**inputs, **how)
        with configured(drafter, num_assistant_tokens=6, acceleration="compile"), oracle_drafts(wanted, 9, right=3):
            assert torch.equal(wanted, model.generate(**inputs, assistant_model=drafter, **how))
        assert drafter.stats is not None
        assert (drafter.stats.loop, drafter.stats.fallbacks) == ("own", [])


def test_what_may_pass_it_is_left_to_plain_decoding() -> None:
    """It raises where the text gets there, and writes where the text ends before."""
    model, drafter = pair("gpt2")
    inputs = left_padded([list(range(5, 14))])
    free = model.generate(**inputs, do_sample=False, max_new_tokens=LAST - 9)[0].tolist()
    how = {"do_sample": False, "max_new_tokens": 60, "pad_token_id": 0}
    with pytest.raises(IndexError):
        model.generate(**inputs, assistant_model=drafter, **how)
    assert drafter.stats is not None
    assert "the target has 40 positions" in drafter.stats.reason
    wanted = model.generate(**inputs, eos_token_id=free[-2], **how)
    assert torch.equal(wanted, model.generate(**inputs, eos_token_id=free[-2], assistant_model=drafter, **how))


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_a_served_text_at_its_last_position_fails_none_beside_it(family: str) -> None:
    model, drafter = pair(family)
    prompts = [(list(range(5, 14)), LAST - 9), (list(range(7, 30)), LAST - 23), (list(range(9, 15)), LAST - 6)]
    settings = {"num_assistant_tokens": 6, "num_assistant_tokens_schedule": "constant"}
    with configured(drafter, **settings):
        batch = batch_of(drafter, 3, context=LAST, chunk=64)
        written = write_all(batch, [text_of(*each) for each in prompts])
    assert written == [plain(model, *each) for each in prompts]


def test_served_texts_end_where_positions_do() -> None:
    _, drafter = pair("gpt2")
    tokenizer: Any = demo_tokenizer()
    engine = Engine(drafter, tokenizer, EngineSettings(context=512))
    engine.close(0)
    assert engine.settings.context == LAST
