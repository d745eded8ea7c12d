"""One `generate` call as it reaches us, read once: what every loop needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..decoding.text import StopRules
from ..drafter.assistant import Assistant
from ..sampling.logits_processing import ScoreProcessing
from ..target.cache_argument import CACHE_ARGUMENT

NOT_FOR_THE_MODEL = ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor")


@dataclass(frozen=True)
class Call:
    """One `generate` call, everything prepared.

    Attributes:
        input_ids: `(B, L)`, left-padded.
        logits_processor, stopping_criteria: as transformers prepared them, for its own loops.
        processing, rules: the same two as our loop takes them.
        model_inputs: what the model is given beside `input_ids`, mask and cache among it.
    """

    model: Any
    drafter: Assistant
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    processing: ScoreProcessing
    rules: StopRules
    generation_config: GenerationConfig
    synced_gpus: bool
    streamer: Any
    model_inputs: dict[str, Any]

    @classmethod
    def read(
        cls,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        given: Mapping[str, Any],
    ) -> Call:
        """The call whose arguments `_assisted_decoding` got; `given` are those by keyword."""
        others = ("synced_gpus", "streamer", *NOT_FOR_THE_MODEL)
        return cls(
            model=model,
            drafter=given["assistant_model"],
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            processing=ScoreProcessing(logits_processor),
            rules=StopRules.from_criteria(stopping_criteria, generation_config.max_length),
            generation_config=generation_config,
            synced_gpus=bool(given.get("synced_gpus")),
            streamer=given.get("streamer"),
            model_inputs={name: value for name, value in given.items() if name not in others},
        )

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def cache(self) -> Any:
        """What the caller brought, or what `generate` made."""
        return self.model_inputs.get(CACHE_ARGUMENT)

    @property
    def attention_mask(self) -> Tensor | None:
        """`(B, n)` with `n` at least the prompt's length, or `None`: nothing is masked."""
        return self.model_inputs.get("attention_mask")

    @property
    def position_ids(self) -> Tensor | None:
        return self.model_inputs.get("position_ids")

    @property
    def longest_text(self) -> int:
        """Tokens that the text may come to, prompts included."""
        return self.text_length + self.rules.max_length - self.input_ids.shape[1]

    @property
    def may_rotate_otherwise(self) -> bool:
        """Whether the text may get so long that the target rotates all its positions in another way."""
        limit = self.drafter.binding.rotates_alike_up_to
        return limit is not None and self.longest_text > limit

    @property
    def text_length(self) -> int:
        """Tokens of the whole text, of which `input_ids` may be the new ones only."""
        if self.attention_mask is not None:
            return self.attention_mask.shape[1]
        # transformers 5.23 drops a mask of ones (5.17 does not); the positions it made from it are still there.
        if self.position_ids is None:
            return self.input_ids.shape[1]
        # Along several axes, as behind pictures, they are not the tokens counted.
        several = self.position_ids.dim() > 2
        return self.position_ids.shape[-1] if several else int(self.position_ids[..., -1].max()) + 1
