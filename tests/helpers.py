"""Targets, drafters and prompts that several test files share. Models are built once per test process.

The random targets are tiny but lively: their weights are spread so that attention matters and greedy text wanders.
A random drafter is almost never right there, so `oracle_drafts` puts the text the target is going to write into the
drafts, cut off at a random depth: every number of accepted tokens, 0 to K, occurs.
"""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from torch import Tensor

from eagle31_hf import Eagle31Drafter, SpeculationStats
from eagle31_hf.cache import graph_sizes
from eagle31_hf.cache.stock import CACHE_ARGUMENT
from eagle31_hf.drafter.dynamic import grow_tree
from eagle31_hf.drafter.session import DraftState
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.drafting.plan import REST, DraftPlan, DraftPolicy, ReadTexts
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.graphs import captured
from eagle31_hf.loop import decoder, kept_graphs
from eagle31_hf.loop.choosing import RoundBatch
from eagle31_hf.loop.pair import Pair
from eagle31_hf.loop.round import Round
from eagle31_hf.measure.exactness import Kind, judge
from eagle31_hf.memory.cards import Card
from eagle31_hf.memory.drafter_facts import read_drafter
from eagle31_hf.memory.ledger import LedgerTerm, MemorySettings, build_ledger
from eagle31_hf.memory.target_facts import read_target

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = SHARED / "models"
DEMO_DRAFTER = MODELS / "demo-drafter-eagle31"
HELD_OUT = ("gsm8k", "sgd", "taskmaster")

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = 8

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "qwen2": lambda: hf.Qwen2Config(**{k: v for k, v in GROUPED.items() if k != "head_dim"}),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **GROUPED, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=16,
    ),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
}  # fmt: skip
FAMILIES = tuple(CONFIGS)
PACKINGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-dq": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


# --- targets ----------------------------------------------------------------------------------------------------------


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Everything random inside follows `seed`; the generator outside is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def random_target(config: Any, seed: int = 0) -> Any:
    """An fp32 causal LM with random weights."""
    with seeded(seed):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


@cache
def target_of(name: str) -> Any:
    """The fp32 target called `name`: a family, `"stories260K"` or `"demo-target"`. Shared: leave it as it is."""
    if name in CONFIGS:
        return random_target(CONFIGS[name]())
    return hf.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()


@cache
def demo_tokenizer() -> Any:
    return hf.AutoTokenizer.from_pretrained(MODELS / "demo-target", padding_side="left")


# --- drafters ---------------------------------------------------------------------------------------------------------


def random_drafter(target: Any, seed: int = 1, **overrides: Any) -> Eagle31Drafter:
    """An untrained drafter attached to `target`, which drafts all the same."""
    with seeded(seed):
        drafter = Eagle31Drafter.from_target(target, **overrides).eval()
        if drafter.draft_ids is not None:
            size, vocabulary = drafter.config.draft_vocab_size, drafter.config.vocab_size
            drafter.d2t.copy_(torch.randperm(vocabulary)[:size].sort().values - torch.arange(size))
            drafter._draft_ids = None
            drafter.attach(target)  # again: rows of a shared head are gathered by these ids
    drafter.generation_config.num_assistant_tokens_schedule = "constant"  # rounds have drafts though these are in vain
    return drafter


@cache
def drafter_of(name: str) -> Eagle31Drafter:
    """The drafter tests use with `target_of(name)`: the trained one for the demo target, else a random one."""
    target = target_of(name)
    if name == "demo-target":
        return Eagle31Drafter.from_pretrained(DEMO_DRAFTER, target=target)
    reduced = name in ("qwen3", "gpt_neox")
    return random_drafter(target, aux_layers=[1, 2, 4], **({"draft_vocab_size": 40} if reduced else {}))


@contextmanager
def configured(drafter: Eagle31Drafter, **fields: Any) -> Iterator[Eagle31Drafter]:
    """`drafter` with these fields of its `generation_config`, and its own again afterwards."""
    before = {name: getattr(drafter.generation_config, name) for name in fields}
    for name, value in fields.items():
        setattr(drafter.generation_config, name, value)
    try:
        yield drafter
    finally:
        for name, value in before.items():
            setattr(drafter.generation_config, name, value)


