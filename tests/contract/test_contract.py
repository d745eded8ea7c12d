"""The contract: whatever the drafter, the loop and the draft's shape, the text is the one plain `generate` writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from helpers import (
    DEMO_DRAFTER,
    FAMILIES,
    MODELS,
    assert_same_or_tie,
    configured,
    demo_tokenizer,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    random_drafter,
    target_of,
    use_fixed_shapes_only,
)
from matrix import WHOLE, matrix, pairwise

TARGETS = (*FAMILIES, "stories260K", "demo-target")
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"speculation_loop": "own"},
    "static": {"speculation_loop": "own", "draft_top_k": 3, "draft_tree": "static", "draft_tree_size": 14},
    "dynamic": {"speculation_loop": "own", "draft_top_k": 2, "draft_tree_size": 15},
}
COMPILED = {f"{name} compiled": {**shape, "acceleration": "compile"} for name, shape in SHAPES.items()}
OWN = {**SHAPES, **COMPILED}
STOCK = {"speculation_loop": "stock"}
LOOPS = {"stock": STOCK, **SHAPES}
EVERY = {**LOOPS, **COMPILED}
NEW_TOKENS = 24
SHORT = 10
NOT_WHOLE = [name for name in TARGETS if name not in WHOLE]
EVERY_TARGET = [*WHOLE, *(pytest.param(name, marks=pytest.mark.contract) for name in NOT_WHOLE)]
GROUPS = (1,) * 8 + (3,) * 4 + (8,) * 5  # batch sizes: 60 prompts for each target,
DEMO_GROUPS = (1,) * 4 + (3,) * 2 + (8,) * 2  # 26 long ones for the demo target


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled here goes through all that compiling needs (fixed shapes, buckets, padding) but the compiler,
    which `test_acceleration` calls for every family. Buckets are small, so that texts outgrow them.
    """
    use_fixed_shapes_only(monkeypatch)


@dataclass(frozen=True)
class Batch:
    """Prompts as `generate` takes them, and what plain decoding makes of them."""

    inputs: dict[str, Any]
    plain: Tensor

    @property
    def prompt_length(self) -> int:
        return self.inputs["input_ids"].shape[1]


def greedy(name: str, inputs: dict[str, Tensor], **kwargs: Any) -> Any:
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | kwargs
    return target_of(name).generate(**inputs, **kwargs)


PLAIN: dict[tuple[str, ...], Tensor] = {}


def plain_batch(name: str, inputs: dict[str, Tensor], **kwargs: Any) -> Batch:
    """`inputs` and their plain text, which is written once for the same prompts and the same settings."""
    settings = [repr(value) for _, value in sorted(kwargs.items())]
    if any(" at 0x" in setting for setting in settings):  # an object: what it does next time is not known
        return Batch(inputs, greedy(name, inputs, **kwargs))
    key = (name, str(inputs["input_ids"].tolist()), *sorted(kwargs), *settings)
    if key not in PLAIN:
        PLAIN[key] = greedy(name, inputs, **kwargs)
    return Batch(inputs, PLAIN[key])


@cache
def inputs_of(name: str) -> list[dict[str, Tensor]]:
    groups = DEMO_GROUPS if name == "demo-target" else GROUPS
    prompts = prompts_for(name, sum(groups))
    return [left_padded([prompts.pop() for _ in range(size)]) for size in groups]


def batch_of(name: str, size: int, **kwargs: Any) -> Batch:
    return plain_batch(name, left_padded(prompts_for(name, size, seed=17)), **kwargs)


def assert_loop_agrees(name: str, batch: Batch, loop: dict[str, Any], *, oracle: bool = True, **kwargs: Any) -> int:
    """Our text equals `batch.plain`; `kwargs` go to `generate`. Returns the rows that ended in a proven tie."""
    with configured(drafter_of(name), **({"num_assistant_tokens": 5} | loop)) as drafter:
        if oracle:
            with oracle_drafts(batch.plain, batch.prompt_length, seed=batch.prompt_length):
                ours = greedy(name, batch.inputs, assistant_model=drafter, **kwargs)
        else:
            ours = greedy(name, batch.inputs, assistant_model=drafter, **kwargs)
    assert drafter.stats is not None
    assert drafter.stats.loop == loop["speculation_loop"]
    assert drafter.stats.fallbacks == []
    return assert_same_or_tie(target_of(name), batch.plain, ours, batch.inputs["attention_mask"])


