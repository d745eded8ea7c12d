"""What a memory plan must know of a drafter: its matrices and sizes, from its configuration alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
from ..drafting.shape import repeats_mask
from ..errors import MemoryPlanError
from ..targets.fresh_drafter import default_config
from .dry_run import ForwardBytes, dry_run_of
from .target_facts import TargetFacts, load_config
from .weights import SCHEMES, Quantization

# A fresh or unknown drafter is planned with the draft vocabulary most published ones have.
USUAL_DRAFT_VOCABULARY = 32000

OWN_HEAD = "mtp"
"""As a drafter: the multi-token-prediction head inside the target."""


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter's share of a plan. `linears` are `(N, K)` of the matrices a quantiser may pack, layer by layer.

    Attributes:
        aux_width: `A * Ht`, what it reads of the target per position.
        draft_vocab: `Vd`.
        count: what its layers take of a forward, as `DryRun.count`.
        head: `(Vd, H)` draft head, its own or gathered from the target's; `None` if the target's whole head is shared.
        plain_elements: `fc`, norms, biases, experts and an embedding of its own: never packed.
        fixed_bytes: vocabulary map and rotary tables.
    """

    name: str
    hidden_size: int
    aux_width: int
    draft_vocab: int
    element_bytes: int
    count: Callable[..., ForwardBytes]
    linears: tuple[tuple[int, int], ...]
    head: tuple[int, int] | None
    plain_elements: int
    fixed_bytes: int

    def weight_bytes(self, precision: Quantization) -> int:
        """Bytes of the layers, `fc`, norms and embedding; the head is a term of its own."""
        packed = sum(_matrix_bytes(precision, matrix) for matrix in self.linears)
        return packed + self.plain_elements * precision.dtype_bytes + self.fixed_bytes

    def head_bytes(self, precision: Quantization) -> int:
        return _matrix_bytes(precision, self.head) if self.head else 0

    def absorb_bytes(self, tokens: int, slots: int, *, batch: int, **sizes: Any) -> int:
        """Most that a pass over true hidden states takes, which stay alive throughout."""
        rows, b = batch * tokens, self.element_bytes
        fused = rows * (2 * self.aux_width + self.hidden_size) * b  # normed slots, side by side again, fc's output
        layers = self.count(tokens, slots, batch=batch, **sizes).activations
        return rows * self.aux_width * b + max(fused, layers)

    def step_bytes(self, tokens: int, slots: int, *, batch: int, **sizes: Any) -> int:
        """Most that one draft step takes, or ranking its `(rows, Vd)` logits: fp32 copy and log-probabilities."""
        rows = batch * tokens
        ranking = rows * self.draft_vocab * (self.element_bytes + 4 + 4)
        layers = self.count(tokens, slots, batch=batch, **sizes).activations
        return max(layers, ranking) + rows * self.hidden_size * 2


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
    same_tokens = config.vocab_size == target.vocab_size or config.knows_vocabulary_of(target.vocab_size)
    if config.target_hidden_size != target.hidden_size or not same_tokens:
        raise MemoryPlanError(
            f"the drafter was made for hidden size {config.target_hidden_size} and {config.vocab_size} tokens, target "
            f"{target.name} has {target.hidden_size} and {target.vocab_size}; plan with a drafter made for it"
        )
    return drafter_facts(config, target.quantization.dtype_bytes, copies_rows=_copies_head_rows(drafter))


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
        rows = min(target.vocab_size, USUAL_DRAFT_VOCABULARY)
        return default_config(target.forward.model.config, draft_vocab_size=rows)
    config = getattr(drafter, "config", drafter)
    if isinstance(config, Eagle31Config):
        return config
    raise MemoryPlanError(
        f"got a {type(drafter).__name__} as drafter; wanted a folder, a Hub id, an Eagle31Config, a drafter, or None "
        "for one shaped like the target"
    )


