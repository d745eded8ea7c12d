"""One `generate` call: what it asks for, read once, what its model is given, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache.stock import CACHE_ARGUMENT
from ..drafter.assistant import Assistant
from ..errors import UnsupportedGenerationError
from ..loop.text import StopRules
from ..sampling.logits_processing import ScoreProcessing
from ..stats import SpeculationStats
from ..targets.binding import OF_STATES_ALONE
from ..targets.prompt_forward import PromptForward

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


# --- what the model is given ------------------------------------------------------------------------------------------

PLACED_BY_OUR_LOOP = {
    CACHE_ARGUMENT,
    OF_STATES_ALONE,
    "attention_mask",
    "cache_position",
    "inputs_embeds",
    "logits_to_keep",
    "position_ids",
    "use_cache",
}
READ_WITH_THE_PROMPT = {
    "feature_attention_mask",
    "image_grid_thw",
    "image_sizes",
    "input_features",
    "mm_encoder_outputs",
    "mm_token_type_ids",
    "pixel_values",
    "pixel_values_videos",
    "second_per_grid_ts",
    "token_type_ids",
    "video_grid_thw",
}
"""What models want in their first forward only. Each is in a test; a name that is not here goes by another loop."""


def beside_tokens(call: Call) -> list[str]:
    """Names of what the model is given with the prompt that our loop does not place itself."""
    given = {name for name, value in call.model_inputs.items() if not _is_nothing(value)} - PLACED_BY_OUR_LOOP
    if _has_axes_of_its_own(call):
        given.add("position_ids")
    return sorted(given)


def prompt_forward(call: Call, padding: list[int]) -> PromptForward | None:
    """How the model reads the prompts itself; `None` where they are tokens and nothing else."""
    return PromptForward(call.input_ids, padding, call.model_inputs) if beside_tokens(call) else None


def left_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Pads in front of each row.

    Raises:
        UnsupportedGenerationError: a mask has holes or pads on the right.
    """
    rows, length = input_ids.shape
    if attention_mask is None:
        return [0] * rows
    mask = attention_mask[:, -length:].bool()
    padding = length - mask.sum(dim=1)
    columns = torch.arange(length, device=mask.device)
    if not torch.equal(mask, columns >= padding[:, None]) or int(padding.max()) >= length:
        raise UnsupportedGenerationError(
            "the attention mask has pads behind or between tokens (or a row without any token); pad prompts on the "
            "left: tokenizer.padding_side = 'left'"
        )
    return padding.tolist()


def _is_nothing(value: Any) -> bool:
    """`None`, or outputs of encoders (`mm_encoder_outputs`) none of which had anything to read."""
    return value is None or (isinstance(value, Mapping) and all(_is_nothing(part) for part in value.values()))


def _has_axes_of_its_own(call: Call) -> bool:
    """Whether positions run along several axes, and along one of them otherwise than the text."""
    positions = call.position_ids
    if positions is None or positions.dim() != 3:
        return False
    rows = call.batch_size
    return any(has_positions_of_its_own(axis.expand(rows, -1), call.attention_mask) for axis in positions)


def has_positions_of_its_own(positions: Tensor | None, mask: Tensor | None) -> bool:
    """Whether position ids were given that are not the ones `generate` makes from the mask."""
    if positions is None or positions.dim() != 2:
        return False
    if mask is None:  # transformers 5.23 drops a mask of ones
        expected = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        return not torch.equal(positions, expected)
    if mask.dim() != 2 or mask.shape[1] != positions.shape[1]:
        return True
    expected = mask.long().cumsum(-1) - 1
    return bool(((positions != expected) & (mask != 0)).any())


# --- how long its drafts may get --------------------------------------------------------------------------------------

NAME = "num_assistant_tokens"
REMEMBERED = "_eagle31_num_assistant_tokens"


def remember_draft_tokens(
    prepared: GenerationConfig, kwargs: Mapping[str, Any], given: GenerationConfig | None, defaults: GenerationConfig
) -> None:
    """Keep what a call asks for: in `prepared` an unset `num_assistant_tokens` is transformers' default.

    Args:
        prepared: what `generate` makes of the others.
        kwargs: of the call, which come before `given`, its `generation_config`.
        defaults: the model's own.
    """
    asked = kwargs.get(NAME)
    for config in (given, defaults):
        if asked is None and config is not None:
            asked = getattr(config, REMEMBERED, getattr(config, NAME, None))
    setattr(prepared, REMEMBERED, asked)


def asked_tokens(generation_config: GenerationConfig) -> int | None:
    """Draft tokens that a call asks for; `None`: as the drafter's settings say."""
    return getattr(generation_config, REMEMBERED, getattr(generation_config, NAME, None))


# --- what it returns --------------------------------------------------------------------------------------------------


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with `speculation_stats`."""

    speculation_stats: SpeculationStats | None = None


def with_stats(output: Any, stats: SpeculationStats) -> Any:
    """An output of transformers' own loops with the figures; bare ids stay as they are."""
    if isinstance(output, GenerateDecoderOnlyOutput):
        values = {field.name: getattr(output, field.name) for field in fields(output)}
        return SpeculativeOutput(**values, speculation_stats=stats)
    return output
