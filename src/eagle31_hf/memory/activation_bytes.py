"""Bytes a forward pass takes above weights and caches, at its worst moment, and what captured ones keep.

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

from ..cache.graph_sizes import SLOT_BUCKET, slot_bucket
from ..drafting.shape import RESIDENT_QUERIES, DraftShape, repeats_mask
from .cards import MIB, Card
from .state_bytes import StateShape


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder-only model that its activations and caches depend on.

    Attributes:
        windows: per layer, tokens it sees back, or `None` for all.
        key_dim, value_dim: per head; they differ for latent attention.
        token_bytes: of a pass over many tokens, for each: what is alive at most, keys and values aside.
        element_bytes: of activations and of an unquantised cache.
        score_bytes: held per attention score by attention without a fused kernel; 0 with one.
        kv_by_layer: per layer, heads its cache tells apart and the elements a slot of one of them takes; empty: as
            above. Latent attention caches less than it attends to; where layers differ, above are the widest's sizes;
            a layer that does not attend keeps nothing.
        states: of layers that keep recurrent and convolution states; `None`: there are none.
        logit_bytes: of a logit; 0: in the model's precision.
        expanded_elements: of keys and values that latent attention makes of each slot it sees, for each query head.
    """

    hidden_size: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    token_bytes: int
    vocab_size: int
    windows: tuple[int | None, ...]
    element_bytes: int = 2
    score_bytes: int = 0
    kv_by_layer: tuple[tuple[int, int], ...] = ()
    states: StateShape | None = None
    logit_bytes: int = 0
    expanded_elements: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def layers(self, capacity: int, block: int) -> list[tuple[int, int, int]]:
        """What each layer's cache keeps of a row: key/value heads, elements of a head's slot, slots.

        All slots of full layers, ring and scratch of windowed ones; a window no row can outgrow is stored as a full
        layer.
        """
        same = (self.kv_heads, self.key_dim + self.value_dim)
        kinds = self.kv_by_layer or (same,) * self.num_layers
        slots = [self.visible_slots(capacity, block, capacity, window) for window in self.windows]
        return [(heads, width, count) for (heads, width), count in zip(kinds, slots, strict=True)]

    @staticmethod
    def visible_slots(context: int, block: int, capacity: int, window: int | None) -> int:
        """Slots of a layer with this window, of `context`, that a block attends to."""
        return context if window is None or window >= capacity else max(window - 1, 1) + block

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
    always = mask_bytes(shape, block) + taps * rows * shape.hidden_size * b
    attention = rows * (2 * shape.key_dim + 3 * shape.hidden_size) * b + _attention_bytes(shape, block)
    steps = 0 if shape.states is None else block.batch * shape.states.forward_step
    return always + max(rows * shape.token_bytes, attention, steps)


def _attention_bytes(shape: DecoderShape, block: Block) -> int:
    """Queries, output, its log-sum-exp, and what else is made for the kernel: see `grouped_attention`."""
    b, rows = shape.element_bytes, block.rows
    per_head = shape.key_dim + shape.value_dim
    visible = max(shape.visible_slots(block.context, block.tokens, block.capacity, w) for w in shape.windows)
    made = block.batch * shape.kv_heads * per_head * visible * block.grown_bytes
    groups = shape.q_heads // shape.kv_heads
    if shape.expanded_elements:
        queries = 2 * rows * shape.key_dim  # as projected, and those of which a part was rotated
        made = shape.q_heads * (block.batch * shape.expanded_elements * visible + queries) * b
    elif groups > 1 and block.tokens > 1:
        if shape.score_bytes:
            made = block.batch * shape.q_heads * per_head * visible * b
        elif repeats_mask(block.tokens, shape.kv_heads, groups, shape.key_dim):
            masks = block.batch if block.ragged else 1
            made = max(made, masks * groups * block.tokens * visible * b)
    return made + rows * shape.q_heads * (per_head * b + 4 + shape.score_bytes * visible)


def full_cache_bytes(shape: DecoderShape, capacity: int, block: int) -> int:
    """Keys and values of one row in the model's dtype."""
    return sum(heads * width * slots for heads, width, slots in shape.layers(capacity, block)) * shape.element_bytes


