"""The cache against stock models, against a list of lists, and against the mask formula."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import StaticCache

from eagle31_hf.cache import SpeculativeCache
from eagle31_hf.cache.masks import RESIDENT_QUERIES
from eagle31_hf.cache.spans import AttentionSpan
from eagle31_hf.errors import ConfigurationError, IncompatibleTargetError, MemoryPlanError, UnsupportedGenerationError

VOCAB = 61
WINDOW = 8
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-windowed": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0, layer_types=MIXED),
    ),
    "qwen3": ("qwen3", {}),
    "mistral-windowed": ("mistral", dict(sliding_window=WINDOW)),
    "mixtral": ("mixtral", dict(sliding_window=None, **MOE)),
    "mixtral-windowed": ("mixtral", dict(sliding_window=WINDOW, **MOE)),
    "gemma3-mixed": ("gemma3_text", dict(sliding_window=WINDOW, layer_types=MIXED)),
    "gpt_neox": ("gpt_neox", {}),
}
CELLS = [(name, attention) for name in MODELS for attention in ("eager", "sdpa")]
CELLS.append(("llama4-chunked", "eager"))
MODELS["llama4-chunked"] = (
    "llama4_text",
    dict(
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=48,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        moe_layers=[1],
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
)


_models: dict[tuple[str, str], torch.nn.Module] = {}


def tiny_model(name: str, attention: str = "sdpa") -> torch.nn.Module:
    if (name, attention) not in _models:
        kind, extra = MODELS[name]
        config = AutoConfig.for_model(kind, **{**COMMON, **extra})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        for parameter in model.parameters():
            # Large weights: attention must be sharp enough for a wrong mask cell to show.
            torch.nn.init.normal_(parameter, std=0.3)
        _models[name, attention] = model.eval()
    return _models[name, attention]


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# Trees and their naive reading ---------------------------------------------------------------------------------------


@dataclass
class Tree:
    """Node 0 is the root; parents precede children."""

    tokens: list[int]
    parents: list[int]

    def path(self, node: int) -> list[int]:
        return [node] if node == 0 else [*self.path(self.parents[node]), node]

    @property
    def depths(self) -> torch.Tensor:
        return torch.tensor([len(self.path(i)) - 1 for i in range(len(self.tokens))])

    @property
    def ancestors(self) -> torch.Tensor:
        size = len(self.tokens)
        return torch.tensor([[j in self.path(i) for j in range(size)] for i in range(size)])


def random_tree(rng: random.Random, size: int) -> Tree:
    parents = [0] + [rng.randrange(max(0, i - 3), i) for i in range(1, size)]
    return Tree([rng.randrange(3, VOCAB) for _ in range(size)], parents)


def oracle(model, tokens: list[int]) -> torch.Tensor:
    """Logits after the last token, by one plain forward without any cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def make_cache(model, batch_size: int, **sizes) -> SpeculativeCache:
    sizes = {"capacity": 128, "block": 16, **sizes}
    return SpeculativeCache.from_config(model.config, batch_size=batch_size, **sizes)


def forward(model, cache, tokens, ancestors=None, depths=None, after=0):
    """One placed forward, `(B, T, V)` logits."""
    tokens = torch.as_tensor(tokens)
    cache.place(tokens.shape[1], after=after)
    return model(
        tokens,
        past_key_values=cache,
        attention_mask=cache.attention_mask(ancestors, depths),
        position_ids=cache.position_ids(depths),
        use_cache=True,
    ).logits


def prefill(model, cache, rows: list[list[int]], chunk: int = 5) -> None:
    """Right-padded column chunks; a row that has ended commits nothing."""
    for start in range(0, max(map(len, rows)), chunk):
        parts = [row[start : start + chunk] for row in rows]
        width = max(map(len, parts))
        forward(model, cache, [part + [0] * (width - len(part)) for part in parts])
        cache.commit([len(part) for part in parts])


def tree_forward(model, cache, trees: list[Tree]) -> torch.Tensor:
    ancestors, depths = torch.stack([t.ancestors for t in trees]), torch.stack([t.depths for t in trees])
    return forward(model, cache, [t.tokens for t in trees], ancestors, depths)


