"""A target from a folder or from the Hub, with its tokenizer: what every command loads it by."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.files import refuse_drafter_as_target
from ..checkpoints.hub import folder_meant, missing_folder, target_class
from ..errors import CheckpointNotFoundError, IncompatibleTargetError, config_problem, first_line
from ..targets.devices import SHORT_NAMES, quick_dtype

_TOKENIZER_FILES = r"tokeni[sz]er|vocab|merges|spiece|sentencepiece|bpe|tiktoken|tekken|\.model$"


def load_target(
    name: str, *, dtype: str = "auto", device_map: Any = None, quantization_config: Any = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in evaluation mode, and its tokenizer.

    Args:
        name: folder or Hub id.
        dtype: `"auto"` for what this machine computes in quickly, `"stored"`, or a torch type's name, short or not
            (`PRECISIONS`).
        device_map, quantization_config: as transformers takes them.

    Raises:
        CheckpointNotFoundError: it is not there, not complete, or there is no network to ask.
        IncompatibleTargetError: it is a drafter or a GGUF file, or transformers cannot make a decoder of it.
    """
    refuse_drafter_as_target(name)
    packed = {} if quantization_config is None else {"quantization_config": quantization_config}
    try:
        config = AutoConfig.from_pretrained(name)  # small, and its absence says more than that of a tokenizer
        refuse_drafter_as_target(name, config.architectures)
        require_tokenizer(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        precision = _precision(config, dtype, device_map, bool(packed))
        options: dict[str, Any] = {"dtype": precision, "device_map": device_map, **packed}
        model: Any = target_class(config).from_pretrained(name, **options)
    except OSError as error:
        raise CheckpointNotFoundError(_why_not_found(name, error)) from error
    except StrictDataclassError as error:
        raise IncompatibleTargetError(f"the config.json of {name!r} is wrong: {config_problem(error)}") from error
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise IncompatibleTargetError(
            f"the target {name!r} cannot be loaded; wanted a decoder-only transformers model with its tokenizer: "
            f"{first_line(error)}"
        ) from error
    return model.eval(), tokenizer


def require_tokenizer(name: str) -> None:
    """transformers would make an empty one of nothing, or list the ways to convert one.

    Raises:
        CheckpointNotFoundError: the folder holds none.
    """
    if os.path.isdir(name) and not any(re.search(_TOKENIZER_FILES, file) for file in os.listdir(name)):
        raise CheckpointNotFoundError(
            f"the folder {name!r} holds no tokenizer; copy tokenizer.json and tokenizer_config.json (or whatever "
            "tokenizer files there are) from the folder of the model it was made from"
        )


def packing_config(bits: str, compute_dtype: Any = None) -> BitsAndBytesConfig:
    """`quantization_config` of a target packed by bitsandbytes in `"4bit"` (nf4, scales packed, too) or `"8bit"`.

    Args:
        compute_dtype: of the products of 4-bit weights; `None`: bitsandbytes' own.
    """
    if bits == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = {} if compute_dtype is None else {"bnb_4bit_compute_dtype": compute_dtype}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **compute)


def dtype_here(name: str, *, dtype: str, device_map: Any) -> torch.dtype | None:
    """What `load_target` would load a target in that is stored otherwise; `None`: as stored, or not known yet.

    Args:
        name, dtype, device_map: as `load_target` takes them; the weights are not packed.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError, StrictDataclassError):  # loading it says more
        return None
    precision = _precision(config, dtype, device_map, packed=False)
    if not isinstance(precision, torch.dtype) or precision == config.get_text_config().dtype:
        return None
    return precision


def _precision(config: Any, dtype: str, device_map: Any, packed: bool) -> torch.dtype | str:
    """What a target is loaded in; packed weights and several devices decide for themselves."""
    if dtype not in ("auto", "stored"):
        return SHORT_NAMES.get(dtype, dtype)
    stored = config.get_text_config().dtype
    decides = getattr(config, "quantization_config", None) or packed or device_map not in ("cpu", "cuda", "mps")
    if stored is None or decides:
        return "auto"
    return stored if dtype == "stored" else quick_dtype(stored, device_map)


def _why_not_found(name: str, error: OSError) -> str:
    if os.path.isdir(name):
        return f"the folder {name!r} holds no complete target (config.json, weights, tokenizer): {first_line(error)}"
    if missing := missing_folder(name):
        return missing
    return (
        f"no target at {name!r}: no such folder, and the Hub did not give it ({first_line(error)}); check the "
        f"spelling, your access and the network, or pass a local folder{folder_meant(name)}"
    )
