"""The rooms of docs/architecture.md: imports point to rooms above only, without cycles, never at the package root."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "eagle31_hf"
ROOMS = [  # a room may import from itself and from those above it
    {"errors"},
    {"configuration_eagle31", "tree", "topology", "sampling", "walking", "control", "stats", "generation_settings"},
    {"processing", "sequences"},
    {"cache"},
    {"checkpoints"},
    {"memory"},
    {"target_quantization", "target", "verification", "selftest"},
    {"quantization", "fixed_dtypes", "modeling_eagle31"},
    {"drafter"},
    {"drafting", "proposing"},
    {"compiled_steps", "acceleration", "draft_graphs", "compiled_drafting", "compiled_round_end"},
    {"conversation"},
    {"assisted", "reading", "decoding_request", "judging", "decoding", "recovery", "generate_call"},
    {"generation"},
    {"demo", "benchmark", "diagnostics", "training", "serve"},
    {"cli"},
]
ROOT = "eagle31_hf"


def dotted(path: Path) -> str:
    """`cache.masks` for `cache/masks.py`, `cache` for `cache/__init__.py`, the root's own name for the root."""
    return ".".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__") or ROOT


MODULES = {dotted(path): path for path in PACKAGE.rglob("*.py")}


def room_of(module: str) -> int:
    for number, room in enumerate(ROOMS):
        if module.partition(".")[0] in room:
            return number
    pytest.fail(f"{module} has no room yet; give it one in ROOMS and in docs/architecture.md")


def imports_of(source: str, folder: tuple[str, ...] = ()) -> set[str]:
    """Modules of the package that `source`, a file in `folder`, imports; `ROOT` for the package itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.partition(".")[0] == ROOT]
            found |= {path.partition(".")[2] or ROOT for path in paths}
        elif isinstance(node, ast.ImportFrom):
            found |= set(_imported_from(node, folder))
    return found


def _imported_from(node: ast.ImportFrom, folder: tuple[str, ...]) -> list[str]:
    if not node.level and (node.module or "").partition(".")[0] != ROOT:
        return []
    base = folder[: len(folder) - node.level + 1] if node.level else ()
    name = node.module or "" if node.level else (node.module or "").partition(".")[2]
    parent = ".".join((*base, name)).strip(".")
    # `from .x import y` means the module x.y if there is one, else a name of x itself
    inner = [f"{parent}.{alias.name}".strip(".") for alias in node.names]
    return [path if path in MODULES else parent or ROOT for path in inner]


def import_graph() -> dict[str, set[str]]:
    graph = {}
    for module, path in MODULES.items():
        if module != ROOT:
            graph[module] = imports_of(path.read_text(), path.relative_to(PACKAGE).parts[:-1])
    return graph


def test_imports_point_upward_only():
    wrong = [
        f"{module} imports {other}"
        for module, others in import_graph().items()
        for other in others - {ROOT}
        if room_of(other) > room_of(module)
    ]
    assert not wrong


def test_no_module_imports_the_package_root():
    assert not [module for module, others in import_graph().items() if ROOT in others]


def test_there_is_no_import_cycle():
    TopologicalSorter(import_graph()).prepare()  # raises CycleError, naming the cycle


@pytest.mark.parametrize(
    ("source", "folder", "found"),
    [
        ("from .tree import DraftTree", (), {"tree"}),
        ("from . import tree, cache", (), {"tree", "cache"}),
        ("from . import __version__", (), {ROOT}),
        ("from ..tree import DraftTree", ("cache",), {"tree"}),
        ("from .masks import ragged_mask", ("cache",), {"cache.masks"}),
        ("from . import masks", ("cache",), {"cache.masks"}),
        ("from .. import cli", ("cache",), {"cli"}),
        ("from .cache import SpeculativeCache", (), {"cache"}),
        ("def f():\n    from eagle31_hf import Eagle31Drafter", (), {ROOT}),
        ("from eagle31_hf.cache.masks import ragged_mask", ("training",), {"cache.masks"}),
        ("import eagle31_hf.stats", (), {"stats"}),
        ("import eagle31_hf", (), {ROOT}),
        ("from torch import tree", (), set()),
    ],
)
def test_every_way_to_import_is_seen(source, folder, found):
    assert imports_of(source, folder) == found