# --- prompts, batches, depths -----------------------------------------------------------------------------------------


def by_pair(cases: Iterable[Any]) -> dict[tuple[str, str], list[int]]:
    """Of each target and shape, which batches of the target they are tried on."""
    tried: dict[tuple[str, str], list[int]] = {}
    for name, shape, index in cases:
        tried.setdefault((name, shape), []).append(index)
    return tried


WHOLE_BATCHES = by_pair(itertools.product(WHOLE, OWN, range(len(GROUPS))))


def has_batch(name: str, shape: str, index: int) -> bool:
    return index < len(DEMO_GROUPS if name == "demo-target" else GROUPS)


OTHER_BATCHES = by_pair(pairwise(NOT_WHOLE, [*OWN], range(len(GROUPS)), allowed=has_batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "indices"),
    [
        *((*pair, indices) for pair, indices in WHOLE_BATCHES.items()),
        *(pytest.param(*pair, indices[:1], marks=pytest.mark.contract) for pair, indices in OTHER_BATCHES.items()),
        *((*pair, indices[1:]) for pair, indices in OTHER_BATCHES.items() if indices[1:]),
    ],
    ids=lambda value: f"{len(value)} batches" if isinstance(value, list) else value,
)
def test_own_loop_writes_the_plain_text(name: str, shape: str, indices: list[int]) -> None:
    """506 prompts over all targets: batches of 1, 3 and 8, ragged, chunked and not, right and wrong drafts."""
    ties, sizes = 0, set()
    for index in indices:
        batch = plain_batch(name, inputs_of(name)[index])
        sizes.add(len(batch.plain))
        ties += assert_loop_agrees(
            name,
            batch,
            OWN[shape] | {"num_assistant_tokens": index % 8 + 1},
            oracle=index % 2 == 0,
            prefill_chunk_size=5 if index % 3 == 0 else None,
        )
    assert ties <= 1
    if shape in COMPILED:  # else all of it may have been served by eager code
        kinds = {"chain": "draft", "tree": "draft", "step": "draft"}  # at once or, static trees, level by level
        made = {(kinds.get(kind, kind), rows) for kind, rows, *_ in drafter_of(name).require_binding().compiled.keys}
        wanted = ("verify", "absorb", "draft", *(["advance"] if "static" not in shape and name in WHOLE else []))
        assert made >= {(kind, rows) for kind in wanted for rows in sizes}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_TARGET)
