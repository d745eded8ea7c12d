"""The door: which loop takes a `generate` call and why, what it reports, and that nothing stays broken behind it."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.generation import stopping_criteria as stock_criteria

from eagle31_hf import Eagle31Drafter, Eagle31GenerationConfig, SpeculationStats
from eagle31_hf.decoding.text import Sequences, StopRules
from eagle31_hf.demo import drafter_path
from eagle31_hf.errors import ConfigurationError, Eagle31Error, UnsupportedGenerationError
from eagle31_hf.generation import hooks
from eagle31_hf.stats import PhaseClock
from helpers import (
    CONFIGS,
    configured,
    demo_tokenizer,
    drafter_of,
    held_out_prompts,
    left_padded,
    oracle_drafts,
    prompts_for,
    random_drafter,
    random_target,
    seeded,
    target_of,
)


def greedy(name: str, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | kwargs
    return target_of(name).generate(**inputs, **kwargs)


def one(name: str = "llama") -> dict[str, Tensor]:
    return left_padded(prompts_for(name, 1))


def stats_of(name: str = "llama") -> SpeculationStats:
    stats = drafter_of(name).stats
    assert stats is not None
    return stats


# --- pipeline ---------------------------------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("batch_size", [1, 2])
def test_pipeline(batch_size: int) -> None:
    target, tokenizer = target_of("demo-target"), demo_tokenizer()
    texts = ["How many legs do seven spiders have?", "I need a table for two", "Play some jazz."]
    chats = [[{"role": "user", "content": text}] for text in texts]
    settings = {"max_new_tokens": 20, "do_sample": False, "batch_size": batch_size}
    plain = hf.pipeline("text-generation", model=target, tokenizer=tokenizer)(chats, **settings)
    eagle = hf.pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter_of("demo-target"))
    assert eagle(chats, **settings) == plain
    assert eagle(chats[0], **settings) == plain[0]
    assert stats_of("demo-target").loop == "own"


# --- stats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["own", "stock"])
def test_stats_tell_what_happened(loop: str) -> None:
    inputs = one()
    plain = greedy("llama", inputs)
    settings = {"num_assistant_tokens": 4, "speculation_loop": loop}
    with configured(drafter_of("llama"), **settings) as drafter, oracle_drafts(plain, inputs["input_ids"].shape[1]):
        out = greedy("llama", inputs, assistant_model=drafter, return_dict_in_generate=True)
    stats = stats_of()
    assert out.speculation_stats is stats
    assert stats.loop == loop
    assert stats.reason == ("" if loop == "own" else "asked for")
    assert stats.new_tokens == 16
    assert 0 < stats.accepted < stats.drafted
    # The first token comes from the prefill; each round adds what it accepted and one token, the last ones maybe less.
    assert stats.rounds + stats.accepted >= 15
    assert stats.acceptance_length == pytest.approx((stats.accepted + stats.rounds) / stats.rounds)
    assert len(stats.drafted_at) == len(stats.reached_at) == len(stats.accepted_at) == 4
    assert stats.drafted_at[0] == stats.reached_at[0]
    assert sum(stats.accepted_at) == stats.accepted
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
    assert all(0 <= rate <= 1 for rate in stats.cumulative_acceptance + stats.conditional_acceptance)
    assert min(stats.prefill_s, stats.draft_s, stats.verify_s) > 0
    assert stats.other_s >= 0
    assert json.loads(json.dumps(stats.to_dict()))["accepted"] == stats.accepted
    assert f"{stats.acceptance_length:.2f}" in str(stats)


def test_stats_are_of_the_last_call() -> None:
    drafter = drafter_of("llama")
    greedy("llama", one(), assistant_model=drafter)
    first = stats_of()
    greedy("llama", one(), assistant_model=drafter, max_new_tokens=5)
    assert stats_of() is not first
    assert stats_of().new_tokens == 5
    assert first.new_tokens == 16


def test_stats_of_a_batch_sum_over_rows() -> None:
    inputs = left_padded(prompts_for("llama", 5))
    greedy("llama", inputs, assistant_model=drafter_of("llama"))
    assert stats_of().new_tokens == 5 * 16
    assert stats_of().rounds >= 5


def test_drafts_behind_a_rows_end_still_count_for_the_drafter() -> None:
    """Rows that are nearly done draft as deep as the others need; that must not look like a bad drafter."""
    inputs = left_padded(prompts_for("llama", 3))
    length = inputs["input_ids"].shape[1]
    plain = greedy("llama", inputs, max_new_tokens=40)
    settings = {"num_assistant_tokens": 4, "speculation_loop": "own"}
    truth = plain.clone()  # two rows meet one wrong draft each, so the rows drift apart
    truth[0, length + 1] = (truth[0, length + 1] + 1) % 96
    truth[1, length + 6] = (truth[1, length + 6] + 1) % 96
    for end in (5, 17, 30):
        with configured(drafter_of("llama"), **settings) as drafter, oracle_drafts(truth, length, right=4):
            greedy("llama", inputs, assistant_model=drafter, max_new_tokens=end)
        assert stats_of().drafted - stats_of().accepted <= 2 * 4, "more than the two wrong drafts was refused"


def test_record_round_counts_by_hand() -> None:
    stats = SpeculationStats()
    assert stats.acceptance_length == 0.0
    stats.record_round(depth=2, nodes=2, accepted=[2, 0])
    stats.record_round(depth=3, nodes=7, accepted=[1])
    stats.record_round(depth=0, nodes=0, accepted=[0])
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 11, 3)
    assert stats.drafted_at == [3, 3, 1]
    assert stats.reached_at == [3, 2, 0]
    assert stats.accepted_at == [2, 1, 0]
    assert stats.acceptance_length == 7 / 4
    assert stats.cumulative_acceptance == [2 / 3, 1 / 3, 0.0]
    assert stats.conditional_acceptance == [2 / 3, 1 / 2, 0.0]


def test_steadiness_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens a second, then eight in two; what memory took back and was written again is counted once."""
    now = iter([100.0, 100.5, 101.5, 102.5, 103.5])
    monkeypatch.setattr("eagle31_hf.stats.time.perf_counter", lambda: next(now))
    stats = SpeculationStats()
    assert (stats.first_token_s, stats.speed_variation, stats.slow_tok_per_s) == (None, None, None)
    clock = PhaseClock(stats)
    for total in (1, 9, 13, 11, 17):
        clock.note_tokens(total)
    assert stats.arrivals == [(0.5, 1), (1.5, 8), (2.5, 4), (3.5, 4)]
    assert stats.first_token_s == 0.5
    assert stats.speed_over_time == [8.0, 4.0]
    assert stats.speed_variation == pytest.approx(1 / 3)
    assert stats.slow_tok_per_s == 4.0
    assert stats.to_dict()["slow_tok_per_s"] == 4.0


