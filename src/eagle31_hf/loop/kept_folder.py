"""The user's cache folder, and what a pair's graphs are kept there by."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from .. import __version__
from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter

CACHE_VARIABLE = "EAGLE31_CACHE"
FORMAT = 2


def cache_folder() -> Path:
    """`$EAGLE31_CACHE`, else `eagle31` in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle31"


def pair_key(drafter: Assistant) -> dict[str, Any]:
    """Everything that graphs of a pair depend on beside the target's modules, JSON-ready."""
    binding = drafter.binding
    device, config = binding.head_device, binding.text_config
    is_cuda = device.type == "cuda"
    return {
        "format": FORMAT,
        "device": torch.cuda.get_device_name(device) if is_cuda else f"{device.type} {platform.processor()}",
        "machine": platform.node(),
        "threads": torch.get_num_threads(),
        "target": _shape_of(config),
        "attention": binding.attention,
        "quantization": str(getattr(getattr(binding.model, "hf_quantizer", None), "quantization_config", "")),
        "cache_type": drafter.generation_config.stored_cache_type,
        "dtype": str(binding.model.dtype),
        **_of_network(drafter),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "eagle31_hf": __version__,
        },
    }


def _of_network(drafter: Assistant) -> dict[str, str]:
    if not isinstance(drafter, Eagle31Drafter):
        return {"drafter": "none"}
    return {
        "drafter": _shape_of(drafter.config),
        "drafter_dtype": str(drafter.dtype),
        "drafter_packing": str(drafter.packing),
    }


def _shape_of(config: PreTrainedConfig) -> str:
    """Of a configuration, wherever the model was loaded from: a folder that was moved is no change."""
    fields = json.loads(config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    return digest_of(fields)[:16]


def digest_of(key: dict[str, Any]) -> str:
    """A folder's name for all that is in `key`."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def setting_of(drafter: Assistant) -> Hashable:
    """What of a `pair_key` may change while a process runs."""
    binding = drafter.binding
    settings = drafter.generation_config.stored_cache_type, binding.attention
    return binding.model.dtype, binding.head_device, drafter.dtype, torch.get_num_threads(), settings
