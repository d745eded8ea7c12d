"""Processors, criteria and streamers of the caller's: they are asked and shown what plain decoding asks and shows them.

Each prefix of the text once, in order, and nothing behind its end. What only plain decoding can follow (they draw
random numbers, return other scores, see a batch as one) is plain from the start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf.loop import choosing, survive
from eagle31_hf.loop.accept import Acceptor
from eagle31_hf.loop.round import Round
from eagle31_hf.loop.text import Sequences
from eagle31_hf.sampling import callers_code
from helpers import (
    Shown,
    assert_same_text,
    configured,
    drafter_of,
    left_padded,
    oracle_drafts,
    prompts_for,
    seeded,
    target_of,
    use_fixed_shapes_only,
    write,
)
from matrix import pairwise
from memory_faults import Fault

SHAPES: dict[str, dict[str, Any]] = {"chain": {}, "tree": {"draft_top_k": 2, "draft_tree_size": 15}}
LOOPS = SHAPES | {f"{name} compiled": shape | {"acceleration": "compile"} for name, shape in SHAPES.items()}


def prompts(rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    return left_padded(prompts_for("llama", rows, seed=seed))


def assert_plain(inputs: dict[str, Tensor], **how: Any) -> Tensor:
    how = {"max_new_tokens": 20, **how}
    how["settings"] = {"num_assistant_tokens": 4, **how.get("settings", {})}
    return assert_same_text(target_of("llama"), drafter_of("llama"), inputs, **how)


# --- criteria ---------------------------------------------------------------------------------------------------------


def by_row(ids: Tensor, _scores: Any, **_: Any) -> Any:
    return ids[:, -1] % 9 == 0


def first_row(ids: Tensor, _scores: Any, **_: Any) -> Any:
    """As tutorials have it."""
    return any(int(ids[0, -1]) == stop for stop in range(3, 96, 7))


def any_row(ids: Tensor, _scores: Any, **_: Any) -> Any:
    return torch.full((len(ids),), bool((ids[:, -1] % 9 == 0).any()))


def all_rows(ids: Tensor, _scores: Any, **_: Any) -> Any:
    return bool((ids[:, -1] % 2 == 0).all())


def by_text(ids: Tensor, _scores: Any, **_: Any) -> Any:
    texts = [" ".join(map(str, row)) for row in ids[:, -3:].tolist()]
    return torch.tensor(["7" in text and "1" in text for text in texts])


class Calls(hf.StoppingCriteria):
    """A budget of steps."""

    def __init__(self) -> None:
        self.left = 9

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        return torch.full((len(input_ids),), self.left <= 0)


class Clock(Calls):
    """Says when its time is over, of which each look takes some; a plain bool."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1.3  # type: ignore[assignment]
        return self.left <= 0


class LikeEos(hf.EosTokenCriteria):
    """Rows that it ends are padded, too."""


class Shorter(hf.MaxLengthCriteria):
    """Known to nobody by its type."""