def packed_cache_bytes(shape: DecoderShape, capacity: int, block: int) -> int:
    """Keys and values of one row in 8 bits, and a scale in the model's dtype per head and slot for each of the two."""
    layers = shape.layers(capacity, block)
    return sum(heads * slots * (width + 2 * shape.element_bytes) for heads, width, slots in layers)


def unpacked_layer_bytes(shape: DecoderShape, capacity: int, block: int) -> int:
    """One row of the place where layers of an 8-bit cache are unpacked in turn: the largest, in the model's dtype."""
    return max(heads * width * slots for heads, width, slots in shape.layers(capacity, block)) * shape.element_bytes


ACCEPT_BYTES = 4 + 4 + 4 + 8 + 4 + 2
"""For each logit: fp32 scores before and after, a sorted copy and its ids, their sums, and which of them go, twice."""


def logits_bytes(shape: DecoderShape, rows: int) -> int:
    """Logits `(rows, V)` as the model returns them."""
    return rows * shape.vocab_size * (shape.logit_bytes or shape.element_bytes)


def accept_bytes(shape: DecoderShape, rows: int) -> int:
    """Processing and acceptance of `(rows, V)` logits by temperature and top-p, which take most."""
    return rows * shape.vocab_size * ACCEPT_BYTES


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter; see `Eagle31Config`.

    Attributes:
        decoder: its own layers, as those of any decoder.
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
    fused_qkv = (shape.q_heads + 2 * shape.kv_heads) * shape.key_dim
    attention = rows * (2 * shape.key_dim + 5 * width + fused_qkv) * b + _attention_bytes(shape, block)
    return mask_bytes(shape, block) + max(rows * shape.token_bytes, attention)


# --- captured steps ---------------------------------------------------------------------------------------------------
#
# Four steps are captured (`graphs.captured`): the target's verification of a draft and of a single token, the first
# draft of a text, and a round's end. Each has tensors of its own that it reads from and gives; what they need between
# their kernels they share, one after the other in one pool. Each length at which rows are looked at has recordings of
# its own. Where layers keep states, moving them on is a fifth, once for all lengths. By counted storages of the steps;
# how a driver's allocator cuts its pool up, and what a graph itself takes, is not in it.

HOPPER = (9, 0)
RECORDINGS_FORMULA = (
    "pool: max(verify, accept, update, draft), and states handed out; of each length (256, 512 ... slots) inputs and "
    "outputs: (2N + 1) * B * (V*b + hidden states) + B*V * (4 * (3K+1) + 2) + B*Vd * (2b + 2 * max(4, k*b)), and what "
    "is recorded of states, and one set; cuBLAS: 8 or 32 MiB"
)


def recorded_lengths(slots: int) -> int:
    """How many lengths (256, 512, 1024 ... slots) rows of so many are looked at in, one after the other."""
    return (slot_bucket(slots) // SLOT_BUCKET).bit_length()


def input_output_bytes(target: DecoderShape, drafter: DrafterShape, draft: DraftShape, batch: int) -> int:
    """Inputs and outputs of the steps for one length."""
    vocab, b = target.vocab_size, target.element_bytes
    verified = logits_bytes(target, draft.nodes) + draft.nodes * drafter.aux_width * b  # of one step, read by another
    single = logits_bytes(target, 1) + drafter.aux_width * b  # of a token where drafting rests
    noise = (2 * draft.depth + 1 + draft.depth) * vocab * 4  # a round's end looks further ahead than the first draft
    seen = 2 * vocab
    return batch * (2 * verified + single + noise + seen) + 2 * drafted_bytes(drafter, draft, batch)


def drafted_bytes(drafter: DrafterShape, draft: DraftShape, batch: int) -> int:
    """What a step that ends with a draft gives: logits and state to go on from, and scores to be checked by."""
    b, vocab = drafter.decoder.element_bytes, drafter.draft_vocab
    root = vocab * b + drafter.decoder.hidden_size * b
    return batch * (root + vocab * max(4, draft.top_k * b if draft.is_tree else 0))


def workspace_bytes(card: Card) -> int:
    """What cuBLAS takes for the stream on which steps are captured, by torch's defaults."""
    capability = card.compute_capability
    return 32 * MIB if capability is None or capability >= HOPPER else 4096 * 1024 * 2 + 16 * 1024 * 8
