"""How a model is served: what `generate` is told, and which processors it then applies to scores."""

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


def sampling_options(temperature: float) -> dict[str, Any]:
    """What `generate` is told to write at this temperature; 0 is greedy."""
    return {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
