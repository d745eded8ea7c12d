"""The ledger of one run: every term, its bytes, the formula it came from and the moments at which it is alive.

The peak is the moment whose terms add up to most. Moments follow one generation of our own loop:

    load              weights arrive, one tensor of them not yet packed
    prefill chunk     the target reads a chunk of the prompt
    drafter prefill   the drafter reads the same chunk's hidden states
    verify            the target's forward over the draft's nodes
    accept            logits become accepted tokens
    drafter update    the drafter reads the accepted tokens' hidden states
    draft             the drafter proposes
    between texts     what stays: weights and, where steps are captured, recordings, keys, values and states
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..cache.graph_sizes import cache_size
from ..drafting.shape import RESIDENT_QUERIES, DraftShape, default_tree_size, noise_bytes
from .activation_bytes import (
    ACCEPT_BYTES,
    RECORDINGS_FORMULA,
    Block,
    DecoderShape,
    absorb_bytes,
    accept_bytes,
    draft_step_bytes,
    drafted_bytes,
    full_cache_bytes,
    input_output_bytes,
    logits_bytes,
    packed_cache_bytes,
    recorded_lengths,
    resident_mask_bytes,
    target_forward_bytes,
    unpacked_layer_bytes,
    workspace_bytes,
)
from .cards import Card
from .drafter_facts import DrafterFacts
from .quantization_schemes import SCHEMES, Quantization
from .state_bytes import StateShape
from .target_facts import TargetFacts

LOAD, PREFILL, DRAFTER_PREFILL = "load", "prefill chunk", "drafter prefill"
VERIFY, ACCEPT, UPDATE, DRAFT = "verify", "accept", "drafter update", "draft"
RUNNING = (PREFILL, DRAFTER_PREFILL, VERIFY, ACCEPT, UPDATE, DRAFT)
BETWEEN = "between texts"
KEPT = (*RUNNING, BETWEEN)
MOMENTS = (LOAD, *KEPT)
ROUND = (VERIFY, ACCEPT, UPDATE, DRAFT)

# Checkpoints of the other methods are packed already.
_PACKED_WHILE_LOADING = ("bnb-int8", "bnb-nf4", "bnb-fp4")
_LAYER_FORMULA = (
    "masks, taps + B*T * max(a token's, counted by a run without memory; b * (3H + 2*n_q*d) with masks repeated "
    "n_q/n_kv times)"
)
_DRAFTER_FORMULA = "hidden states + b*T * max(7H + 4I, attention)"

CACHE_TYPES = ("full", "int8")
"""Those of `cache.quantized`, which imports torch."""
DRAFTER_PRECISIONS = ("full", "int8", "nf4")
"""What a drafter's matrices may be stored as; `"full"` is the target's own dtype, in `"nf4"` the scales are packed too.

Best first.
"""


@dataclass(frozen=True)
class MemorySettings:
    """What a plan decides, and a generation keeps to.

    Attributes:
        context: longest row, prompt and new tokens.
        batch: rows.
        draft_tokens: depth of a draft; 0 means no drafter.
        tree_size: nodes verified per round, root included; `None` for a chain.
        draft_top_k: children per node of a tree; `None`: as its size allows, by the rule for sizes nobody asked for.
        draft_is_usual: nobody asked for a draft. It is the largest of what is drafted then, chains or trees.
        prefill_chunk: prompt tokens per target forward.
        cache_type: one of `CACHE_TYPES`; the target's. The drafter's one layer stays as it is.
        drafter_precision: one of `DRAFTER_PRECISIONS`.
    """

    context: int
    batch: int = 1
    draft_tokens: int = 6
    tree_size: int | None = None
    draft_top_k: int | None = None
    draft_is_usual: bool = False
    prefill_chunk: int = 2048
    cache_type: str = "full"
    drafter_precision: str = "full"

    @property
    def speculates(self) -> bool:
        return self.draft_tokens > 0

    @property
    def shape(self) -> DraftShape:
        """The largest draft of a round."""
        if self.tree_size is None or not self.speculates:
            return DraftShape(self.draft_tokens)
        top_k = self.draft_top_k or max(1, self.tree_size // default_tree_size(self.draft_tokens, top_k=1))
        return DraftShape(self.draft_tokens, top_k=top_k, size=self.tree_size)

    @property
    def cache_capacity(self) -> int:
        """Slots per row the target's cache needs."""
        return self.shape.target_capacity(self.context)

    @property
    def drafter_capacity(self) -> int:
        return self.shape.drafter_capacity(self.context)

    @property
    def chunk(self) -> int:
        return min(self.prefill_chunk, self.context)


@dataclass(frozen=True)
class LedgerTerm:
    """`num_bytes` that are alive during `moments`."""

    name: str
    num_bytes: int
    formula: str
    moments: tuple[str, ...]