def random_rows(rng: random.Random, lengths) -> list[list[int]]:
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.abs().max() > 0.5  # logits large enough for the bound to mean something
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# Stock models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), CELLS)
@pytest.mark.parametrize("lengths", [(13,), (6, 6), (3, 12, 21)], ids=["one", "alike", "ragged"])
def test_rounds_on_a_stock_model_equal_plain_forwards(name, attention, lengths):
    """Chunked prefill, then random trees and random acceptances, far past the window's wrap-around."""
    model, rng = tiny_model(name, attention), random.Random(len(lengths))
    cache = make_cache(model, len(lengths))
    rows = random_rows(rng, lengths)
    prefill(model, cache, rows)
    for _ in range(6):
        size = rng.choice([1, 4, 7])
        trees = [random_tree(rng, size) for _ in rows]
        logits = tree_forward(model, cache, trees)
        kept = []
        for row, tree, row_logits in zip(rows, trees, logits, strict=True):
            node = rng.randrange(size)
            path = tree.path(node)
            assert_close(row_logits[node], oracle(model, row + [tree.tokens[i] for i in path]))
            kept.append(path[: rng.randint(0 if len(rows) > 1 else 1, len(path))])
        width = max(map(len, kept))
        cache.keep([path + [-1] * (width - len(path)) for path in kept], [len(path) for path in kept])
        for row, tree, path in zip(rows, trees, kept, strict=True):
            row += [tree.tokens[i] for i in path]
        assert cache.lengths == [len(row) for row in rows] == cache.lengths_tensor.tolist()


@pytest.mark.parametrize(("name", "attention"), CELLS)
def test_every_node_of_a_ragged_tree_equals_its_own_path(name, attention):
    model, rng = tiny_model(name, attention), random.Random(7)
    cache = make_cache(model, 3)
    rows = random_rows(rng, (4, 19, 10))
    prefill(model, cache, rows)
    trees = [random_tree(rng, 6) for _ in rows]
    logits = tree_forward(model, cache, trees)
    for row, tree, row_logits in zip(rows, trees, logits, strict=True):
        for node in range(6):
            assert_close(row_logits[node], oracle(model, row + [tree.tokens[i] for i in tree.path(node)]))


