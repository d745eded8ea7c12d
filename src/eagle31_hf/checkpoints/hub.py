"""Where a drafter's checkpoint lies: a folder, or a repository of the Hub, of which what is needed is downloaded."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub

from ..errors import CheckpointFormatError, CheckpointNotFoundError, shown
from .files import CONFIG_FILE, INDEX_FILE, PICKLE_FILE, holds_fusion, read_json
from .mtp import FAMILIES, UNREADABLE, StoredHead, find_head, head_files, refuse_lost_head, text_fields


def resolve_checkpoint(
    path_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """The local folder of a checkpoint, downloading config and weights if `path_or_id` is a Hub id.

    Of a target with an MTP head only the files are fetched that hold the head, and a `.bin` file only where there is no
    safetensors file. A local folder wins over a Hub id of that name. A repository may keep drafters in folders:
    `owner/name/folder` is one of them.

    Raises:
        CheckpointNotFoundError: no such folder or id, no access to it, or no network to ask.
    """
    if (folder := _local_folder(path_or_id)) is not None:
        return folder
    repo_id, inner = _repository(str(path_or_id))
    options = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    try:
        folder = _download(repo_id, inner, [CONFIG_FILE, INDEX_FILE], options)
        folder = _download(repo_id, inner, [CONFIG_FILE, INDEX_FILE, *head_files(folder)], options)
        if not any(folder.glob("*.safetensors")):
            folder = _download(repo_id, inner, [CONFIG_FILE, PICKLE_FILE], options)
    except (OSError, hub.HFValidationError, hub.EntryNotFoundError) as error:
        raise CheckpointNotFoundError(_why_not_found(str(path_or_id), revision, error)) from error
    if not (folder / CONFIG_FILE).exists():
        wanted = "check the folder's name" if inner else f"if it keeps drafters in folders, pass '{repo_id}/FOLDER'"
        raise CheckpointNotFoundError(f"{shown(str(path_or_id))} has no {CONFIG_FILE} on the Hub; {wanted}")
    return folder


def _local_folder(path_or_id: str | os.PathLike[str]) -> Path | None:
    """The folder of that name, if there is one."""
    folder = Path(path_or_id)
    try:
        folder = folder.expanduser()
        is_folder, is_there = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError, ValueError):  # too long, a loop of links, no such user, a NUL
        return None
    if is_folder:
        return folder
    if is_there:
        raise CheckpointNotFoundError(
            f"{folder} is a file; pass a folder with {CONFIG_FILE} and safetensors (a GGUF file cannot be read)"
        )
    return None


def can_be_hub_id(name: str) -> bool:
    """Whether a repository on the Hub could have that name (`name` or `owner/name`); the Hub is not asked."""
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except hub.HFValidationError:
        return False
    return True


def folder_meant(name: str) -> str:
    """`"; did you mean PATH?"` for the folder whose name is nearest among those beside it, or nothing."""
    path = Path(name)
    try:
        beside = [other.name for other in path.expanduser().parent.iterdir() if other.is_dir()]
    except (OSError, RuntimeError, ValueError):
        return ""
    close = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.7)
    return f"; did you mean {path.with_name(close[0])}?" if close else ""


def missing_folder(name: str | os.PathLike[str]) -> str:
    """One line for the path of a target that is not there; empty for what is, and for what may be a Hub id."""
    if os.path.exists(name) or can_be_hub_id(str(name)):
        return ""
    return f"no target at {str(name)!r}: no such folder{folder_meant(str(name)) or '; check the path'}"


def _repository(name: str) -> tuple[str, str]:
    """The id of a repository, and the folder in it, empty if it is not one of `owner/name/folder`."""
    parts = name.split("/")
    is_inner = len(parts) == 3 and all(parts) and not name.startswith(".")
    return ("/".join(parts[:2]), parts[2]) if is_inner else (name, "")


def _download(repo_id: str, inner: str, patterns: list[str], options: dict[str, Any]) -> Path:
    """These files of the repository, or of one folder of it: other folders hold other checkpoints."""
    wanted = [f"{inner}/{pattern}" for pattern in patterns] if inner else patterns
    others = [f"{inner}/*/*"] if inner else ["*/*"]
    folder = huggingface_hub.snapshot_download(repo_id, allow_patterns=wanted, ignore_patterns=others, **options)
    return Path(folder) / inner


def _why_not_found(name: str, revision: str | None, error: Exception) -> str:
    local = f"or pass a local folder that holds config.json and the weights{folder_meant(name)}"
    if isinstance(error, hub.GatedRepoError):
        return f"{shown(name)} is gated: accept its terms on its Hub page and pass token=…, {local}"
    at = f" (revision {revision!r})" if revision else ""
    return (
        f"{shown(name)} is neither a local folder nor a Hub id ('owner/name') that could be read{at}: "
        f"{type(error).__name__}; check the spelling and the network (offline, by HF_HUB_OFFLINE or local_files_only, "
        f"there is only what was downloaded before), {local}"
    )


def holds_drafter(path_or_id: str | os.PathLike[str]) -> bool:
    """Whether an EAGLE-3 drafter lies there, sound or not: its weights have the `fc` that fuses hidden states.

    Only headers are read, of a folder or of what is downloaded from the Hub.

    Raises:
        CheckpointNotFoundError: no such folder or id, no access to it, or no network to ask.
    """
    folder = resolve_checkpoint(path_or_id)
    try:
        return holds_fusion(folder)
    except CheckpointFormatError:
        return False


def target_class(config: Any) -> Any:
    """The auto class that loads a target of this configuration.

    `AutoModelForCausalLM` does not map every decoder that sees, though most write texts without pictures as well.
    """
    import transformers

    kind = type(config)
    maps = kind in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder
    sees = not maps and kind in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def target_holds_head(path_or_id: str | os.PathLike[str]) -> bool:
    """Whether a target's folder or Hub id holds an MTP head that can be read; false as well if it cannot be found.

    Of the Hub its config.json, its index and the files that hold the head are fetched.
    """
    try:
        head = find_head(resolve_checkpoint(path_or_id))
    except (CheckpointFormatError, CheckpointNotFoundError):
        return False  # what is wrong with a target is said where it is loaded
    return head is not None and head.family is not None


def require_head(path_or_id: str | os.PathLike[str]) -> StoredHead:
    """The MTP head in a folder or Hub id.

    Raises:
        CheckpointFormatError: there is none that can be read.
    """
    folder = resolve_checkpoint(path_or_id)
    if (head := find_head(folder)) is not None:
        return head
    refuse_lost_head(folder)
    kind = text_fields(read_json(folder / CONFIG_FILE)).get("model_type")
    reason = UNREADABLE.get(str(kind), f"those of {', '.join(FAMILIES)} can")
    raise CheckpointFormatError(
        f"{folder} holds no MTP head that can be read ({reason}); name an EAGLE drafter that was made for this target"
    )