def build_ledger(
    target: TargetFacts, drafter: DrafterFacts | None, card: Card, settings: MemorySettings
) -> tuple[LedgerTerm, ...]:
    """Every term of a run, empty ones left out."""
    captured = drafter is not None and captures_steps(target, card, settings)
    terms = [LedgerTerm("runtime", card.context_bytes, "CUDA or Metal, before the first tensor", MOMENTS)]
    terms += _weight_terms(target)
    terms += _target_terms(target, settings, taps=_taps(target, drafter, settings), captured=captured)
    if drafter is not None and settings.speculates:
        terms += _drafter_weight_terms(drafter, drafter_quantization(target, settings.drafter_precision))
        terms += _drafter_terms(target, drafter, card, settings, captured=captured)
    if captured:
        assert drafter is not None, "asked above"
        terms.append(_recordings_term(target, drafter, card, settings, terms))
    return tuple(term for term in terms if term.num_bytes)


def captures_steps(target: TargetFacts, card: Card, settings: MemorySettings) -> bool:
    """Whether rounds are captured as CUDA graphs unless somebody asks for eager ones: LLM.int8 waits for the device,
    and targets whose recurrent states cannot be recorded are decoded plainly."""
    waits = target.quantization.method == "bnb-int8"
    states = target.shape.states
    is_plain = states is not None and states.unrecorded > 0
    is_captured = settings.cache_type == "full" and not waits and not is_plain
    return settings.speculates and card.kind == "cuda" and is_captured


def bytes_by_moment(terms: tuple[LedgerTerm, ...]) -> dict[str, int]:
    """Sum of what is alive, for every moment that has a term of its own."""
    return {moment: sum(term.num_bytes for term in terms if moment in term.moments) for moment in MOMENTS}


def drafter_quantization(target: TargetFacts, precision: str) -> Quantization:
    """How a drafter's matrices are stored at this precision, beside a target of this dtype."""
    dtype = target.quantization.dtype
    packed = {"full": SCHEMES[dtype], "int8": SCHEMES["bnb-int8"], "nf4": SCHEMES["bnb-nf4-dq"]}[precision]
    return Quantization(**{**vars(packed), "dtype": dtype})


# --- weights ----------------------------------------------------------------------------------------------------------


def _weight_terms(target: TargetFacts) -> list[LedgerTerm]:
    weights, packing = target.weights, target.quantization
    plain = "storages of the loaded model" if target.loaded else f"elements * {packing.dtype_bytes}"
    on_the_fly = weights.largest_tensor if not target.loaded and packing.method in _PACKED_WHILE_LOADING else 0
    return [
        LedgerTerm(f"target weights, {packing.name}", weights.packed, packing.rules.formula, MOMENTS),
        LedgerTerm("target experts, not packed", weights.experts, f"elements * {packing.dtype_bytes}", MOMENTS),
        LedgerTerm("target weights, not packed", weights.plain, plain, MOMENTS),
        LedgerTerm("one tensor before packing", on_the_fly, f"n * {packing.dtype_bytes}", (LOAD,)),
    ]


def _drafter_weight_terms(drafter: DrafterFacts, precision: Quantization) -> list[LedgerTerm]:
    formula = f"matrices: {precision.rules.formula}; fc, norms, embedding: elements * {precision.dtype_bytes}"
    return [
        LedgerTerm(f"drafter weights, {precision.name}", drafter.weight_bytes(precision), formula, MOMENTS),
        LedgerTerm(f"draft head, {precision.name}", drafter.head_bytes(precision), "Vd rows of H", MOMENTS),
    ]


# --- target -----------------------------------------------------------------------------------------------------------


def _taps(target: TargetFacts, drafter: DrafterFacts | None, settings: MemorySettings) -> int:
    if drafter is None or not settings.speculates:
        return 0
    return drafter.shape.aux_width // target.shape.hidden_size