@pytest.mark.parametrize("name", ["llama", "gemma3-mixed", "mistral-windowed"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_single_token_without_a_mask_equals_a_plain_forward(name, attention):
    """`None` masks reach transformers' own mask code on tensor models and attention itself on dict models."""
    model, rng = tiny_model(name, attention), random.Random(3)
    cache = make_cache(model, 1)
    (row,) = random_rows(rng, (11,))
    prefill(model, cache, [row])
    for _ in range(4):
        row.append(rng.randrange(3, VOCAB))
        assert_close(forward(model, cache, [row[-1:]])[0, -1], oracle(model, row))
        cache.commit(1)


@pytest.mark.parametrize("name", ["llama", "gemma3-mixed"])
@pytest.mark.parametrize("lengths", [(13,), (3, 12)], ids=["one", "ragged"])
def test_a_tree_grown_level_by_level_equals_the_whole_tree(name, lengths):
    model, rng = tiny_model(name), random.Random(5)
    cache = make_cache(model, len(lengths))
    prefill(model, cache, random_rows(rng, lengths))
    tree = Tree([5, 6, 7, 8, 9, 10], [0, 0, 0, 1, 2, 2])
    tokens = torch.tensor([tree.tokens] * len(lengths))
    whole = forward(model, cache, tokens, tree.ancestors, tree.depths)
    cache.rollback(cache.lengths)
    for first, end in ((0, 1), (1, 3), (3, 6)):
        level = forward(
            model, cache, tokens[:, first:end], tree.ancestors[first:end, :end], tree.depths[:end], after=first
        )
        assert_close(level, whole[:, first:end])
    cache.keep([[0, 2, 5]] * len(lengths), [3] * len(lengths))
    assert cache.lengths == [n + 3 for n in lengths]


@pytest.mark.parametrize("name", ["llama", "gemma3-mixed"])
@pytest.mark.parametrize("slab", [None, 8])
def test_a_forward_that_fails_half_way_leaves_nothing_behind(name, slab):
    model, rng = tiny_model(name), random.Random(9)
    rows, tree = random_rows(rng, (15,)), random_tree(rng, 7)
    cache, unharmed = (make_cache(model, 1, slab=slab) for _ in range(2))
    for one in (cache, unharmed):
        prefill(model, one, rows)
    before = cache.lengths

    def fail(*_):
        raise torch.OutOfMemoryError("injected")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        tree_forward(model, cache, [random_tree(rng, 7)])
    hook.remove()
    cache.rollback(before)
    assert torch.equal(tree_forward(model, cache, [tree]), tree_forward(model, unharmed, [tree]))
    for one in (cache, unharmed):
        one.keep([tree.path(6)], [len(tree.path(6))])
    assert torch.equal(forward(model, cache, [[5, 6]]), forward(model, unharmed, [[5, 6]]))


@pytest.mark.parametrize("name", ["llama", "qwen2-windowed", "mistral-windowed", "gemma3-mixed"])
@pytest.mark.parametrize("new_tokens", [2, 20])
def test_a_stock_cache_is_taken_over_and_handed_back(name, new_tokens):
    model, rng = tiny_model(name), random.Random(1)
    prompts = torch.tensor(random_rows(rng, (4, 4)))
    theirs = DynamicCache(config=model.config)
    options = dict(do_sample=False, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0)
    rows = model.generate(prompts, past_key_values=theirs, **options).tolist()
    cache = make_cache(model, 2)
    cache.load_dynamic(theirs)
    assert cache.lengths == [3 + new_tokens] * 2
    logits = forward(model, cache, [row[-1:] for row in rows])
    for row, row_logits in zip(rows, logits, strict=True):
        assert_close(row_logits[-1], oracle(model, row))
    cache.commit(1)

    rows = [[*row, 11] for row in rows]
    fresh = cache.to_dynamic(model.config)
    cache.export_into(theirs)
    assert theirs.get_seq_length() == fresh.get_seq_length() == len(rows[0]) - 1
    wanted = model.generate(torch.tensor(rows), **options)
    for stock in (fresh, theirs):
        assert torch.equal(model.generate(torch.tensor(rows), past_key_values=stock, **options), wanted)


def test_shared_key_value_layers_stay_empty_and_are_skipped():
    cache = SpeculativeCache([None, None], batch_size=1, capacity=32, block=8)
    cache.place(4)
    cache.update(torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4, 5), 0)
    cache.keep([[0, 2]], [2])
    assert not cache.layers[1].is_initialized
    assert cache.num_bytes == 32 * 2 * (3 + 5) * 4
    assert cache.to_dynamic(AutoConfig.for_model("llama", **COMMON)).get_seq_length() == 2


# A list of lists -----------------------------------------------------------------------------------------------------


@dataclass
class Mirror:
    """The cache beside plain Python lists. Keys and values are the token number itself."""

    windows: list[int | None]
    rows: list[list[int]]
    slab: int | None
    cache: SpeculativeCache = field(init=False)
    next_token: int = 1

    def __post_init__(self):
        self.cache = SpeculativeCache(
            self.windows,
            batch_size=len(self.rows),
            capacity=96,
            block=8,
            slab=self.slab,
            layer_types=["sliding_attention" if w else "full_attention" for w in self.windows],
        )

    def write(self, num_tokens: int, after: int = 0) -> torch.Tensor:
        """Write unique tokens through every layer, `(B, T)`."""
        size = len(self.rows) * num_tokens
        tokens = torch.arange(self.next_token, self.next_token + size).view(-1, num_tokens)
        self.next_token += size
        self.cache.place(num_tokens, after=after)
        keys = tokens[:, None, :, None].float()
        for layer in range(len(self.windows)):
            self.cache.update(keys.expand(-1, 2, -1, 3), -keys.expand(-1, 2, -1, 5), layer)
        return tokens

    def check(self):
        lengths = [len(row) for row in self.rows]
        assert self.cache.lengths == lengths == self.cache.lengths_tensor.tolist()
        for layer, window in zip(self.cache.layers, self.windows, strict=True):
            if not layer.is_initialized:
                continue
            for b, row in enumerate(self.rows):
                ring = len(row) if window is None else max(window - 1, 1)
                for position in range(max(0, len(row) - ring), len(row)):
                    slot = position if window is None else position % ring
                    assert (layer.keys[b, :, slot] == row[position]).all()
                    assert (layer.values[b, :, slot] == -row[position]).all()


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_histories_equal_a_list_of_lists(data):
    draw = data.draw
    batch_size = draw(st.integers(1, 3))
    mirror = Mirror([None, 4, None, 4], [[] for _ in range(batch_size)], draw(st.sampled_from([None, 5])))
    for _ in range(draw(st.integers(1, 10))):
        rows = mirror.rows
        if max(map(len, rows)) > 80:
            break
        after = draw(st.integers(0, 3))
        tokens = mirror.write(draw(st.integers(1, 5)))
        if after:
            tokens = torch.cat([tokens, mirror.write(after, after=tokens.shape[1])], dim=1)
        size = tokens.shape[1]
        action = draw(st.sampled_from(["keep", "keep tensor", "commit", "forget", "select", "crop"]))
        if action.startswith("keep"):
            sets = [draw(st.sets(st.integers(0, size - 1))) for _ in rows]
            paths = [sorted(nodes) for nodes in sets]
            padded = [path + [-1] * (size - len(path)) for path in paths]
            counts = [len(path) for path in paths]
            mirror.cache.keep(torch.tensor(padded) if action == "keep tensor" else padded, counts)
            for b, path in enumerate(paths):
                rows[b] += tokens[b, path].tolist()
        elif action == "commit":
            counts = [draw(st.integers(0, size)) for _ in rows]
            mirror.cache.commit(counts)
            for b, count in enumerate(counts):
                rows[b] += tokens[b, :count].tolist()
        elif action == "forget":
            mirror.cache.rollback(mirror.cache.lengths)
        elif action == "select":
            picked = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=3))
            mirror.cache.select_rows(picked)
            mirror.rows = [list(rows[b]) for b in picked]
        else:
            wanted = [draw(st.integers(0, len(row))) for row in rows]
            # A ring of 3 gives back only rows it never overwrote.
            if all(n in (0, len(row)) or len(row) <= 3 for n, row in zip(wanted, rows, strict=True)):
                mirror.cache.rollback(wanted)
                mirror.rows = [row[:n] for n, row in zip(wanted, rows, strict=True)]
            else:
                with pytest.raises(UnsupportedGenerationError, match="sliding-window"):
                    mirror.cache.rollback(wanted)
                mirror.cache.rollback(mirror.cache.lengths)
        mirror.check()


