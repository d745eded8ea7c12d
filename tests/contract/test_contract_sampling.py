"""The contract under sampling: whatever the drafter, the first three tokens follow the target's own distribution.

The vocabulary is so small that this distribution is computed exactly; what the loops write is counted and compared by
a chi-square test. Seeds are fixed, so a p-value is the same every time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from scipy import stats
from torch import Tensor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.decoding import eager_round
from eagle31_hf.decoding.decoder import SpeculativeDecoder
from eagle31_hf.decoding.request import DecodingRequest
from eagle31_hf.decoding.text import Sequences, StopRules
from eagle31_hf.sampling.logits_processing import ScoreProcessing
from eagle31_hf.trees.shape import DraftShape
from eagle31_hf.trees.static import StaticTopology
from helpers import GROUPED, calibrated, configured, random_drafter, random_target, seeded, switching_policies
from matrix import pairwise

V = 8
RUNS = 10_000
P_VALUE = 0.01
PROMPT = [3, 5, 1]
SETTINGS: dict[str, dict[str, Any]] = {
    "t1": {"temperature": 1.0, "top_k": 0},
    "top_p": {"temperature": 0.7, "top_p": 0.8, "top_k": 0},
    "top_k": {"temperature": 1.0, "top_k": 4},
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_assistant_tokens": 2},  # two drafts and what the target adds: three tokens
    "static": {"num_assistant_tokens": 2, "draft_top_k": 3, "draft_tree": "static", "draft_tree_size": 9},
    "dynamic": {"num_assistant_tokens": 2, "draft_top_k": 3, "draft_tree_size": 9},
}
DRAFTERS = ("good", "bad", "adversarial")


@cache
def target() -> Any:
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    config = {**GROUPED, **sizes, "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.35}
    model = random_target(hf.LlamaConfig(**config), seed=4)
    model.generation_config.eos_token_id = None
    return model


@cache
def drafter_called(name: str) -> Eagle31Drafter:
    """`good` learned the target's distribution, `bad` is random, `adversarial` likes best what the target likes least.

    The last two know six of the eight tokens only.
    """
    fields: dict[str, Any] = {"aux_layers": [0, 0, 1], "initializer_range": 0.3}
    if name == "bad":
        return random_drafter(target(), draft_vocab_size=6, **fields)
    drafter = random_drafter(target(), **fields)
    distil(drafter)
    if name == "good":
        return drafter
    contrary = random_drafter(target(), draft_vocab_size=6, **fields)
    with torch.no_grad():
        tensors = {key: value.clone() for key, value in drafter.canonical_tensors().items()}
        assert contrary.draft_ids is not None
        tensors["lm_head.weight"] = -2 * tensors["lm_head.weight"][contrary.draft_ids]
        tensors["d2t"] = contrary.d2t
        contrary.load_canonical(tensors)
    return contrary


def distil(drafter: Eagle31Drafter) -> None:
    """A few teacher-forced steps on random text: close to the target, not equal to it."""
    binding = drafter.require_binding()
    with seeded(5), torch.enable_grad():
        optimiser = torch.optim.Adam(drafter.parameters(), lr=1e-2)
        for _ in range(400):
            ids = torch.randint(0, V, (64, 7))
            with torch.no_grad(), binding.capturing():
                teacher = binding.model(ids).logits.log_softmax(-1)
                aux = binding.take_aux()
            positions = torch.arange(6).expand(64, -1)
            out = drafter.decode(
                drafter.embed(ids[:, 1:]).detach(), drafter.fuse_aux(aux[:, :-1]), drafter.rotary(positions)
            )
            student = drafter.draft_logits(out.normed).log_softmax(-1)
            loss = (teacher[:, 1:].exp() * (teacher[:, 1:] - student)).sum(-1).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    drafter.requires_grad_(False)


def warpers(setting: str) -> hf.LogitsProcessorList:
    settings = SETTINGS[setting]
    result = hf.LogitsProcessorList([hf.TemperatureLogitsWarper(settings["temperature"])])
    if settings["top_k"]:
        result.append(hf.TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        result.append(hf.TopPLogitsWarper(settings["top_p"]))
    return result


@cache
def exact_joint(setting: str) -> Tensor:
    """Probability of each of the `V**3` continuations of the prompt, by the target and transformers' own warpers."""
    texts = torch.tensor([[*PROMPT, *pair] for pair in itertools.product(range(V), repeat=2)])
    with torch.no_grad():
        logits = target()(texts).logits[:, len(PROMPT) - 1 :]  # (V*V, 3, V)
    first, second, third = (warpers(setting)(texts, logits[:, i]).softmax(-1) for i in range(3))
    row = torch.arange(V * V)
    joint = first[row, texts[:, -2]] * second[row, texts[:, -1]]  # (V*V,)
    return (joint[:, None] * third).flatten().double()


