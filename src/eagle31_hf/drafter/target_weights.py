"""Copies of what a drafter shares with its target, for layouts and engines that have no words for sharing."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..checkpoints import Checkpoint
from ..targets.binding import TargetBinding
from ..targets.quantized import gather_head_rows

EMBEDDING, HEAD = "embedding", "head"


@torch.no_grad()
def copy_from_target(checkpoint: Checkpoint, target: PreTrainedModel, parts: Collection[str]) -> Checkpoint:
    """The checkpoint with `parts` (`"embedding"`, `"head"`) of its own wherever it shares them with `target`.

    The embedding `(V, H)` is what the target makes of each id, scaling included; the head has the draft vocabulary's
    rows `(Vd, H)`. Both in the drafter's dtype.

    Raises:
        IncompatibleTargetError: the drafter is not for this target.
    """
    config, tensors = copy.deepcopy(checkpoint.config), dict(checkpoint.tensors)
    dtype, binding = tensors["fc.weight"].dtype, TargetBinding(target, config)
    try:
        if EMBEDDING in parts and not config.own_embedding:
            ids = torch.arange(config.vocab_size, device=binding.input_device)
            tensors["embed_tokens.weight"], config.own_embedding = binding.embed(ids[None])[0].to("cpu", dtype), True
        if HEAD in parts and not config.own_lm_head:
            ids = torch.arange(config.draft_vocab_size or config.vocab_size) + tensors.get("d2t", torch.tensor(0))
            rows = gather_head_rows(binding.lm_head, ids, binding.compute_dtype)
            tensors["lm_head.weight"], config.own_lm_head = rows.to("cpu", dtype), True
    finally:
        binding.close()
    return replace(checkpoint, config=config, tensors=tensors)
