"""The ledger of one run: every term, its bytes, the formula it came from and the moments at which it is alive.

The peak is the moment whose terms add up to most. Moments follow one generation of our own loop:

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

from ..cache.graph_sizes import SLOT_BUCKET, cache_size, slot_bucket
from ..drafting.shape import USUAL_TREE, DraftShape, noise_bytes
from .cards import MIB, Card
from .drafter_facts import DrafterFacts
from .dry_run import Forward
from .target_facts import TargetFacts
from .weights import FORMULAS, Quantization, scheme

PREFILL, DRAFTER_PREFILL = "prefill chunk", "drafter prefill"
VERIFY, ACCEPT, UPDATE, DRAFT = "verify", "accept", "drafter update", "draft"
RUNNING = (PREFILL, DRAFTER_PREFILL, VERIFY, ACCEPT, UPDATE, DRAFT)
BETWEEN = "between texts"
MOMENTS = (*RUNNING, BETWEEN)
ROUND = (VERIFY, ACCEPT, UPDATE, DRAFT)

ACCEPT_BYTES = 4 + 4 + 4 + 8 + 4 + 2
"""For each logit: fp32 scores before and after, a sorted copy and its ids, their sums, and which of them go, twice."""

DRAFTER_PRECISIONS = {"full": "", "int8": "bnb-int8", "nf4": "bnb-nf4-dq"}
"""What drafters may be stored as, best first, and the key of `SCHEMES`; `"full"`: the target's own dtype."""


@dataclass(frozen=True)
class MemorySettings:
    """What a plan decides, and a generation keeps to.

    Attributes:
        context: longest row, prompt and new tokens.
        batch: rows.
        draft_tokens: depth of a draft; 0 means no drafter.
        tree_size: nodes verified per round, root included; `None` for a chain.
        draft_top_k: children per node of a tree; `None`: two, if `tree_size` is given.
        draft_is_usual: nobody asked for a draft. It is the largest of what is drafted then, chains or trees.
        prefill_chunk: prompt tokens per target forward.
        cache_type: `"full"` or `"int8"`; the target's. The drafter's one layer stays as it is.
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
        top_k = self.draft_top_k or USUAL_TREE.top_k
        return DraftShape(self.draft_tokens, top_k=top_k, size=self.tree_size)


@dataclass(frozen=True)
class LedgerTerm:
    """`num_bytes` that are alive during `moments`."""

    name: str
    num_bytes: int
    moments: tuple[str, ...]
    formula: str = "counted by a run without memory"


def build_ledger(
    target: TargetFacts, drafter: DrafterFacts | None, card: Card, settings: MemorySettings
) -> tuple[LedgerTerm, ...]:
    """Every term of a run, empty ones left out."""
    return _Ledger(target, drafter, card, settings).terms()


def captures_steps(target: TargetFacts, card: Card, settings: MemorySettings) -> bool:
    """Whether rounds are captured as CUDA graphs unless somebody asks for eager ones: LLM.int8 waits for the device."""
    can_be = settings.cache_type == "full" and target.quantization.method != "bnb-int8"
    return settings.speculates and card.kind == "cuda" and can_be


def drafter_quantization(target: TargetFacts, precision: str) -> Quantization:
    """How a drafter's matrices are stored at this precision, beside a target of this dtype."""
    dtype = target.quantization.dtype
    return scheme(DRAFTER_PRECISIONS[precision] or dtype, dtype)


