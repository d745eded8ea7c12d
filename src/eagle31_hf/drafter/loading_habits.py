"""What people pass to `from_pretrained` out of habit, answered with what to do for a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigurationError

_ANSWERS = {
    "device_map": "a drafter is one small module: leave it out to follow the target's LM head, or pass device='cuda:0'",
    "torch_dtype": "pass it as dtype=, or leave it out to follow the target",
    "load_in_8bit": "pass quantization_config=BitsAndBytesConfig(load_in_8bit=True)",
    "load_in_4bit": "pass quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')",
    "trust_remote_code": "no code of a checkpoint is ever run: leave it out",
    "attn_implementation": "the drafter attends by torch's SDPA: leave it out",
    "low_cpu_mem_usage": "a checkpoint is always read once, straight into place: leave it out",
    "use_safetensors": "safetensors are taken wherever there are any: leave it out",
    "subfolder": "pass it with the id, 'owner/name/folder', or the folder itself",
    "config": "what the weights are is read from the checkpoint: leave it out, or make Eagle31Drafter(config)",
    "use_auth_token": "pass token=",
    "max_memory": "leave it out, or pass memory='auto' to plan target and drafter together",
    "offload_folder": "a drafter stays where it runs: leave it out",
}


def answer_habits(habits: Mapping[str, Any]) -> None:
    """Raises:
    ConfigurationError: an argument of transformers' `from_pretrained`; the message says what to do instead.
    TypeError: an argument nobody knows.
    """
    for name, value in habits.items():
        if name in _ANSWERS:
            raise ConfigurationError(f"got {name}={value!r} for a drafter; {_ANSWERS[name]}")
        raise TypeError(f"Eagle31Drafter.from_pretrained got an unexpected keyword argument {name!r}")


def chosen_dtype(dtype: torch.dtype | str | None, stored: torch.dtype) -> torch.dtype | None:
    """The dtype asked for; `"auto"` is the `stored` one, `None` stays open.

    Raises:
        ConfigurationError: no floating point dtype has that name.
    """
    if dtype is None or dtype == "auto":
        return stored if dtype else None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            f"got dtype={dtype!r}; wanted 'auto', 'bfloat16', 'float16', 'float32' or such a dtype"
        )
    return found
