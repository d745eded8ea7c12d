"""What a memory plan must know of a drafter: its matrices and sizes, from its configuration alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoints import expected_shapes, filled, inspect_checkpoint, packable_shapes, published_weights
from ..configuration_eagle31 import Eagle31Config
from ..errors import MemoryPlanError
from .activation_bytes import DecoderShape, DrafterShape
from .quantization_schemes import Quantization
from .target_facts import TargetFacts, digest

# A fresh or unknown drafter is planned with the draft vocabulary most published ones have.
USUAL_DRAFT_VOCABULARY = 32000


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter's share of a plan. `linears` are `(N, K)` of the matrices a quantiser may pack, layer by layer.

    Attributes:
        head: `(Vd, H)` draft head, its own or gathered from the target's; `None` if the target's whole head is shared.
        embedding_elements: of its own embedding, 0 if shared.
        plain_elements: `fc`, norms and biases: never packed.
        fixed_bytes: vocabulary map and rotary tables.
    """

    name: str
    fingerprint: str
    shape: DrafterShape
    linears: tuple[tuple[int, int], ...]
    head: tuple[int, int] | None
    embedding_elements: int
    plain_elements: int
    fixed_bytes: int

    def weight_bytes(self, precision: Quantization) -> int:
        """Bytes of the layers, `fc`, norms and embedding; the head is a term of its own."""
        packed = sum(_matrix_bytes(precision, matrix) for matrix in self.linears)
        return packed + (self.embedding_elements + self.plain_elements) * precision.dtype_bytes + self.fixed_bytes

    def head_bytes(self, precision: Quantization) -> int:
        return _matrix_bytes(precision, self.head) if self.head else 0


def _matrix_bytes(precision: Quantization, matrix: tuple[int, int]) -> int:
    """As `PackingScheme.packs`: rows that are no whole blocks, or what packing would make larger, stay as they are."""
    plain = math.prod(matrix) * precision.dtype_bytes
    aligned = precision.group_size <= 0 or matrix[1] % precision.group_size == 0
    return min(precision.matrix_bytes(*matrix), plain) if aligned else plain


def read_drafter(drafter: Any, target: TargetFacts) -> DrafterFacts:
    """Facts of a drafter's config, folder, Hub id or loaded drafter; `None` means one shaped like the target.

    Raises:
        MemoryPlanError: it cannot be read, or was made for a target of another width or vocabulary.
    """
    config = _drafter_config(drafter, target)
    shape = target.shape
    same_tokens = config.vocab_size == shape.vocab_size or config.knows_vocabulary_of(shape.vocab_size)
    if config.target_hidden_size != shape.hidden_size or not same_tokens:
        raise MemoryPlanError(
            f"the drafter was made for hidden size {config.target_hidden_size} and {config.vocab_size} tokens, target "
            f"{target.name} has {shape.hidden_size} and {shape.vocab_size}; plan with a drafter made for it"
        )
    return drafter_facts(config, target.shape.element_bytes)


def _drafter_config(drafter: Any, target: TargetFacts) -> Eagle31Config:
    if isinstance(drafter, (str, Path)):
        return inspect_checkpoint(drafter).config
    if drafter is None:
        return _default_drafter_config(target)
    config = getattr(drafter, "config", drafter)
    if isinstance(config, Eagle31Config):
        return config
    raise MemoryPlanError(
        f"got a {type(drafter).__name__} as drafter; wanted a folder, a Hub id, an Eagle31Config, a drafter, or None "
        "for one shaped like the target"
    )


def _default_drafter_config(target: TargetFacts) -> Eagle31Config:
    shape = target.shape
    return Eagle31Config(
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        intermediate_size=target.intermediate_size,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.key_dim,
        vocab_size=shape.vocab_size,
        draft_vocab_size=min(shape.vocab_size, USUAL_DRAFT_VOCABULARY),
        aux_norm="per_slot",
        norm_output=True,
    )


def drafter_facts(config: Eagle31Config, element_bytes: int) -> DrafterFacts:
    """Facts of a drafter of this configuration."""
    head_dim, kv_heads = filled(config.head_dim), filled(config.num_key_value_heads)
    draft_vocab = filled(config.draft_vocab_size)
    aux_width = config.num_aux_hidden_states * filled(config.target_hidden_size)
    packable = packable_shapes(config)
    counted_apart = {weight for module in packable for weight in published_weights(module)}
    counted_apart |= {"embed_tokens.weight", "lm_head.weight", "d2t"}
    shapes = expected_shapes(config)
    reduced = draft_vocab < config.vocab_size
    latent = config.is_latent
    decoder = DecoderShape(
        hidden_size=config.hidden_size,
        q_heads=config.num_attention_heads,
        # Latent attention has one key, latent and rotated part side by side, and one value, the latent.
        kv_heads=1 if latent else kv_heads,
        key_dim=filled(config.kv_lora_rank) + head_dim if latent else head_dim,
        value_dim=filled(config.kv_lora_rank) if latent else head_dim,
        token_bytes=element_bytes * (2 * head_dim + 7 * config.hidden_size + 4 * config.intermediate_size),
        vocab_size=config.vocab_size,
        windows=(config.sliding_window,) * config.num_hidden_layers,
        element_bytes=element_bytes,
    )
    return DrafterFacts(
        name=config.name_or_path or "one layer shaped like the target's",
        fingerprint=digest({**asdict(decoder), "aux": aux_width, "draft_vocab": draft_vocab}),
        shape=DrafterShape(decoder, aux_width, draft_vocab),
        linears=tuple(size for name, size in packable.items() if name != "lm_head"),
        head=(draft_vocab, config.hidden_size) if config.own_lm_head or reduced else None,
        embedding_elements=config.vocab_size * config.hidden_size if config.own_embedding else 0,
        plain_elements=sum(math.prod(shape) for name, shape in shapes.items() if name not in counted_apart),
        fixed_bytes=(8 * draft_vocab if reduced else 0) + 2 * 4 * (head_dim // 2),
    )