def test_full_layers_roll_back_to_any_length():
    mirror = Mirror([None, None], [[], []], None)
    rng = random.Random(0)
    for _ in range(30):
        tokens = mirror.write(6)
        counts = [rng.randint(0, 6) for _ in range(2)]
        mirror.cache.commit(counts)
        mirror.rows = [row + new[:n].tolist() for row, new, n in zip(mirror.rows, tokens, counts, strict=True)]
        lengths = [rng.randint(len(row) // 2, len(row)) for row in mirror.rows]
        mirror.cache.rollback(lengths)
        mirror.rows = [row[:n] for row, n in zip(mirror.rows, lengths, strict=True)]
        mirror.check()
    mirror.cache.crop(-2)
    mirror.rows = [row[:-2] for row in mirror.rows]
    mirror.check()
    mirror.cache.reset()
    assert mirror.cache.lengths == [0, 0]


@pytest.mark.parametrize("slab", [None, 16])
def test_buffers_stay_where_they_are(slab):
    mirror = Mirror([None, 4], [[]], slab)
    pointers = []
    for _ in range(20):
        mirror.write(4)
        mirror.cache.attention_mask(torch.ones(4, 4).tril().bool())
        mirror.cache.keep([[0, 3]], [2])
        held = [t.data_ptr() for layer in mirror.cache.layers for t in (layer.keys, layer.values)]
        pointers.append((*held, mirror.cache._masks.resident._buffer.data_ptr()))
    assert mirror.cache.lengths == [40]
    # 2 tokens a round and 4 on top: slabs of 16 are outgrown at 44 slots twice, full size never.
    assert len(set(pointers)) == (1 if slab is None else 3)
    assert mirror.cache.layers[0].keys.shape[2] == (96 if slab is None else 48)
    assert mirror.cache.layers[1].keys.shape[2] == 3 + 8


# Masks ---------------------------------------------------------------------------------------------------------------


def naive_mask(lengths, ancestors, depths, after, window=None, chunked=False):
    """Cell by cell: full layers by slot; windowed layers by ring slot, then block."""
    num_queries, num_nodes = ancestors.shape[1:]
    ring = None if window is None else max(window - 1, 1)
    width = (max(lengths) if ring is None else ring) + num_nodes
    mask = torch.full((len(lengths), 1, num_queries, width), torch.finfo(torch.float32).min)
    for b, length in enumerate(lengths):
        node_slot = length if ring is None else ring
        held = {p if ring is None else p % ring: p for p in range(length)}
        for query in range(num_queries):
            position = length + int(depths[b, after + query])
            candidates = list(held.items())
            candidates += [
                (node_slot + j, length + int(depths[b, j])) for j in range(num_nodes) if ancestors[b, query, j]
            ]
            for slot, key_position in candidates:
                near = window is None or (
                    position // window == key_position // window if chunked else position - key_position < window
                )
                if near:
                    mask[b, 0, query, slot] = 0
    return mask


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch_size=st.integers(1, 3),
    shared=st.booleans(),
    slab=st.sampled_from([None, 7]),
    kind=st.sampled_from(["sliding_attention", "chunked_attention"]),
    window=st.integers(1, 6),
)
def test_masks_equal_the_formula_after_every_round(seed, batch_size, shared, slab, kind, window):
    """Rounds of random tree, acceptance and rollback: the resident mask must never remember a rejected block."""
    rng = random.Random(seed)
    cache = SpeculativeCache(
        [None, window],
        batch_size=batch_size,
        capacity=90,
        block=9,
        slab=slab,
        layer_types=["full_attention", kind],
    )
    for _ in range(10):
        size, after = rng.randint(1, 6), rng.randint(0, 3)
        trees = [random_tree(rng, after + size)] * batch_size
        if not shared:
            trees = [random_tree(rng, after + size) for _ in range(batch_size)]
        ancestors = torch.stack([t.ancestors for t in trees])
        depths = torch.stack([t.depths for t in trees])
        if after:
            cache.place(after)
            cache.attention_mask(ancestors[:, :after, :after])
        cache.place(size, after=after)
        queries = ancestors[:, after:]
        masks = cache.attention_mask(queries[0] if shared else queries, depths[0] if shared else depths)
        wanted = naive_mask(cache.lengths, queries, depths, after)
        full = masks["full_attention"]
        if full is None:
            assert not wanted.any()
        else:
            assert torch.equal(full.expand_as(wanted), wanted)
        wanted = naive_mask(cache.lengths, queries, depths, after, window, kind == "chunked_attention")
        assert torch.equal(masks[kind].expand_as(wanted), wanted)
        wanted_positions = torch.tensor(cache.lengths)[:, None] + depths[:, after:]
        assert torch.equal(cache.position_ids(depths), wanted_positions)

        count = rng.randint(0, after + size)
        cache.commit([count if rng.random() < 0.7 else rng.randint(0, after + size) for _ in range(batch_size)])
        if rng.random() < 0.2:
            cache.reset()
        if max(cache.lengths) > 75:
            break


def test_a_chain_needs_no_ancestors():
    for lengths in ([4], [4, 4], [2, 9]):
        for num_tokens in (1, 3, 9):
            cache = SpeculativeCache([None], batch_size=len(lengths), capacity=40, block=9)
            cache.place(9)
            cache.commit(lengths)
            cache.place(num_tokens)
            got = cache.attention_mask()
            chain = torch.ones(num_tokens, num_tokens).tril().bool().expand(len(lengths), -1, -1)
            depths = torch.arange(num_tokens).expand(len(lengths), -1)
            wanted = naive_mask(lengths, chain, depths, 0)
            assert wanted.any() == (got is not None)
            if got is not None:
                assert torch.equal(got.expand_as(wanted), wanted)


def test_a_prefill_chunk_does_not_stay_in_the_resident_mask():
    cache = SpeculativeCache([None], batch_size=1, capacity=4096, block=RESIDENT_QUERIES + 1)
    cache.place(RESIDENT_QUERIES + 1)
    assert cache.attention_mask().shape == (1, 1, RESIDENT_QUERIES + 1, RESIDENT_QUERIES + 1)
    assert cache.num_bytes == 0
    cache.commit(RESIDENT_QUERIES + 1)
    cache.place(4)
    mask = cache.attention_mask()
    assert not mask[..., : RESIDENT_QUERIES + 1].any()
    assert mask[..., RESIDENT_QUERIES + 1 :].count_nonzero() == 6
    assert cache.num_bytes == 4 * 4096 * 4


def test_masks_follow_the_dtype():
    cache = SpeculativeCache([None, 3], batch_size=1, capacity=20, block=4, layer_types=MIXED[1:])
    cache.place(4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for mask in cache.attention_mask(dtype=dtype).values():
            assert mask.dtype == dtype
            assert mask.min() == torch.finfo(dtype).min


# Configurations and refusals -----------------------------------------------------------------------------------------


def spans_of(kind: str, capacity: int = 64, masks_by_type: bool | None = None, **fields):
    config = AutoConfig.for_model(kind, **{**COMMON, **fields})
    cache = SpeculativeCache.from_config(config, batch_size=1, capacity=capacity, block=8, masks_by_type=masks_by_type)
    return cache._spans


def test_windows_come_from_the_config():
    full, sliding = AttentionSpan(), AttentionSpan(WINDOW)
    assert spans_of("llama").by_mask == {"full_attention": full}
    assert spans_of("mistral", sliding_window=WINDOW).spans == (sliding,) * 3
    assert spans_of("mistral", sliding_window=None).spans == (full,) * 3
    assert spans_of("phi3", sliding_window=WINDOW).types is None
    assert spans_of("qwen3").types == ("full_attention",) * 3
    mixed = spans_of("gemma3_text", sliding_window=WINDOW, layer_types=MIXED)
    assert mixed.by_mask == {"sliding_attention": sliding, "full_attention": full}
    chunked = spans_of("llama4_text", **MODELS["llama4-chunked"][1])
    assert chunked.by_mask["chunked_attention"] == AttentionSpan(WINDOW, chunked=True)
    stray = spans_of("mistral", masks_by_type=False, sliding_window=WINDOW, layer_types=["full_attention"] * 3)
    assert stray.types is None
    assert stray.spans == (sliding,) * 3


def test_a_window_that_no_row_outgrows_is_full_attention():
    assert spans_of("mistral", capacity=WINDOW, sliding_window=WINDOW).rings == set()
    assert spans_of("mistral", capacity=WINDOW + 1, sliding_window=WINDOW).rings == {WINDOW - 1}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("falcon_h1", {}),
        ("qwen3_next", {}),
        ("lfm2", dict(num_hidden_layers=2, layer_types=["conv", "full_attention"])),
    ],
)
def test_recurrent_targets_are_refused(kind, fields):
    config = AutoConfig.for_model(kind, **fields)
    with pytest.raises(IncompatibleTargetError, match=kind):
        SpeculativeCache.from_config(config, batch_size=1, capacity=8, block=8)