class _Ledger:
    """The terms of one run."""

    def __init__(self, target: TargetFacts, drafter: DrafterFacts | None, card: Card, settings: MemorySettings):
        self.target, self.card, self.settings = target, card, settings
        self.drafter = drafter if settings.speculates else None
        self.batch, self.nodes = settings.batch, settings.shape.nodes
        self.chunk = min(settings.prefill_chunk, settings.context)
        self.captured = self.drafter is not None and captures_steps(target, card, settings)
        self.kept = MOMENTS if self.captured else RUNNING
        (self.slots, block), cache_type = settings.shape.target_cache(settings.context, self.chunk), settings.cache_type
        verify = Forward(self.nodes, self.slots, block, self.batch, cache_type, verifies=True, grows=False)
        self.prefill = target.forward.count(Forward(self.chunk, settings.context, block, self.batch, cache_type))
        self.verify, self.held = target.forward.count(verify), target.forward.count(self._kept_rows(verify))
        read = 0 if self.drafter is None else self.drafter.aux_width
        self.tapped = read * target.quantization.dtype_bytes

    def terms(self) -> tuple[LedgerTerm, ...]:
        """All that are not empty."""
        terms = [
            LedgerTerm("runtime", self.card.context_bytes, MOMENTS, "CUDA or Metal, before the first tensor"),
            *self._weights(),
            *self._target(),
        ]
        if self.drafter is not None:
            terms += self._drafter(self.drafter)
            if self.captured:
                terms.append(self._recordings(self.drafter, terms))
        return tuple(term for term in terms if term.num_bytes)

    def _kept_rows(self, forward: Forward) -> Forward:
        """Where steps are captured, keys and values stay for the next text, in rows of whole steps of 256 slots."""
        if not self.captured:
            return forward
        capacity, block, _ = cache_size(forward.slots, forward.block, exact=True)
        return replace(forward, slots=capacity, block=block)

    # --- target ------------------------------------------------------------------------------------------------------

    def _weights(self) -> list[LedgerTerm]:
        target, weights, packing = self.target, self.target.weights, self.target.quantization
        elements, matrices = f"elements * {packing.dtype_bytes}", FORMULAS.get(packing.method, "size of the files")
        plain = "storages of the loaded model" if target.loaded else elements
        return [
            LedgerTerm(f"target weights, {packing.name}", weights.packed, MOMENTS, matrices),
            LedgerTerm("target experts, not packed", weights.experts, MOMENTS, elements),
            LedgerTerm("target weights, not packed", weights.plain, MOMENTS, plain),
        ]

    def _target(self) -> list[LedgerTerm]:
        settings, batch, verify, prefill = self.settings, self.batch, self.verify, self.prefill
        packing, matrices = self.target.quantization, [self.target.weights.largest_packed]
        rows, vocabulary = batch * self.nodes, self.target.vocab_size
        depth = settings.shape.depth
        ahead = 2 * depth + 1 if self.captured else depth + 1  # a graph drafts again behind all that it may accept
        noise = noise_bytes(batch, vocabulary, ahead)
        accept = rows * (vocabulary * ACCEPT_BYTES + self.tapped)
        # Where rows end in different columns, the logits of all these of each row; scores of each row's last token.
        last = batch * (prefill.logits + vocabulary * 4)
        return [
            LedgerTerm(f"target cache, {settings.cache_type}", self.held.cache, self.kept),
            *self._states(),
            LedgerTerm("prefill activations", prefill.activations + batch * self.chunk * self.tapped, (PREFILL,)),
            LedgerTerm("prefill logits", last, (DRAFTER_PREFILL,), "B*B*V * b + B*V * 4"),
            LedgerTerm("verify activations", verify.activations + rows * self.tapped, (VERIFY,)),
            LedgerTerm("one layer moving to a larger buffer", verify.largest_layer, (VERIFY,), "its keys and values"),
            LedgerTerm("verify logits", self.nodes * verify.logits, (ACCEPT, UPDATE), "B*N*V * b"),
            LedgerTerm("acceptance", accept, (ACCEPT,), f"B*N*V * {ACCEPT_BYTES} + hidden states"),
            LedgerTerm("sampling noise", noise, ROUND, "(16 + K + 1, by graphs 2K + 1) * B*V * 4, of one row twice"),
            LedgerTerm("kept scores", rows * vocabulary * 4, (UPDATE,), "B*N*V * 4"),
            self._workspace(packing, matrices, batch * self.chunk, PREFILL),
            self._workspace(packing, matrices, rows, VERIFY),
        ]  # fmt: skip

    def _workspace(
        self, packing: Quantization, matrices: Sequence[tuple[int, int]], tokens: int, moment: str, whose: str = ""
    ) -> LedgerTerm:
        """What a product with a packed matrix takes."""
        needed, (rows, columns) = max((packing.workspace_bytes(*matrix, tokens), matrix) for matrix in matrices)
        formula = f"largest packed matrix, {rows} x {columns}"
        return LedgerTerm(f"{whose}unpacking workspace, {moment}", needed, (moment,), formula)

    def _states(self) -> list[LedgerTerm]:
        """Recurrent and convolution states. Where steps are captured, those of each row stay for the next text."""
        verify = self.verify
        copies = max(self.batch, 2) * verify.states // self.batch
        return [
            LedgerTerm("target states", verify.states, self.kept, "B*S"),
            LedgerTerm("target states, of a block", verify.states, RUNNING, "B*S"),
            LedgerTerm("target states, recorded", verify.recorded, ROUND),
            LedgerTerm("target states, rebuilt", verify.rebuilding, (ACCEPT,)),
            LedgerTerm("target states, copies", copies, RUNNING, "max(B, 2) * S"),
        ]

    # --- drafter -----------------------------------------------------------------------------------------------------

    def _drafter(self, drafter: DrafterFacts) -> list[LedgerTerm]:
        settings, batch, chunk, linears = self.settings, self.batch, self.chunk, drafter.linears
        # The head sees the last token of a prompt or of a round only.
        with_head = [*linears, drafter.head] if drafter.head else linears
        # Only CUDA kernels multiply 4-bit weights with a few tokens as they are; the others unpack them for any number.
        fewest = 1 if self.card.kind == "cuda" else 5
        updated, stepped = max(batch * (settings.draft_tokens + 1), fewest), max(batch * settings.shape.top_k, fewest)
        precision = drafter_quantization(self.target, settings.drafter_precision)
        matrices = f"matrices: {FORMULAS[precision.method]}; fc, norms, embedding: elements * {precision.dtype_bytes}"
        held = drafter.count(self._kept_rows(self._drafter_forward(settings.shape.draft_block)))
        prefill = replace(self._drafter_forward(chunk), slots=settings.context, grows=True)
        return [
            LedgerTerm(f"drafter weights, {precision.name}", drafter.weight_bytes(precision), MOMENTS, matrices),
            LedgerTerm(f"draft head, {precision.name}", drafter.head_bytes(precision), MOMENTS, "Vd rows of H"),
            LedgerTerm("drafter cache, full", held.cache, self.kept),
            LedgerTerm("drafter prefill activations", drafter.count(prefill).activations, (DRAFTER_PREFILL,)),
            LedgerTerm("drafter update activations", self._update(drafter), (UPDATE,)),
            LedgerTerm("draft activations", self._step(drafter), (DRAFT,)),
            LedgerTerm("drafter layer moving to a larger buffer", held.largest_layer, (UPDATE, DRAFT),
                       "its keys and values"),
            self._workspace(precision, linears, batch * chunk, DRAFTER_PREFILL, "drafter "),
            self._workspace(precision, linears, updated, UPDATE, "drafter "),
            self._workspace(precision, with_head, stepped, DRAFT, "drafter "),
        ]  # fmt: skip

    def _drafter_forward(self, tokens: int, *, verifies: bool = False) -> Forward:
        slots, block = self.settings.shape.drafter_cache(self.settings.context, self.chunk)
        return Forward(tokens, slots, block, self.batch, verifies=verifies, grows=False)

    def _update(self, drafter: DrafterFacts) -> int:
        forward = self._drafter_forward(self.settings.draft_tokens + 1)
        return drafter.count(replace(forward, slots=self.slots)).activations

    def _step(self, drafter: DrafterFacts) -> int:
        return drafter.count(self._drafter_forward(self.settings.shape.top_k, verifies=True)).activations

    # --- captured steps ----------------------------------------------------------------------------------------------
    #
    # Four steps are captured (`graphs.captured`), which share what they need between their kernels in one pool; what
    # each reads and gives is its own, for each length of rows. Where layers keep states, moving them on is a fifth,
    # once for all lengths. How a driver's allocator cuts its pool up, and what a graph itself takes, is not counted.

    def _recordings(self, drafter: DrafterFacts, terms: Sequence[LedgerTerm]) -> LedgerTerm:
        """What recordings keep. Between its kernels a captured step needs what an eager one would, but keeps it; rows
        get longer before it, not within."""
        shape, verify, batch, vocabulary = self.settings.shape, self.verify, self.batch, self.target.vocab_size
        rows = batch * self.nodes
        # A step that ends with a draft: logits and state to go on from, and logits to be checked by.
        given = batch * (drafter.config.hidden_size + (1 + shape.top_k) * drafter.draft_vocab) * drafter.dtype.itemsize
        pooled = {
            VERIFY: verify.activations + rows * self.tapped + verify.states,
            # What the step gives lies where scores have lain.
            ACCEPT: rows * vocabulary * (ACCEPT_BYTES + 1) - given,
            UPDATE: self._update(drafter),
            DRAFT: self._step(drafter),
        }
        unpacked = {term.moments[0]: term.num_bytes for term in terms if "unpacking workspace" in term.name}
        pool = max(num_bytes + unpacked.get(moment, 0) for moment, num_bytes in pooled.items())
        lengths = recorded_lengths(cache_size(self.slots, 1, exact=True).capacity)
        one = verify.logits + batch * self.tapped  # of a token, where drafting rests
        # Noise, of which a round's end needs more than the first draft, and twice which tokens were seen.
        drawn_by = batch * vocabulary * (4 * (3 * shape.depth + 1) + 2)
        # Moving states on reads what was given of them and gives as many, whatever the length.
        own = lengths * ((2 * self.nodes + 1) * one + drawn_by + 2 * given) + (lengths + 1) * verify.given
        return LedgerTerm("recordings", pool + own + workspace_bytes(self.card), MOMENTS, RECORDINGS_FORMULA)


HOPPER = (9, 0)
RECORDINGS_FORMULA = (
    "pool: max(verify, accept, update, draft), and states handed out; of each length (256, 512 ... slots) inputs and "
    "outputs: (2N + 1) * B * (V*b + hidden states) + B*V * (4 * (3K+1) + 2) + 2b * B * (H + (1+k) * Vd), and what "
    "is recorded of states, and one set; cuBLAS: 8 or 32 MiB"
)


def recorded_lengths(slots: int) -> int:
    """How many lengths (256, 512, 1024 ... slots) rows of so many are looked at in, one after the other."""
    return (slot_bucket(slots) // SLOT_BUCKET).bit_length()


def workspace_bytes(card: Card) -> int:
    """What cuBLAS takes for the stream on which steps are captured, by torch's defaults."""
    capability = card.compute_capability
    return 32 * MIB if capability is None or capability >= HOPPER else 4096 * 1024 * 2 + 16 * 1024 * 8
