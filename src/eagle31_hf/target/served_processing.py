"""The processors that a `generate` call of a model applies to scores, without generating."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sampling.logits_processing import ScoreProcessing


def processing_of(model: Any, **told: Any) -> ScoreProcessing:
    """What `model.generate` makes of its generation config and of what it is `told`.

    Args:
        told: keyword arguments of `generate` beside prompts and lengths.
    """
    seen: list[Any] = []

    def note(_model: Any, input_ids: Tensor, logits_processor: Any, **_others: Any) -> Tensor:
        seen.append(logits_processor)
        return input_ids

    ids = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    ends = {"max_new_tokens": 1, "pad_token_id": 0}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), custom_generate=note, **ends, **told)
    return ScoreProcessing(seen[0])