def test_llama4_is_refused_where_its_query_scale_would_follow_slots():
    with pytest.raises(IncompatibleTargetError, match="8192"):
        spans_of("llama4_text", capacity=8192, **MODELS["llama4-chunked"][1])


def test_sizes_and_windows_are_checked():
    with pytest.raises(ConfigurationError, match="capacity"):
        SpeculativeCache([None], batch_size=1, capacity=0, block=4)
    with pytest.raises(ConfigurationError, match="layer_types"):
        SpeculativeCache([None, 4], batch_size=1, capacity=32, block=4)
    with pytest.raises(ConfigurationError, match="layer types"):
        SpeculativeCache([None, 4], batch_size=1, capacity=32, block=4, layer_types=["full_attention"])


def test_what_does_not_fit_is_refused_before_anything_is_written():
    cache = SpeculativeCache([None], batch_size=2, capacity=10, block=6)
    with pytest.raises(MemoryPlanError, match="block=6"):
        cache.place(7)
    with pytest.raises(MemoryPlanError, match="block=6"):
        cache.place(3, after=4)
    cache.place(6)
    cache.commit([6, 2])
    with pytest.raises(MemoryPlanError, match="capacity=10"):
        cache.place(5)
    assert cache.lengths == [6, 2]
    cache.place(4)


