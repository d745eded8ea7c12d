"""The rooms of docs/developing/architecture.md: a folder or a file at the top is a room; imports go one way."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "eagle31_hf"
PAGE = Path(__file__).parents[1] / "docs" / "developing" / "architecture.md"
LEVELS = [  # a room may import from itself and from rooms of the levels above it
    {"errors", "demo"},
    {"stats", "config", "settings", "drafting", "texts"},
    {"sampling", "cache", "checkpoints"},
    {"memory", "targets"},
    {"drafter"},
    {"graphs"},
    {"loop"},
    {"generate"},
    {"training", "measure", "serving"},
    {"cli"},
]
MOST_ROOMS, MOST_FLOORS = 20, 9
ROOT = "eagle31_hf"


def dotted(path: Path) -> str:
    """`cache.masks` for `cache/masks.py`, `cache` for `cache/__init__.py`, the root's own name for the root."""
    return ".".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__") or ROOT


# `__main__` is no room but the door to one: it calls the command, and nothing imports it.
MODULES = {dotted(path): path for path in PACKAGE.rglob("*.py") if path.name != "__main__.py"}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def level_of(module: str) -> int:
    for number, level in enumerate(LEVELS):
        if room_of(module) in level:
            return number
    pytest.fail(f"{module} has no room yet; give it one in LEVELS and in docs/developing/architecture.md")


def imports_of(source: str, package: str = ROOT) -> set[str]:
    """Modules of ours that `source`, a file in `package`, imports; `ROOT` for the package itself."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {module_of(name) for name in names if name.partition(".")[0] == ROOT}
    return found - {""}


def module_of(name: str) -> str:
    """The longest beginning of a dotted name that is a module; empty for the root's version, which is no module and
    there before any other."""
    parts = name.split(".")[1:]
    if parts == ["__version__"]:
        return ""
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or ROOT


def import_graph() -> dict[str, set[str]]:
    graph = {}
    for module, path in MODULES.items():
        if module != ROOT:
            graph[module] = imports_of(path.read_text(), ".".join((ROOT, *path.relative_to(PACKAGE).parts[:-1])))
    return graph


def room_graph() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {}
    for module, others in import_graph().items():
        used = rooms.setdefault(room_of(module), set())
        used |= {room_of(other) for other in others - {ROOT}} - {room_of(module)}
    return rooms


def test_imports_between_rooms_go_one_way():
    wrong = [
        f"{module} imports {other}"
        for module, others in import_graph().items()
        for other in others - {ROOT}
        if room_of(other) != room_of(module) and level_of(other) > level_of(module)
    ]
    assert not wrong


def floors_of(graph: dict[str, set[str]]) -> dict[str, int]:
    """A room stands one floor above the highest one it imports."""
    floors: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        floors[room] = 1 + max((floors[other] for other in graph[room]), default=0)
    return floors


def test_there_are_few_rooms_on_few_floors():
    floors = floors_of(room_graph())
    assert len(floors) <= MOST_ROOMS, sorted(floors)
    assert max(floors.values()) <= MOST_FLOORS, floors


def test_the_page_shows_the_house_as_it_is():
    page, graph = PAGE.read_text(), room_graph()
    shown = {
        room: int(number) for number, rooms in re.findall(r"^floor (\d)  (.+)$", page, re.M) for room in rooms.split()
    }
    assert shown == floors_of(graph)
    assert f"{len(graph)} rooms and {sum(map(len, graph.values()))} imports between them" in page


def test_every_path_the_page_names_is_there():
    """Of the table of questions; elsewhere modules are named without their ending."""
    named = set(re.findall(r"`([a-z_0-9]+/[a-z_0-9/]+\.py)`", PAGE.read_text()))
    assert len(named) > 10
    assert not [path for path in named if not any((root / path).exists() for root in (PACKAGE, PACKAGE.parents[1]))]


def test_no_module_imports_the_package_root():
    assert not [module for module, others in import_graph().items() if ROOT in others]


ROUND = {"drafter.propose", "drafter.dynamic", "drafter.draft_scores", "graphs.verify", "graphs.draft_graphs",
         "graphs.round_graphs", "sampling.acceptance"}  # fmt: skip


def test_only_the_loop_drafts_verifies_and_accepts():
    """What writes texts drives rounds. `generate.candidates` drafts for transformers' own assisted loop."""
    above = {"generate", "serving", "measure", "cli"}
    users = {module for module, others in import_graph().items() if others & ROUND and room_of(module) in above}
    assert users == {"generate.candidates"}


def test_there_is_no_import_cycle():
    TopologicalSorter(import_graph()).prepare()  # raises CycleError, naming the cycle


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from .masks import ragged_mask", {"cache.masks"}),
        ("from . import masks, spans", {"cache.masks", "cache.spans"}),
        ("from .. import cli, __version__", {"cli"}),
        ("from ..drafting.shape import DraftShape", {"drafting.shape"}),
        ("def f():\n    from eagle31_hf import Eagle31Drafter", {ROOT}),
        ("import eagle31_hf.stats, torch", {"stats"}),
        ("from torch import tree", set()),
    ],
)
def test_every_way_to_import_is_seen(source, found):
    assert imports_of(source, f"{ROOT}.cache") == found


def test_what_is_kept_of_a_pair_is_typed() -> None:
    named = {node.id for node in ast.walk(ast.parse(MODULES["loop.pair"].read_text())) if isinstance(node, ast.Name)}
    assert "Any" not in named


PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_)\w+")
PRIVATE_FILES = {"cache/torch_internals.py", "graphs/ahead/torch_internals.py"}
MOST_PRIVATE = 10


def test_what_torch_promises_nobody_is_asked_in_two_files():
    """So that an update of torch is looked through in minutes."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = [line for line in path.read_text().splitlines() if PRIVATE.search(line)]
        if lines:
            found[path.relative_to(PACKAGE).as_posix()] = lines
    assert set(found) == PRIVATE_FILES
    assert sum(map(len, found.values())) <= MOST_PRIVATE, found


def test_graphs_for_a_cpu_stand_behind_one_door():
    """What compiles ahead of time is asked by those who keep graphs and by nobody else."""
    graph, room = import_graph(), "graphs.ahead"
    users = {module for module, others in graph.items() if any(other.startswith(room) for other in others)}
    assert {module for module in users if not module.startswith(room)} == {"loop.kept_graphs"}
