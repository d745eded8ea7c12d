"""What a memory plan must know of a drafter: its matrices, and what its forwards take, from its configuration alone."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cache.spans import LayerKind, LayerKinds
from ..cache.speculative import SpeculativeCache
from ..checkpoints import inspect_checkpoint, require_head, target_holds_head
from ..checkpoints.eagle_network import DrafterOutput, Eagle31Network
from ..checkpoints.mtp import promised_head
from ..checkpoints.mtp_network import MtpNetwork
from ..config import Eagle31Config, MtpConfig
from ..errors import MemoryPlanError
from ..targets.fresh_drafter import default_config
from .dry_run import CountedForwards, Forward, ForwardBytes, counting
from .target_facts import TargetFacts
from .weights import Quantization

# A fresh or unknown drafter is planned with the draft vocabulary most published ones have.
USUAL_DRAFT_VOCABULARY = 32000

OWN_HEAD = "mtp"
"""As a drafter: the multi-token-prediction head inside the target."""


class DrafterFacts(CountedForwards):
    """A drafter's share of a plan: its matrices, and its network, to be run without memory.

    Its forwards read hidden states of the target, which stay alive throughout, and give the last token's logits. Those
    that verify are draft steps instead: they read what was fed back, and all logits are ranked.

    Args:
        dtype: it computes in.
        copies_rows: whether a head inside a target drafts from rows of its LM head that have to be copied.

    Attributes:
        aux_width: `A * Ht`, what it reads of the target per position.
        draft_vocab: `Vd`.
        linears: `(N, K)` of the matrices a quantiser may pack, layer by layer.
        head: `(Vd, H)` draft head, its own or gathered from the target's; `None` if the target's whole head is shared.
        plain_bytes: of all that is never packed: `fc`, norms, biases, experts, an embedding of its own, and tables.
    """

    def __init__(self, config: Eagle31Config, dtype: torch.dtype, *, copies_rows: bool = False):
        kind = MtpNetwork if isinstance(config, MtpConfig) else Eagle31Network
        with torch.device("meta"):
            self.network = kind(config)
        self.network.to(device="meta", dtype=dtype)  # type: ignore[call-arg]  # tables were made where numbers are
        self.config, self.dtype, self.draft_vocab = config, dtype, config.draft_vocab_size
        self.aux_width = config.num_aux_hidden_states * config.target_hidden_size
        self.name = config.name_or_path or "one layer shaped like the target's"
        has_rows = config.own_lm_head or self.draft_vocab < config.vocab_size
        if isinstance(config, MtpConfig):
            self.name, has_rows = f"the target's MTP head ({config.family})", copies_rows
        self.head = (self.draft_vocab, config.hidden_size) if has_rows else None
        packable = self.network.packable()
        self.linears = tuple(size for matrix, size in packable.items() if matrix != "lm_head")
        tensors = (*self.network.parameters(), *self.network.buffers())
        in_matrices = sum(map(math.prod, packable.values())) * dtype.itemsize
        self.plain_bytes = sum(tensor.nbytes for tensor in tensors) - in_matrices
        windows = [config.sliding_window] * config.num_hidden_layers
        super().__init__(kind.__name__, windows, [self._run_over_our_cache])

    def weight_bytes(self, precision: Quantization) -> int:
        """Bytes of the layers, `fc`, norms and embedding; the head is a term of its own."""
        return self.plain_bytes + sum(_matrix_bytes(precision, matrix) for matrix in self.linears)

    def head_bytes(self, precision: Quantization) -> int:
        return _matrix_bytes(precision, self.head) if self.head else 0

    def _run_over_our_cache(self, forward: Forward) -> ForwardBytes:
        with counting() as counter:
            cache = SpeculativeCache(LayerKinds(tuple(map(LayerKind, self.windows))), **forward.cache_sizes)
            return self._over(cache, forward, partial(self._read, forward, cache), counter)

    def _read(self, forward: Forward, cache: SpeculativeCache, tokens: int) -> Tensor:
        steps, width = forward.verifies, self.config.hidden_size if forward.verifies else self.aux_width
        states = torch.empty(forward.batch, tokens, width, dtype=self.dtype, device="meta")
        out = self._decode(cache, states, steps=steps)
        logits = out.normed.new_empty(forward.batch, tokens if steps else 1, self.draft_vocab)
        return logits.float().log_softmax(-1) if steps else logits

    def _decode(self, cache: SpeculativeCache, states: Tensor, *, steps: bool) -> DrafterOutput:
        """Apart from `_read`: what it makes is let go before there are logits."""
        mask: Any = cache.attention_mask(dtype=self.dtype)
        hidden = states if steps else self.network.fuse_aux(states)
        embedded = states.new_empty(*states.shape[:2], self.config.hidden_size)
        return self.network.decode(embedded, hidden, self.network.rotary(cache.position_ids()), mask, cache)


def _matrix_bytes(precision: Quantization, matrix: tuple[int, int]) -> int:
    packed = precision.packs(matrix, precision.dtype_bytes)
    return precision.matrix_bytes(*matrix) if packed else math.prod(matrix) * precision.dtype_bytes


def read_drafter(drafter: Any, target: TargetFacts) -> DrafterFacts:
    """Facts of a drafter's config, folder, Hub id or loaded drafter; `None` means one shaped like the target.

    Raises:
        MemoryPlanError: it cannot be read, or was made for a target of another width or vocabulary.
    """
    config, offsets = _config_and_map(drafter, target)
    same_tokens = config.vocab_size == target.vocab_size or config.knows_vocabulary_of(target.vocab_size)
    width = target.forward.text.hidden_size
    if config.target_hidden_size != width or not same_tokens:
        raise MemoryPlanError(
            f"the drafter was made for hidden size {config.target_hidden_size} and {config.vocab_size} tokens, target "
            f"{target.name} has {width} and {target.vocab_size}; plan with a drafter made for it"
        )
    # Of a head inside a target the first rows of the LM head are read in place.
    copies_rows = isinstance(config, MtpConfig) and offsets is not None and bool(offsets.any())
    return DrafterFacts(config, target.quantization.torch_dtype, copies_rows=copies_rows)


def drafter_to_plan(drafter: Any, target: Any, facts: TargetFacts) -> Any:
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
    # Of the Hub the configuration alone was asked: no weights are fetched for a plan.
    head = promised_head(facts.forward.model.config)
    if head is None and is_asked:
        raise MemoryPlanError(
            f"got drafter 'mtp', but the configuration of {facts.name} says of no MTP head that can be read; name a "
            "drafter, or none"
        )
    return head


def _config_and_map(drafter: Any, target: TargetFacts) -> tuple[Eagle31Config, Tensor | None]:
    """Its configuration and, where its draft vocabulary is known, the offsets of its ids."""
    if isinstance(drafter, (str, Path)):
        summary = inspect_checkpoint(drafter)
        stored = summary.names.get("d2t")
        return summary.config, None if stored is None else summary.stored.load([stored])[stored]
    if drafter is None:
        rows = min(target.vocab_size, USUAL_DRAFT_VOCABULARY)
        return default_config(target.forward.model.config, draft_vocab_size=rows), None
    config = getattr(drafter, "config", drafter)
    if isinstance(config, Eagle31Config):
        return config, getattr(drafter, "d2t", None)
    raise MemoryPlanError(
        f"got a {type(drafter).__name__} as drafter; wanted a folder, a Hub id, an Eagle31Config, a drafter, or None "
        "for one shaped like the target"
    )
