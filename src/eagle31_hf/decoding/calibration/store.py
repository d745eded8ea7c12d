"""Calibrations on disk, in the user's cache folder: one file for each pair, precision, device and set of versions.

Nothing here can stop a generation: a file that is broken, foreign or cannot be written is logged, once, and done
without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from ... import __version__
from ...drafter.assistant import Assistant
from ...drafter.drafter import Eagle31Drafter
from ...errors import ConfigurationError, named_line
from .calibration import Calibration

logger = logging.getLogger(__name__)
_said: set[str] = set()

CACHE_VARIABLE = "EAGLE31_CACHE"
FORMAT = 2


def cache_folder() -> Path:
    """`$EAGLE31_CACHE`, else `eagle31` in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle31"


def calibration_key(drafter: Assistant, *, compiled: bool) -> dict[str, Any]:
    """Everything the seconds depend on, JSON-ready."""
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
        "compiled": compiled,
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
    told = json.loads(config.to_json_string(use_diff=False))
    told.pop("_name_or_path", None)
    return digest_of(told)[:16]


def calibration_file(key: dict[str, Any]) -> Path:
    """Where a calibration of this key lies."""
    return cache_folder() / "calibrations" / f"{digest_of(key)}.json"


def digest_of(key: dict[str, Any]) -> str:
    """A file's name for all that is in `key`."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def load(key: dict[str, Any]) -> Calibration | None:
    """The calibration of this key; `None` where there is none that can be used."""
    path = calibration_file(key)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            raise ConfigurationError("it was made for another machine or pair")
        return Calibration.from_dict(stored["calibration"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError, ConfigurationError) as error:
        _say(f"the calibration in {path} is not used ({named_line(error)}); `eagle31 doctor --calibrate` renews it")
        return None


def save(key: dict[str, Any], calibration: Calibration) -> Path | None:
    """Keep it for later processes. Returns where, `None` if the folder takes nothing."""
    path = calibration_file(key)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"key": key, "calibration": calibration.to_dict()}), encoding="utf-8")
        unfinished.replace(path)  # at once: whoever reads meanwhile sees the old one or the new one
    except OSError as error:
        _say(f"the calibration could not be kept in {path.parent} ({named_line(error)}); it holds for this process")
        return None
    return path


def _say(what: str) -> None:
    if what not in _said:
        _said.add(what)
        logger.warning("eagle31: %s", what)