@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_has_its_time(rows: int) -> None:
    inputs = left_padded(prompts_for("llama", rows))
    target_of("llama").generate(**inputs, max_new_tokens=20, pad_token_id=0, assistant_model=drafter_of("llama"))
    stats = drafter_of("llama").stats
    assert sum(count for _, count in stats.arrivals) == stats.new_tokens
    assert stats.arrivals == sorted(stats.arrivals)
    assert len(stats.arrivals) == stats.passes + 1


def test_phase_clock_charges_phases_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 3.5, 4.0, 10.0])
    monkeypatch.setattr("eagle31_hf.stats.time.perf_counter", lambda: next(now))
    stats = SpeculationStats()
    clock = PhaseClock(stats)
    with clock.phase("draft"):
        pass
    with pytest.raises(ZeroDivisionError), clock.phase("verify"):
        raise ZeroDivisionError
    clock.stop()
    assert (stats.draft_s, stats.verify_s, stats.other_s) == (2.0, 0.5, 7.5)


def test_old_names_of_figures_are_understood_for_a_version() -> None:
    stats = SpeculationStats(other_s=2.5, skipped_rounds=3)
    with pytest.deprecated_call(match="other_s"):
        assert stats.rest_s == 2.5
    with pytest.deprecated_call(match="skipped_rounds"):
        assert stats.rests == 3


