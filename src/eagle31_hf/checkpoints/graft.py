"""A head that a fine-tune has lost, put back into its folder from the model it was made from.

The head's tensors are copied as they are, into a shard of their own that the folder's index names, so that every engine
that reads the folder finds them. A model in one file gets an index, which transformers does not look at there. The last
step of writing is one rename: before it the folder is what it was, after it the new one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, CheckpointFormatError
from .files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, open_tensors, read_json, replacing
from .hub import require_head
from .mtp import MtpFamily, StoredHead, find_head, promises_head, text_fields

HEAD_SHARD = "model-mtp.safetensors"
"""The head's shard beside others. llama.cpp's converter reads files that begin like this."""
SAME = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads")
"""Fields of the text configuration that base and fine-tune must agree in."""


def graft_head(base: str | Path, folder: Path) -> list[str]:
    """Put the MTP head of `base`, folder or Hub id, into the target in `folder`, byte for byte; its tensors' names.

    Raises:
        CheckpointFormatError: `base` holds no head, `folder` holds one already, or they are not of one model.
        CheckpointError: it cannot be written there; the folder is what it was.
    """
    head = require_head(base)
    if head.family is None:
        raise CheckpointFormatError(f"{base} holds a head by itself, without its target's names; pass the target")
    head.config()  # refused here if it is not whole
    loaded = head.stored.load(head.names.values())
    head.unpack({ours: loaded[theirs] for ours, theirs in head.names.items()})
    _require_room_for_it(head, head.family, folder)
    held = open_tensors(folder).headers  # Ernie's final norm is the target's, and there already
    tensors = {name: tensor for name, tensor in loaded.items() if name not in held}
    index = json.dumps(_with_head(_index(folder, held), tensors), indent=2, ensure_ascii=False) + "\n"
    try:
        with replacing(folder / INDEX_FILE) as new_index, replacing(folder / HEAD_SHARD) as new_shard:
            new_index.write_text(index, encoding="utf-8")
            save_file(tensors, new_shard, metadata={"format": "pt"})
            new_shard.chmod((folder / CONFIG_FILE).stat().st_mode)
    except (OSError, SafetensorError) as error:
        (folder / HEAD_SHARD).unlink(missing_ok=True)
        raise CheckpointError(
            f"the head could not be written to {folder} ({error}); the folder is what it was: make room there"
        ) from error
    return sorted(tensors)


def _require_room_for_it(head: StoredHead, family: MtpFamily, folder: Path) -> None:
    if find_head(folder) is not None:
        raise CheckpointFormatError(f"{folder} holds an MTP head already; nothing was changed")
    if (folder / HEAD_SHARD).exists():
        raise CheckpointFormatError(f"{folder / HEAD_SHARD} is there, and no index names it; remove it")
    raw_config = read_json(folder / CONFIG_FILE)
    ours, theirs = text_fields(raw_config), text_fields(head.raw_config)
    for field in SAME:
        if ours.get(field) != theirs.get(field):
            raise CheckpointFormatError(
                f"{folder} has {field} {ours.get(field)}, and {head.folder} {theirs.get(field)}; a head fits the model "
                "it was trained with and its fine-tunes: pass the model that this one was made from"
            )
    if promises_head(head.raw_config) and not promises_head(raw_config):
        raise CheckpointFormatError(
            f"{folder / CONFIG_FILE} lacks {family.count}, by which engines know of the head; write it there as "
            f"{head.folder / CONFIG_FILE} has it"
        )


def _index(folder: Path, held: Iterable[str]) -> dict[str, Any]:
    """The folder's index, or one of its only file, which holds these tensors."""
    if not (folder / WEIGHTS_FILE).is_file():
        return read_json(folder / INDEX_FILE)
    if (folder / INDEX_FILE).exists():
        raise CheckpointFormatError(
            f"{folder / INDEX_FILE} is there beside {WEIGHTS_FILE}; remove the one that is not used"
        )
    size = (folder / WEIGHTS_FILE).stat().st_size
    return {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(held, WEIGHTS_FILE)}


def _with_head(index: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The index with the head's tensors in their shard."""
    metadata = dict(index.get("metadata") or {})
    if isinstance(metadata.get("total_size"), int):
        metadata["total_size"] += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {**index, "metadata": metadata, "weight_map": {**index["weight_map"], **dict.fromkeys(tensors, HEAD_SHARD)}}