def p_value(triples: Tensor, expected: Tensor) -> float:
    """Chi-square p-value of triples `(R, 3)`; 0 if one of them cannot occur."""
    codes = triples @ torch.tensor([V * V, V, 1])
    counts = torch.bincount(codes, minlength=V**3).double()
    if counts[expected == 0].any():
        return 0.0
    wanted = expected * len(triples)
    common = wanted >= 5  # the statistic needs cells of some size: the rare ones are merged
    got = torch.cat((counts[common], counts[~common].sum()[None]))
    want = torch.cat((wanted[common], wanted[~common].sum()[None]))
    keep = want > 0
    return float(stats.chisquare(got[keep].numpy(), want[keep].numpy() * float(got.sum() / want[keep].sum())).pvalue)


def assert_follows(setting: str, triples_of: Callable[[int], Tensor]) -> None:
    """`triples_of(seed)` follow the exact distribution.

    A sound loop fails at one seed in a hundred, and there are dozens of tests; a wrong one fails at every seed.
    """
    values = []
    for seed in (11, 12):
        values.append(p_value(triples_of(seed), exact_joint(setting)))
        if values[-1] > P_VALUE:
            return
    raise AssertionError(f"p-values {values}: the texts do not follow the target's distribution")


def sample(
    name: str, setting: str, settings: dict[str, Any], *, batch: int, runs: int = RUNS, seed: int = 11
) -> Tensor:
    """The first three tokens `(runs, 3)` of seeded generations in batches of `batch`."""
    new_tokens = settings["num_assistant_tokens"] + 2  # so that the first draft has its full depth
    config = hf.GenerationConfig(
        do_sample=True,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        bos_token_id=1,
        num_assistant_tokens=None,
        **SETTINGS[setting],
    )
    inputs = {
        "input_ids": torch.tensor([PROMPT] * batch),
        "attention_mask": torch.ones(batch, len(PROMPT), dtype=torch.long),
    }
    kept = []
    with seeded(seed), configured(drafter_called(name), **settings) as drafter:
        for _ in range(-(-runs // batch)):
            out = target().generate(**inputs, generation_config=config, assistant_model=drafter)
            kept.append(out[:, len(PROMPT) : len(PROMPT) + 3])
    assert drafter.stats is not None
    assert drafter.stats.loop == settings["speculation_loop"]
    return torch.cat(kept)[:runs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "shape", "name"),
    [
        pytest.param(*case, marks=[pytest.mark.contract] if case[2] == "good" else [])
        for case in pairwise([*SETTINGS], [*SHAPES], DRAFTERS)
    ],
)
def test_own_loop_keeps_the_distribution(setting: str, shape: str, name: str) -> None:
    """Many rows at once: every pair of a setting, a shape and a drafter."""
    settings = SHAPES[shape] | {"speculation_loop": "own"}
    assert_follows(setting, lambda seed: sample(name, setting, settings, batch=1000, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["good", "bad"])  # the adversarial one never doubts
def test_chains_ended_by_doubt_keep_the_distribution(few_row_runs: int, name: str) -> None:
    chain = SHAPES["chain"] | {"speculation_loop": "own"}
    doubting = chain | {"draft_min_confidence": 0.6}
    assert drafted(name, doubting) < 0.9 * drafted(name, chain), "doubt ends chains"
    assert_follows("t1", lambda seed: sample(name, "t1", doubting, batch=4, runs=few_row_runs, seed=seed))


def drafted(name: str, settings: dict[str, Any]) -> int:
    """Tokens drafted in a dozen small batches."""
    total = 0
    for seed in range(12):
        sample(name, "t1", settings, batch=4, runs=4, seed=seed)
        run = drafter_called(name).stats
        assert run is not None
        total += run.drafted
    return total


FEW_ROWS = [
    ("chain", "good", "top_p"),
    ("chain", "bad", "top_k"),  # drawn among a few
    ("static", "bad", "t1"),
    ("dynamic", "adversarial", "top_k"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "name", "setting"), FEW_ROWS)
@pytest.mark.parametrize("batch", [1, 4])
def test_own_loop_keeps_the_distribution_in_small_batches(
    few_row_runs: int, batch: int, shape: str, name: str, setting: str
) -> None:
    """Thousands of runs of one row are many rounds, so the loop is driven past `generate`, which costs more than it."""

    def triples_of(seed: int) -> Tensor:
        with seeded(seed):
            return torch.cat([first_three(name, setting, shape, batch) for _ in range(few_row_runs // batch)])

    assert_follows(setting, triples_of)


def first_three(name: str, setting: str, shape: str, batch: int) -> Tensor:
    """Three tokens `(batch, 3)` of each row, by our loop without its door."""
    settings = SHAPES[shape]
    depth, top_k, size = (
        settings["num_assistant_tokens"],
        settings.get("draft_top_k", 1),
        settings.get("draft_tree_size", 0),
    )
    static = StaticTopology.best_for([0.7, 0.2, 0.05], depth=depth, size=size) if shape == "static" else None
    prompts = torch.tensor([PROMPT] * batch)
    request = DecodingRequest(
        sequences=Sequences(prompts, [0] * batch, StopRules(max_length=len(PROMPT) + 4), pad_id=0),
        processing=ScoreProcessing(warpers(setting)),
        shape=DraftShape(depth=depth, top_k=top_k, size=size, static=static),
        do_sample=True,
    )
    decoder = SpeculativeDecoder(drafter_called(name), request)
    with torch.no_grad(), decoder.binding.capturing():
        decoder.prefill()
        while min(len(new) for new in request.sequences.new) < 3:
            decoder.step()
    return torch.tensor([new[:3] for new in request.sequences.new])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), [("bad", "top_p"), ("adversarial", "top_k")])
def test_stock_loop_keeps_the_distribution(few_row_runs: int, name: str, setting: str) -> None:
    """The rule is transformers'; ours are the drafts' probabilities, warped and of a part of the vocabulary."""
    settings = SHAPES["chain"] | {"speculation_loop": "stock"}
    assert_follows(setting, lambda seed: sample(name, setting, settings, batch=1, runs=few_row_runs, seed=seed))


def test_the_test_would_notice() -> None:
    """Negative controls: another setting's distribution, and a loop that trusts its drafts too much."""
    for setting in SETTINGS:
        assert (exact_joint(setting) * RUNS >= 5).sum() > 30, "many triples are frequent enough to be counted"
    settings = SHAPES["chain"] | {"speculation_loop": "own"}
    triples = sample("good", "top_p", settings, batch=1000)
    assert p_value(triples, exact_joint("t1")) < 1e-6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "eagle31_hf.sampling.rejection.uniform_numbers",
            lambda shape, *_: torch.rand(shape, dtype=torch.float64) * 0.8,
        )
        assert p_value(sample("good", "t1", settings, batch=1000), exact_joint("t1")) < 1e-3


@pytest.mark.contract
def test_drafters_are_what_they_are_called() -> None:
    """Acceptance ranks them, and is as high as the two distributions allow: `sum min(p, q)`."""
    rates = {}
    for name in DRAFTERS:
        sample(name, "t1", SHAPES["chain"] | {"speculation_loop": "own"}, batch=2000, runs=2000)
        run = drafter_called(name).stats
        assert run is not None
        rates[name] = run.accepted_at[0] / run.drafted_at[0]
        assert rates[name] == pytest.approx(first_acceptance(name), abs=0.05)
    assert rates["good"] > 0.7 > rates["bad"] > 2 * rates["adversarial"], rates


@torch.no_grad()
def first_acceptance(name: str) -> float:
    """Chance that the first draft after the prompt and one token of the target's is accepted."""
    drafter = drafter_called(name)
    binding = drafter.require_binding()
    texts = torch.tensor([[*PROMPT, token] for token in range(V)])
    with binding.capturing():
        p = target()(texts).logits.softmax(-1)
        aux = binding.take_aux()[:, :-1]
    positions = torch.arange(len(PROMPT)).expand(V, -1)
    out = drafter.decode(drafter.embed(texts[:, 1:]), drafter.fuse_aux(aux), drafter.rotary(positions))
    q = torch.zeros(V, V)
    ids = torch.arange(V) if drafter.draft_ids is None else drafter.draft_ids
    q[:, ids] = drafter.draft_logits(out.normed)[:, -1].softmax(-1)
    accepted = torch.minimum(p[:, -1], q).sum(-1)  # (V,) for each first token
    return float((p[0, -2] * accepted).sum())


def test_seed_repeats_the_text() -> None:
    prompts = {"input_ids": torch.tensor([PROMPT] * 4), "attention_mask": torch.ones(4, 3, dtype=torch.long)}
    for shape in SHAPES.values():
        with configured(drafter_called("good"), **shape) as drafter:
            texts: list[Tensor] = []
            for seed in (1, 1, 2):
                with seeded(seed):
                    texts.append(target().generate(
                        **prompts, do_sample=True, max_new_tokens=20, pad_token_id=0, assistant_model=drafter
                    ))  # fmt: skip
        assert torch.equal(texts[0], texts[1])
        assert not torch.equal(texts[0], texts[2])


def test_rows_are_drawn_independently() -> None:
    """Equal prompts in one batch do not share their dice."""
    triples = sample("good", "t1", SHAPES["chain"] | {"speculation_loop": "own"}, batch=2, runs=400)
    pairs = triples.view(200, 2, 3)
    same = (pairs[:, 0] == pairs[:, 1]).all(1).float().mean()
    assert same < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["good", "adversarial"])
@pytest.mark.parametrize("shape", SHAPES)
def test_switching_in_every_round_keeps_the_distribution(shape: str, name: str) -> None:
    """Nothing, the drafter's tokens or others, as many as dice say: what is drafted does not change what follows."""
    settings = SHAPES[shape] | {"speculation_loop": "own"}
    with switching_policies():
        assert_follows("t1", lambda seed: sample(name, "t1", settings, batch=250, runs=5000, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["calibrated", "pid", "heuristic"])
def test_schedules_keep_the_distribution(schedule: str) -> None:
    settings = SHAPES["chain"] | {"speculation_loop": "own", "num_assistant_tokens_schedule": schedule}
    with calibrated(drafter_called("good")):
        assert_follows("top_p", lambda seed: sample("good", "top_p", settings, batch=250, runs=5000, seed=seed))


@pytest.mark.slow
def test_drafts_from_the_text_keep_the_distribution(few_row_runs: int) -> None:
    """One row, whose prompt repeats itself, so that prompt lookup drafts."""
    settings = SHAPES["chain"] | {"speculation_loop": "own", "num_assistant_tokens_schedule": "calibrated"}
    with (
        calibrated(drafter_called("bad")),
        mock.patch(f"{__name__}.PROMPT", [3, 5, 1, 3, 5, 1, 3, 5]),
        mock.patch.object(eager_round, "given_chain", wraps=eager_round.given_chain) as given,
    ):
        exact_joint.cache_clear()
        try:
            assert_follows("t1", lambda seed: sample("bad", "t1", settings, batch=1, runs=few_row_runs, seed=seed))
            assert given.call_count > few_row_runs // 20
        finally:
            exact_joint.cache_clear()
