"""Keys and values in 8 bits: against a list of rounded vectors, against token-by-token decoding, against the plan."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, Gemma3nTextConfig, LlamaConfig

from eagle31_hf.cache import SpeculativeCache
from eagle31_hf.cache.quantized import CACHE_TYPES, CODES, EightBitCode
from eagle31_hf.compiled import graphs
from eagle31_hf.errors import ConfigurationError, IncompatibleTargetError
from eagle31_hf.generation_config import CACHE_TYPES as ALL_CACHE_TYPES
from eagle31_hf.generation_config import Eagle31GenerationConfig
from eagle31_hf.memory.activation_bytes import packed_cache_bytes, unpacked_layer_bytes
from eagle31_hf.memory.quantization_schemes import SCHEMES
from eagle31_hf.memory.target_facts import decoder_shape
from helpers import CONFIGS, configured, demo_tokenizer, drafter_of, left_padded, oracle_drafts, prompts_for, target_of
from matrix import WHOLE, pairwise

PACKED = tuple(CODES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 5
WINDOW = 6


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# --- codes ------------------------------------------------------------------------------------------------------------


def rounded(code: EightBitCode, states: Tensor) -> Tensor:
    return code.decode(*code.encode(states), torch.empty_like(states))


def naive_rounded(kind: str, vector: Sequence[float]) -> list[float]:
    """One vector, in double precision and without looking at a bit."""
    top, largest = CODES[kind].largest, max(abs(x) for x in vector)
    scale = 2.0**-24
    while scale * top < largest:
        scale *= 2
    if kind == "int8":
        return [round(x / scale) * scale for x in vector]

    def e4m3(x: float) -> float:
        step = 2.0 ** max(math.floor(math.log2(abs(x))) - 3, -9) if x else 1.0
        return round(x / step) * step

    return [e4m3(x / scale) * scale for x in vector]


@st.composite
def vectors(draw: st.DrawFn) -> tuple[torch.dtype, Tensor]:
    """Vectors of very unlike size, with zeros, and some that sit on the border of two scales."""
    dtype = draw(st.sampled_from(DTYPES))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        size = 2.0 ** draw(st.integers(-30, 14))
        factors = st.one_of(st.floats(-1, 1), st.sampled_from([0.0, 1.0, -1.0, 127 / 128, 448 / 512, 255 / 256]))
        rows.append([size * draw(factors) for _ in range(6)])
    return dtype, torch.tensor(rows, dtype=torch.float64).to(dtype)[None, :, None]  # (1, rows, 1, 6)


@given(vectors(), st.sampled_from(PACKED))
@settings(max_examples=150, deadline=None)
def test_rounding_is_what_the_formula_says_and_happens_once(case: tuple[torch.dtype, Tensor], kind: str) -> None:
    dtype, states = case
    code = CODES[kind]
    codes, scales = code.encode(states)
    assert codes.dtype == torch.int8
    assert scales.dtype == dtype
    once = rounded(code, states)
    wanted = [naive_rounded(kind, vector) for vector in states[0, :, 0].double().tolist()]
    assert torch.equal(once[0, :, 0], torch.tensor(wanted, dtype=torch.float64).to(dtype))
    assert torch.equal(rounded(code, once), once)
    for other in DTYPES:  # at most seven bits times a power of two: only fp16 is ever out of its range
        held = once.to(other)
        assert torch.equal(held.double(), once.double()) or other == torch.float16
        if held.isfinite().all():
            assert torch.equal(rounded(code, held), held)


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_are_bounded_and_nothing_becomes_nan(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 3, 50, 64).to(dtype) * torch.logspace(-3, 3, 50, base=10.0)[:, None].to(dtype)
    states[:, :, 7] = 0
    back = rounded(CODES[kind], states)
    largest = states.abs().amax(-1, keepdim=True).float()
    error = (back - states).abs().float()
    # int8: half a step of at most 1/63.5 of the largest; fp8: half a step of 3 bits of mantissa
    bound = largest / 127 if kind == "int8" else (states.abs().float() / 16).clamp_min(largest * 2**-16)
    assert (error <= bound).all()
    assert error.max() > 0
    assert not back[:, :, 7].any()
    assert back.isfinite().all()


# --- a list of rounded vectors ----------------------------------------------------------------------------------------


@cache
def vectors_of_token(seed: int, width: int) -> Tensor:
    """`(heads, width)`, large ones and small ones."""
    dice = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-3, 3, (HEADS, 1), generator=dice)
    return torch.randn(HEADS, width, generator=dice) * size


@dataclass
class Mirror:
    """The cache beside plain lists: per row the tokens it holds, per token the vectors a reader must get."""

    kind: str
    windows: list[int | None]
    batch_size: int = 1
    slab: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    cache: SpeculativeCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = SpeculativeCache(
            self.windows,
            batch_size=self.batch_size,
            capacity=96,
            block=8,
            slab=self.slab,
            layer_types=["sliding_attention" if w else "full_attention" for w in self.windows],
            cache_type=self.kind,
        )
        self.rows: list[list[int]] = [[] for _ in range(self.batch_size)]  # tokens, by number
        self.next_token = 1

    def states(self, tokens: Tensor, layer: int, width: int) -> Tensor:
        """Random vectors `(B, heads, T, width)` that follow from token and layer alone."""
        seed = self.seed * 10_000_019 + layer * 11 + width
        made = [[vectors_of_token(seed + int(token) * 101, width) for token in row] for row in tokens]
        return torch.stack([torch.stack(row, 1) for row in made]).to(self.dtype)

    def write(self, num_tokens: int, after: int = 0, tokens: Tensor | None = None) -> Tensor:
        """Write tokens `(B, T)`, new ones unless given, through every layer; check what a reader of them gets."""
        if tokens is None:
            size = self.batch_size * num_tokens
            tokens = torch.arange(self.next_token, self.next_token + size).view(-1, num_tokens)
            self.next_token += size
        self.cache.place(tokens.shape[1], after=after)
        for layer in range(len(self.windows)):
            keys, values = self.states(tokens, layer, KEY_DIM), self.states(tokens, layer, VALUE_DIM)
            for seen, written in zip(self.cache.update(keys, values, layer), (keys, values), strict=True):
                wanted = rounded(CODES[self.kind], written)
                for b, length in enumerate(self.cache.lengths):
                    window = self.windows[layer]
                    first = (length if window is None else window - 1) + after
                    assert torch.equal(seen[b, :, first : first + tokens.shape[1]], wanted[b])
        return tokens

    def check(self) -> None:
        assert self.cache.lengths == [len(row) for row in self.rows]
        for index, (layer, window) in enumerate(zip(self.cache.layers, self.windows, strict=True)):
            if not layer.is_initialized:
                continue
            for b, row in enumerate(self.rows):
                newest = row if window is None else row[max(0, len(row) - (window - 1)) :]
                for held, width in zip(layer.held_row(b, len(row)), (KEY_DIM, VALUE_DIM), strict=True):
                    assert held.shape == (1, HEADS, len(newest), width)
                    if newest:
                        states = self.states(torch.tensor([newest]), index, width)
                        assert torch.equal(held, rounded(CODES[self.kind], states))

    def stored(self) -> list[Tensor]:
        """Every bit that belongs to a committed token, codes and scales, layer by layer and row by row."""
        found = []
        for layer in self.cache.layers:
            for b, row in enumerate(self.rows):
                found += [buffer[b, :, layer.slots_of(len(row))] for buffer in layer.buffers]
        return found


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_random_histories_equal_a_list_of_rounded_vectors(data: st.DataObject) -> None:
    draw = data.draw
    mirror = Mirror(
        draw(st.sampled_from(PACKED)),
        [None, 4, None],
        batch_size=draw(st.integers(1, 3)),
        slab=draw(st.sampled_from([None, 5])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1000)),
    )
    for _ in range(draw(st.integers(1, 8))):
        after = draw(st.integers(0, 3))
        tokens = mirror.write(draw(st.integers(1, 5)))
        if after:
            tokens = torch.cat([tokens, mirror.write(after, after=tokens.shape[1])], dim=1)
        size, rows = tokens.shape[1], mirror.rows
        action = draw(st.sampled_from(["keep", "commit", "forget", "select", "crop"]))
        if action == "keep":
            paths = [draw(st.lists(st.integers(0, size - 1), unique=True).map(sorted)) for _ in rows]
            width = max(1, *map(len, paths))
            mirror.cache.keep([path + [0] * (width - len(path)) for path in paths], [len(path) for path in paths])
            for b, path in enumerate(paths):
                rows[b] += tokens[b, path].tolist()
        elif action == "commit":
            counts = [draw(st.integers(0, size)) for _ in rows]
            mirror.cache.commit(counts)
            for b, count in enumerate(counts):
                rows[b] += tokens[b, :count].tolist()
        elif action == "select":
            picked = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
            mirror.cache.select_rows(picked)
            mirror.rows, mirror.batch_size = [list(rows[b]) for b in picked], len(picked)
        else:
            shorter = action == "crop" and all(len(row) <= 3 for row in rows)  # a ring of 3 has lost nothing
            wanted = [draw(st.integers(0, len(row))) if shorter else len(row) for row in rows]
            mirror.cache.rollback(wanted)
            mirror.rows = [row[:n] for n, row in zip(wanted, rows, strict=True)]
        mirror.check()


# --- rollback ---------------------------------------------------------------------------------------------------------


def grown(mirror: Mirror, lengths: Sequence[int]) -> Mirror:
    """Rows of these lengths, read in right-padded chunks of 8; row `b` consists of tokens `1000 b + 1, 2, ...`."""
    texts = [[1000 * b + i + 1 for i in range(length)] for b, length in enumerate(lengths)]
    for start in range(0, max(lengths), 8):
        parts = [text[start : start + 8] for text in texts]
        width = max(map(len, parts))
        mirror.write(width, tokens=torch.tensor([part + [0] * (width - len(part)) for part in parts]))
        mirror.cache.commit([len(part) for part in parts])
    mirror.rows = texts
    return mirror


def assert_same_storage(one: Mirror, other: Mirror) -> None:
    for found, wanted in zip(one.stored(), other.stored(), strict=True):
        assert torch.equal(found, wanted)


EDGES = [7, 8, 9, 15, 16, 17]  # around chunks of 8 and slabs of 16
LAYOUTS = {"full": [None, None], "window": [None, WINDOW, WINDOW]}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("length", EDGES)
def test_rejected_tokens_leave_no_trace(kind: str, layout: str, batch_size: int, length: int) -> None:
    """A block of 8 of which any number is kept, at every offset around a block's edge."""
    lengths = [length + 3 * b for b in range(batch_size)]
    for kept in range(9):
        one, never = (grown(Mirror(kind, LAYOUTS[layout], batch_size, slab=16), lengths) for _ in range(2))
        drafts = torch.arange(8).expand(batch_size, -1) + 5000
        one.write(8, tokens=drafts)
        one.cache.keep(None, [kept] * batch_size)
        if kept:
            never.write(kept, tokens=drafts[:, :kept])
            never.cache.commit(kept)
        for mirror in (one, never):
            mirror.rows = [row + drafts[b, :kept].tolist() for b, row in enumerate(mirror.rows)]
        assert_same_storage(one, never)
        one.check()
        # The next round reads the same, too.
        for mirror in (one, never):
            mirror.write(2, tokens=torch.full((batch_size, 2), 9000))
        if batch_size == 1:  # in a batch, what lies behind a shorter row is hidden by its mask
            for a, b in zip(one.cache.layers, never.cache.layers, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a.read(), b.read(), strict=True))


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("length", EDGES)
def test_truncated_rows_equal_rows_that_never_were_longer(kind: str, length: int) -> None:
    for shorter in range(length + 1):
        one = grown(Mirror(kind, [None, None], 2, slab=16), [length, length + 4])
        one.cache.rollback([shorter, shorter + 4])
        one.rows = [row[: shorter + 4 * b] for b, row in enumerate(one.rows)]
        never = grown(Mirror(kind, [None, None], 2, slab=16), [shorter, shorter + 4])
        assert_same_storage(one, never)
        one.check()


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("windows", LAYOUTS.values(), ids=list(LAYOUTS))
def test_accepted_paths_of_trees_are_moved_bit_for_bit(kind: str, windows: list[int | None]) -> None:
    rng = random.Random(0)
    one, never = (grown(Mirror(kind, windows, 3, slab=16), [6, 15, 9]) for _ in range(2))
    for round_number in range(5):
        nodes = torch.arange(7).expand(3, -1) + 100 * round_number + torch.tensor([[10_000], [20_000], [30_000]])
        paths = [[0, *sorted(rng.sample(range(1, 7), count))] for count in rng.sample(range(5), 3)]
        width = max(map(len, paths))
        one.write(7, tokens=nodes)
        one.cache.keep([path + [0] * (width - len(path)) for path in paths], [len(path) for path in paths])
        accepted = [nodes[b, path].tolist() for b, path in enumerate(paths)]
        never.write(width, tokens=torch.tensor([row + [0] * (width - len(row)) for row in accepted]))
        never.cache.commit([len(path) for path in paths])
        for mirror in (one, never):
            mirror.rows = [row + new for row, new in zip(mirror.rows, accepted, strict=True)]
        assert_same_storage(one, never)
        one.check()