def _target_terms(target: TargetFacts, settings: MemorySettings, *, taps: int, captured: bool) -> list[LedgerTerm]:
    shape, batch = target.shape, settings.batch
    chunk, nodes, capacity = settings.chunk, settings.shape.nodes, settings.cache_capacity
    stored_bytes = shape.element_bytes if settings.cache_type == "full" else 1
    prefill = _block(settings, chunk, settings.context, capacity, stored_bytes)
    prefilled = target_forward_bytes(shape, prefill, taps=taps)
    verify = _block(settings, nodes, capacity, capacity, stored_bytes)
    tapped = taps * shape.hidden_size * shape.element_bytes
    logits = logits_bytes(shape, verify.rows)
    layers = target_forward_bytes(shape, verify, taps=taps)
    after_layers = verify.rows * (2 * shape.hidden_size * shape.element_bytes + tapped) + logits
    depth = settings.shape.depth
    ahead = 2 * depth + 1 if captured else depth + 1  # a graph drafts again behind all that it may accept
    noise = noise_bytes(batch, shape.vocab_size, ahead)
    accept = accept_bytes(shape, verify.rows) + verify.rows * tapped
    return [
        *_cache_terms("target", shape, settings, captured=captured),
        *_state_terms(shape.states, settings, captured=captured),
        LedgerTerm("prefill activations", prefilled, _LAYER_FORMULA, (PREFILL,)),
        LedgerTerm("prefill logits", logits_bytes(shape, batch * batch), "B*B*V * b", (PREFILL, DRAFTER_PREFILL)),
        LedgerTerm("verify activations", max(layers, after_layers), _LAYER_FORMULA, (VERIFY,)),
        LedgerTerm("verify logits", logits, "B*N*V * b", (ACCEPT, UPDATE)),
        LedgerTerm("acceptance", accept, f"B*N*V * {ACCEPT_BYTES} + hidden states", (ACCEPT,)),
        LedgerTerm("sampling noise", noise, "(16 + K + 1, by graphs 2K + 1) * B*V * 4, of one row twice", ROUND),
        LedgerTerm("kept scores", verify.rows * shape.vocab_size * 4, "B*N*V * 4", (UPDATE,)),
        _workspace_term(target, prefill, PREFILL),
        _workspace_term(target, verify, VERIFY),
    ]


def _workspace_term(target: TargetFacts, block: Block, moment: str) -> LedgerTerm:
    rows, columns = target.weights.largest_packed
    needed = target.quantization.workspace_bytes(rows, columns, block.rows) if rows else 0
    return LedgerTerm(f"unpacking workspace, {moment}", needed, f"largest packed matrix, {rows} x {columns}", (moment,))


def _block(settings: MemorySettings, tokens: int, context: int, capacity: int, grown_bytes: int) -> Block:
    batch = settings.batch
    return Block(batch, tokens, context, capacity, ragged=batch > 1, grown_bytes=grown_bytes)


def _cache_terms(owner: str, shape: DecoderShape, settings: MemorySettings, *, captured: bool) -> list[LedgerTerm]:
    """Where steps are captured, keys and values stay for the next text, in rows of whole steps of 256 slots."""
    is_target = owner == "target"
    batch, kind = settings.batch, settings.cache_type if is_target else "full"
    nodes = settings.shape.nodes if is_target else settings.shape.draft_block
    capacity = settings.cache_capacity if is_target else settings.drafter_capacity
    block = max(settings.chunk, nodes)
    if captured:
        capacity, block, _ = cache_size(capacity, block, exact=True)
    small_chunk = settings.chunk if settings.chunk <= RESIDENT_QUERIES else 0  # read with the mask of rounds
    mask = 0 if batch > 1 else resident_mask_bytes(shape, max(nodes, small_chunk), capacity)
    if kind == "full":
        stored, unpacked = batch * full_cache_bytes(shape, capacity, block), 0
        formula = "B * layers * slots * n_kv(dk+dv) * b"
    else:
        stored = batch * packed_cache_bytes(shape, capacity, block)
        unpacked = batch * unpacked_layer_bytes(shape, capacity, block)
        formula = "B * layers * slots * n_kv(dk+dv + 2b)"
    return [
        LedgerTerm(f"{owner} cache, {kind}", stored, formula, KEPT if captured else RUNNING),
        LedgerTerm(f"{owner} layer unpacked", unpacked, "B * slots * n_kv(dk+dv) * b of one layer", RUNNING),
        LedgerTerm(f"{owner} mask", mask, "2^ceil(log2 N) * slots * b", RUNNING),
    ]


def _state_terms(states: StateShape | None, settings: MemorySettings, *, captured: bool) -> list[LedgerTerm]:
    """Recurrent and convolution states: S bytes of one row. Where steps are captured, those of each row stay for the
    next text."""
    if states is None:
        return []
    batch, nodes, one = settings.batch, settings.shape.nodes, states.num_bytes
    tape, rebuilding = states.tape_bytes(nodes), states.rebuilding_bytes(nodes)
    return [
        LedgerTerm("target states", batch * one, "B*S", KEPT if captured else RUNNING),
        LedgerTerm("target states, of a chunk", batch * one, "B*S", (PREFILL, DRAFTER_PREFILL)),
        LedgerTerm("target states, of a draft", batch * one, "B*S", ROUND),
        LedgerTerm("target states, recorded", batch * tape, "B * layers * ((K+T)*2*channels*b + T*gates)", ROUND),
        LedgerTerm("target states, rebuilt", batch * rebuilding, "B * (recurrent states + T * vectors)", (ACCEPT,)),
        LedgerTerm("target states, snapshots", max(batch, 2) * one, "max(B, 2) * S", RUNNING),
    ]


