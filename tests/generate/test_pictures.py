"""Prompts that are more than tokens, read by the model's own first forward and continued by our rounds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cache.layers import SlotLayer
from eagle31_hf.cache.speculative import SpeculativeCache
from eagle31_hf.drafter.session import DraftSession
from eagle31_hf.errors import UnsupportedGenerationError
from eagle31_hf.generate import continuation, routes
from eagle31_hf.loop.round import Round
from eagle31_hf.loop.survive import FallbackStep
from eagle31_hf.targets.prompt_forward import PromptForward
from families import GPT_2, IDS, IMAGE, SEEING_FAMILIES, VIDEO, hearing_inputs, hearing_model, picture_of
from helpers import (
    assert_same_text,
    configured,
    left_padded,
    random_drafter,
    random_prompts,
    random_target,
    side_by_side,
    write,
)
from memory_faults import Fault

FAMILIES = ("gemma3", "qwen2.5_vl")  # windows and pictures that see both ways; positions along several axes


@functools.cache
def pair(family: str) -> tuple[Any, Eagle31Drafter]:
    model = hearing_model() if family == "qwen2_audio" else SEEING_FAMILIES[family].model()
    return model, random_drafter(model, aux_layers=[1, 2, 4])


def assert_is_plains(family: str, inputs: dict[str, Any], **kwargs: Any) -> Tensor:
    """By our own loop, with drafts of which some are right."""
    model, drafter = pair(family)
    tree = {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 9}
    return assert_same_text(model, drafter, inputs, oracle=1, settings=tree, **kwargs)


def film(family: str, seed: int) -> dict[str, Tensor]:
    """Two frames, of which each takes a step in time."""
    frames = {"pixel_values_videos": picture_of(seed, (32, 3 * 8 * 8)), "video_grid_thw": torch.tensor([[2, 4, 4]])}
    ids = torch.tensor([[5, 88, *[VIDEO] * 4, 89, 88, *[VIDEO] * 4, 89, 17, 23]])
    if family == "qwen2.5_vl":  # counts one run of tokens for a film, and the seconds of its frames
        ids = torch.tensor([[5, 88, *[VIDEO] * 8, 89, 17, 23]])
        frames["second_per_grid_ts"] = torch.tensor([2.0])
    kinds = 2 * (ids == VIDEO).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **frames}


@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen2.5_vl", "qwen3_vl", "qwen2_audio"])
def test_films_and_sounds(family: str) -> None:
    texts = [
        assert_is_plains(family, hearing_inputs(seed) if family == "qwen2_audio" else film(family, seed))
        for seed in (1, 2)
    ]
    assert not torch.equal(*texts)


@pytest.mark.parametrize("family", SEEING_FAMILIES)
def test_a_prompt_that_ends_with_its_picture(family: str) -> None:
    """The next token's position may then differ from axis to axis."""
    inputs = SEEING_FAMILIES[family].inputs(1)
    end = int((inputs["input_ids"][0] == IMAGE).nonzero().max()) + 1
    cut = {name: value[:, :end] for name, value in inputs.items() if value.shape == inputs["input_ids"].shape}
    assert_is_plains(family, {**inputs, **cut})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [{"num_return_sequences": 2, "do_sample": True, "top_k": 1},
     {"return_dict_in_generate": True, "output_logits": True}],
    ids=["several texts", "scores"],
)  # fmt: skip
def test_what_else_generate_returns(family: str, how: dict[str, Any]) -> None:
    assert_is_plains(family, SEEING_FAMILIES[family].inputs(1), **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_threads_with_a_picture_each(family: str) -> None:
    model, drafter = pair(family)
    pictures = [SEEING_FAMILIES[family].inputs(n, rows=1 + n % 2, padding=[n, 0][: 1 + n % 2]) for n in range(8)]
    plain = [write(model, inputs) for inputs in pictures]
    write(model, pictures[0], assistant_model=drafter)  # the first of a kind is tried
    texts = side_by_side(lambda n: write(model, pictures[n], assistant_model=drafter), len(pictures))
    assert all(map(torch.equal, texts, plain))


@pytest.mark.parametrize("whole", [True, False], ids=["whole text", "new tokens only"])
@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2.5_vl"])
def test_the_next_turn_still_sees_the_picture(family: str, whole: bool) -> None:
    """In the cache; what is passed is text. Once the turn before is ours, once it is plain."""
    model, drafter = pair(family)
    texts = []
    for first, second in ((None, None), (drafter, drafter), (None, drafter)):
        cache = hf.DynamicCache(config=model.config.get_text_config())
        inputs = SEEING_FAMILIES[family].inputs(1) | {"past_key_values": cache}
        answer = write(model, inputs, return_dict_in_generate=True, assistant_model=first).sequences
        more = torch.cat((answer, torch.tensor([[7, 9, 11]])), dim=1)
        passed = more if whole else more[:, cache.get_seq_length() :]
        turn = {"input_ids": passed, "attention_mask": torch.ones_like(more), "past_key_values": cache}
        texts.append(write(model, turn, assistant_model=second)[:, -16:])
    assert torch.equal(texts[1], texts[0])
    assert torch.equal(texts[2], texts[0])


def test_new_pictures_behind_a_cache_are_plains_business() -> None:
    model, drafter = pair("llava")
    before = left_padded(random_prompts(1, vocabulary=80))
    inputs = SEEING_FAMILIES["llava"].inputs(1)
    whole = torch.cat((write(model, before), inputs["input_ids"]), dim=1)
    inputs |= {"input_ids": whole, "attention_mask": torch.ones_like(whole)}

    def fresh() -> dict[str, Any]:
        cache = hf.DynamicCache(config=model.config.get_text_config())
        write(model, before, past_key_values=cache)
        return {"past_key_values": cache}

    assert_same_text(model, drafter, inputs, loop="plain", why="cache", fresh=fresh)
    assert "pixel" in drafter.stats.reason or "mm_encoder_outputs" in drafter.stats.reason


def test_an_input_that_no_test_knows_goes_by_another_loop_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = pair("qwen3_vl")
    why = "mm_token_type_ids, which our loop does not hand on"
    monkeypatch.setattr(routes, "READ_WITH_THE_PROMPT", {"pixel_values", "mm_encoder_outputs"})
    for rows in (1, 3):
        inputs = SEEING_FAMILIES["qwen3_vl"].inputs(1, rows)
        assert_same_text(model, drafter, inputs, loop="plain", why=why)


def test_an_input_of_every_forward_is_found_out() -> None:
    """GPT-2 adds an embedding for a token's type, also to the tokens it writes."""
    model = random_target(hf.GPT2Config(**GPT_2, **IDS))
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    inputs = left_padded(random_prompts(1))
    inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
    text = assert_same_text(model, drafter, inputs, loop="plain", why="logits differ")
    assert not torch.equal(text, write(model, {**inputs, "token_type_ids": None})), "or nothing is tested"
    with configured(drafter, speculation_loop="own"), pytest.raises(UnsupportedGenerationError, match="token_type_ids"):
        write(model, inputs, assistant_model=drafter)


def test_positions_that_were_counted_wrong_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SEEING_FAMILIES["qwen2.5_vl"].model()
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    monkeypatch.setattr(SpeculativeCache, "offset_positions", lambda *_: None)
    assert_same_text(model, drafter, SEEING_FAMILIES["qwen2.5_vl"].inputs(1), loop="plain")


def test_it_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SEEING_FAMILIES["gemma3"].model()
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    tried, attempt = [], continuation._try
    monkeypatch.setattr(continuation, "_try", lambda *given: tried.append(given) or attempt(*given))
    for picture in (1, 2):
        write(model, SEEING_FAMILIES["gemma3"].inputs(picture), assistant_model=drafter)
    assert len(tried) == 1


PLACES: dict[str, tuple[Any, str, int]] = {
    "trying": (PromptForward, "__call__", 1),
    "first forward": (PromptForward, "__call__", 2),
    "taking over": (SpeculativeCache, "load_dynamic", 2),
    "first write": (SlotLayer, "lazy_initialization", 6),
    "absorb": (DraftSession, "_absorb", 1),
    "later absorb": (DraftSession, "_absorb", 3),
    "verify": (Round, "verify", 2),
    "keep": (SpeculativeCache, "keep", 3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.thorough(every=6)
def test_memory_that_runs_out_changes_no_text(family: str, place: str) -> None:
    model, drafter = pair(family)
    drafter.binding.not_continued.clear()
    inputs = SEEING_FAMILIES[family].inputs(1, rows=3, padding=[0, 5, 2])
    new = write(model, inputs)[1, inputs["input_ids"].shape[1] :].tolist()
    ends = {"eos_token_id": max(new[:-1], key=new.index)}  # what comes up last
    owner, name, at = PLACES[place]
    loop, why = ("plain", "memory ran out") if place == "trying" else ("own", "")
    with Fault(at).before(owner, name) as fault:
        assert_same_text(model, drafter, inputs, oracle=2, loop=loop, why=why, **ends)
    assert fault.raised
    if place == "trying":
        assert not drafter.binding.not_continued, "it is tried again"
    else:
        assert FallbackStep.FREE.value in drafter.stats.memory_steps