def drafter_facts(config: Eagle31Config, element_bytes: int, *, copies_rows: bool = False) -> DrafterFacts:
    """Facts of a drafter of this configuration.

    Args:
        copies_rows: whether a head inside a target drafts from rows of its LM head that have to be copied.
    """
    if isinstance(config, MtpConfig):
        return _head_facts(config, element_bytes, copies_rows=copies_rows)
    draft_vocab, packable = filled(config.draft_vocab_size), packable_shapes(config)
    elements = sum(math.prod(shape) for name, shape in expected_shapes(config).items() if name != "d2t")
    reduced = draft_vocab < config.vocab_size
    return DrafterFacts(
        name=config.name_or_path or "one layer shaped like the target's",
        hidden_size=config.hidden_size,
        aux_width=config.num_aux_hidden_states * filled(config.target_hidden_size),
        draft_vocab=draft_vocab,
        element_bytes=element_bytes,
        count=_EagleLayers(config, element_bytes).count,
        linears=tuple(size for name, size in packable.items() if name != "lm_head"),
        head=(draft_vocab, config.hidden_size) if config.own_lm_head or reduced else None,
        plain_elements=elements - sum(map(math.prod, packable.values())),
        fixed_bytes=(8 * draft_vocab if reduced else 0) + 2 * 4 * (filled(config.head_dim) // 2),
    )


def _head_facts(config: MtpConfig, element_bytes: int, *, copies_rows: bool) -> DrafterFacts:
    """Of a head inside a target. Its layers are of the target's class, so they are counted as a target's are."""
    width, draft_vocab = config.hidden_size, filled(config.draft_vocab_size)
    precision = next(each for each in SCHEMES.values() if each.dtype_bytes == element_bytes)
    run = dry_run_of(config.layers_config(), precision)
    layers: nn.Module = run.decoder.layers
    linears = tuple(
        (module.out_features, module.in_features)
        for name, module in layers.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(PACKED_MODULES)
    )
    in_layers = sum(each.numel() for each in (*layers.parameters(), *layers.buffers()))
    beside = 2 * width * width + 3 * width  # `fc`, and the norms of embedding, state and output
    rotary = sum(each.nbytes for name, each in run.decoder.named_buffers() if not name.startswith("layers."))
    return DrafterFacts(
        name=f"the target's MTP head ({config.family})",
        hidden_size=width,
        aux_width=width,
        draft_vocab=draft_vocab,
        element_bytes=element_bytes,
        count=run.count,
        linears=linears,
        head=(draft_vocab, width) if copies_rows else None,
        plain_elements=beside + in_layers - sum(map(math.prod, linears)),
        fixed_bytes=(8 * draft_vocab if draft_vocab < config.vocab_size else 0) + rotary,
    )


@dataclass(frozen=True)
class _EagleLayers:
    """What an EAGLE drafter's layers take, by formula: its network is built above this room, so it cannot run here."""

    config: Eagle31Config
    element_bytes: int

    def count(
        self, tokens: int, slots: int, *, capacity: int, block: int, batch: int = 1, grows: bool = True
    ) -> ForwardBytes:
        """As `DryRun.count`."""
        config, b, rows = self.config, self.element_bytes, batch * tokens
        width, q_heads, key = config.hidden_size, config.num_attention_heads, filled(config.head_dim)
        rotated, kv_heads, value = key, filled(config.num_key_value_heads), key
        if config.is_latent:  # one key, latent and rotated part side by side, and one value, the latent
            kv_heads, value = 1, filled(config.kv_lora_rank)
            key += value
        window = config.sliding_window
        ring = None if window is None or window >= capacity else max(window - 1, 1)
        visible, stored = (slots, slots) if ring is None else (ring + tokens, ring + block)
        mask = rows * visible * b
        layer = batch * kv_heads * (key + value) * b * stored
        groups = q_heads // kv_heads
        beside = [layer * visible // stored if grows else 0]
        if groups > 1 and tokens > 1 and repeats_mask(tokens, kv_heads, groups, key):
            beside.append(groups * mask)
        projected = 2 * key + 5 * width + (q_heads + 2 * kv_heads) * key
        attention = rows * (projected * b + q_heads * ((key + value) * b + 4)) + max(beside)
        mlp = rows * b * (2 * rotated + 7 * width + 4 * config.intermediate_size)
        return ForwardBytes(
            activations=mask + max(mlp, attention),
            cache=config.num_hidden_layers * layer,
            largest_layer=layer,
        )