# --- draft length -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["own", "stock"])
def test_number_of_assistant_tokens_is_honoured(loop: str) -> None:
    drafter = drafter_of("llama")
    for depth in (1, 3, 7):
        with configured(drafter, num_assistant_tokens=depth, speculation_loop=loop):
            greedy("llama", one(), assistant_model=drafter)
        assert len(stats_of().drafted_at) == depth
        with configured(drafter, num_assistant_tokens=2, speculation_loop=loop):
            greedy("llama", one(), assistant_model=drafter, num_assistant_tokens=depth)
        assert len(stats_of().drafted_at) == depth, "what the call asks for comes first"


def test_trees_have_the_size_asked_for() -> None:
    with configured(drafter_of("llama"), num_assistant_tokens=3, draft_top_k=3, draft_tree_size=9) as drafter:
        for kind in ("static", "dynamic"):
            with configured(drafter, draft_tree=kind):
                greedy("llama", one(), assistant_model=drafter, max_new_tokens=8)
            assert stats_of().drafted <= 8 * stats_of().rounds
            assert stats_of().drafted > 3 * stats_of().rounds, "more than a chain"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_assistant_tokens", 0), ("draft_top_k", 0), ("draft_tree_size", 1), ("draft_tree", "oak"),
        ("speculation_loop", "fast"), ("acceleration", "warp"), ("num_assistant_tokens_schedule", "guess"),
        ("draft_min_confidence", 1.5), ("draft_min_confidence", "low"), ("prefill_chunk_size", -3),
        ("prefill_chunk_size", "four"), ("draft_top_k", 97), ("draft_top_k", True),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(field: str, value: Any) -> None:
    with configured(drafter_of("llama"), **{field: value}) as drafter, pytest.raises(ConfigurationError, match=field):
        greedy("llama", one(), assistant_model=drafter)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_assistant_tokens", -1), ("num_assistant_tokens", "x"), ("prefill_chunk_size", 0), ("dola_layers", "high")],
)
def test_settings_of_a_call_that_make_no_sense(field: str, value: Any) -> None:
    """Each would have gone on silently, or died in torch."""
    with pytest.raises(Eagle31Error, match=field):
        greedy("llama", one(), assistant_model=drafter_of("llama"), **{field: value})


def test_fields_that_nothing_would_read_are_refused_by_name() -> None:
    config = drafter_of("llama").generation_config
    with pytest.raises(ConfigurationError, match=r"'draft_topk'.*draft_top_k"):
        config.draft_topk = 4
    with pytest.raises(ConfigurationError, match=r"'zebra'.*our own are draft_top_k"):
        Eagle31GenerationConfig(zebra=1)
    assert not hasattr(config, "draft_topk")
    twin = copy.deepcopy(config)
    twin.temperature = 0.5
    assert Eagle31GenerationConfig.from_dict(twin.to_dict()).to_dict() == twin.to_dict()


def test_settings_are_a_generation_config() -> None:
    config = Eagle31GenerationConfig(num_assistant_tokens=5, draft_top_k=4)
    assert isinstance(config, hf.GenerationConfig)
    assert (config.num_assistant_tokens, config.draft_top_k) == (5, 4)
    config.check()


# --- which loop -------------------------------------------------------------------------------------------------------


def test_own_loop_is_the_first_choice() -> None:
    greedy("llama", one(), assistant_model=drafter_of("llama"))
    assert (stats_of().loop, stats_of().reason) == ("own", "")


@pytest.mark.parametrize("loop", ["plain", "stock", "own"])
def test_new_tokens_are_those_that_were_written(loop: str) -> None:
    """What fills up an ended row was not written, and neither was what the stock loop accepts behind the end."""
    rows = 1 if loop == "stock" else 3
    inputs = left_padded(prompts_for("llama", rows))
    length = inputs["input_ids"].shape[1]
    free = greedy("llama", inputs, max_new_tokens=20)
    end = int(free[0, length + 6])
    text = greedy("llama", inputs, max_new_tokens=20, eos_token_id=end)[:, length:]
    written = sum(row.index(end) + 1 if end in row else len(row) for row in text.tolist())
    with configured(drafter_of("llama"), speculation_loop=loop) as drafter, oracle_drafts(free, length):
        for kwargs in ({}, {"return_dict_in_generate": True}):
            greedy("llama", inputs, max_new_tokens=20, eos_token_id=end, assistant_model=drafter, **kwargs)
            assert (stats_of().loop, stats_of().new_tokens) == (loop, written)
    assert written < 20 * rows, "or no row has ended early"


