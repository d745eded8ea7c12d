"""Targets whose positions end (GPT-2, OPT, GPT-J, ...): texts up to the last one, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers as hf
from batches import assert_plain, batch_of

from eagle31_hf.serving.engine import Engine, EngineSettings
from families import IDS
from helpers import (
    assert_same_text,
    configured,
    demo_tokenizer,
    left_padded,
    random_drafter,
    random_target,
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
TO_THE_END = {"max_new_tokens": LAST - 9, "pad_token_id": 0}
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
    inputs = left_padded([list(range(5 + row, 14 + row)) for row in range(rows)])
    settings = {"num_assistant_tokens": 6, **SHAPES[shape]}
    for oracle in range(3):
        assert_same_text(model, drafter, inputs, oracle=oracle, settings=settings, do_sample=do_sample, **TO_THE_END)
        assert drafter.stats.reason == ""


@pytest.mark.parametrize("family", ["gpt2", "gptj"])
def test_graphs_keep_to_it_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs look deeper than a text's end."""
    use_fixed_shapes_only(monkeypatch)
    model, drafter = pair(family)
    for rows in (1, 3):
        inputs = left_padded([list(range(5 + row, 14 + row)) for row in range(rows)])
        settings = {"num_assistant_tokens": 6, "acceleration": "compile", "num_assistant_tokens_schedule": "planned"}
        assert_same_text(model, drafter, inputs, oracle=1, settings=settings, do_sample=False, **TO_THE_END)
        assert drafter.stats.fallbacks == []


def test_what_may_pass_it_is_left_to_plain_decoding() -> None:
    """It raises where the text gets there, and writes where the text ends before."""
    model, drafter = pair("gpt2")
    inputs, how = left_padded([list(range(5, 14))]), {"do_sample": False, "pad_token_id": 0}
    free = model.generate(**inputs, max_new_tokens=LAST - 9, **how)[0].tolist()
    with pytest.raises(IndexError):
        model.generate(**inputs, assistant_model=drafter, max_new_tokens=60, **how)
    assert "the target has 40 positions" in drafter.stats.reason
    assert_same_text(model, drafter, inputs, loop="plain", eos_token_id=free[-2], max_new_tokens=60, **how)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_a_served_text_at_its_last_position_fails_none_beside_it(family: str) -> None:
    _, drafter = pair(family)
    with configured(drafter, num_assistant_tokens=6):
        batch = batch_of(drafter, 3, context=LAST, chunk=64)
        assert_plain(
            batch, [(list(range(start, end)), LAST - end + start) for start, end in ((5, 14), (7, 30), (9, 15))]
        )


def test_served_texts_end_where_positions_do() -> None:
    engine = Engine(pair("gpt2")[1], demo_tokenizer(), EngineSettings(context=512))
    engine.close(0)
    assert engine.settings.context == LAST
