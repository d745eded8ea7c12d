"""Graphs that outlive a process: a step exported and compiled ahead of time, loaded later without any compiling.

`torch.compile` keeps some of its work on disk, but every process would trace and lower its steps anew, which rewinds
random numbers and holds up the thread that writes. A package (AOTInductor) is machine code: it is loaded in the time
its bytes take to read. A small pair's holds the weights, too, and its folder is for these weights alone; a larger
pair's step is several packages that are lent the weights (`piece_program`). A package asks nothing of its inputs, so
what they looked like when it was made is written beside it and compared at every call.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..flat_steps import Code, FlatStep, Look, ReshapedStep, lend, num_own, tensors_of
from ..graph_makers import GraphKey, Step
from .compiler_processes import CompilerProcesses
from .own_files import make_own_folder, why_not_ours
from .piece_program import PieceProgram, bound
from .repeated_layers import LayerCutter
from .torch_internals import load_package

SETTINGS = {
    "aot_inductor.compile_wrapper_opt_level": "O1",  # it calls kernels, and takes a compiler longest
    "size_asserts": False,  # packed tensors have no strides
}
"""Of inductor, for all packages."""

TRIED_PRODUCTS = "ATEN,CPP"
"""Which of them is quicker is tried for each shape, on a machine that does nothing else."""


def freezing(dtype: torch.dtype) -> dict[str, Any]:
    """Settings of inductor for packages that hold their weights.

    Products are oneDNN's or inductor's own. In float32 its own are never slower (two AVX2 cores, the embedded pair's
    graphs: 0.94 to 1.00 of the time of what trying chose), and trying takes a third of a graph's time to compile; in
    other precisions it depends on the shape and on the processor.
    """
    return {
        "freezing": True,  # weights become constants of the graph, laid out as its products read them
        "max_autotune": True,  # looks at inductor's own products; pays with frozen weights alone
        "max_autotune_gemm_backends": "CPP" if dtype == torch.float32 else TRIED_PRODUCTS,
        "autotune_num_choices_displayed": 0,
        "max_autotune_report_choices_stats": False,
    }


# --- the folder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphPackages:
    """Packages of one pair.

    Args:
        folder: theirs alone.
        models: whose weights the steps read.
        cutter: cuts steps into pieces that are lent the weights; `None`: each step is one package that holds them.
        settings: further ones of inductor, as `Graphs` has them.
    """

    folder: Path
    models: nn.ModuleList
    cutter: LayerCutter | None
    settings: Mapping[str, Any]

    @property
    def tries_products(self) -> bool:
        """Whether compiling times products, beside which nothing else may run."""
        return self.settings.get("max_autotune_gemm_backends") == TRIED_PRODUCTS

    def names(self) -> frozenset[str]:
        """Of the graphs that are whole."""
        try:
            with os.scandir(self.folder) as entries:
                return frozenset(entry.name[: -len(".json")] for entry in entries if entry.name.endswith(".json"))
        except OSError:
            return frozenset()

    def load(self, key: GraphKey, step: Step) -> ReshapedStep:
        """The graph of `key` in the place of `step`.

        Raises:
            OSError, ValueError, LookupError, TypeError, RuntimeError: it is not there, is broken, or others may have
                written it.
        """
        told = json.loads(_own(self.folder / f"{name_of(key)}.json").read_text(encoding="utf-8"))
        if not isinstance(told, dict) or told["key"] != repr(key):
            raise ValueError("it is another graph's")
        codes = [self._load_whole(name, size) for name, size in told["packages"]]
        if told["calls"] is None:
            (code,) = codes
        else:
            packed = None if self.cutter is None else self.cutter.weights
            code = bound(codes, told["calls"], told["outputs"], tensors_by_name(self.models), packed)
        looks = [Look(tuple(shape), tuple(stride), DTYPES[dtype]) for shape, stride, dtype in told["signature"]]
        return ReshapedStep(code, step, looks)

    def _load_whole(self, name: str, size: int) -> Code:
        package = _own(self.folder / Path(name).name)
        if package.stat().st_size != size:
            raise ValueError("it is only a part of one")
        return load_package(package)

    def compile(self, key: GraphKey, step: Step, inputs: tuple, processes: CompilerProcesses) -> Callable[[], None]:
        """Let `processes` compile `step`, which takes each a minute or so.

        Returns:
            Waits for them and keeps the graph. It may raise `OSError`: the folder takes nothing; `CompilerError`.

        Raises:
            OSError: there is no room.
            Exception: whatever exporting stumbles over.
        """
        make_own_folder(self.folder)
        exported = _export(FlatStep(step, inputs, self.models), inputs)
        looks = [(*look[:2], str(look.dtype)) for look in map(Look.of, tensors_of(inputs))]
        told: dict[str, Any] = {"key": repr(key), "signature": looks, "calls": None}
        parts = {f"{name_of(key)}.pt2": exported}
        if self.cutter is not None:
            program = PieceProgram.of(exported, self.cutter, tensors_by_name(self.models))
            pieces = enumerate(program.pieces)
            parts = {f"{name_of(key)}.{number}.pt2": _export_piece(piece) for number, piece in pieces}
            told |= {"calls": program.calls, "outputs": program.outputs}
        settings = {**SETTINGS, **self.settings}
        begun = {name: processes.compile(part, self._unfinished(name), settings) for name, part in parts.items()}

        def keep() -> None:
            packages = [self._finish(*each) for each in begun.items()]
            unfinished = self.folder / f"{name_of(key)}.{os.getpid()}"
            unfinished.write_text(json.dumps(told | {"packages": packages}), encoding="utf-8")
            unfinished.chmod(OWN)
            unfinished.replace(self.folder / f"{name_of(key)}.json")  # last: packages without it are not looked at

        return keep

    def _finish(self, name: str, written: Future[None]) -> tuple[str, int]:
        """One package, in its place; its name and its bytes."""
        written.result()
        size = self._unfinished(name).stat().st_size
        self._unfinished(name).chmod(OWN)
        self._unfinished(name).replace(self.folder / name)
        return name, size

    def _unfinished(self, name: str) -> Path:
        return self.folder / f"{os.getpid()}.{name}"


DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

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


def _export(flat: FlatStep, inputs: tuple) -> torch.export.ExportedProgram:
    tensors = tensors_of(inputs)
    try:
        return _captured(flat, tuple(tensor.clone() for tensor in tensors))
    finally:
        lend(inputs[-1], tensors[num_own(inputs) :])  # tracing has left tensors of its own in it


def _export_piece(piece: fx.GraphModule) -> torch.export.ExportedProgram:
    looks = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    return _captured(piece, tuple(torch.empty_strided(look.shape, look.stride(), dtype=look.dtype) for look in looks))


def _captured(module: nn.Module, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, inputs, strict=False)