def test_forwards_that_were_not_placed_are_refused():
    cache = SpeculativeCache([None], batch_size=1, capacity=16, block=4)
    states = torch.zeros(1, 1, 3, 2)
    with pytest.raises(UnsupportedGenerationError, match="place"):
        cache.update(states, states, 0)
    cache.place(2)
    with pytest.raises(UnsupportedGenerationError, match="1 rows of 3 tokens"):
        cache.update(states, states, 0)
    model = tiny_model("llama")
    with pytest.raises(UnsupportedGenerationError, match="to_dynamic"):
        model.generate(torch.tensor([[3, 4, 5]]), past_key_values=make_cache(model, 1), max_new_tokens=2)


@pytest.mark.parametrize(
    ("path", "counts"),
    [(None, [4, 1]), (None, [1]), (None, [-1, 1]), ([[0, 3], [0, 1]], [2, 2]), ([[0], [-1]], [1, 1])],
)
def test_nodes_outside_the_block_are_not_kept(path, counts):
    cache = SpeculativeCache([None], batch_size=2, capacity=16, block=4)
    cache.place(3)
    with pytest.raises(UnsupportedGenerationError, match="below 3"):
        cache.keep(path, counts)
    assert cache.lengths == [0, 0]


def test_a_failed_commit_of_a_ring_is_not_rolled_back_silently(monkeypatch):
    mirror = Mirror([4, 4], [[]], None)
    mirror.write(8)
    mirror.cache.commit(8)
    mirror.write(4)

    def fail(*_):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(mirror.cache.layers[1], "copy", fail)
    with pytest.raises(torch.OutOfMemoryError):
        mirror.cache.commit(2)
    with pytest.raises(UnsupportedGenerationError, match="prefill"):
        mirror.cache.rollback([8])
    mirror.cache.rollback([0])


