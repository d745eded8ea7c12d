"""What a run begins with: the frozen target, settings that suit it, and a drafter to train."""

from __future__ import annotations

import os
import timeit
from dataclasses import fields
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafter.drafter import Eagle31Drafter
from ..memory.cards import best_kind
from ..memory.layer_sizes import trained_context
from ..target.loading import load_target as load_pretrained
from ..target.loading import packing_config, stored_dtype
from .data.vocabulary import DraftVocabulary
from .settings import SMALL_TARGET_PARAMETERS, ResolvedSettings, TrainingSettings


def load_target(settings: TrainingSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The frozen target, quantised as it will be served, and its tokenizer.

    Raises:
        CheckpointNotFoundError, IncompatibleTargetError, ConfigurationError: it cannot be found or loaded.
    """
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
    stored = stored_dtype(settings.target) if settings.dtype == "auto" else None
    precision = stored or target.dtype
    return precision if precision.is_floating_point else torch.bfloat16


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether training in mixed precision is faster there: on CUDA cards, and on CPUs that show it.

    What a CPU lists says too little: some that list bfloat16 instructions are slower with them. So both are timed, some
    50 ms in all; with several processes the first decides for all.
    """
    if device.type != "cpu":
        return device.type == "cuda"
    faster = [_product_s(torch.bfloat16) < CLEARLY_FASTER * _product_s(torch.float32)]
    return bool(broadcast_object_list(faster)[0])


CLEARLY_FASTER = 0.8  # of the time: a run that is resumed shall find the same


def _product_s(dtype: torch.dtype) -> float:
    """Least seconds of a product as large as a small drafter's."""
    left, right = torch.ones(512, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    return min(timeit.repeat(lambda: torch.mm(left, right), repeat=5, number=1))


def resolve(settings: TrainingSettings, target: PreTrainedModel) -> ResolvedSettings:
    """Fill what was left open to suit the target's size."""
    config = target.config.get_text_config()
    small = target.num_parameters() < SMALL_TARGET_PARAMETERS
    length = 512 if small else 4096
    vocabulary = config.vocab_size
    defaults: dict[str, Any] = {
        "regenerate": "last" if small else "each",
        "max_new_tokens": 128 if small else 256,
        "write_rows": 64 if small else 16,
        "supervise": "all" if small else "assistant",
        "max_length": min(length, trained_context(config) or length),
        "draft_vocab_size": vocabulary // 2 if vocabulary <= 32_000 else min(32_000, vocabulary),
        "accumulate": 1 if small else 4,
        # 3.99 accepted where 4 rows and 8e-3 gave 3.37 for the same tokens (docs/LOG.md, 2026-11-22).
        "batch_rows": 2 if small else 4,
        "learning_rate": 2e-3 if small else 1e-4,
        "eval_steps": 500 if small else 200,
    }
    if not getattr(target.generation_config, "do_sample", False):
        # Whether it will be served greedily or sampled is not known; texts of both kinds made the acceptance length
        # at temperature 1 7 % greater in the one comparison made (docs/LOG.md, 2026-11-21).
        defaults["temperature"] = (0.0, 1.0)
    told = {item.name: getattr(settings, item.name) for item in fields(TrainingSettings)}
    left_open = {name: value for name, value in defaults.items() if told[name] in (None, ())}
    return ResolvedSettings(**{**told, **left_open})


def set_vocabulary(drafter: Eagle31Drafter, target: PreTrainedModel, vocabulary: DraftVocabulary) -> None:
    """Give the head of a fresh drafter the target's own rows for the draft vocabulary."""
    if len(vocabulary.ids) < drafter.config.vocab_size:
        drafter.d2t.copy_(vocabulary.d2t)
        drafter._draft_ids = None
    head = target.get_output_embeddings()
    weight: Any = head.weight  # type: ignore[union-attr]
    if drafter.lm_head is not None and weight.is_floating_point():
        with torch.no_grad():
            drafter.lm_head.weight.copy_(weight[vocabulary.ids.to(weight.device)])