@pytest.mark.parametrize("kind", PACKED)
def test_a_copy_is_independent(kind: str) -> None:
    one = grown(Mirror(kind, [None, WINDOW]), [11])
    twin = copy.deepcopy(one)
    one.write(4)
    one.cache.commit(4)
    twin.check()
    assert twin.cache._workspace is not one.cache._workspace


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_survives_the_way_through_a_stock_one_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    one = grown(Mirror(kind, [None, None], 2, dtype=dtype), [13, 13])
    stock = one.cache.to_dynamic(LlamaConfig(num_hidden_layers=2))
    assert stock.layers[0].keys.dtype == dtype
    back = Mirror(kind, [None, None], 2, dtype=dtype)
    back.cache.load_dynamic(stock)
    back.rows = one.rows
    back.check()
    values = [torch.equal(*pair) for pair in zip(back.stored(), one.stored(), strict=True)]
    assert all(values) or kind == "fp8"  # 2 * 224 is 448: two codes, one number


# --- memory -----------------------------------------------------------------------------------------------------------


def filled(config, kind: str, **sizes) -> SpeculativeCache:
    """A cache that has held a block of states as the model of `config` makes them, in bf16."""
    cache = SpeculativeCache.from_config(config, cache_type=kind, **sizes)
    shape = decoder_shape(config, SCHEMES["bf16"])
    block = sizes["block"]
    for _ in range(sizes["capacity"] // block):
        cache.place(block)
        for layer in range(shape.num_layers):
            size = (sizes["batch_size"], shape.kv_heads, block)
            cache.update(
                torch.ones(*size, shape.key_dim, dtype=torch.bfloat16),
                torch.ones(*size, shape.value_dim, dtype=torch.bfloat16),
                layer,
            )
        cache.commit(block)
    return cache


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("slab", [None, 16])
def test_bytes_are_those_of_the_plan(kind: str, family: str, slab: int | None) -> None:
    config = CONFIGS[family]()
    shape = decoder_shape(config, SCHEMES["bf16"])
    cache = filled(config, kind, batch_size=3, capacity=64, block=8, slab=slab)
    planned = packed_cache_bytes(shape, 64, 8) + unpacked_layer_bytes(shape, 64, 8)
    assert cache.num_bytes == 3 * planned
    assert cache._workspace.num_bytes == 3 * unpacked_layer_bytes(shape, 64, 8)


@pytest.mark.parametrize("kind", PACKED)
def test_the_workspace_is_made_once_and_shared(kind: str) -> None:
    mirror = Mirror(kind, [None, WINDOW, None], 2)
    places, sizes = set(), set()
    for _ in range(10):
        mirror.write(6)
        mirror.cache.commit([3, 2])
        for layer in mirror.cache.layers:
            keys, values = layer.read()
            places.add(keys.untyped_storage().data_ptr())
            assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        sizes.add(mirror.cache.num_bytes)
    assert len(places) == len(sizes) == 1
    mirror.cache._workspace.clear()
    assert mirror.cache.num_bytes < sizes.pop()
    mirror.write(2)  # takes it anew


# --- text -------------------------------------------------------------------------------------------------------------

NEW_TOKENS = 20
SHAPES = {
    "chain": {"draft_top_k": 1, "num_assistant_tokens": 4},
    "static": {"draft_top_k": 2, "num_assistant_tokens": 3, "draft_tree": "static", "draft_tree_size": 7},
    "dynamic": {"draft_top_k": 2, "num_assistant_tokens": 3, "draft_tree": "dynamic", "draft_tree_size": 7},
}


@cache
@torch.no_grad()
def token_by_token(name: str, prompt: tuple[int, ...], kind: str, new_tokens: int = NEW_TOKENS) -> list[Tensor]:
    """Logits after each token of the target's greedy text over such a cache, one token per forward, prompt included.

    Returns `(V,)` per token from the prompt's last one on.
    """
    binding = drafter_of(name).require_binding()
    cache = SpeculativeCache.from_config(
        binding.text_config, batch_size=1, capacity=len(prompt) + new_tokens, block=1,
        masks_by_type=binding.masks_by_type, cache_type=kind,
    )  # fmt: skip
    found: list[Tensor] = []
    token_ids = list(prompt)
    while len(found) < new_tokens:
        token = token_ids[cache.lengths[0]]
        cache.place(1)
        mask = cache.attention_mask(dtype=binding.compute_dtype)
        logits = binding.forward(torch.tensor([[token]]), cache.position_ids(), mask, cache).logits[0, -1]
        cache.commit(1)
        if cache.lengths[0] >= len(prompt):
            found.append(logits)
            token_ids.append(int(logits.argmax()))
    return found


def plain_text(name: str, prompts: Sequence[Sequence[int]], kind: str) -> tuple[Tensor, list[list[Tensor]]]:
    """New tokens `(B, n)` of token-by-token decoding, and the logits behind them."""
    logits = [token_by_token(name, tuple(prompt), kind) for prompt in prompts]
    return torch.tensor([[int(step.argmax()) for step in row] for row in logits]), logits


def assert_same_text(found: Tensor, plain: Tensor, logits: list[list[Tensor]]) -> None:
    """Equal up to the first token where the two candidates are as near as the step between two codes can move them.

    A number that falls on the border between two codes goes either way with the last bit of the arithmetic.
    """
    for b, row in enumerate(found):
        differences = (row != plain[b]).nonzero()
        if len(differences):
            at = int(differences[0])
            step = logits[b][at]
            assert step[plain[b, at]] - step[row[at]] < 1e-3 * (step.max() - step.min()), (b, at)


CELLS = [
    *itertools.product(WHOLE, SHAPES, PACKED, (1, 3)),
    *pairwise(("mistral", "gpt_neox", "mixtral"), [*SHAPES], [*PACKED], (1, 3)),
]


@pytest.mark.parametrize(("name", "shape", "kind", "batch_size"), CELLS)
def test_drafting_does_not_change_the_text(name: str, shape: str, kind: str, batch_size: int) -> None:
    prompts = prompts_for(name, batch_size, seed=batch_size)
    plain, logits = plain_text(name, prompts, kind)
    inputs = left_padded(prompts)
    length = inputs["input_ids"].shape[1]
    truth = torch.cat((inputs["input_ids"], plain), 1)
    with configured(drafter_of(name), cache_type=kind, **SHAPES[shape]) as eagle, oracle_drafts(truth, length):
        out = target_of(name).generate(
            **inputs, assistant_model=eagle, max_new_tokens=NEW_TOKENS, do_sample=False, prefill_chunk_size=5
        )
        assert eagle.stats.loop == "own"
        assert eagle.stats.cache_type == kind
        assert eagle.stats.accepted > 0
    assert_same_text(out[:, length:], plain, logits)


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("depth", range(1, 9))
def test_no_draft_length_changes_the_text(kind: str, depth: int) -> None:
    prompts = prompts_for("llama", 1, seed=3)
    plain, logits = plain_text("llama", prompts, kind)
    inputs = left_padded(prompts)
    length = inputs["input_ids"].shape[1]
    truth = torch.cat((inputs["input_ids"], plain), 1)
    with (
        configured(drafter_of("llama"), cache_type=kind, num_assistant_tokens=depth) as eagle,
        oracle_drafts(truth, length),
    ):
        out = target_of("llama").generate(**inputs, assistant_model=eagle, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert_same_text(out[:, length:], plain, logits)


def test_a_cache_of_few_bits_is_really_used() -> None:
    """The logits are those of rounded keys and values: near the full ones, and not equal to them."""
    prompt = tuple(prompts_for("llama", 1)[0])
    full, fp8 = (token_by_token("llama", prompt, kind, new_tokens=1)[0] for kind in ("full", "fp8"))
    difference = (full - fp8).abs().max() / (full.max() - full.min())
    assert 1e-4 < difference < 0.2


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kind", PACKED)
def test_a_conversation_goes_on_as_if_it_had_never_stopped(name: str, kind: str) -> None:
    """The carried cache is a stock one in full precision; rounding it again must change nothing."""
    (prompt,) = prompts_for(name, 1, seed=5)
    options = {"max_new_tokens": 10, "do_sample": False}
    with configured(drafter_of(name), cache_type=kind) as eagle:
        carried = DynamicCache(config=target_of(name).config)
        first = target_of(name).generate(
            torch.tensor([prompt]), assistant_model=eagle, past_key_values=carried, **options
        )
        longer = torch.cat((first, torch.tensor([[5, 6, 7]])), 1)
        again = target_of(name).generate(longer, assistant_model=eagle, **options)
        went_on = target_of(name).generate(longer, assistant_model=eagle, past_key_values=carried, **options)
    assert torch.equal(went_on, again)


def test_verification_over_such_a_cache_stays_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_compile", lambda step, device: step)
    options = {"max_new_tokens": 10, "do_sample": False}
    prompt = torch.tensor([prompts_for("llama", 1)[0]])
    found = {}
    for how in ("eager", "compile"):
        with configured(drafter_of("llama"), cache_type="int8", acceleration=how) as eagle:
            found[how] = target_of("llama").generate(prompt, assistant_model=eagle, **options)
            assert ("not compiled" in "".join(eagle.stats.fallbacks)) == (how == "compile")
    assert torch.equal(found["eager"], found["compile"])


@cache
def demo_acceptance_length(kind: str) -> float:
    rounds = accepted = 0
    with configured(drafter_of("demo-target"), cache_type=kind, num_assistant_tokens=5) as eagle:
        for prompt in prompts_for("demo-target", 4):
            target_of("demo-target").generate(
                torch.tensor([prompt]), assistant_model=eagle, max_new_tokens=64, do_sample=False,
                eos_token_id=None, pad_token_id=demo_tokenizer().pad_token_id,
            )  # fmt: skip
            rounds, accepted = rounds + eagle.stats.rounds, accepted + eagle.stats.accepted
    return 1 + accepted / rounds


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKED)
def test_the_trained_drafter_drafts_as_well_over_such_a_cache(kind: str) -> None:
    assert demo_acceptance_length(kind) > 0.9 * demo_acceptance_length("full") > 2


# --- settings and refusals --------------------------------------------------------------------------------------------


def test_all_rooms_know_the_same_cache_types() -> None:
    assert ("auto", *CACHE_TYPES) == ALL_CACHE_TYPES
    assert Eagle31GenerationConfig().stored_cache_type == "full"
    assert Eagle31GenerationConfig(cache_type="fp8").stored_cache_type == "fp8"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_type": "int4"}, "cache_type is 'int4'"),
        ({"cache_type": None}, "cache_type is None"),
        ({"cache_type": "int8", "speculation_loop": "stock"}, "only our own loop"),
        ({"cache_type": "fp8", "speculation_loop": "plain"}, "only our own loop"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Eagle31GenerationConfig(**fields).check()
    with (
        configured(drafter_of("llama"), **fields) as eagle,
        pytest.raises(ConfigurationError, match=message),
    ):
        target_of("llama").generate(torch.tensor([[3, 4]]), assistant_model=eagle, max_new_tokens=2)


def test_settings_survive_saving(tmp_path) -> None:
    Eagle31GenerationConfig(cache_type="int8").save_pretrained(tmp_path)
    assert Eagle31GenerationConfig.from_pretrained(tmp_path).cache_type == "int8"


def test_another_loop_says_that_it_does_not_use_the_cache_type() -> None:
    with configured(drafter_of("llama"), cache_type="int8") as eagle:
        target_of("llama").generate(
            torch.tensor([[3, 4]]), assistant_model=eagle, max_new_tokens=2, cache_implementation="static"
        )
        assert eagle.stats.loop == "plain"
        assert eagle.stats.cache_type == "full"
        assert "cache_type is not used there" in eagle.stats.reason


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"int4.*full, int8, fp8"):
        SpeculativeCache([None], batch_size=1, capacity=8, block=4, cache_type="int4")
    config = LlamaConfig(num_hidden_layers=2)
    with pytest.raises(ConfigurationError, match="MPS"):
        SpeculativeCache.from_config(config, batch_size=1, capacity=8, block=4, cache_type="fp8", device="mps")
    sharing = Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["full_attention"] * 4)
    with pytest.raises(IncompatibleTargetError, match="another layer's keys and values"):
        SpeculativeCache.from_config(sharing, batch_size=1, capacity=8, block=4, cache_type="int8")
