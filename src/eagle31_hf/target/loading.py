"""A target from a folder, from the Hub or from a GGUF file, with its tokenizer: what every command loads it by.

A `.gguf` file stands for itself: transformers unpacks its weights while loading, unless it has kernels for them.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checkpoints.files import refuse_drafter_as_target
from ..checkpoints.gguf_header import read_gguf_metadata
from ..checkpoints.hub import GGUF_SUFFIX, can_be_hub_id, folder_meant, target_class
from ..errors import CheckpointNotFoundError, ConfigurationError, IncompatibleTargetError, first_line
from .precision import SHORT_NAMES, quick_dtype

logger = logging.getLogger(__name__)

GGUF_STORED_DTYPE = torch.bfloat16
"""What unpacked weights are taken to be stored in: the file names no type for them."""
SINGLE_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
"""`tokenizer.ggml.pre` of files whose text is split into single digits and then as GPT-2 splits it (llama.cpp)."""
_TOKENIZER_FILES = r"tokeni[sz]er|vocab|merges|spiece|sentencepiece|bpe|tiktoken|tekken|\.model$"
AS_GPT2 = ("default", "gpt-2", "gpt2", "jais", "mpt", "olmo", "phi-2", "trillion")


def load_target(
    name: str, *, dtype: str = "auto", device_map: Any = None, quantization_config: Any = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target in evaluation mode, and its tokenizer.

    Args:
        name: folder, Hub id or `.gguf` file.
        dtype: `"auto"` for what this machine computes in quickly, `"stored"`, or a torch type's name, short or not
            (`PRECISIONS`).
        device_map, quantization_config: as transformers takes them.

    Raises:
        CheckpointNotFoundError: it is not there, not complete, or there is no network to ask.
        CheckpointFormatError: it is a damaged GGUF file.
        ConfigurationError: it is a GGUF file, and the package that reads them is not installed.
        IncompatibleTargetError: it is a drafter, or transformers cannot make a decoder of it.
    """
    place = pretrained_place(name)
    refuse_drafter_as_target(name)
    # How the file says that text is split before it is tokenised. Reads the header, so damage is told first.
    splitting = str(read_gguf_metadata(Path(name)).get("tokenizer.ggml.pre", "default")) if is_gguf(name) else None
    packed = {} if quantization_config is None else {"quantization_config": quantization_config}
    try:
        config = AutoConfig.from_pretrained(**place)  # small, and its absence says more than that of a tokenizer
        refuse_drafter_as_target(name, config.architectures)
        _require_tokenizer(name)
        tokenizer = AutoTokenizer.from_pretrained(**place)
        if splitting is not None:
            mend_splitting(tokenizer, splitting, name)
        precision = _precision(name, config, dtype, device_map, bool(packed))
        options: dict[str, Any] = {"dtype": precision, "device_map": device_map, "output_loading_info": True, **packed}
        loaded: Any = target_class(config).from_pretrained(**place, **options)
        model, found = loaded
    except OSError as error:
        raise CheckpointNotFoundError(_why_not_found(name, error)) from error
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise IncompatibleTargetError(
            f"the target {name!r} cannot be loaded; wanted a decoder-only transformers model with its tokenizer: "
            f"{first_line(error)}"
        ) from error
    if is_gguf(name) and found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise IncompatibleTargetError(
            f"transformers finds no tensors for {len(missing)} weights of {name!r} ({', '.join(missing[:3])}); use "
            "another GGUF file of this model, or its folder"
        )
    return model.eval(), tokenizer


def _require_tokenizer(name: str) -> None:
    """transformers would make an empty one of nothing, or list the ways to convert one."""
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


def is_gguf(name: str) -> bool:
    """Whether a target is named by a GGUF file."""
    return name.endswith(GGUF_SUFFIX)


def pretrained_place(name: str) -> dict[str, str]:
    """Where `from_pretrained` finds a target: its arguments.

    Raises:
        CheckpointNotFoundError: there is no such GGUF file.
        ConfigurationError: the package that reads GGUF files is not installed.
    """
    if not is_gguf(name):
        return {"pretrained_model_name_or_path": name}
    path = Path(name)
    if not path.is_file():
        raise CheckpointNotFoundError(f"no GGUF file {name!r}; check the path (files on the Hub: download them first)")
    try:
        import gguf  # noqa: F401  an extra: transformers unpacks with it
    except ImportError:
        raise ConfigurationError(f"{name!r} is read with the package gguf: pip install gguf") from None
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def mend_splitting(tokenizer: Any, splitting: str, name: str) -> None:
    """Give a tokenizer read from the GGUF file `name` the `splitting` of text that the file names.

    transformers knows some of these names; text of the others is split as GPT-2 splits it, and tokenised otherwise
    than the target has learned. What can be mended is, of the rest the user is told.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if backend is None or repr(backend.pre_tokenizer) != repr(as_gpt2) or splitting in AS_GPT2:
        return
    if splitting in SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_gpt2])
    else:
        logger.warning(
            "eagle31: %s splits text as %r, which transformers does not know; it is split as GPT-2 does, so some texts "
            "are tokenised otherwise than the target has learned. Use the tokenizer of the model's folder where that "
            "matters",
            Path(name).name,
            splitting,
        )


def dtype_here(name: str, *, dtype: str, device_map: Any) -> torch.dtype | None:
    """What `load_target` would load a target in that is stored otherwise; `None`: as stored, or nobody can say yet.

    Args:
        name, dtype, device_map: as `load_target` takes them; the weights are not packed.
    """
    if is_gguf(name):
        return None
    try:
        config = AutoConfig.from_pretrained(**pretrained_place(name))
    except (OSError, ValueError, KeyError):  # whoever loads it says more
        return None
    precision = _precision(name, config, dtype, device_map, packed=False)
    if not isinstance(precision, torch.dtype) or precision == config.get_text_config().dtype:
        return None
    return precision


def stored_dtype(name: str) -> torch.dtype | None:
    """What a target's weights are stored in, as its configuration says; `None` if it does not.

    Raises:
        CheckpointNotFoundError, ConfigurationError, OSError, ValueError: there is no configuration.
    """
    return _stored_dtype(name, AutoConfig.from_pretrained(**pretrained_place(name)))


def _stored_dtype(name: str, config: Any) -> torch.dtype | None:
    return config.get_text_config().dtype or (GGUF_STORED_DTYPE if is_gguf(name) else None)


def _precision(name: str, config: Any, dtype: str, device_map: Any, packed: bool) -> torch.dtype | str:
    """What a target is loaded in; packed weights and several devices decide for themselves."""
    if dtype not in ("auto", "stored"):
        return SHORT_NAMES.get(dtype, dtype)
    stored = _stored_dtype(name, config)
    decides = getattr(config, "quantization_config", None) or packed or device_map not in ("cpu", "cuda", "mps")
    if stored is None or (decides and not is_gguf(name)):
        return "auto"
    return stored if dtype == "stored" or decides else quick_dtype(stored, device_map)


def _why_not_found(name: str, error: OSError) -> str:
    if os.path.isdir(name):
        return f"the folder {name!r} holds no complete target (config.json, weights, tokenizer): {first_line(error)}"
    if not can_be_hub_id(name):
        meant = folder_meant(name) or "; check the path"
        return f"no target at {name!r}: no such folder, and it cannot be a Hub id ('owner/name'){meant}"
    return (
        f"no target at {name!r}: no such folder, and the Hub did not give it ({first_line(error)}); check the "
        f"spelling, your access and the network, or pass a local folder{folder_meant(name)}"
    )