def test_stock_loop_writes_the_plain_text(name: str) -> None:
    """205 prompts over all targets, every K from 1 to 8: each with each on whole families, else each with one."""
    ties = 0
    for index, prompt in enumerate(prompts_for(name, 5 if name == "demo-target" else 25, seed=3)):
        batch = plain_batch(name, left_padded([prompt]), max_new_tokens=SHORT)
        for depth in range(1, 9) if name in WHOLE else (index % 8 + 1,):
            loop = STOCK | {"num_assistant_tokens": depth}
            ties += assert_loop_agrees(name, batch, loop, oracle=(index // 8 + depth) % 2 == 0, max_new_tokens=SHORT)
    assert ties <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_TARGET)
def test_own_chain_at_every_depth(name: str) -> None:
    """208 prompts over all targets, alone and in batches, every K from 1 to 8: as above."""
    sizes = (1, 3, 4) if name == "demo-target" else (1, 8, 8, 8)
    prompts, ties = prompts_for(name, sum(sizes), seed=4), 0
    for index, size in enumerate(sizes):
        inputs = left_padded([prompts.pop() for _ in range(size)])
        batch = plain_batch(name, inputs, max_new_tokens=SHORT)
        for depth in range(1, 9):
            if name in WHOLE or depth % len(sizes) == index:
                loop = SHAPES["chain"] | {"num_assistant_tokens": depth}
                ties += assert_loop_agrees(name, batch, loop, oracle=depth % 3 > 0, max_new_tokens=SHORT)
    assert ties <= 1


@pytest.mark.parametrize("loop", LOOPS)
def test_random_drafter_on_the_demo_target(loop: str) -> None:
    drafter = random_drafter(target_of("demo-target"), draft_vocab_size=512)
    with configured(drafter, **LOOPS[loop]):
        for prompt in prompts_for("demo-target", 3):
            inputs = left_padded([prompt])
            ours = greedy("demo-target", inputs, assistant_model=drafter)
            assert torch.equal(ours, plain_batch("demo-target", inputs).plain)
    drafter.detach()


@pytest.mark.contract
@pytest.mark.parametrize(("name", "shape", "chunk"), pairwise(("llama", "gemma3", "mistral"), [*OWN], (1, 2, 7, 1000)))
def test_prompts_in_chunks(name: str, shape: str, chunk: int) -> None:
    batch = plain_batch(name, inputs_of(name)[-1])
    assert assert_loop_agrees(name, batch, OWN[shape], prefill_chunk_size=chunk) == 0


def test_oracle_reaches_every_number_of_accepted_tokens() -> None:
    """Else the tests above would not see what they are for."""
    for loop in LOOPS.values():
        ended = torch.zeros(5, dtype=torch.long)  # rounds that accepted 0, 1, ... 4 tokens and no more
        for inputs in inputs_of("llama")[:8]:
            assert_loop_agrees("llama", plain_batch("llama", inputs), loop | {"num_assistant_tokens": 4})
            stats = drafter_of("llama").stats
            assert stats is not None
            reached = torch.tensor([*stats.reached_at, stats.accepted_at[-1]])
            accepted = torch.tensor([*stats.accepted_at, 0])
            ended[: len(reached)] += reached - accepted
        assert ended.min() > 0, f"{loop}: {ended.tolist()}"


# --- where the text ends ----------------------------------------------------------------------------------------------


class DigitSum(hf.StoppingCriteria):
    """Ends a row when the ids since the prompt add up to a multiple of `divisor`."""

    def __init__(self, prompt_length: int, divisor: int):
        self.prompt_length, self.divisor = prompt_length, divisor

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, self.prompt_length :].sum(1) % self.divisor == 0


def has_rows(name: str, loop: str, size: int) -> bool:
    """The stock loop takes one row; that rows of the demo target end, few of them show as well."""
    most = {"stock": 1} | dict.fromkeys(COMPILED, 1 if name == "demo-target" else 8)
    return size <= most.get(loop, 3 if name == "demo-target" else 8)


@pytest.mark.parametrize(
    ("name", "loop", "size"), matrix([*FAMILIES, "demo-target"], [*EVERY], (1, 3, 8), allowed=has_rows)
)
def test_end_of_sequence_inside_a_draft(name: str, loop: str, size: int) -> None:
    free = batch_of(name, size)
    new = free.plain[:, free.prompt_length :]
    for at in (0, 1, 4, 11):
        stops = {int(new[0, at]), int(new[-1, (at + 5) % NEW_TOKENS])} - set(free.inputs["input_ids"][:, -1].tolist())
        ends = {"eos_token_id": sorted(stops)}
        if not stops:
            continue
        batch = plain_batch(name, free.inputs, **ends)
        assert batch.plain.shape[1] < free.plain.shape[1] or size > 1
        with oracle_drafts(free.plain, free.prompt_length, seed=at):  # drafts that go on behind the end
            assert_loop_agrees(name, batch, EVERY[loop], oracle=False, **ends)


@pytest.mark.parametrize(("name", "shape", "size", "eos"), matrix(FAMILIES, [*OWN], (1, 3, 8), (False, True)))
def test_custom_criteria_inside_a_block(name: str, shape: str, size: int, eos: bool) -> None:
    free, divisor = batch_of(name, size), (3, 7)[FAMILIES.index(name) % 2]
    ids = {"eos_token_id": int(free.plain[0, -3])} if eos else {}
    rules = {"stopping_criteria": hf.StoppingCriteriaList([DigitSum(free.prompt_length, divisor)])}
    batch = Batch(free.inputs, greedy(name, free.inputs, **ids, **rules))
    with oracle_drafts(free.plain, free.prompt_length, seed=divisor):
        assert_loop_agrees(name, batch, OWN[shape], oracle=False, **ids, **rules)


@cache
def stopped_batch(size: int, start: int) -> tuple[Batch, Batch, dict[str, Any]]:
    """A batch as it goes on, as strings stop it, and how: once, as transformers takes a second to prepare strings."""
    free = batch_of("demo-target", size, max_new_tokens=14)
    texts = demo_tokenizer().batch_decode(free.plain[:, free.prompt_length :])
    stops = {"stop_strings": [texts[0][start : start + 4], texts[-1][start + 9 : start + 11]]}
    settings = stops | {"tokenizer": demo_tokenizer(), "max_new_tokens": 14}
    return free, Batch(free.inputs, greedy("demo-target", free.inputs, **settings)), settings


