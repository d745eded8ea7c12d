"""The first forward of a generation as the model itself prepares it: with pictures, or positions along several axes.

Our own prefill places tokens, masks and positions. Where a prompt is more than tokens, only the model knows what those
are: which placeholders become what, which of them see each other, how positions run through a picture. So the whole
prompt goes through the model's own `prepare_inputs_for_generation` and forward, as in plain `generate`, over a stock
cache; what it leaves behind is taken over, and rounds count positions on from the prompt's last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from transformers import DynamicCache

from ..cache.stock import CACHE_ARGUMENT
from .binding import TargetBinding


class PromptOutput(NamedTuple):
    """What the first forward leaves behind, rows left-padded as they came.

    Attributes:
        logits: `(B, V)` after each prompt.
        aux: hidden states `(B, L, A*Ht)` of every column, or `None` where they are not captured.
        cache: keys and values of every column.
        offsets: `(A, B)` how far positions behind the prompt run ahead of the tokens counted, along each axis; `None`
            where they are counted along one.
    """

    logits: Tensor
    aux: Tensor | None
    cache: DynamicCache
    offsets: Tensor | None


@dataclass(frozen=True)
class PromptForward:
    """Prompts `(B, L)`, left-padded, and what the model is given beside them.

    Attributes:
        padding: pads in front of each row.
        model_inputs: as `generate` hands them to the model, without a cache.
    """

    input_ids: Tensor
    padding: Sequence[int]
    model_inputs: Mapping[str, Any]

    def lengths(self, rows: Sequence[int]) -> list[int]:
        """Tokens of these rows without their padding."""
        return [self.input_ids.shape[1] - self.padding[row] for row in rows]

    def __call__(self, binding: TargetBinding) -> PromptOutput:
        """One forward of the target over all rows; pictures are not told apart by row."""
        cache = DynamicCache(config=binding.text_config)
        model: Any = binding.model
        prepared = model.prepare_inputs_for_generation(
            self.input_ids, is_first_iteration=True, **{**self.model_inputs, CACHE_ARGUMENT: cache}
        )
        logits = model(**{**prepared, "logits_to_keep": 1}, return_dict=True).logits[:, -1]
        aux = binding.take_aux() if binding.taps.are_open else None
        return PromptOutput(logits, aux, cache, self._offsets(prepared.get("position_ids")))

    def _offsets(self, positions: Tensor | None) -> Tensor | None:
        if positions is None or positions.dim() != 3:
            return None
        lengths = positions.new_tensor(self.lengths(range(len(self.input_ids))))
        return positions[..., -1].expand(-1, len(lengths)) + 1 - lengths  # generate, too, adds one to the last
