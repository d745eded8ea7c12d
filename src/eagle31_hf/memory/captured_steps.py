"""Bytes that captured steps keep on a card from their first text on: see `compiled.captured`.

Four steps are captured: the target's verification of a draft and of a single token, the first draft of a text, and a
round's end. Each has tensors of its own that it reads from (`inputs`) and gives (`outputs`); what they need between
their kernels they share, one after the other in one pool. Rows are looked at in lengths of 256, 512, 1024 ... slots,
and each length has recordings of its own. Where layers keep states, moving them on is a fifth, once for all lengths. By
counted storages of the steps; how a driver's allocator cuts its pool up, and what a graph itself takes, is not in it.
"""

from __future__ import annotations

from ..cache.graph_sizes import SLOT_BUCKET, slot_bucket
from ..trees.shape import DraftShape
from .activation_bytes import DecoderShape, DrafterShape, logits_bytes
from .cards import MIB, Card

HOPPER = (9, 0)
FORMULA = (
    "pool: max(verify, accept, update, draft), and states handed out; of each length (256, 512 ... slots) inputs and "
    "outputs: (2N + 1) * B * (V*b + hidden states) + B*V * (4 * (3K+1) + 2) + B*Vd * (2b + 2 * max(4, k*b)), and what "
    "is recorded of states, and one set; cuBLAS: 8 or 32 MiB"
)


def recorded_lengths(slots: int) -> int:
    """How many lengths rows of so many slots are looked at in, one after the other."""
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