@pytest.mark.contract
@pytest.mark.parametrize(("shape", "size", "start"), pairwise([*OWN], (1, 3, 8), (3, 17)))
def test_stop_strings_inside_a_block(shape: str, size: int, start: int) -> None:
    free, batch, settings = stopped_batch(size, start)
    with oracle_drafts(free.plain, free.prompt_length, seed=start):
        assert_loop_agrees("demo-target", batch, OWN[shape], oracle=False, **settings)


@pytest.mark.contract
@pytest.mark.parametrize("loop", LOOPS)
def test_length_limits(loop: str) -> None:
    for name in ("qwen3", "demo-target"):
        inputs = left_padded(prompts_for(name, 1))
        length = inputs["input_ids"].shape[1]
        for limit in ({"max_new_tokens": 1}, {"max_new_tokens": 2}, {"max_new_tokens": None, "max_length": length + 7}):
            batch = Batch(inputs, greedy(name, inputs, **limit))
            assert assert_loop_agrees(name, batch, LOOPS[loop] | {"num_assistant_tokens": 8}, **limit) == 0


# --- processors -------------------------------------------------------------------------------------------------------


class OnlyOddAfterEven(hf.LogitsProcessor):
    """A processor of the user's own, looking at the last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        parity = torch.arange(scores.shape[-1])[None] % 2
        return scores.masked_fill(parity == input_ids[:, -1:] % 2, float("-inf"))


def one_third(row: int, ids: Tensor) -> list[int]:
    return list(range((row + len(ids)) % 3, 96, 3))


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, 96, 2))},
    "bad_words": {"bad_words_ids": [[i] for i in range(4, 40)] + [[50, 51], [60, 61, 62]]},
    "prefix_allowed_tokens": {"prefix_allowed_tokens_fn": one_third},
    "sequence_bias": {"sequence_bias": [[[i], -4.0] for i in range(20, 60)] + [[[70, 71], 3.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(10, 60)), "begin_suppress_tokens": [61, 62, 63]},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 5},
    "encoder_pair": {"encoder_repetition_penalty": 1.5},
    "forced_eos": {"forced_eos_token_id": 7},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [9, 11, 13]},
}


def takes_processor(name: str, processor: str, loop: str, size: int) -> bool:
    # The stock loop takes one row, and would call the user's function with drafts.
    return loop != "stock" or (size == 1 and processor != "prefix_allowed_tokens")


@pytest.mark.parametrize(
    ("name", "processor", "loop", "size"),
    # With the compiled loop, where rows that have ended stay in the batch.
    matrix(["llama", "qwen3"], [*PROCESSORS], [*LOOPS, "dynamic compiled"], (1, 3), allowed=takes_processor),
)
def test_processors(name: str, processor: str, loop: str, size: int) -> None:
    kwargs = PROCESSORS[processor]
    assert assert_loop_agrees(name, batch_of(name, size, **kwargs), EVERY[loop], **kwargs) == 0


def test_processors_change_the_text() -> None:
    """Else the test above would hold for a loop that forgets them."""
    for processor, kwargs in PROCESSORS.items():
        without = batch_of("llama", 3).plain
        assert not torch.equal(batch_of("llama", 3, **kwargs).plain, without), processor


@pytest.mark.contract
@pytest.mark.parametrize("loop", SHAPES)
def test_processor_of_the_users_own(loop: str) -> None:
    kwargs = {"logits_processor": hf.LogitsProcessorList([OnlyOddAfterEven()])}
    for name in ("llama", "qwen3"):
        assert assert_loop_agrees(name, batch_of(name, 1, **kwargs), LOOPS[loop], **kwargs) == 0


# --- what else generate returns ---------------------------------------------------------------------------------------


@pytest.mark.contract
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_scores_and_logits(loop: str, size: int) -> None:
    if loop == "stock" and size > 1:
        pytest.skip("the stock loop takes one row")
    kwargs = {"repetition_penalty": 1.3, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for name in ("llama", "gemma3"):
        inputs = left_padded(prompts_for(name, size, seed=17))
        plain = greedy(name, inputs, **kwargs)
        with (
            configured(drafter_of(name), **LOOPS[loop]) as drafter,
            oracle_drafts(plain.sequences, inputs["input_ids"].shape[1]),
        ):
            ours = greedy(name, inputs, assistant_model=drafter, **kwargs)
        assert torch.equal(ours.sequences, plain.sequences)
        assert ours.speculation_stats is drafter.stats
        for mine, theirs in ((ours.scores, plain.scores), (ours.logits, plain.logits)):
            assert len(mine) == len(theirs) == NEW_TOKENS
            for step in range(NEW_TOKENS):
                torch.testing.assert_close(mine[step], theirs[step], atol=1e-4, rtol=1e-4)


@pytest.mark.contract
@pytest.mark.parametrize("loop", SHAPES)
def test_scores_of_rows_that_end_early(loop: str) -> None:
    free = batch_of("llama", 3)
    kwargs = {"eos_token_id": int(free.plain[2, -15]), "return_dict_in_generate": True, "output_logits": True}
    plain = greedy("llama", free.inputs, **kwargs)
    with (
        configured(drafter_of("llama"), num_assistant_tokens=6, **SHAPES[loop]) as drafter,
        oracle_drafts(free.plain, free.prompt_length, right=6),
    ):
        ours = greedy("llama", free.inputs, assistant_model=drafter, **kwargs)
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.logits) == len(plain.logits)
    new = plain.sequences[:, free.prompt_length :]
    for row in range(3):
        ends = (new[row] == kwargs["eos_token_id"]).nonzero()
        written = int(ends[0]) + 1 if len(ends) else new.shape[1]
        for step in range(written):
            torch.testing.assert_close(ours.logits[step][row], plain.logits[step][row], atol=1e-4, rtol=1e-4)
        assert not any(bool(step[row].any()) for step in ours.logits[written:]), "nothing was written there"


class Recorder(hf.generation.streamers.BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


@pytest.mark.contract
@pytest.mark.parametrize("loop", LOOPS)
def test_streamer_gets_the_text(loop: str) -> None:
    for name, at in (("llama", -8), ("demo-target", -6)):
        batch = batch_of(name, 1, eos_token_id=int(batch_of(name, 1).plain[0, at]))
        eos = int(batch.plain[0, -1])
        recorder = Recorder()
        assert_loop_agrees(name, batch, LOOPS[loop], streamer=recorder, eos_token_id=eos)
        assert recorder.tokens == batch.plain[0].tolist()
        assert recorder.ended == 1


@pytest.mark.contract
@pytest.mark.parametrize("shape", SHAPES)
def test_several_sequences_for_each_prompt(shape: str) -> None:
    """Sampling from the one likeliest token is greedy, and allowed to return several."""
    batch = batch_of("llama", 3)
    three = Batch(batch.inputs, batch.plain.repeat_interleave(3, dim=0))
    with configured(drafter_of("llama"), **SHAPES[shape]) as drafter:
        ours = greedy("llama", batch.inputs, assistant_model=drafter, do_sample=True, top_k=1, num_return_sequences=3)
    assert torch.equal(ours, three.plain)


# --- bf16 -------------------------------------------------------------------------------------------------------------


@cache
def bf16_pair() -> Eagle31Drafter:
    target = hf.AutoModelForCausalLM.from_pretrained(MODELS / "demo-target", dtype=torch.bfloat16).eval()
    return Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)


@cache
def bf16_texts() -> list[Batch]:
    """Ten prompts, and what the target alone writes after them."""
    target, options = bf16_pair().require_binding().model, {"do_sample": False, "max_new_tokens": 32}
    prompts = [left_padded([prompt]) for prompt in prompts_for("demo-target", 10)]
    return [Batch(inputs | options, target.generate(**inputs, **options)) for inputs in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_bf16_differs_only_in_ties(loop: str) -> None:
    target, ties = bf16_pair().require_binding().model, 0
    with configured(bf16_pair(), num_assistant_tokens=5, **LOOPS[loop]) as drafter:
        for batch in bf16_texts():
            ours = target.generate(**batch.inputs, assistant_model=drafter)
            ties += assert_same_or_tie(target, batch.plain, ours)
    assert ties < len(bf16_texts()) // 2, "most texts have no tie at all"
