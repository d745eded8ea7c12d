"""Which loop takes a `generate` call and why, and what a loop asked for by name refuses. The text is plain's by any."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.errors import IncompatibleTargetError, UnsupportedGenerationError
from eagle31_hf.generate import hooks
from families import SPARSE_AND_LATENT
from helpers import (
    CONFIGS,
    GREEDY,
    Shown,
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    one,
    prompts_for,
    random_drafter,
    random_prompts,
    random_target,
    seeded,
    target_of,
    write,
)


def drafter_for(config: Any, **fields: Any) -> Eagle31Drafter:
    return random_drafter(random_target(config), **fields)


def never(ids: Tensor, _scores: Any) -> Tensor:
    return torch.zeros(len(ids), dtype=torch.bool)


class Pass(hf.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


SYNTH_ID = {"watermarking_config": hf.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]), "do_sample": True}
SEVERAL = {"num_return_sequences": 2, "do_sample": True}
NOT_OURS: dict[str, tuple[int, dict[str, Any], str]] = {
    "n-grams of prompts": (2, {"encoder_no_repeat_ngram_size": 2, **SEVERAL}, "encoder_no_repeat_ngram_size"),
    "SynthID": (3, SYNTH_ID, "SynthIDTextWatermarkLogitsProcessor"),
    "guidance": (3, {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
    "criteria": (3, {"stopping_criteria": [never]}, "never"),
    "function": (3, {"prefix_allowed_tokens_fn": lambda _row, ids: range(3, 96, 2)}, "PrefixConstrained"),
    "unknown_processor": (3, {"logits_processor": [Pass()]}, "Pass"),
    "hidden_states": (1, {"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "attentions": (1, {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "no_cache": (1, {"use_cache": False}, "use_cache=False"),
    "static_cache": (1, {"cache_implementation": "static"}, "StaticCache"),
}


@pytest.mark.contract
@pytest.mark.parametrize("case", NOT_OURS)
def test_plain_decoding_says_why_and_our_loop_asked_for_by_name_refuses(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows, kwargs, word = NOT_OURS[case]
    drafter, inputs = drafter_for(CONFIGS["llama"]()), left_padded(prompts_for("llama", rows))
    model, how = drafter.binding.model, GREEDY | {"max_new_tokens": 8} | kwargs
    hooks._logged.clear()
    with caplog.at_level(logging.WARNING, logger="eagle31_hf.generate.hooks"):
        for _ in range(2):
            assert_same_text(model, drafter, inputs, loop="plain", why=word, **how)
    said = [record.getMessage() for record in caplog.records if record.name == "eagle31_hf.generate.hooks"]
    assert len(said) == 1, "once, not at every call"
    assert word in said[0]
    if how.get("return_dict_in_generate"):
        output = model.generate(**inputs, assistant_model=drafter, **how)
        assert output.speculation_stats is drafter.stats
        assert len(output.hidden_states or output.attentions) == 8
    refusal = pytest.raises(UnsupportedGenerationError, match=rf"(?s)speculation_loop='own'.*{word}.*auto")
    with configured(drafter, speculation_loop="own"), refusal:
        model.generate(**inputs, assistant_model=drafter, **how)


def test_what_was_asked_for_and_caches_and_beams_of_transformers() -> None:
    target, drafter, plain = target_of("llama"), drafter_of("llama"), {"inputs": one(), "loop": "plain"}
    assert_same_text(target, drafter, why="asked for", settings={"speculation_loop": "plain"}, **plain)
    assert_same_text(target, drafter, one())
    assert_same_text(target, drafter, why="beam search", num_beams=3, **plain)
    assert drafter.stats.rounds == 0, "not those of the call before"

    def cache() -> dict[str, Any]:
        return {"past_key_values": hf.StaticCache(config=target.config, max_cache_len=64)}

    assert_same_text(target, drafter, why="StaticCache", fresh=cache, **plain)
    plain |= {"settings": {"cache_type": "int8"}, "cache_implementation": "static"}
    assert_same_text(target, drafter, why="cache_type is not used there", **plain)
    assert drafter.stats.cache_type == "full"


@pytest.mark.parametrize("other", [{"use_mtp": True}, {"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 2}])
@pytest.mark.parametrize("place", ["call", "config", "target"])
def test_a_drafter_that_is_named_comes_before_other_ways_to_draft(other: dict[str, Any], place: str) -> None:
    drafter = drafter_for(CONFIGS["llama"]())
    target: Any = drafter.binding.model
    wanted = target.generate(**one(), **GREEDY)
    how: dict[str, Any] = other if place == "call" else {}
    if place == "config":
        how = {"generation_config": hf.GenerationConfig(**other)}
    if place == "target":
        target.generation_config.update(**other)
    text = target.generate(**one(), assistant_model=drafter, **GREEDY, **how)
    assert (drafter.stats.loop, drafter.stats.reason) == ("own", "")
    assert torch.equal(text, wanted)


def test_a_target_without_trees_is_decoded_plainly() -> None:
    drafter = drafter_for(CONFIGS["llama"]())
    drafter.binding.tree_unsupported_reason = "the target failed the tree self-test (tried in a test)"
    for rows in (1, 3):
        inputs = left_padded(prompts_for("llama", rows))
        assert_same_text(drafter.binding.model, drafter, inputs, loop="plain", why="tree self-test")


@pytest.mark.contract
def test_prompt_that_ends_with_end_of_sequence() -> None:
    inputs = one()
    last = int(inputs["input_ids"][0, -1])
    text = assert_same_text(target_of("llama"), drafter_of("llama"), inputs, eos_token_id=last)
    assert text.shape[1] > inputs["input_ids"].shape[1]


def test_ensemble_weight_is_refused() -> None:
    with pytest.raises((UnsupportedGenerationError, ValueError, TypeError), match="assistant_ensemble_weight"):
        write("llama", one(), assistant_model=drafter_of("llama"), assistant_ensemble_weight=0.5)


# --- what the model is given ------------------------------------------------------------------------------------------


@pytest.mark.contract
def test_masks_of_another_length_than_the_prompt() -> None:
    """A longer one moves the text's positions; a shorter one is plain's error before ours could be silent."""
    inputs, drafter, why = one(), drafter_of("llama"), "mask is longer"
    mask = inputs["attention_mask"]
    for wide in (torch.cat((mask, mask), 1), torch.cat((0 * mask, mask), 1)):
        assert_same_text(target_of("llama"), drafter, inputs | {"attention_mask": wide}, loop="plain", why=why)
    for short in (mask[:, 2:], torch.cat((0 * mask[:, :1], mask[:, 3:]), 1)):
        with pytest.raises(UnsupportedGenerationError, match="attention mask covers"):
            write("llama", inputs | {"attention_mask": short}, assistant_model=drafter)


@pytest.mark.contract
@pytest.mark.parametrize("masked", [(1, slice(5, None)), (0, 3), (1, slice(None))], ids=["right", "hole", "empty"])
def test_rows_that_are_not_padded_on_the_left_are_decoded_plainly(masked: Any) -> None:
    with seeded(3):
        ids = torch.randint(2, 96, (2, 9))
    mask = torch.ones_like(ids)
    mask[masked] = 0
    inputs, why = {"input_ids": ids, "attention_mask": mask}, "pads behind or between tokens"
    assert_same_text(target_of("llama"), drafter_of("llama"), inputs, loop="plain", why=why)


POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "reversed": lambda straight: straight.flip(1),
    "repeated": lambda straight: straight - (straight >= straight.shape[1] // 2).long(),
    "shifted": lambda straight: straight + 7,
}


@pytest.mark.parametrize("given", POSITIONS)
def test_positions_of_ones_own_are_plains(given: str) -> None:
    model, drafter, inputs = target_of("llama"), drafter_of("llama"), left_padded(random_prompts(1, seed=3))
    straight = torch.arange(inputs["input_ids"].shape[1])[None]
    others = inputs | {"position_ids": POSITIONS[given](straight)}
    assert_same_text(model, drafter, others, loop="plain", why="position_ids")
    assert_same_text(model, drafter, inputs | {"position_ids": straight})


@pytest.mark.parametrize(
    ("changed", "word"),
    [({"pixel_value": torch.zeros(1)}, "pixel_value"), ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "reshape")],
    ids=["invented keyword", "empty prompt"],
)
def test_a_call_that_plain_decoding_refuses_gets_plains_answer(changed: dict[str, Tensor], word: str) -> None:
    said = []
    for assistant in (None, drafter_of("llama")):
        with pytest.raises((ValueError, RuntimeError), match=word) as error:
            write("llama", {"input_ids": one()["input_ids"]} | changed, assistant_model=assistant)
        said.append(str(error.value))
    assert said[0] == said[1]


# --- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("float32", "float64"), ("bfloat16", "float32")])
@pytest.mark.parametrize("tree", [{}, {"draft_top_k": 2, "draft_tree_size": 9}], ids=["chain", "tree"])
def test_a_target_of_another_precision_than_when_attached(before: str, after: str, tree: dict[str, int]) -> None:
    model = random_target(CONFIGS["llama"](), seed=6).to(getattr(torch, before))
    drafter = random_drafter(model, aux_layers=[1, 2, 4])
    model.to(getattr(torch, after))
    assert_same_text(model, drafter, left_padded(random_prompts(3, seed=2)), settings=tree)


@pytest.mark.parametrize("size", [120, 60])
def test_a_vocabulary_resized_after_attaching_is_named(size: int) -> None:
    drafter = drafter_for(CONFIGS["llama"]())
    model = drafter.binding.model
    model.resize_token_embeddings(size, mean_resizing=False)
    with pytest.raises(IncompatibleTargetError, match="attach"):
        model.generate(**left_padded(random_prompts(1, vocabulary=50)), **GREEDY, assistant_model=drafter)


@pytest.mark.skipif(not hasattr(hf, "DeepseekV32Config"), reason="of newer versions of transformers")
def test_layers_that_keep_more_than_keys_and_values_are_decoded_plainly() -> None:
    """An indexer chooses by keys of its own, which no draft could be taken back from."""
    config = hf.DeepseekV32Config(**SPARSE_AND_LATENT, index_topk=6, index_n_heads=2, index_head_dim=8)
    drafter, inputs = drafter_for(config, aux_layers=[1, 2, 4]), left_padded(random_prompts(1))
    assert_same_text(drafter.binding.model, drafter, inputs, loop="plain", why="layers of kind")


def test_a_target_that_wants_a_mask_for_each_row() -> None:
    """XGLM, in batches of prompts that are alike and that are not."""
    config = hf.XGLMConfig(
        vocab_size=96, d_model=64, ffn_dim=96, num_layers=4, attention_heads=4, max_position_embeddings=128,
        init_std=0.15, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    drafter = drafter_for(config, aux_layers=[1, 2, 3])
    for prompts in (random_prompts(1), random_prompts(3), random_prompts(1) * 3):
        assert_same_text(drafter.binding.model, drafter, left_padded(prompts))


@pytest.mark.parametrize("beams", [1, 2])
def test_a_call_within_a_call_takes_neither_its_assistant_nor_its_stats(beams: int) -> None:
    """From a streamer that is shown the prompt, or a processor of a beam search: before a text of ours has begun."""
    drafter = drafter_for(CONFIGS["llama"]())
    target: Any = drafter.binding.model
    seen: list[Any] = []

    def ask() -> None:
        if not seen:
            seen.append((target.generate(**one(), **GREEDY, assistant_model=None), drafter.stats))

    class Asks(Shown, hf.LogitsProcessor):
        def put(self, value: Tensor) -> None:
            ask()

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
            ask()
            return scores

    how: dict[str, Any] = {"streamer": Asks()} if beams == 1 else {"logits_processor": [Asks()], "num_beams": beams}
    text = target.generate(**one(), **GREEDY, assistant_model=drafter, **how)
    assert seen[0][1] is None
    assert drafter.stats.loop == ("own" if beams == 1 else "plain"), drafter.stats.reason
    assert beams > 1 or torch.equal(text, seen[0][0])


def test_a_way_to_decode_of_the_callers_keeps_its_streamer() -> None:
    target, drafter, shown = target_of("llama"), drafter_of("llama"), Shown()

    def decode(model: Any, *prepared: Any, **inputs: Any) -> Any:
        others = [inputs.pop(name) for name in ("logits_processor", "stopping_criteria", "generation_config")]
        return model._sample(*prepared, *others, False, shown, **inputs)

    text = target.generate(**one(), **GREEDY, assistant_model=drafter, custom_generate=decode)
    assert drafter.stats.loop == "own"
    assert shown.tokens == text[0, one()["input_ids"].shape[1] :].tolist()


def test_a_recipe_by_name_is_handed_the_assistant(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, given = target_of("llama"), drafter_of("llama"), list[Any]()

    def recipe(model: Any, **arguments: Any) -> Any:
        given.append(arguments["assistant_model"])
        return model.generate(**arguments)

    monkeypatch.setattr(target, "load_custom_generate", lambda *_, **__: recipe)
    assert_same_text(target, drafter, one(), loop="own", custom_generate="owner/recipe")
    assert given == [None, drafter]
