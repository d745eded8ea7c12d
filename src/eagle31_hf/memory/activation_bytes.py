"""Bytes a forward pass takes above weights and caches, at its worst moment.

Each formula lists what is alive when one decoder layer is at its widest, found by tracing stock models with fake
tensors and confirmed by such traces in the tests. `T = B*C` tokens run at once, `S` slots are visible, an element has
`b` bytes.

    while a layer's MLP runs       4H + 3I per token: embeddings, layer input, residual, normed; gate, up, product
    while its attention runs       3H + 2 n_q d per token, and the mask repeated for each query head of a group; without
                                   a fused kernel keys and values, repeated for every query head
    while a recurrent layer runs   what the model is seen to take on the meta device (`state_bytes`)
    always                         rotary tables, masks, the hidden states being tapped

Left out: workspaces inside kernels, and padding of a mask whose row length is no multiple of 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..trees.shape import RESIDENT_QUERIES, repeats_mask
from .state_bytes import StateShape


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder-only model that its activations and caches depend on.

    Attributes:
        windows: per layer, tokens it sees back, or `None` for all.
        key_dim, value_dim: per head; they differ for latent attention.
        mlp_units: widest MLP intermediate per token, in elements (for experts: over all chosen ones).
        rotary_tables: distinct cosine/sine pairs.
        element_bytes: of activations and of an unquantised cache.
        score_bytes: held per attention score by attention without a fused kernel; 0 with one.
        kv_by_layer: per layer, heads its cache tells apart and the elements a slot of one of them takes; empty: as
            above. Latent attention caches less than it attends to; where layers differ, above are the widest's sizes;
            a layer that does not attend keeps nothing.
        states: of layers that keep recurrent and convolution states; `None`: there are none.
        logit_bytes: of a logit, if the model gives them in another precision; 0: in its own.
    """

    hidden_size: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    mlp_units: int
    vocab_size: int
    windows: tuple[int | None, ...]
    rotary_tables: int = 1
    element_bytes: int = 2
    score_bytes: int = 0
    kv_by_layer: tuple[tuple[int, int], ...] = ()
    states: StateShape | None = None
    logit_bytes: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def kv_elements(self, capacity: int, block: int) -> int:
        """Cache elements of one row: all slots of full layers, ring and scratch of windowed ones."""
        return sum(self._layer_elements(capacity, block))

    def largest_layer_elements(self, capacity: int, block: int) -> int:
        """Cache elements of one row of the layer that keeps most."""
        return max(self._layer_elements(capacity, block))

    def kv_heads_slots(self, capacity: int, block: int) -> int:
        """Keys and values of one row as (head, slot) pairs: what a per-token scale is stored for."""
        return sum(2 * heads * slots for heads, _, slots in self._layers(capacity, block))

    def _layer_elements(self, capacity: int, block: int) -> list[int]:
        return [heads * width * slots for heads, width, slots in self._layers(capacity, block)]

    def _layers(self, capacity: int, block: int) -> list[tuple[int, int, int]]:
        """Of each layer: key/value heads, elements of a head's slot, slots."""
        same = (self.kv_heads, self.key_dim + self.value_dim)
        kinds = self.kv_by_layer or (same,) * self.num_layers
        slots = [self.layer_slots(window, capacity, block) for window in self.windows]
        return [(heads, width, count) for (heads, width), count in zip(kinds, slots, strict=True)]

    @staticmethod
    def layer_slots(window: int | None, capacity: int, block: int) -> int:
        """Slots of one layer. A window no row can outgrow is stored as a full layer."""
        return capacity if window is None or window >= capacity else max(window - 1, 1) + block

    def visible_slots(self, context: int, block: int, capacity: int) -> int:
        """Most slots a query of any layer attends to."""
        return max(
            context if window is None or window >= capacity else max(window - 1, 1) + block for window in self.windows
        )

    def distinct_windows(self, capacity: int) -> list[int | None]:
        return list(dict.fromkeys(None if w is None or w >= capacity else w for w in self.windows))


@dataclass(frozen=True)
class Block:
    """One forward: `batch` rows of `tokens` tokens that see `context` slots, their own included.

    Attributes:
        capacity: slots the cache was made for.
        ragged: rows differ in length, so each has a mask of its own.
        grown_bytes: of an element of a cache that may move to a larger buffer now, old and new of one layer side by
            side; 0: it stays.
    """

    batch: int
    tokens: int
    context: int
    capacity: int
    ragged: bool = False
    grown_bytes: int = 0

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


def mask_bytes(shape: DecoderShape, block: Block) -> int:
    """Masks made for this forward; the resident one of a small block of equal rows belongs to the cache."""
    copies = block.batch if block.ragged else 1
    total = 0
    for window in shape.distinct_windows(block.capacity):
        if window is not None:
            total += copies * block.tokens * (max(window - 1, 1) + block.tokens)
        elif block.ragged or block.tokens > RESIDENT_QUERIES:
            total += copies * block.tokens * block.context
    return total * shape.element_bytes


