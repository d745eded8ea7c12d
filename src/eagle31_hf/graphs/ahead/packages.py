"""Graphs that outlive a process: a step exported and compiled ahead of time, loaded later without any compiling.

`torch.compile` keeps some of its work on disk, but every process would trace and lower its steps anew, which rewinds
random numbers and holds up the thread that writes. A package (AOTInductor) is machine code: it is loaded in the time
its bytes take to read. A step is several packages, which are lent the weights (`pieces`). A package asks nothing of its
inputs, so what they looked like when it was made is written beside it and compared at every call.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..steps import (
    GraphKey,
    GraphMaker,
    OtherInputsError,
    Step,
    buffers_of,
    over,
    tensors_in,
    with_tensors,
    without_tensors,
)
from .compiler_processes import CompilerProcesses
from .packed_weights import PackedWeights
from .pieces import Code, PieceProgram, bound, dtype_of
from .torch_internals import load_package

# --- the folder -------------------------------------------------------------------------------------------------------


@dataclass
class GraphPackages(GraphMaker):
    """Packages of one pair: a maker of the graphs that were whole when they were first asked for.

    Args:
        folder: theirs alone.
        models: whose weights the steps read.
        layers: classes of the modules that are compiled once however often they occur.
        packed: weights as the steps read them.
    """

    folder: Path
    models: nn.ModuleList
    layers: Collection[type]
    packed: PackedWeights
    failure = "a kept graph cannot be used (`eagle31 warmup` renews it)"

    @cached_property
    def names(self) -> frozenset[str]:
        """Of the graphs that are whole."""
        return frozenset(path.stem for path in self.folder.glob("*.json"))

    def can_make(self, key: GraphKey) -> bool:
        return name_of(key) in self.names

    def make(self, key: GraphKey, step: Step, inputs: tuple, outputs: Any) -> LoadedStep:
        """The graph of `key`, loaded.

        Raises:
            Exception: it is not there, is broken, or others may have written it.
        """
        told = json.loads(_own(self.folder / f"{name_of(key)}.json").read_text(encoding="utf-8"))
        if not isinstance(told, dict) or told["key"] != repr(key):
            raise ValueError("it is another graph's")
        codes = [load_package(_own(self.folder / Path(name).name)) for name in told["packages"]]
        code = bound(codes, told, tensors_by_name(self.models), self.packed)
        looks = [(tuple(shape), stride and tuple(stride), dtype_of(name)) for shape, stride, name in told["signature"]]
        return LoadedStep(code, without_tensors(outputs), looks)

    def compile(self, key: GraphKey, step: Step, inputs: tuple, processes: CompilerProcesses) -> Callable[[], None]:
        """Let `processes` compile `step`, which takes each a minute or so.

        Returns:
            Waits for them and keeps the graph. It may raise `OSError`: the folder takes nothing; `CompilerError`.

        Raises:
            OSError: there is no room.
            Exception: whatever exporting stumbles over.
        """
        exported = _captured(FlatStep(step, inputs, self.models), tuple([each.clone() for each in tensors_of(inputs)]))
        looks = [(shape, stride, str(dtype)) for shape, stride, dtype in looks_of(inputs)]
        program = PieceProgram.of(exported, self.layers, self.packed, tensors_by_name(self.models))
        begun = {
            f"{name_of(key)}.{number}.pt2": processes.compile(_export_piece(piece))
            for number, piece in enumerate(program.pieces)
        }
        told = {"key": repr(key), "signature": looks, "packages": [*begun], **program._asdict()}
        del told["pieces"]

        def keep() -> None:
            for name, written in begun.items():
                self._keep(written(), name)
            unfinished = self.folder / f"{os.getpid()}.unfinished"
            unfinished.write_text(json.dumps(told), encoding="utf-8")
            self._keep(unfinished, f"{name_of(key)}.json")  # last: packages without it are not looked at

        return keep

    def _keep(self, written: Path, name: str) -> None:
        written.chmod(OWN)
        written.replace(self.folder / name)


# --- a step as code, and code as a step -------------------------------------------------------------------------------

Look = tuple[tuple[int, ...], tuple[int, ...] | None, torch.dtype]
"""What code asks of a tensor that it reads: shape, strides (`None`: a dense one's), precision."""


def tensors_of(inputs: tuple) -> list[Tensor]:
    """What code takes of a step's inputs: tensors as dense ones, then its cache's buffers as they lie."""
    *others, cache = inputs
    return [*(tensor.contiguous() for tensor in tensors_in(others)), *buffers_of(cache)]


def looks_of(inputs: tuple) -> list[Look]:
    """Of `tensors_of`."""
    *others, cache = inputs
    dense: list[Look] = [(tensor.shape, None, tensor.dtype) for tensor in tensors_in(others)]
    return dense + [(each.shape, each.stride(), each.dtype) for each in buffers_of(cache)]


class FlatStep(nn.Module):
    """A step that takes tensors alone and gives tensors alone, as exporting wants it.

    Args:
        step: what is computed.
        inputs: what it takes.
        models: whose weights it reads.
    """

    def __init__(self, step: Step, inputs: tuple, models: nn.ModuleList):
        super().__init__()
        *others, self._cache = inputs
        self._step, self._others, self.models = step, without_tensors(tuple(others)), models

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        left = iter(tensors)
        inputs = with_tensors(self._others, left)
        return tuple(tensors_in(self._step(*inputs, over(self._cache, list(left)))))


class LoadedStep:
    """Code that knows tensors alone, in a step's place.

    Args:
        code: takes and gives lists of tensors.
        form: of the step's outputs, without tensors.
        looks: of the tensors that the code was made for.
    """

    def __init__(self, code: Code, form: Any, looks: list[Look]):
        self._code, self._form, self._looks = code, form, looks

    def __call__(self, *inputs: Any) -> Any:
        """Raises `OtherInputsError` for inputs that the code was not made for."""
        tensors = tensors_of(inputs)
        if not self.takes(tensors):
            raise OtherInputsError("the graph was made for inputs of other shapes, strides or precisions")
        with torch.no_grad():
            return with_tensors(self._form, iter(self._code(tensors)))

    def takes(self, tensors: list[Tensor]) -> bool:
        """Whether the code was made for such tensors, as `tensors_of` gives them."""
        return len(tensors) == len(self._looks) and all(
            tensor.shape == shape and stride in (None, tensor.stride()) and tensor.dtype is dtype
            for tensor, (shape, stride, dtype) in zip(tensors, self._looks, strict=True)
        )


# --- files ------------------------------------------------------------------------------------------------------------

OWN = 0o600
"""Mode of packages, whatever the umask: they are code."""


def _own(path: Path) -> Path:
    """Raises `PermissionError` where others may have written it."""
    if why := why_not_ours(path):
        raise PermissionError(why)
    return path


def name_of(key: GraphKey) -> str:
    """Its files' name, the same in every process."""
    return f"{prefix_of(key)}{_digest(key)}"


def prefix_of(key: GraphKey) -> str:
    """What names of graphs begin with that differ from this one in nothing but the lengths of rows."""
    return f"{key.kind}-{key.rows}x{key.size}-{_digest(key.sampling)}-"


def _digest(told: object) -> str:
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


def tensors_by_name(models: nn.ModuleList) -> dict[str, Tensor]:
    """Weights, buffers and other tensors that modules hold, as `FlatStep` names them."""
    weights = (*models.named_parameters("models", remove_duplicate=False), *models.named_buffers("models"))
    held = {
        f"models.{place}.{name}": value
        for place, module in models.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    return held | dict(weights)


def _export_piece(piece: fx.GraphModule) -> torch.export.ExportedProgram:
    looks = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    return _captured(piece, tuple(torch.empty_strided(look.shape, look.stride(), dtype=look.dtype) for look in looks))


def _captured(module: nn.Module, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, inputs, strict=False)


# --- may code be loaded from here? only from files that the user, or root, alone can write ----------------------------


def why_not_ours(path: Path) -> str:
    """Why somebody else may have written what lies at `path`, links followed; empty if nobody else can have.

    The file or folder is looked at, and every folder above it: who may write one of them may exchange what is in it.
    """
    if not hasattr(os, "getuid"):  # Windows: modes say nothing, the cache folder is in the user's own profile
        return ""
    try:
        real = path.resolve(strict=True)
        whys = (_why_not(part, part.stat()) for part in (real, *real.parents))
        return next((why for why in whys if why), "")
    except OSError as error:
        return f"{path} cannot be looked at ({error.strerror})"


def make_own_folder(folder: Path) -> None:
    """Make it and those above it that are missing, writable for the user alone whatever the umask.

    Raises:
        OSError: the folder cannot be made.
    """
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)


def _why_not(part: Path, seen: os.stat_result) -> str:
    if seen.st_uid not in (0, os.getuid()):
        return f"{part} belongs to another user (uid {seen.st_uid})"
    # In a folder with the sticky bit, as /tmp, nobody exchanges what is another's.
    by_others = seen.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    if by_others and not (stat.S_ISDIR(seen.st_mode) and seen.st_mode & stat.S_ISVTX):
        return f"others may write {part} (mode {stat.S_IMODE(seen.st_mode):o}; chmod go-w {part})"
    return ""