def use_fixed_shapes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that graphs for a CPU need (buckets, padding, fixed buffers), with buckets that fill and without a compiler:
    with `acceleration="compile"` each step stands for its own graph."""
    monkeypatch.setitem(captured.CAPTURES, "cpu", mock.Mock(side_effect=AssertionError("steps are graphs here")))
    monkeypatch.setattr(captured.CapturesSteps, "make", lambda self, key, step, inputs, outputs: step)
    monkeypatch.setattr(captured.CapturesSteps, "exact_sizes", False)
    monkeypatch.setattr(kept_graphs, "FEWEST_CAPTURED_TOKENS", 10**9)
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 16)


class RoundWrapper:
    """A round that does what another does, for subclasses to change a step of."""

    def __init__(self, inner: Round | RoundWrapper):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def wrapped_rounds(wrap: Callable[[Round], RoundWrapper]) -> Iterator[None]:
    """While open, our loop's rounds are what `wrap` makes of them."""
    make = decoder.Round
    with mock.patch.object(decoder, "Round", lambda *made_of: wrap(make(*made_of))):
        yield


def grown_tree(logits: Sequence[Tensor], top_k: int, size: int, draft_to_target: Tensor | None = None) -> DraftTree:
    """The tree below roots 99 that is grown from logits `(B, 1, V)` of the root, then `(B, k, V)` of each level."""
    first, *others = (DraftState(each, torch.zeros(*each.shape[:2], 1)) for each in logits)
    steps, roots = iter(others), torch.full((len(first.logits),), 99)
    shape = DraftShape(len(logits), top_k=top_k, size=size)
    return grow_tree(first, lambda *args, **kwargs: next(steps), draft_to_target, roots, shape)


def ledger_of(drafter: Eagle31Drafter, settings: MemorySettings) -> tuple[LedgerTerm, ...]:
    """What texts take with an attached drafter and these settings."""
    facts = read_target(drafter.binding.model)
    return build_ledger(facts, read_drafter(drafter, facts), Card("cpu", "cpu", 0, 0), settings)


# --- drafts that are right for a while --------------------------------------------------------------------------------


def longest_path(tree: DraftTree, row: int) -> list[int]:
    """Nodes from the root to one of the deepest, the first of equals."""
    parents, path = tree.parents[row].tolist(), [int(tree.depths[row].argmax())]
    while path[0] != 0:
        path.insert(0, parents[path[0]])
    return path


@contextmanager
def oracle_drafts(truth: Tensor, prompt_length: int, seed: int = 0, right: int | None = None) -> Iterator[None]:
    """Drafts that follow `truth` `(B, L + n)`, what plain decoding writes, up to a depth `right`, then go astray.

    The drafter runs as ever; only the tokens it proposes are replaced, along the longest path of the tree. Without
    `right` the depth is a random one every time.
    """
    dice = torch.Generator().manual_seed(seed)

    def coming(row: int, written: int, depth: int) -> list[int]:
        count = int(torch.randint(0, depth + 1, (), generator=dice)) if right is None else right
        start = prompt_length + written
        return truth[row, start : start + min(count, depth)].tolist()

    class OracleRound(RoundWrapper):
        def draft(self, batch: RoundBatch) -> DraftTree:
            tree = self.inner.draft(batch)
            tokens = tree.tokens.clone()
            for b, row in enumerate(batch.rows):
                path = longest_path(tree, b)
                written = len(batch.sequences.new[row])
                for node, token in zip(path[1:], coming(row, written, len(path) - 1), strict=False):
                    tokens[b, node] = token
            return dataclasses.replace(tree, tokens=tokens)

    with wrapped_rounds(OracleRound):
        yield


# --- policies ---------------------------------------------------------------------------------------------------------


class SwitchingPolicy(DraftPolicy):
    """Draws anew in every round: nothing, the drafter's, or tokens out of the air; how many."""

    def __init__(self, shape: DraftShape, seed: int = 0):
        self.shape, self.dice = shape, random.Random(seed)
        self.kinds: set[str] = set()

    def next_draft(self, rows: Sequence[int], texts: ReadTexts | None, remaining: int) -> DraftPlan:
        kind = self.dice.choice(("none", "cut", "whole", "chain", "given"))
        self.kinds.add(kind)
        depth = self.dice.randint(1, self.shape.depth)
        if kind == "none":
            return REST
        if kind == "cut":
            return DraftPlan(self.shape.cut_to(depth))
        if kind == "chain":
            return DraftPlan(DraftShape(depth=depth))
        if kind == "given":
            chains = [self._air(texts.text(row), depth) for row in rows]
            return DraftPlan(DraftShape(depth=depth), tokens=tuple(chains))
        return DraftPlan(self.shape)

    def _air(self, text: Sequence[int], depth: int) -> tuple[int, ...]:
        """Tokens the text has already, so that some of them are right."""
        return tuple(self.dice.choice(text) for _ in range(self.dice.randint(1, depth)))

    def record(self, *_round: Any) -> None:
        """Learns nothing."""


