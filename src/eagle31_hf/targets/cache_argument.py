"""The name by which transformers hands a model its cache.

transformers 5.24 renamed `past_key_values` to `cache`, in the arguments of models and of `generate` and in their
outputs; until 5.40 models still take the old name, with a warning. Before, models without attention had a name of their
own for it. When 5.23 is no longer supported, this module goes.
"""

from __future__ import annotations

import inspect

from transformers import GenerationMixin, PreTrainedModel

_OLD, _NEW = "past_key_values", "cache"
OF_STATES_ALONE = "cache_params"

CACHE_ARGUMENT = _NEW if _NEW in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else _OLD


def cache_argument(model: PreTrainedModel) -> str:
    """By which name `model` takes it."""
    taken = inspect.signature(model.forward).parameters
    return OF_STATES_ALONE if CACHE_ARGUMENT not in taken and OF_STATES_ALONE in taken else CACHE_ARGUMENT