CRITERIA: dict[str, Callable[[], list[Any]]] = {
    **{rule.__name__: lambda rule=rule: [rule] for rule in (by_row, first_row, any_row, all_rows, by_text)},
    **{kind.__name__: lambda kind=kind: [kind()] for kind in (Calls, Clock)},
    "Shorter": lambda: [Shorter(max_length=30)],
    "LikeEos": lambda: [LikeEos(list(range(3, 96, 5)))],
    "EosTokenCriteria": lambda: [hf.EosTokenCriteria([3, 8, 13, 18, 23, 28])],
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize(
    ("kind", "rows", "do_sample", "streams"), pairwise([*CRITERIA], (1, 2, 3, 4), (False, True), (False, True))
)
def test_texts_end_and_are_shown_as_in_plain_decoding(kind: str, rows: int, do_sample: bool, streams: bool) -> None:
    shown: list[Shown] = []

    def fresh() -> dict[str, Any]:
        shown.append(Shown())
        return {"stopping_criteria": CRITERIA[kind](), **({"streamer": shown[-1]} if streams else {})}

    is_own = rows == 1 or (kind == "EosTokenCriteria" and not streams)
    why = "" if is_own else "Shown" if kind == "EosTokenCriteria" else kind
    for seed in range(3):
        inputs = prompts(rows, seed)
        how: dict[str, Any] = {"seed": 5, "do_sample": do_sample}
        free = write("llama", inputs, max_new_tokens=20, **how)  # drafts go on behind the text's end
        text = assert_plain(inputs, loop="own" if is_own else "plain", why=why, truth=free, right=4, fresh=fresh, **how)
        plains, ours = shown[-2:]
        assert (ours.tokens, ours.blocks[-1:]) == (plains.tokens, plains.blocks[-1:])
        assert is_own or ours.blocks == plains.blocks, "all rows at once"
        new, ends = text[:, inputs["input_ids"].shape[1] :].tolist(), set(range(3, 96, 5))
        ends = {"EosTokenCriteria": {3, 8, 13, 18, 23, 28}, "LikeEos": ends}.get(kind, set())
        written = [next((at + 1 for at, token in enumerate(row) if token in ends), len(row)) for row in new]
        assert drafter_of("llama").stats.new_tokens == sum(written), "pads are no new tokens"


# --- processors that keep state ---------------------------------------------------------------------------------------


class Strict(hf.LogitsProcessor):
    """Keeps a sum over the tokens it has seen, likes what that says, and refuses to be shown anything but the next."""

    def __init__(self, ends: Any = ()):
        self.seen: list[int] = []
        self.ends = set(ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[0].tolist()
        assert not self.seen or (ids[:-1] == self.seen and ids[-1] not in self.ends), "not the next prefix"
        self.seen = ids
        liked = sum(ids) % scores.shape[1]
        return scores.index_add(1, torch.tensor([liked]), torch.full((1, 1), 3.0))


@pytest.mark.contract
@pytest.mark.parametrize("shape", LOOPS)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_processor_is_shown_each_prefix_once_and_nothing_behind_the_end(
    shape: str, do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where drafts hit the end of sequence or the length limit and go on."""
    use_fixed_shapes_only(monkeypatch)
    inputs, how = prompts(), {"do_sample": do_sample, "max_new_tokens": 30}
    length = inputs["input_ids"].shape[1]
    free = write("llama", inputs, logits_processor=[Strict()], **how)
    limits: list[dict[str, Any]] = [{}, {"eos_token_id": int(free[0, length + 9])}, {"max_new_tokens": 9}]
    for depth, limit in itertools.product((6, 1), limits):
        shown, ends = list[Strict](), [limit.get("eos_token_id")]

        def fresh(shown: list[Strict] = shown, ends: list[Any] = ends) -> dict[str, Any]:
            shown.append(Strict(ends))
            return {"logits_processor": [shown[-1]]}

        settings = LOOPS[shape] | {"num_assistant_tokens": depth}
        text = assert_plain(inputs, truth=free, right=depth, fresh=fresh, settings=settings, **how | limit)
        assert drafter_of("llama").stats.accepted > 3
        assert [each.seen for each in shown] == [text[0, :-1].tolist()] * 2, "the last token's prefix is the last one"


@pytest.mark.contract
def test_a_function_of_the_users_is_called_as_plain_decoding_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prefix_allowed_tokens_fn` may keep state."""
    use_fixed_shapes_only(monkeypatch)
    calls: list[list[int]] = []

    def fresh() -> dict[str, Any]:
        log: list[int] = []
        calls.append(log)

        def allowed(row: int, ids: Tensor) -> list[int]:
            log.append(len(ids))
            return list(range(len(log) % 3, 96, 3))

        return {"prefix_allowed_tokens_fn": allowed}

    for settings in LOOPS.values():
        assert_plain(prompts(), oracle=0, fresh=fresh, settings=settings)
        assert calls[-1] == calls[-2]


@pytest.mark.contract
@pytest.mark.parametrize("shape", LOOPS)
def test_one_row_of_guidance_is_drafted_for(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own forward passes and cache follow the text; several rows share one cache and are left to plain decoding."""
    use_fixed_shapes_only(monkeypatch)
    assert_plain(prompts(), oracle=0, settings=LOOPS[shape], guidance_scale=1.5)


# --- code that draws, or returns other scores -------------------------------------------------------------------------


class Jitter(hf.LogitsProcessor):
    """Draws from its `first` call on, and is shown one more token each time."""

    def __init__(self, first: int = 1):
        self.first, self.calls, self.last = first, 0, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert self.last in (0, input_ids.shape[1] - 1), "not the next prefix"
        self.last = input_ids.shape[1]
        self.calls += 1
        return scores + 3 * torch.randn_like(scores) if self.calls >= self.first else scores


class Counting(hf.LogitsProcessor):
    """Likes a token for each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_add(1, torch.tensor([self.calls * 5 % 96]), torch.full((len(scores), 1), 2.0))


class Luck(hf.StoppingCriteria):
    """Draws from its `first` call on."""

    def __init__(self, first: int = 1):
        self.first, self.calls = first, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        ends = self.calls >= self.first and bool(torch.rand(()) < 0.1)
        return torch.full((len(input_ids),), ends)


class Other(hf.LogitsProcessor):
    """Returns something else from its `first` call on."""

    def __init__(self, change: Callable[[Tensor], Any], first: int = 1):
        self.change, self.first, self.calls = change, first, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        self.calls += 1
        return self.change(scores) if self.calls >= self.first else scores


def allowing(first: int) -> Callable[[int, Tensor], list[int]]:
    """A `prefix_allowed_tokens_fn` that draws which tokens it allows, from its `first` call on."""
    calls = itertools.count(1)

    def function(row: int, ids: Tensor) -> list[int]:
        return torch.randperm(90)[:40].tolist() if next(calls) >= first else list(range(2, 96, 2))

    return function


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "processor": lambda first: {"logits_processor": [Jitter(first)]},
    "behind one that counts": lambda first: {"logits_processor": [Counting(), Jitter(first)]},
    "before one that counts": lambda first: {"logits_processor": [Jitter(first), Counting()]},
    "criterion": lambda first: {"stopping_criteria": [Luck(first)]},
    "criterion, a processor counts": lambda at: {"stopping_criteria": [Luck(at)], "logits_processor": [Counting()]},
    "both": lambda first: {"stopping_criteria": [Luck(first)], "logits_processor": [Jitter()]},
    "function": lambda first: {"prefix_allowed_tokens_fn": allowing(first)},
    "fewer columns": lambda first: {"logits_processor": [Other(lambda scores: scores[:, :90], first)]},
    "double": lambda first: {"logits_processor": [Other(lambda scores: scores.double() * 1.7, first)]},
}  # fmt: skip


def can_be_followed(case: str, first: int, *_: Any) -> bool:
    """A criterion may draw behind drafts that a processor was shown already."""
    return case != "criterion, a processor counts" or first == 1


@pytest.mark.contract
@pytest.mark.parametrize(
    ("case", "first", "shape", "do_sample", "eos"),
    pairwise([*CASES], (1, 2, 7), [*SHAPES], (False, True), (False, True), allowed=can_be_followed),
)
def test_what_noise_taken_ahead_cannot_follow(case: str, first: int, shape: str, do_sample: bool, eos: bool) -> None:
    """None is asked twice what it has answered; from there on nothing is drafted."""
    shown: list[Shown] = []

    def fresh() -> dict[str, Any]:
        shown.append(Shown())
        return {**CASES[case](first), "streamer": shown[-1]}

    how: dict[str, Any] = {"do_sample": do_sample, "output_scores": True, "return_dict_in_generate": True}
    how["eos_token_id"] = [17, 60, 61, 62] if eos else None
    for seed in range(3):
        settings = SHAPES[shape] | {"speculation_loop": "own"}
        assert_plain(prompts(seed=seed), seed=seed, right=4, settings=settings, fresh=fresh, **how)
        assert shown[-1].tokens == shown[-2].tokens
        assert shown[-1].blocks.count("end") == 1
        stats: Any = drafter_of("llama").stats
        said = [why for why in stats.fallbacks if "draws" in why or "returns" in why]
        assert said == stats.fallbacks
        assert said or stats.new_tokens < max(first, 2)
        assert first > 1 or stats.drafted == 0, "from the first token on"


@pytest.mark.contract
@pytest.mark.parametrize(
    ("case", "rows", "do_sample"), pairwise(["processor", "criterion", "function"], (2, 3), (False, True))
)
def test_batches_that_only_plain_decoding_can_follow(case: str, rows: int, do_sample: bool) -> None:
    assert_plain(prompts(rows), seed=3, loop="plain", fresh=lambda: CASES[case](1), do_sample=do_sample)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(("processor", "first"), [(Counting, 4), (lambda: Jitter(4), 3)], ids=["counts", "draws"])
def test_what_cannot_be_followed_any_more_is_said(processor: Callable[[], Any], first: int, do_sample: bool) -> None:
    """A processor was shown drafts, or drew behind one, before a criterion drew. What it made of them is of no use."""
    inputs, asked = prompts(seed=2), list[list[int]]()
    length = inputs["input_ids"].shape[1]
    free = write("llama", inputs, 2, max_new_tokens=20, do_sample=do_sample, logits_processor=[processor()])

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        asked.append(ids[0].tolist())
        return scores

    how: dict[str, Any] = {"logits_processor": [processor(), note], "stopping_criteria": [Luck(first)]}
    how |= {"max_new_tokens": 20, "do_sample": do_sample}
    with configured(drafter_of("llama"), num_assistant_tokens=4) as drafter, oracle_drafts(free, length, right=4):
        text = write("llama", inputs, 2, assistant_model=drafter, **how)[0].tolist()
    assert any("took random numbers" in why for why in drafter.stats.fallbacks)
    assert all(text[:end] in asked for end in range(length, len(text)))


FAULTS: dict[str, tuple[Any, str]] = {
    "the walk": (Acceptor, "accept"),
    "the round's judgement": (Round, "accept"),
    "a choice": (choosing, "choose"),
    "a later processor": (hf.TopKLogitsWarper, "__call__"),
    "a criterion": (Sequences, "_must_stop"),
    "commit": (Round, "commit"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", ["keeps state", "processor", "criterion", "both", "fewer columns"])
@pytest.mark.thorough(every=2)
def test_nothing_is_asked_or_drawn_twice_where_memory_runs_out(
    case: str, fault: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round is judged again, and what was said and drawn the first time holds."""
    monkeypatch.setattr(survive, "give_back_memory", lambda: None)  # collects garbage, for long
    fresh = CASES | {"keeps state": lambda _first: {"logits_processor": [Strict()]}}
    how: dict[str, Any] = {"do_sample": True, "output_scores": True, "return_dict_in_generate": True, "written": {}}
    how |= {"seed": 5, "right": 4, "settings": SHAPES[shape], "fresh": lambda: fresh[case](3)}
    assert_plain(prompts(), **how)
    raised = 0
    for at in range(1, 7):
        with Fault(at).after(*FAULTS[fault]) as failing:
            assert_plain(prompts(), **how)
        raised += failing.raised
    assert raised or (case, fault) == ("both", "a choice"), "torch draws from the first token on"


def test_a_carried_cache_is_left_as_it_was_and_then_filled() -> None:
    caches: list[Any] = []

    def fresh() -> dict[str, Any]:
        caches.append(hf.DynamicCache(config=target_of("llama").config))
        return {"past_key_values": caches[-1], **CASES["processor"](5)}

    assert_plain(prompts(), seed=3, fresh=fresh, return_dict_in_generate=True, do_sample=True)
    plain, ours = (cache.layers[0].keys for cache in caches)
    torch.testing.assert_close(plain, ours)


def test_the_generator_of_the_device_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a card's: what draws from either one is noticed."""
    dice, card = torch.Generator(), torch.device("cuda")
    states = {card: dice.get_state, torch.device("cpu"): torch.get_rng_state}
    monkeypatch.setattr(callers_code, "random_state", lambda device: states[device]())
    monkeypatch.setattr(callers_code, "set_random_state", lambda device, state: None)
    for generator in (dice, torch.default_generator):
        code = callers_code.CallersCode(5, card)
        with seeded(3):
            assert code.must_end(5, ["Quiet"], lambda: True)
            assert not code.why
            code.must_end(6, ["Luck"], lambda generator=generator: bool(torch.rand(1, generator=generator) < 2))
        assert "Luck draws" in code.why


# --- code that fails --------------------------------------------------------------------------------------------------


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
    code, drafter = OutOfTheCallersMemory(), drafter_of("llama")
    given: Any = [code]
    if where == "prefix_allowed_tokens_fn":

        def given(row: int, ids: Tensor) -> list[int]:
            code(ids, ids)
            return list(range(96))

    with pytest.raises(torch.OutOfMemoryError, match="the caller's own"):
        write("llama", prompts(), assistant_model=drafter, **{where: given})
    assert code.calls == 3, "it is not asked again"
    assert drafter.stats.memory_steps == {}
    assert_plain(prompts())