@contextmanager
def switching_policies() -> Iterator[list[SwitchingPolicy]]:
    """While open, every generation of our loop has one, whatever its schedule; those made so far."""
    made: list[SwitchingPolicy] = []

    def choose(_pair: Pair, shape: Any, **_how: Any) -> SwitchingPolicy:
        made.append(SwitchingPolicy(shape, seed=len(made)))
        return made[-1]

    with mock.patch.object(Pair, "_planner", choose):
        yield made


# --- prompts ----------------------------------------------------------------------------------------------------------


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int = 0) -> dict[str, Tensor]:
    """Prompts of unlike length as `generate` wants them."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def prompts_of(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Prompts of random ids of these lengths, as `generate` wants them."""
    dice = torch.Generator().manual_seed(seed)
    return left_padded([torch.randint(3, VOCABULARY, (n,), generator=dice).tolist() for n in lengths])


def random_prompts(count: int, vocabulary: int = VOCABULARY, seed: int = 0, longest: int = 21) -> list[list[int]]:
    """`count` prompts of 2 to `longest` random ids, shorter and longer than the sliding windows of the targets."""
    dice = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=dice).tolist()
    return [torch.randint(3, vocabulary, (length,), generator=dice).tolist() for length in lengths]


@cache
def held_out_prompts(name: str) -> list[list[int]]:
    """Token ids of the 75 held-out conversations of one set, cut as in the demo drafter's README."""
    rows = (SHARED / "data" / "chat" / f"{name}_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [_prompt_ids(json.loads(row)["conversations"]) for row in rows]


def _prompt_ids(messages: list[dict[str, str]]) -> list[int]:
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    text = demo_tokenizer().apply_chat_template(
        messages[: min(last_user, 4) + 1], add_generation_prompt=True, tokenize=False
    )
    return demo_tokenizer()(text, add_special_tokens=False)["input_ids"]


def prompts_for(name: str, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts for `target_of(name)`: held-out conversations for the demo target, random ids for the others."""
    if name == "demo-target":
        return [prompt for sets in zip(*map(held_out_prompts, HELD_OUT), strict=True) for prompt in sets][:count]
    return random_prompts(count, target_of(name).config.vocab_size, seed)


def one(name: str = "llama") -> dict[str, Tensor]:
    """A prompt for `target_of(name)` as `generate` wants it."""
    return left_padded(prompts_for(name, 1))


# --- what is shown ----------------------------------------------------------------------------------------------------


class Shown(hf.generation.streamers.BaseStreamer):
    """A streamer that keeps what it is shown, and raises `error` once that were `after` blocks.

    Attributes:
        blocks: as they came, `"end"` last.
        tokens: all of them in a row.
    """

    def __init__(self, error: type[BaseException] = AssertionError, after: int = 10**9):
        self.blocks: list[Any] = []
        self.tokens: list[int] = []
        self.error, self.after = error, after

    def put(self, value: Tensor) -> None:
        if len(self.blocks) == self.after:
            raise self.error("stop")
        self.blocks.append(value.tolist())
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.blocks.append("end")


# --- comparing --------------------------------------------------------------------------------------------------------


GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
"""What a text is compared by where a test asks for nothing else."""


def write(target: Any, inputs: Tensor | dict[str, Any], seed: int = 0, **kwargs: Any) -> Any:
    """What `generate` of a target, or of `target_of` a name, returns: `GREEDY` where `kwargs` do not say otherwise."""
    model = target_of(target) if isinstance(target, str) else target
    arguments = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    with seeded(seed):
        return model.generate(**arguments, **GREEDY | kwargs)


def stats_of(name: str = "llama") -> SpeculationStats:
    """Of the last call of `drafter_of(name)`."""
    stats = drafter_of(name).stats
    assert stats is not None
    return stats


def side_by_side(call: Callable[[int], Any], count: int, threads: int = 8) -> list[Any]:
    """Results of so many calls, made by threads that begin together."""
    together, results = threading.Barrier(threads), dict[int, Any]()

    def begin(first: int) -> None:
        together.wait()
        results.update({index: call(index) for index in range(first, count, threads)})

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(begin, range(threads)))
    return [results[index] for index in range(count)]


def assert_same_text(
    target: Any,
    drafter: Any,
    inputs: Tensor | dict[str, Tensor],
    *,
    seed: int = 0,
    loop: str | None = "own",
    why: str = "",
    oracle: int | None = None,
    right: int | None = None,
    truth: Tensor | None = None,
    settings: dict[str, Any] | None = None,
    fresh: Callable[[], dict[str, Any]] = dict,
    written: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Tensor:
    """`generate(**kwargs)` writes the same tokens with the drafter as without, by the same scores where these are
    returned, and leaves the generator alike. Texts are `GREEDY` where `kwargs` do not say otherwise.

    Args:
        inputs: prompts `(B, T)`, or the arguments that hold them.
        loop: the loop that must have written the text, by `stats.loop`; `None` if any may.
        why: what `stats.reason` must say.
        oracle: seed of drafts that are right for a while (`oracle_drafts`), of which our loop must have accepted some.
        right: drafts are right for so many tokens, in every round.
        truth: what right drafts follow, of which none need be accepted; default: the plain text.
        settings: fields of the drafter's `generation_config` meanwhile.
        fresh: makes arguments that keep state (processors, criteria, streamers), once for each of the two texts.
        written: keeps the target's plain texts, so that none is written twice; what `kwargs` hold must outlive it.

    Returns:
        Tensor: the text `(B, T)`, prompts included.
    """
    arguments = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    kwargs = {**GREEDY, **kwargs}

    def write(**assistant: Any) -> tuple[Tensor, Any, Tensor]:
        torch.manual_seed(seed)
        output = target.generate(**arguments, **kwargs, **fresh(), **assistant)
        return getattr(output, "sequences", output), output, torch.get_rng_state()

    if written is None:
        plain, plain_output, plain_state = write()
    else:
        key = str((seed, sorted(kwargs.items()), [(name, tensor.tolist()) for name, tensor in arguments.items()]))
        plain, plain_output, plain_state = written[key] = written.get(key) or write()
    drafts: Any = nullcontext()
    if oracle is not None or right is not None:
        length = arguments["input_ids"].shape[1]
        drafts = oracle_drafts(plain if truth is None else truth, length, seed=oracle or 0, right=right)
    with configured(drafter, **settings or {}), drafts:
        text, output, state = write(assistant_model=drafter)
    assert torch.equal(text, plain), f"got {text.tolist()}, wanted {plain.tolist()}"
    assert torch.equal(state, plain_state), "torch's generator was left in another state"
    assert loop in (None, drafter.stats.loop), f"written by {drafter.stats.loop}: {drafter.stats.reason}"
    assert why in drafter.stats.reason, f"wanted {why!r} in {drafter.stats.reason!r}"
    assert loop != "own" or not drafter.stats.reason, drafter.stats.reason
    given_up = drafter.stats.loop != "own" or drafter.stats.memory_steps
    assert oracle is None or truth is not None or given_up or drafter.stats.accepted > 0, "nothing was tried"
    for name in ("scores", "logits"):
        ours, plains = (getattr(each, name, None) or () for each in (output, plain_output))
        for one, other in zip(ours, plains, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    return text


def assert_same_turns(target: Any, drafter: Any, inputs: dict[str, Tensor], turns: int = 2, **kwargs: Any) -> list[int]:
    """A dialogue over one carried cache, each turn with three tokens more, is plain's without it. Returns how many
    tokens of each turn were read."""
    cache, read = hf.DynamicCache(config=target.config.get_text_config()), list[int]()
    for _ in range(turns):
        text = write(target, inputs, assistant_model=drafter, **{CACHE_ARGUMENT: cache}, **kwargs)
        assert torch.equal(text, write(target, inputs, **kwargs))
        assert drafter.stats.loop == "own", drafter.stats.reason
        read.append(drafter.stats.prefilled_tokens)
        ids = torch.cat((text, torch.tensor([[7, 8, 9]])), 1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return read


def assert_same_or_tie(model: Any, inputs: dict[str, Tensor], plain: Tensor, ours: Tensor) -> int:
    """Rows `(B, T)` behind these prompts are equal, or part where the target's own rounding decides (`judge`): in
    blocks of other sizes it computes other logits. Returns how many part."""
    ids, ties = inputs["input_ids"], 0
    length, mask = ids.shape[1], inputs.get("attention_mask", torch.ones_like(ids)).bool()
    for row, (wanted, text) in enumerate(zip(plain, ours, strict=True)):
        new = text[length:].tolist(), wanted[length:].tolist()
        verdict = judge(model, ids[row, mask[row]], *new, blocks=(2, 3, 5))
        assert verdict.kind is not Kind.DIFFERENT, f"row {row}: {verdict}"
        ties += verdict.kind is Kind.TIE
    return ties