# --- drafter ----------------------------------------------------------------------------------------------------------


def _drafter_terms(
    target: TargetFacts, drafter: DrafterFacts, card: Card, settings: MemorySettings, *, captured: bool
) -> list[LedgerTerm]:
    shape, capacity = drafter.shape, settings.drafter_capacity
    prefill = _block(settings, settings.chunk, settings.context, capacity, shape.decoder.element_bytes)
    update = replace(prefill, tokens=settings.draft_tokens + 1, context=settings.cache_capacity)
    step = replace(prefill, tokens=settings.shape.top_k, context=capacity)
    return [
        *_cache_terms("drafter", shape.decoder, settings, captured=captured),
        LedgerTerm("drafter prefill activations", absorb_bytes(shape, prefill), _DRAFTER_FORMULA, (DRAFTER_PREFILL,)),
        LedgerTerm("drafter update activations", absorb_bytes(shape, update), _DRAFTER_FORMULA, (UPDATE,)),
        LedgerTerm("draft activations", draft_step_bytes(shape, step), "max(layer, B*T*Vd * (b+8))", (DRAFT,)),
        *_drafter_workspace_terms(drafter, drafter_quantization(target, settings.drafter_precision), card, settings),
    ]


def _drafter_workspace_terms(
    drafter: DrafterFacts, precision: Quantization, card: Card, settings: MemorySettings
) -> list[LedgerTerm]:
    """What a product with a packed matrix takes. The head sees the last token of a prompt or of a round only."""
    batch, head = settings.batch, (drafter.head,) if drafter.head else ()
    work = {
        DRAFTER_PREFILL: [(matrix, batch * settings.chunk) for matrix in drafter.linears],
        UPDATE: [(matrix, batch * (settings.draft_tokens + 1)) for matrix in drafter.linears],
        DRAFT: [(matrix, batch * settings.shape.top_k) for matrix in (*drafter.linears, *head)],
    }
    # Only CUDA kernels multiply 4-bit weights with a few tokens as they are; the others unpack them for any number.
    fewest = 1 if card.kind == "cuda" else 5
    return [
        LedgerTerm(
            f"drafter unpacking workspace, {moment}",
            max(precision.workspace_bytes(rows, width, max(tokens, fewest)) for (rows, width), tokens in products),
            "largest packed matrix",
            (moment,),
        )
        for moment, products in work.items()
    ]


# --- captured steps ---------------------------------------------------------------------------------------------------


def _recordings_term(
    target: TargetFacts, drafter: DrafterFacts, card: Card, settings: MemorySettings, terms: Sequence[LedgerTerm]
) -> LedgerTerm:
    """What recordings keep. Between its kernels a captured step needs what an eager one would, but keeps it; rows get
    longer before it, not within."""
    shape, batch, nodes = target.shape, settings.batch, settings.shape.nodes
    verify = _block(settings, nodes, settings.cache_capacity, settings.cache_capacity, 0)
    update = replace(verify, tokens=settings.draft_tokens + 1, capacity=settings.drafter_capacity)
    step = replace(update, tokens=settings.shape.top_k, context=settings.drafter_capacity)
    taps = _taps(target, drafter, settings)
    handed_out = 0 if shape.states is None else batch * shape.states.num_bytes
    seen, given = verify.rows * shape.vocab_size, drafted_bytes(drafter.shape, settings.shape, batch)
    pooled = {
        VERIFY: max(target_forward_bytes(shape, verify, taps=taps) + handed_out, logits_bytes(shape, verify.rows)),
        ACCEPT: accept_bytes(shape, verify.rows) + seen - given,  # what the step gives lies where scores have lain
        UPDATE: absorb_bytes(drafter.shape, update),
        DRAFT: draft_step_bytes(drafter.shape, step),
    }
    unpacked = {t.moments[0]: t.num_bytes for t in terms if "unpacking workspace" in t.name}
    pool = max(num_bytes + unpacked.get(moment, 0) for moment, num_bytes in pooled.items())
    lengths = recorded_lengths(cache_size(settings.cache_capacity, 1, exact=True).capacity)
    own = lengths * input_output_bytes(shape, drafter.shape, settings.shape, batch)
    if shape.states is not None:
        # Moving states on reads what was given of them and gives as many, whatever the length.
        own += (lengths + 1) * batch * shape.states.given_bytes(nodes)
    return LedgerTerm("recordings", pool + own + workspace_bytes(card), RECORDINGS_FORMULA, KEPT)
