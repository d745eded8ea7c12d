"""The name by which transformers hands a model its cache.

transformers 5.24 renamed `past_key_values` to `cache`, in the arguments of models and of `generate` and in their
outputs; until 5.40 models still take the old name, with a warning. When 5.23 is no longer supported, this module goes.
"""

from __future__ import annotations

import inspect

from transformers import GenerationMixin

_OLD, _NEW = "past_key_values", "cache"

CACHE_ARGUMENT = _NEW if _NEW in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else _OLD
