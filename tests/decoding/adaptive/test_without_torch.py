"""What decides about drafts is plain arithmetic: it imports no torch and looks at no clock."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import eagle31_hf.decoding.adaptive as adaptive

PURE = ("acceptance_rates", "controller", "costs", "doubt", "guard", "schedules")


@pytest.mark.parametrize("module", PURE)
def test_imports_neither_torch_nor_a_clock(module: str) -> None:
    source = (Path(adaptive.__path__[0]) / f"{module}.py").read_text(encoding="utf-8")
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    assert not names & {"torch", "transformers", "time", "datetime", "random"}