@pytest.mark.parametrize("loop", ["plain", "own"])
def test_pads_that_were_written_count(loop: str) -> None:
    """A row that a criterion ends with the very token that fills it up, beside rows that write on."""
    inputs = left_padded(prompts_for("llama", 3))
    length = inputs["input_ids"].shape[1]
    free = greedy("llama", inputs, max_new_tokens=12)

    def ends(ids: Tensor, _scores: Any) -> Tensor:
        """Row 0 after 5 tokens, whichever rows it is shown together with."""
        first = free[0, : length + 5]
        return torch.tensor([torch.equal(row[: len(first)], first) for row in ids])

    settings = {"stopping_criteria": [ends], "pad_token_id": int(free[0, length + 4]), "max_new_tokens": 12}
    for eos, written in (([95], 5 + 12 + 12), (None, 3 * 12)):
        assert eos is None or not torch.isin(free[:, length:], torch.tensor(eos)).any()
        with configured(drafter_of("llama"), speculation_loop=loop) as drafter, oracle_drafts(free, length):
            greedy("llama", inputs, assistant_model=drafter, eos_token_id=eos, **settings)
        assert (stats_of().loop, stats_of().new_tokens) == (loop, written)


def test_plain_can_be_asked_for() -> None:
    with configured(drafter_of("llama"), speculation_loop="plain") as drafter:
        out = greedy("llama", one(), assistant_model=drafter)
    assert torch.equal(out, greedy("llama", one()))
    assert (stats_of().loop, stats_of().reason) == ("plain", "asked for")


SYNTH_ID = {"watermarking_config": hf.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]), "do_sample": True}
FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "SynthID": (SYNTH_ID, "SynthIDTextWatermarkLogitsProcessor"),
    "hidden_states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "no_cache": ({"use_cache": False}, "use_cache=False"),
    "static_cache": ({"cache_implementation": "static"}, "StaticCache"),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
}


@pytest.mark.contract
@pytest.mark.parametrize("case", FALLBACKS)
def test_plain_fallback_says_why(case: str, caplog: pytest.LogCaptureFixture) -> None:
    kwargs, word = FALLBACKS[case]
    drafter = random_drafter(random_target(CONFIGS["llama"]()))
    model = drafter.require_binding().model
    rows = 3 if word.startswith(("SynthID", "Unbatched")) else 1  # one row of theirs is served by the own loop
    settings: dict[str, Any] = left_padded(prompts_for("llama", rows)) | {"max_new_tokens": 8, "pad_token_id": 0}
    settings |= {"do_sample": False} | kwargs
    hooks._logged.clear()
    with seeded(3):
        plain = model.generate(**settings)
    with caplog.at_level(logging.WARNING, logger="eagle31_hf.generation.hooks"):
        for _ in range(2):
            with seeded(3):
                ours = model.generate(**settings, assistant_model=drafter)
    assert drafter.stats is not None
    assert drafter.stats.loop == "plain"
    assert word in drafter.stats.reason
    said = [record.getMessage() for record in caplog.records if record.name == "eagle31_hf.generation.hooks"]
    assert len(said) == 1, "once, not at every call"
    assert word in said[0]
    if hasattr(plain, "sequences"):
        assert ours.speculation_stats is drafter.stats
        assert len(ours.hidden_states or ours.attentions) == 8
        plain, ours = plain.sequences, ours.sequences
    assert torch.equal(plain, ours)


def test_a_cache_object_of_another_kind_falls_back() -> None:
    target = target_of("llama")
    cache = hf.StaticCache(config=target.config, max_cache_len=64)
    out = greedy("llama", one(), assistant_model=drafter_of("llama"), past_key_values=cache)
    assert "StaticCache" in stats_of().reason
    assert torch.equal(out, greedy("llama", one()))


def test_a_target_without_trees_goes_to_the_stock_loop() -> None:
    drafter = random_drafter(random_target(CONFIGS["llama"]()))
    binding = drafter.require_binding()
    binding.tree_unsupported_reason = "the target failed the tree self-test (tried in a test)"
    out = binding.model.generate(**one(), max_new_tokens=16, do_sample=False, assistant_model=drafter)
    assert torch.equal(out, greedy("llama", one()))
    assert drafter.stats is not None
    assert drafter.stats.loop == "stock"
    assert "tree self-test" in drafter.stats.reason
    batch = left_padded(prompts_for("llama", 3))
    out = binding.model.generate(**batch, max_new_tokens=16, do_sample=False, assistant_model=drafter, pad_token_id=0)
    assert torch.equal(out, greedy("llama", batch))
    assert drafter.stats.loop == "plain"