def resident_mask_bytes(shape: DecoderShape, queries: int, capacity: int) -> int:
    """The mask a cache keeps between rounds for blocks of up to `queries` (rounded up to a power of two)."""
    if queries > RESIDENT_QUERIES or None not in shape.distinct_windows(capacity) or queries <= 1:
        return 0
    return (1 << (queries - 1).bit_length()) * capacity * shape.element_bytes


def target_forward_bytes(shape: DecoderShape, block: Block, *, taps: int) -> int:
    """Peak of the decoder layers of a stock model; `taps` hidden states are kept for the drafter."""
    b, rows = shape.element_bytes, block.rows
    rotary = 2 * shape.rotary_tables * rows * shape.key_dim * b
    always = rotary + mask_bytes(shape, block) + taps * rows * shape.hidden_size * b
    mlp = rows * (4 * shape.hidden_size + shape.mlp_units) * b
    norm = rows * (3 * b + 12) * shape.hidden_size  # fp32 copy, its square, the normed product
    attention = 3 * rows * shape.hidden_size * b + _attention_bytes(shape, block)
    states = shape.states
    mixers = 0 if states is None else max(rows * states.forward_token, block.batch * states.forward_step)
    return always + max(mlp, norm, attention, mixers)


def _attention_bytes(shape: DecoderShape, block: Block) -> int:
    """Queries, output, its log-sum-exp, and what else is made for the kernel: see `grouped_attention`."""
    b, rows = shape.element_bytes, block.rows
    per_head = shape.key_dim + shape.value_dim
    visible = shape.visible_slots(block.context, block.tokens, block.capacity)
    total = rows * shape.q_heads * (per_head * b + 4)
    made = block.batch * shape.kv_heads * per_head * visible * block.grown_bytes
    groups = shape.q_heads // shape.kv_heads
    if groups > 1 and block.tokens > 1:
        if shape.score_bytes:
            made = block.batch * shape.q_heads * per_head * visible * b
        elif repeats_mask(block.tokens, shape.kv_heads, groups, shape.key_dim):
            masks = block.batch if block.ragged else 1
            made = max(made, masks * groups * block.tokens * visible * b)
    total += made
    return total + shape.score_bytes * shape.q_heads * rows * visible


def full_cache_bytes(shape: DecoderShape, capacity: int, block: int) -> int:
    """Keys and values of one row in the model's dtype."""
    return shape.kv_elements(capacity, block) * shape.element_bytes


def packed_cache_bytes(shape: DecoderShape, capacity: int, block: int) -> int:
    """Keys and values of one row in 8 bits, and a scale in the model's dtype per head and slot for each of the two."""
    return shape.kv_elements(capacity, block) + shape.kv_heads_slots(capacity, block) * shape.element_bytes


def unpacked_layer_bytes(shape: DecoderShape, capacity: int, block: int) -> int:
    """One row of the place where layers of an 8-bit cache are unpacked in turn: the largest, in the model's dtype."""
    return shape.largest_layer_elements(capacity, block) * shape.element_bytes


def logits_bytes(shape: DecoderShape, rows: int) -> int:
    """Logits `(rows, V)` as the model returns them."""
    return rows * shape.vocab_size * (shape.logit_bytes or shape.element_bytes)


def accept_bytes(shape: DecoderShape, rows: int) -> int:
    """Processing and acceptance of `(rows, V)` logits by temperature and top-p, which take most: fp32 scores before and
    after, a sorted copy and its ids, their sums, and which of them go, twice."""
    return rows * shape.vocab_size * (4 + 4 + 4 + 8 + 4 + 2)


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter; see `Eagle31Config`.

    Attributes:
        decoder: its own layers, as those of any decoder. `mlp_units` counts gate and up in one, activation, product.
        aux_width: `A * Ht`, what it reads of the target per position.
        draft_vocab: `Vd`.
    """

    decoder: DecoderShape
    aux_width: int
    draft_vocab: int


def absorb_bytes(shape: DrafterShape, block: Block) -> int:
    """Peak of a drafter pass over true hidden states, which stay alive throughout."""
    decoder = shape.decoder
    b, rows = decoder.element_bytes, block.rows
    aux = rows * shape.aux_width * b
    fuse = rows * (2 * shape.aux_width + decoder.hidden_size) * b  # normed slots, side by side again, fc's output
    return aux + max(fuse, _drafter_pass_bytes(decoder, block))


def draft_step_bytes(shape: DrafterShape, block: Block) -> int:
    """Peak of one draft step and of ranking its `(rows, Vd)` logits: fp32 copy and log-probabilities."""
    ranking = block.rows * shape.draft_vocab * (shape.decoder.element_bytes + 4 + 4)
    return max(_drafter_pass_bytes(shape.decoder, block), ranking) + block.rows * shape.decoder.hidden_size * 2


def _drafter_pass_bytes(shape: DecoderShape, block: Block) -> int:
    b, rows, width = shape.element_bytes, block.rows, shape.hidden_size
    always = 2 * rows * shape.key_dim * b + mask_bytes(shape, block)
    mlp = rows * (7 * width + shape.mlp_units) * b
    fused_qkv = (shape.q_heads + 2 * shape.kv_heads) * shape.key_dim
    attention = rows * (5 * width + fused_qkv) * b + _attention_bytes(shape, block)
    return always + max(mlp, attention)