def test_rollback_only_shortens():
    cache = SpeculativeCache([None], batch_size=1, capacity=16, block=4)
    with pytest.raises(UnsupportedGenerationError, match=r"\[1\]"):
        cache.rollback([1])
    with pytest.raises(ValueError, match="crop"):
        cache.crop(1)


def test_foreign_caches_are_refused():
    model = tiny_model("llama")
    ours = make_cache(model, 1)
    static = StaticCache(config=model.config, max_cache_len=16)
    model(torch.tensor([[3, 4, 5]]), past_key_values=static)
    with pytest.raises(UnsupportedGenerationError, match="StaticLayer"):
        ours.load_dynamic(static)
    two_rows = DynamicCache(config=model.config)
    model(torch.tensor([[3, 4, 5]] * 2), past_key_values=two_rows)
    with pytest.raises(UnsupportedGenerationError, match="of 2 rows"):
        ours.load_dynamic(two_rows)
    long = DynamicCache(config=model.config)
    model(torch.tensor([[3] * 129]), past_key_values=long)
    with pytest.raises(MemoryPlanError, match="129"):
        ours.load_dynamic(long)
    assert ours.lengths == [0]


def test_rows_of_different_length_have_no_stock_form():
    cache = SpeculativeCache([None], batch_size=2, capacity=16, block=4)
    cache.place(3)
    cache.update(torch.zeros(2, 1, 3, 2), torch.zeros(2, 1, 3, 2), 0)
    cache.commit([1, 3])
    with pytest.raises(UnsupportedGenerationError, match=r"\[1, 3\]"):
        cache.export_into(DynamicCache())


def test_a_window_is_not_exported_into_a_stock_layer_that_keeps_all():
    model, rng = tiny_model("mistral-windowed"), random.Random(0)
    cache = make_cache(model, 1)
    prefill(model, cache, random_rows(rng, (12,)))
    theirs = DynamicCache()
    theirs.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), 0)
    with pytest.raises(UnsupportedGenerationError, match=r"config=model\.config"):
        cache.export_into(theirs)
    assert theirs.get_seq_length() == 3


def test_a_copy_is_independent():
    model, rng = tiny_model("gemma3-mixed"), random.Random(2)
    cache = make_cache(model, 1)
    (row,) = random_rows(rng, (14,))
    prefill(model, cache, [row])
    twin = copy.deepcopy(cache)
    forward(model, cache, [[7, 8, 9]])
    cache.commit(3)
    assert twin.lengths == [14]
    assert_close(forward(model, twin, [[5]])[0, -1], oracle(model, [*row, 5]))
