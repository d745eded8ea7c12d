"""What a run is made of: the target, settings that suit it, and the drafter that is trained."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints import read_checkpoint
from ..drafter.drafter import Eagle31Drafter, MtpDrafter
from ..drafter.loading import load_target as load_pretrained
from ..drafter.loading import packing_config
from ..errors import TrainingError
from ..memory.cards import best_kind
from ..targets.fresh_drafter import trained_context
from ..texts.rows import Conversation
from .settings import TrainingSettings

HELD_OUT_ROWS = 64
SMALL_TARGET_PARAMETERS = 200_000_000


def load_target(settings: TrainingSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target, quantised as it will be served, and its tokenizer."""
    device = best_kind() if settings.device == "auto" else settings.device
    quantization = None if settings.quantization is None else packing_config(settings.quantization, torch.bfloat16)
    target, tokenizer = load_pretrained(
        settings.target,
        dtype=settings.dtype,
        # With several processes, each takes the card accelerate gives it.
        device_map={"": int(os.environ.get("LOCAL_RANK", "0"))} if device == "cuda" else device,
        quantization_config=quantization,
    )
    return target.requires_grad_(False), tokenizer


def precision_of_result(settings: TrainingSettings, target: PreTrainedModel) -> torch.dtype:
    """What the drafter is saved in: the type its target is stored in, which this machine may have loaded in another."""
    stored = AutoConfig.from_pretrained(settings.target).get_text_config().dtype if settings.dtype == "auto" else None
    precision = stored or target.dtype
    return precision if precision.is_floating_point else torch.bfloat16


def is_small(target: PreTrainedModel) -> bool:
    """Whether a run is sized for a small target on a CPU."""
    return target.num_parameters() < SMALL_TARGET_PARAMETERS


def resolve(settings: TrainingSettings, target: PreTrainedModel) -> TrainingSettings:
    """Fill what was left open to suit the target."""
    config = target.config.get_text_config()
    by_size = {each.name: each.metadata.get("by_size") for each in fields(settings)}
    place = 0 if is_small(target) else 1
    defaults: dict[str, Any] = {name: both[place] for name, both in by_size.items() if both is not None}
    defaults["max_length"] = min(defaults["max_length"], trained_context(config) or defaults["max_length"])
    vocabulary = config.vocab_size
    defaults["draft_vocab_size"] = vocabulary // 2 if vocabulary <= 32_000 else 32_000
    own = target.generation_config
    if getattr(own, "do_sample", False):
        defaults["temperature"] = (float(own.temperature or 1.0),)
    else:
        # Whether it will be served greedily or sampled is not known; texts of both kinds made the acceptance length
        # at temperature 1 7 % greater in the one comparison made (docs/developing/decisions.md, 2026-11-21).
        defaults["temperature"] = (0.0, 1.0)
    left_open = {name: value for name, value in defaults.items() if getattr(settings, name) in (None, ())}
    return replace(settings, **left_open)


def make_drafter(settings: TrainingSettings, target: PreTrainedModel) -> Eagle31Drafter:
    """The drafter named, or a fresh one whose draft vocabulary is still to be set; float32, attached.

    It is made before the target writes for hours: what does not fit shall not cost that.
    """
    if settings.drafter is None:
        drafter = Eagle31Drafter.from_target(target, draft_vocab_size=settings.draft_vocab_size)
        drafter.float()
    else:
        checkpoint = read_checkpoint(settings.drafter, dtype=torch.float32)
        drafter = Eagle31Drafter.from_checkpoint(checkpoint)
        if isinstance(drafter, MtpDrafter):
            raise TrainingError(
                f"{settings.drafter} is an MTP head, which is trained with its target and not here; leave --drafter "
                "out to make an EAGLE drafter"
            )
        drafter.to(device=target.get_output_embeddings().weight.device)  # type: ignore[call-arg, union-attr]
        drafter.attach(target)
    drafter.requires_grad_(True)
    if drafter.embed_tokens is not None:  # it stays the target's
        drafter.embed_tokens.requires_grad_(False)
    return drafter.train()


def set_vocabulary(drafter: Eagle31Drafter, target: PreTrainedModel, draft_ids: Tensor) -> None:
    """Give the head of a fresh drafter the target's own rows for these ids `(Vd,)`."""
    if len(draft_ids) < drafter.config.vocab_size:
        drafter.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
        drafter._draft_ids = None
    weight: Any = target.get_output_embeddings().weight  # type: ignore[union-attr]
    if drafter.lm_head is not None and weight.is_floating_point():
        with torch.no_grad():
            drafter.lm_head.weight.copy_(weight[draft_ids.to(weight.device)])


def split_rows(conversations: list[Conversation], seed: int) -> tuple[list[Conversation], list[Conversation]]:
    """Some rows to measure on, the rest to train on."""
    order = torch.randperm(len(conversations), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(HELD_OUT_ROWS, len(conversations) // 5)
    if count == 0:
        raise TrainingError(
            f"{len(conversations)} conversations are too few to keep some for measuring; give 5 or more, or others "
            "to measure on (--held-out)"
        )
    return [conversations[i] for i in order[:count]], [conversations[i] for i in order[count:]]
