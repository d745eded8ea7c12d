"""Files of a drafter checkpoint: its JSON, its tensors by their headers, and how a folder's checkpoint is replaced.

Nothing in a file is ever executed: safetensors first, `.bin` only through weights-only unpickling.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import (
    CheckpointError,
    CheckpointFormatError,
    ConfigurationError,
    IncompatibleTargetError,
    UnsafeCheckpointError,
    json_kind,
    removal,
    shown,
)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_FILE = "pytorch_model.bin"
MOST_BYTES = 32 << 20
"""Of a JSON file: the index of a model of 700 billion parameters has 9 MB."""
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "I64": torch.int64,
           "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}  # fmt: skip
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# ---------------------------------------------------------------- JSON


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 32 MB.

    Raises:
        CheckpointFormatError: no such file, not a file, or it holds no such object.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would keep us waiting for ever
            raise OSError("it is a folder or a device")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"it has {size} bytes; wanted a JSON file of at most {MOST_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointFormatError(
            f"{path.parent} has no {path.name}; pass the folder that holds it (a GGUF file cannot be read)"
        ) from error
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointFormatError(
            f"{path} cannot be read as JSON ({error}); fetch or write it again, or correct its permissions"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointFormatError(f"{path} holds {json_kind(content)}; wanted a JSON object")
    return content


def get_path(config: Mapping[str, Any], path: str) -> Any:
    """The entry at a dotted path, `None` if any part of it is missing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def set_path(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the entry at a dotted path, making the objects on the way."""
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


# ---------------------------------------------------------------- tensors


def renamed(name: str, beginnings: Mapping[str, str | None]) -> str | None:
    """A tensor's name with another beginning, by the first that fits; `None`: a tensor that is not needed."""
    for beginning, ours in beginnings.items():
        if name.startswith(beginning):
            return None if ours is None else ours + name.removeprefix(beginning)
    return name


def dtype_name(tensor: Tensor) -> str:
    """`"bfloat16"` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class StoredTensors:
    """The weights of a checkpoint folder by stored name; nothing is loaded before `load`.

    Attributes:
        headers: tensors on the meta device, which have shape and dtype and no content; of a `.bin` file its own.
        shards: the safetensors file that each lies in.
    """

    headers: dict[str, Tensor]
    shards: dict[str, Path] = field(default_factory=dict)

    def load(self, names: Collection[str]) -> dict[str, Tensor]:
        """The named tensors on CPU, in their stored dtype and independent of the files."""
        loaded = {name: self.headers[name].clone() for name in names if name not in self.shards}
        for path in sorted({self.shards[name] for name in names if name in self.shards}):
            with _open_safetensors(path) as shard:
                loaded |= {name: shard.get_tensor(name) for name in names if self.shards.get(name) == path}
        return loaded


def open_tensors(folder: Path) -> StoredTensors:
    """Names, shapes and dtypes of a folder's weights: safetensors first, `.bin` only through weights-only unpickling.

    Raises:
        CheckpointFormatError: no weights, a missing shard, or a file whose header does not fit its content.
        UnsafeCheckpointError: a pickle that wants to do more than hold tensors; nothing of it was run.
    """
    shards = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if (folder / WEIGHTS_FILE).is_file():
        return open_shards([folder / WEIGHTS_FILE])
    if (folder / INDEX_FILE).is_file():
        return open_shards(shard_paths(folder, read_index(folder).values()))
    if len(shards) == 1:
        return open_shards(shards)
    if shards:
        raise CheckpointFormatError(
            f"{folder} has {len(shards)} safetensors files but no {INDEX_FILE} to join them; fetch the index too"
        )
    if (folder / PICKLE_FILE).is_file():
        return _open_pickle(folder / PICKLE_FILE)
    raise CheckpointFormatError(f"{folder} has no weights; wanted {WEIGHTS_FILE}, {INDEX_FILE} or {PICKLE_FILE}")


def read_index(folder: Path) -> dict[str, str]:
    """The name of each tensor to that of the file beside the index that holds it.

    Raises:
        CheckpointFormatError: there is no such map, or it names what cannot be a file there.
    """
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointFormatError(f"{folder / INDEX_FILE} has no weight_map; fetch it again")
    wrong = [name for name in weight_map.values() if not _is_shard_name(name)]
    if wrong:
        raise CheckpointFormatError(
            f"{folder / INDEX_FILE} names {shown(wrong)} as shards; wanted names of safetensors files beside it: do "
            "not trust it"
        )
    return weight_map


def shard_paths(folder: Path, names: Iterable[str]) -> list[Path]:
    """The files of these names, each once.

    Raises:
        CheckpointFormatError: some are missing.
    """
    shards = [folder / name for name in sorted(set(names))]
    if missing := [path.name for path in shards if not path.is_file()]:
        raise CheckpointFormatError(f"{folder} lacks the shards {shown(missing)} its index names; fetch them")
    return shards


def _is_shard_name(name: Any) -> bool:
    """A plain file name that every file system can hold."""
    is_name = isinstance(name, str) and re.fullmatch(r"[^/\\\0]+\.safetensors", name) is not None
    return is_name and len(name.encode()) <= 255


def open_shards(paths: list[Path]) -> StoredTensors:
    """Names, shapes and dtypes of what these safetensors files hold together."""
    headers: dict[str, Tensor] = {}
    shards: dict[str, Path] = {}
    for path in paths:
        with _open_safetensors(path) as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                if name in headers:
                    raise CheckpointFormatError(f"{name} is in both {shards[name].name} and {path.name}")
                _require_printable(name, path)
                headers[name], shards[name] = _without_content(shard.get_slice(name), path), path
    return StoredTensors(headers, shards)


def _without_content(stored: Any, path: Path) -> Tensor:
    dtype = _DTYPES.get(stored.get_dtype(), torch.uint8)  # others are a target's, packed
    try:
        return torch.empty(stored.get_shape(), dtype=dtype, device="meta")
    except (RuntimeError, TypeError) as error:
        raise CheckpointFormatError(f"{path} states a shape that no tensor has ({error}); fetch it again") from error


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise CheckpointFormatError(f"{path} is damaged or not a safetensors file ({error}); fetch it again") from error


def _open_pickle(path: Path) -> StoredTensors:
    content = _unpickle(path)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CheckpointFormatError(f"{path} holds more than named tensors; wanted a plain state dict")
    for name, value in content.items():
        _require_printable(name, path)
        if not _is_plain(value):
            raise CheckpointFormatError(
                f"{path}: {shown(name)} is not stored as it is used (sparse, nested, on another device, or one value "
                "said many times); wanted plain tensors: save a state dict of dense tensors on CPU"
            )
    return StoredTensors(content)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, on CPU, and no larger than what is stored of it."""
    dense = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_nested and tensor.layout == torch.strided
    return dense and tensor.device.type == "cpu" and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _require_printable(name: str, path: Path) -> None:
    """Names are shown in terminals, which obey escape sequences."""
    if not name.isprintable():
        raise CheckpointFormatError(f"{path} names a tensor {shown(name)}; wanted printable names: do not trust it")


def _unpickle(path: Path) -> Any:
    try:  # files of torch < 1.6 are no zip archives and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{path} asks to run code or build objects other than tensors; nothing was run and nothing loaded. "
            "Ask its author for safetensors, or convert it on a machine you can lose"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointFormatError(
            f"{path} is damaged or no PyTorch weights file ({type(error).__name__}: {error}); fetch it again"
        ) from error


def holds_fusion(folder: Path) -> bool:
    """Whether an EAGLE drafter's weights lie in `folder`, sound or not: they have the `fc` that fuses hidden states."""
    parts = [name.split(".") for name in open_tensors(folder).headers]
    return any(name[-2:] == ["fc", "weight"] and "mtp" not in name for name in parts)  # a head's is inside a target


def refuse_drafter_as_target(name: str | os.PathLike[str], architectures: Collection[str] | None = ()) -> None:
    """Say so where a drafter is named as a target, or a GGUF file; of a Hub id, by the `architectures` that its config
    states.

    Raises:
        IncompatibleTargetError: it is one.
    """
    if os.fspath(name).endswith(".gguf"):
        raise IncompatibleTargetError(removal("target FILE.gguf"))
    is_one = any("eagle3" in str(architecture).lower() for architecture in architectures or ())
    if not is_one and os.path.isdir(name):
        with suppress(CheckpointFormatError, UnsafeCheckpointError):
            is_one = holds_fusion(Path(name))
    if is_one:
        raise IncompatibleTargetError(
            f"the target {os.fspath(name)!r} is a drafter; name the model it was made for as the target, and this as "
            "the drafter (were the two swapped?)"
        )


# ---------------------------------------------------------------- writing


def require_no_checkpoint(folder: Path) -> None:
    """Raise a `ConfigurationError` if `replace_checkpoint` would take the place of something."""
    if any((folder / name).exists() for name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE)):
        raise ConfigurationError(f"{folder} holds a checkpoint already; name another folder, or pass --force")


def replace_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Puts `config.json` and `model.safetensors` into `folder`, which at every moment holds the old checkpoint, none
    that can be read, or the new one. Other files stay, except the shards of the checkpoint replaced.

    Raises:
        CheckpointError: it cannot be written there (a full disk, no rights).
    """
    apart = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / CONFIG_FILE) as new_config, replacing(folder / WEIGHTS_FILE) as new_weights:
            new_config.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            save_file(apart, new_weights, metadata={"format": "pt"})  # which takes no tensors of one storage
            new_weights.chmod(new_config.stat().st_mode)  # safetensors lets only the owner read what it writes
            # Without its config a folder is no checkpoint: old weights never meet the new config, nor the reverse.
            (folder / CONFIG_FILE).unlink(missing_ok=True)
            for stale in folder.iterdir():
                if stale.name == INDEX_FILE or _SHARD.fullmatch(stale.name):
                    stale.unlink()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint could not be written to {shown(str(folder))} ({error}); make room there or name another "
            "folder"
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` in one step; if anything fails before, it is gone."""
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