class Never(hf.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Pass(hf.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


class Favouring(hf.LogitsProcessor):
    """Likes what its prefix makes it like, and keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.shown += input_ids.tolist()
        liked = input_ids.sum(1, keepdim=True) % scores.shape[1]
        return scores.scatter_add(1, liked, torch.full(liked.shape, 3.0))


@pytest.mark.parametrize(("kind", "do_sample"), [("static", False), ("dynamic", False), ("dynamic", True)])
def test_processors_of_prefixes_are_shown_the_text_alone(kind: str, do_sample: bool) -> None:
    """Of a tree only the nodes that the text passes are processed, one after the other."""
    inputs, length = one(), one()["input_ids"].shape[1]
    plain = greedy("llama", inputs, logits_processor=[Favouring()], max_new_tokens=30)
    shown = Favouring()
    how = {"logits_processor": [shown], "do_sample": do_sample, "max_new_tokens": 30}
    shape = {"num_assistant_tokens": 4, "draft_top_k": 2, "draft_tree_size": 12, "draft_tree": kind}
    with configured(drafter_of("llama"), **shape) as eagle, oracle_drafts(plain, length):
        text = greedy("llama", inputs, assistant_model=eagle, **how)[0].tolist()
    assert stats_of().loop == "own"
    within = [prefix for prefix in shown.shown if len(prefix) < len(text)]
    assert within == [text[:end] for end in range(length, len(text))]
    if not do_sample:
        assert text == plain[0].tolist()
        assert stats_of().rounds < 25, "drafts were accepted"


REFUSED: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "stock_batch": ("stock", 3, {}, "one row at a time"),
    "stock_criteria": ("stock", 1, {"stopping_criteria": [Never()]}, "Never"),
    "stock_chunks": ("stock", 1, {"prefill_chunk_size": 4}, "prefill_chunk_size"),
    "stock_static": ("stock", 1, {"cache_implementation": "static"}, "StaticCache"),
    "own_static": ("own", 1, {"cache_implementation": "static"}, "StaticCache"),
    "own_hidden": ("own", 1, {"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "own_unknown_processor": ("own", 3, {"logits_processor": [Pass()]}, "Pass"),
    "stock_stop_string": ("stock", 1, {"stop_strings": ["zebra"]}, "StopStringCriteria"),
}


@pytest.mark.contract
@pytest.mark.parametrize("case", REFUSED)
def test_a_loop_asked_for_by_name_refuses_what_it_cannot_do(case: str) -> None:
    loop, rows, kwargs, word = REFUSED[case]
    name = "demo-target" if "stop_strings" in kwargs else "llama"
    if "stop_strings" in kwargs:
        kwargs = kwargs | {"tokenizer": demo_tokenizer()}
    inputs = left_padded(prompts_for(name, rows))
    refusal = pytest.raises(UnsupportedGenerationError, match=f"speculation_loop='{loop}'")
    with configured(drafter_of(name), speculation_loop=loop) as drafter, refusal as caught:
        greedy(name, inputs, assistant_model=drafter, **kwargs)
    assert word in str(caught.value)
    assert "auto" in str(caught.value), "says what to do"


def test_stop_string_is_not_left_to_the_stock_loop() -> None:
    drafter = random_drafter(target_of("demo-target"))
    drafter.require_binding().tree_unsupported_reason = "tried in a test"
    inputs = one("demo-target")
    text = demo_tokenizer().decode(greedy("demo-target", inputs)[0, inputs["input_ids"].shape[1] :])
    kwargs = {"stop_strings": [text[6:9]], "tokenizer": demo_tokenizer()}
    plain = greedy("demo-target", inputs, **kwargs)
    assert torch.equal(greedy("demo-target", inputs, assistant_model=drafter, **kwargs), plain)
    assert drafter.stats is not None
    assert drafter.stats.loop == "plain"
    drafter.detach()


@pytest.mark.contract
def test_prompt_that_ends_with_end_of_sequence() -> None:
    """The stock loop of transformers 5.17 would write nothing."""
    inputs = one()
    kwargs = {"eos_token_id": int(inputs["input_ids"][0, -1])}
    plain = greedy("llama", inputs, **kwargs)
    assert plain.shape[1] > inputs["input_ids"].shape[1]
    drafter = drafter_of("llama")
    assert torch.equal(greedy("llama", inputs, assistant_model=drafter, **kwargs), plain)
    with (
        configured(drafter, speculation_loop="stock"),
        pytest.raises(UnsupportedGenerationError, match="end-of-sequence"),
    ):
        greedy("llama", inputs, assistant_model=drafter, **kwargs)


def test_ensemble_weight_is_refused() -> None:
    with pytest.raises((UnsupportedGenerationError, ValueError, TypeError), match="assistant_ensemble_weight"):
        greedy("llama", one(), assistant_model=drafter_of("llama"), assistant_ensemble_weight=0.5)


@pytest.mark.contract
def test_pads_on_the_right_are_refused() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    for mask in ([[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 1, 1], [1, 0, 1, 1]], [[1, 1, 1, 1], [0, 0, 0, 0]]):
        with pytest.raises(UnsupportedGenerationError, match="left"):
            greedy(
                "llama", {"input_ids": ids, "attention_mask": torch.tensor(mask)}, assistant_model=drafter_of("llama")
            )


@pytest.mark.contract
def test_masks_of_another_length_than_the_prompt() -> None:
    """A longer one moves the text's positions; a shorter one is plain's error before ours could be silent."""
    inputs, drafter = one(), drafter_of("llama")
    mask = inputs["attention_mask"]
    for wide in (torch.cat((mask, mask), 1), torch.cat((0 * mask, mask), 1)):
        longer = inputs | {"attention_mask": wide}
        assert torch.equal(greedy("llama", longer, assistant_model=drafter), greedy("llama", longer))
        assert "mask is longer" in stats_of().reason
    for short in (mask[:, 2:], torch.cat((0 * mask[:, :1], mask[:, 3:]), 1)):
        with pytest.raises(UnsupportedGenerationError, match="attention mask covers"):
            greedy("llama", inputs | {"attention_mask": short}, assistant_model=drafter)


# --- errors leave everything usable -----------------------------------------------------------------------------------


class Raising(hf.generation.streamers.BaseStreamer):
    """Raises when the `after`-th block arrives."""

    def __init__(self, error: type[BaseException], after: int):
        self.error, self.left = error, after

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error("stop")

    def end(self) -> None: ...


@pytest.mark.contract
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("loop", ["own", "stock"])
@pytest.mark.parametrize("after", [1, 3])
def test_interrupted_generation_leaves_everything_usable(error: type[BaseException], loop: str, after: int) -> None:
    plain = greedy("gemma3", one())
    with configured(drafter_of("gemma3"), speculation_loop=loop) as drafter:
        with pytest.raises(error):
            greedy("gemma3", one(), assistant_model=drafter, streamer=Raising(error, after))
        binding = drafter.require_binding()
        assert not binding.taps.are_open
        assert binding.taps.are_empty
        assert torch.equal(greedy("gemma3", one(), assistant_model=drafter), plain)
    assert torch.equal(greedy("gemma3", one()), plain)


def test_interrupted_in_the_middle_of_a_forward() -> None:
    plain = greedy("llama", one())
    drafter = drafter_of("llama")
    calls = 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    handle = target_of("llama").model.layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy("llama", one(), assistant_model=drafter)
    handle.remove()
    assert torch.equal(greedy("llama", one(), assistant_model=drafter), plain)


class OutOfTheCallersMemory(hf.LogitsProcessor, hf.StoppingCriteria):
    """A processor or criterion that asks for more memory than there is, the third time it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise torch.OutOfMemoryError("the caller's own")
        return scores if isinstance(scores, Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"])
def test_memory_that_the_callers_code_runs_out_of_is_not_the_targets(where: str) -> None:
    code = OutOfTheCallersMemory()
    given: Any = [code]
    if where == "prefix_allowed_tokens_fn":

        def given(row: int, ids: Tensor) -> list[int]:
            code(ids, ids)
            return list(range(96))

    with pytest.raises(torch.OutOfMemoryError, match="the caller's own"):
        greedy("llama", one(), assistant_model=drafter_of("llama"), **{where: given})
    assert code.calls == 3, "it is not asked again"
    assert stats_of().memory_steps == {}
    assert torch.equal(greedy("llama", one(), assistant_model=drafter_of("llama")), greedy("llama", one()))


# --- others are left alone --------------------------------------------------------------------------------------------


@pytest.mark.contract
def test_other_ways_to_generate_are_untouched() -> None:
    plain = greedy("llama", one())
    assert torch.equal(greedy("llama", one(), prompt_lookup_num_tokens=3), plain)
    assistant = random_target(CONFIGS["llama"](), seed=4)
    assert torch.equal(greedy("llama", one(), assistant_model=assistant), plain)
    with pytest.raises(ValueError, match="num_return_sequences"):
        greedy("llama", one(), assistant_model=assistant, do_sample=True, num_return_sequences=2)


def test_beams_are_transformers_business() -> None:
    greedy("llama", one(), assistant_model=drafter_of("llama"))
    beams = greedy("llama", one(), num_beams=3)
    assert torch.equal(greedy("llama", one(), num_beams=3, assistant_model=drafter_of("llama")), beams)
    assert (stats_of().loop, stats_of().rounds) == ("plain", 0), "not those of the call before"
    assert "beam search" in stats_of().reason


def test_installing_twice_wraps_once() -> None:
    wrapped = hf.GenerationMixin._assisted_decoding
    hooks.install()
    assert hf.GenerationMixin._assisted_decoding is wrapped


def test_generate_leaves_its_arguments_alone() -> None:
    config = hf.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    before = config.to_dict()
    inputs = left_padded(prompts_for("llama", 3))
    copies = {name: tensor.clone() for name, tensor in inputs.items()}
    target_of("llama").generate(**inputs, generation_config=config, assistant_model=drafter_of("llama"))
    assert config.to_dict() == before
    assert all(torch.equal(inputs[name], copies[name]) for name in inputs)
    assert target_of("llama").generation_config.num_assistant_tokens in (None, 20)


# --- a drafter that is never right ------------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("loop", ["own", "stock"])
def test_a_drafter_that_is_never_right_never_changes_the_text(loop: str) -> None:
    inputs = one()
    plain = greedy("llama", inputs)
    wrong = (plain + 1) % 96  # never what the target writes next
    follow_all = oracle_drafts(wrong, inputs["input_ids"].shape[1], right=3)
    with configured(drafter_of("llama"), num_assistant_tokens=3, speculation_loop=loop) as drafter, follow_all:
        ours = greedy("llama", inputs, assistant_model=drafter)
    assert torch.equal(ours, plain)
    assert stats_of().accepted == 0
    assert stats_of().rounds == 15, "one token a round"
    assert stats_of().acceptance_length == 1.0


# --- the demo drafter -------------------------------------------------------------------------------------------------

FIGURES = {
    ("embedded", "gsm8k"): (4.504, (0.87, 0.77, 0.67, 0.62, 0.58)),
    ("embedded", "sgd"): (4.461, (0.90, 0.76, 0.69, 0.60, 0.52)),
    ("embedded", "taskmaster"): (4.565, (0.86, 0.79, 0.74, 0.63, 0.55)),
    ("shared", "sgd"): (4.300, (0.86, 0.73, 0.65, 0.56, 0.49)),  # where the two differ most
}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "name"), FIGURES)
def test_demo_drafters_reach_the_figures_of_their_cards(which: str, name: str) -> None:
    """75 prompts, greedy, a chain of 5, fp32, at most 128 new tokens, end at EOS; in batches of like length."""
    ours = drafter_of("demo-target")
    if which == "embedded":
        ours = Eagle31Drafter.from_pretrained(drafter_path(), target=target_of("demo-target"))
    prompts = sorted(held_out_prompts(name), key=len)
    rounds = accepted = 0
    per_position = torch.zeros(2, 5)
    with configured(ours, num_assistant_tokens=5, speculation_loop="own") as drafter:
        for start in range(0, 75, 15):
            inputs = left_padded(prompts[start : start + 15])
            greedy("demo-target", inputs, assistant_model=drafter, max_new_tokens=128)
            stats = drafter.stats
            assert stats is not None
            rounds, accepted = rounds + stats.rounds, accepted + stats.accepted
            per_position += torch.tensor([stats.accepted_at, stats.drafted_at])
    length, positions = FIGURES[which, name]
    assert (accepted + rounds) / rounds == pytest.approx(length, rel=0.01)
    assert (per_position[0] / per_position[1]).tolist() == pytest.approx(positions, abs=0.02)


# --- sequences --------------------------------------------------------------------------------------------------------


class Even(hf.StoppingCriteria):
    """Ends a row whose last id is even, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.asked += 1
        return input_ids[:, -1] % 2 == 0


def sequences(rules: StopRules, rows: int = 2) -> Sequences:
    return Sequences(torch.full((rows, 3), 9), [0] * rows, rules, pad_id=0)


def test_stop_rules_are_sorted() -> None:
    even, clock = Even(), stock_criteria.MaxTimeCriteria(100.0)
    criteria = hf.StoppingCriteriaList([
        stock_criteria.MaxLengthCriteria(12), stock_criteria.EosTokenCriteria([2, 7]), clock, even,
    ])  # fmt: skip
    rules = StopRules.from_criteria(criteria, max_length=20)
    assert (rules.max_length, rules.eos_ids, rules.clocks, rules.others) == (12, {2, 7}, [clock], [even])


def test_a_block_ends_at_the_first_stop() -> None:
    even = Even()
    text = sequences(StopRules(max_length=20, others=[even]), rows=1)
    assert text.append(0, [5, 7, 8, 9]) == 3
    assert text.new[0] == [5, 7, 8]
    assert even.asked == 3, "once per token, as generate does"
    assert text.live_rows() == []


def test_a_rule_may_answer_with_a_plain_bool() -> None:
    """As LlamaIndex's does; stock generate takes it, too."""
    rules: list[Any] = [lambda input_ids, scores: bool(input_ids[0][-1] == 7), lambda *_: False]
    text = sequences(StopRules(max_length=20, others=rules), rows=1)
    assert text.append(0, [5, 7, 8]) == 2


def test_end_of_sequence_and_padding() -> None:
    text = sequences(StopRules(max_length=20, eos_ids=frozenset({2})))
    assert text.append(0, [5, 2, 6]) == 2
    assert text.append(1, [5, 5, 5, 2]) == 4
    assert text.assemble()[:, 3:].tolist() == [[5, 2, 0, 0], [5, 5, 5, 2]]


def test_length_limit_inside_a_block() -> None:
    text = sequences(StopRules(max_length=5))
    assert text.append(0, [5, 6, 7]) == 2
    assert text.remaining_tokens(0) == 0
    assert text.live_rows() == [1]


def test_without_end_of_sequence_finished_rows_write_on() -> None:
    """`generate` pads finished rows only if there is an EOS; else they go on until the last row has stopped."""
    text = sequences(StopRules(max_length=20, others=[Even()]))
    text.append(0, [4, 5])
    assert text.stopped_at[0] == 1
    text.append(1, [5, 5])
    assert text.live_rows() == [0, 1]
    text.append(1, [5, 6])
    assert text.stopped_at[1] == 4
    assert text.live_rows() == [0], "row 0 still owes the tokens that generate would have shown"
    text.append(0, [7, 7, 7])
    assert text.live_rows() == []
    assert text.assemble()[:, 3:].tolist() == [[4, 5, 7, 7], [5, 5, 5, 6]]


def test_time_ends_every_row() -> None:
    text = sequences(StopRules(max_length=20, clocks=[stock_criteria.MaxTimeCriteria(-1.0)]))
    text.append(0, [5])
    text.append(1, [6])
    text.stop_if_out_of_time()
    assert text.live_rows() == []
    assert text.assemble()[:, 3:].tolist() == [[5], [6]]


def test_prefix_shows_padding_and_drafts() -> None:
    text = Sequences(torch.tensor([[0, 0, 4]]), [2], StopRules(max_length=9), pad_id=0)
    text.append(0, [5])
    assert text.prefix(0, [6, 7]).tolist() == [[0, 0, 4, 5, 6, 7]]


def test_errors_are_of_one_tree() -> None:
    for error in (ConfigurationError, UnsupportedGenerationError):
        assert issubclass(error, Eagle31Error)
