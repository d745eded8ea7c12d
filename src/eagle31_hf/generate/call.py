"""One `generate` call: what it asks for, read once, what its model is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..cache.stock import CACHE_ARGUMENT, held_length
from ..drafter.assistant import Assistant
from ..errors import UnsupportedGenerationError
from ..loop.carried_cache import CarriedCache
from ..loop.pair import Drafting, Pair
from ..loop.text import StopRules
from ..sampling.logits_processing import ScoreProcessing
from ..stats import SpeculationStats
from ..targets.binding import OF_STATES_ALONE
from ..targets.prompt_forward import PromptForward


@dataclass
class AssistedCall:
    """A `generate` call with an assistant of ours, as it enters transformers.

    Attributes:
        draft_tokens: the `num_assistant_tokens` it asks for; `None`: as many as the drafter's settings say.
        by_default: whether it did not name the assistant (`Assistant.use_by_default`).
        has_begun: whether something was written.
    """

    model: Any
    drafter: Assistant
    draft_tokens: int | None
    by_default: bool
    has_begun: bool = False


@dataclass(frozen=True)
class Call:
    """The same with everything prepared: what transformers hands `_sample`.

    Attributes:
        input_ids: `(B, L)`, left-padded.
        logits_processor, stopping_criteria: as transformers' own loop takes them.
        model_inputs: what the model is given beside `input_ids`, mask and cache among it.
    """

    assisted: AssistedCall
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    synced_gpus: bool
    streamer: Any
    model_inputs: dict[str, Any]

    @property
    def model(self) -> Any:
        return self.assisted.model

    @property
    def drafter(self) -> Assistant:
        return self.assisted.drafter

    @cached_property
    def processing(self) -> ScoreProcessing:
        """The processors as our loop takes them."""
        return ScoreProcessing(self.logits_processor)

    @cached_property
    def rules(self) -> StopRules:
        """The criteria as our loop takes them."""
        return StopRules.from_criteria(self.stopping_criteria, self.generation_config.max_length)

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def is_sampled(self) -> bool:
        return bool(self.generation_config.do_sample)

    @property
    def cache(self) -> Any:
        """What the caller brought, or what `generate` made."""
        return self.model_inputs.get(CACHE_ARGUMENT)

    @property
    def cached_length(self) -> int:
        """Tokens that it holds."""
        return 0 if self.cache is None else held_length(self.cache)

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

    @cached_property
    def text_length(self) -> int:
        """Tokens of the whole text, of which `input_ids` may be the new ones only."""
        if self.attention_mask is not None:
            return self.attention_mask.shape[1]
        # transformers 5.23 drops a mask of ones (5.17 does not); the positions it made from it are still there.
        if self.position_ids is None or not self.position_ids.numel():
            return self.input_ids.shape[1]
        # Along several axes, as behind pictures, they are not the tokens counted.
        several = self.position_ids.dim() > 2
        return self.position_ids.shape[-1] if several else int(self.position_ids[..., -1].max()) + 1

    @cached_property
    def padding(self) -> list[int]:
        """Pads of each row, which stand in front of it where `is_left_padded`.

        Raises:
            UnsupportedGenerationError: the mask is shorter than the prompts.
        """
        rows, length = self.input_ids.shape
        if self.text_length < length:
            raise UnsupportedGenerationError(
                f"the attention mask covers {self.text_length} tokens of prompts of {length}; pass the mask that the "
                "tokenizer made with them"
            )
        mask = self.attention_mask
        return [0] * rows if mask is None else (length - mask[:, -length:].bool().sum(dim=1)).tolist()

    @property
    def is_left_padded(self) -> bool:
        """Whether every row has tokens, and no pads behind or between them."""
        length, padding = self.input_ids.shape[1], self.padding
        if self.attention_mask is None:
            return True
        mask = self.attention_mask[:, -length:].bool()
        pads = torch.tensor(padding, device=mask.device)[:, None]
        return max(padding) < length and torch.equal(mask, torch.arange(length, device=mask.device) >= pads)

    @cached_property
    def carried(self) -> CarriedCache | None:
        """What the cache brings from the last turn and takes to the next; `None` if the caller would not get it.

        Raises:
            UnsupportedGenerationError: it has another number of rows.
        """
        cache, mask = self.cache, self.attention_mask
        wanted = self.generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        if cache is None or not wanted or self.batch_size > 1 or not (mask is None or bool(mask.all())):
            return None  # a batch with a cache of the user's is decoded plainly
        carried = CarriedCache(self.drafter, cache)
        if self.cached_length:
            carried.open(self.input_ids)
        return carried

    def drafting(self, on_event: Callable[[str, str], None] | None = None) -> Drafting:
        """What the call and the drafter's `generation_config` ask of drafts."""
        return Pair.of(self.drafter).drafting(
            rows=self.batch_size,
            sampled=self.is_sampled,
            processing=self.processing,
            new_tokens=self.rules.max_length - self.input_ids.shape[1],
            depth=self.assisted.draft_tokens,
            on_event=on_event,
        )

    @property
    def prompt_forward(self) -> PromptForward | None:
        """How the model reads the prompts itself; `None` where they are tokens and nothing else."""
        return PromptForward(self.input_ids, self.padding, self.model_inputs) if beside_tokens(self) else None


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
