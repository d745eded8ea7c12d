"""What a memory plan must know of a drafter: its matrices and sizes, from its configuration alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..checkpoints import (
    expected_shapes,
    filled,
    inspect_checkpoint,
    packable_shapes,
    require_head,
    resolve_checkpoint,
    target_holds_head,
)
from ..checkpoints.mtp import PACKED_MODULES, copies_head_rows, promised_head
from ..config import Eagle31Config, MtpConfig
from ..errors import MemoryPlanError
from .activation_bytes import DecoderShape, DrafterShape
from .quantization_schemes import SCHEMES, Quantization
from .target_facts import TargetFacts, decoder_shape, digest, load_config
from .weight_bytes import weight_inventory

# A fresh or unknown drafter is planned with the draft vocabulary most published ones have.
USUAL_DRAFT_VOCABULARY = 32000

OWN_HEAD = "mtp"
"""As a drafter: the multi-token-prediction head inside the target."""


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter's share of a plan. `linears` are `(N, K)` of the matrices a quantiser may pack, layer by layer.

    Attributes:
        head: `(Vd, H)` draft head, its own or gathered from the target's; `None` if the target's whole head is shared.
        embedding_elements: of its own embedding, 0 if shared.
        plain_elements: `fc`, norms, biases and experts: never packed.
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
    return drafter_facts(config, target.shape.element_bytes, copies_rows=_copies_head_rows(drafter))


def drafter_to_plan(drafter: Any, target: Any) -> Any:
    """The drafter, or where none is named or `OWN_HEAD` is, the head inside a target that is given by folder, Hub id or
    name; `None`: there is none, and none was asked for.

    Raises:
        CheckpointFormatError, MemoryPlanError: the target holds no head that can be read, and it was asked for.
    """
    is_asked = drafter == OWN_HEAD and not Path(OWN_HEAD).is_dir()
    if drafter is not None and not is_asked:
        return drafter
    is_named = isinstance(target, (str, Path))
    if is_named and Path(target).is_dir():
        if is_asked:
            require_head(target)
        return target if target_holds_head(target) else None
    if not is_named and not is_asked:
        return None
    # Of the Hub the configuration alone is asked: no weights are fetched for a plan.
    config = load_config(target) if is_named else getattr(target, "config", target)
    head = promised_head(config) if isinstance(config, PreTrainedConfig) else None
    if head is None and is_asked:
        raise MemoryPlanError(
            f"got drafter 'mtp', but the configuration of {target if is_named else type(target).__name__} says of no "
            "MTP head that can be read; name a drafter, or none"
        )
    return head


def _copies_head_rows(drafter: Any) -> bool:
    """Whether rows of the target's LM head are copied for a head inside it; its first rows are read in place."""
    if isinstance(drafter, (str, Path)):
        return copies_head_rows(resolve_checkpoint(drafter))
    chosen = getattr(drafter, "d2t", None) if isinstance(drafter, nn.Module) else None
    return chosen is not None and bool(chosen.any())


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


def drafter_facts(config: Eagle31Config, element_bytes: int, *, copies_rows: bool = False) -> DrafterFacts:
    """Facts of a drafter of this configuration.

    Args:
        copies_rows: whether a head inside a target drafts from rows of its LM head that have to be copied.
    """
    if isinstance(config, MtpConfig):
        return _head_facts(config, element_bytes, copies_rows=copies_rows)
    head_dim, kv_heads = filled(config.head_dim), filled(config.num_key_value_heads)
    draft_vocab = filled(config.draft_vocab_size)
    aux_width = config.num_aux_hidden_states * filled(config.target_hidden_size)
    packable = packable_shapes(config)
    embedding_elements = config.vocab_size * config.hidden_size if config.own_embedding else 0
    reduced = draft_vocab < config.vocab_size
    elements = sum(math.prod(shape) for name, shape in expected_shapes(config).items() if name != "d2t")
    counted_apart = sum(math.prod(shape) for shape in packable.values()) + embedding_elements
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
        embedding_elements=embedding_elements,
        plain_elements=elements - counted_apart,
        fixed_bytes=(8 * draft_vocab if reduced else 0) + 2 * 4 * (head_dim // 2),
    )


def _head_facts(config: MtpConfig, element_bytes: int, *, copies_rows: bool) -> DrafterFacts:
    """Of a head inside a target. Its layers are of the target's class, so they are counted as a target's are."""
    layers = config.layers_config()
    width, draft_vocab = config.hidden_size, filled(config.draft_vocab_size)
    linears, plain, rotary = [], 2 * width * width, 0  # `fc`
    for tensor in weight_inventory(layers).tensors:
        if ".layers." in f".{tensor.module}":
            if tensor.role == "linear" and tensor.module.endswith(PACKED_MODULES):
                linears.append(tensor.matrix)
            else:
                plain += tensor.elements
        elif tensor.dtype_bytes is not None:
            rotary += tensor.elements * tensor.dtype_bytes
        elif tensor.role == "other":
            plain += 3 * tensor.elements  # the final norm, and those of embedding and state, which are like it
    decoder = decoder_shape(layers, next(each for each in SCHEMES.values() if each.dtype_bytes == element_bytes))
    joined = 3 * width * element_bytes  # embedding and state, normed, stay beside the layers
    decoder = replace(decoder, token_bytes=decoder.token_bytes + joined)
    reduced = draft_vocab < config.vocab_size
    return DrafterFacts(
        name=f"the target's MTP head ({config.family})",
        fingerprint=digest({**asdict(decoder), "aux": width, "draft_vocab": draft_vocab}),
        shape=DrafterShape(decoder, width, draft_vocab),
        linears=tuple(linears),
        head=(draft_vocab, width) if copies_rows else None,
        embedding_elements=0,
        plain_elements=plain,
        fixed_bytes=(8 * draft_vocab if reduced else 0) + rotary,
    )
