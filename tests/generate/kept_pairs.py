"""A pair whose graphs are kept, and packages without a compiler: a package then is the exported step itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle31_hf.cache import graph_sizes
from eagle31_hf.drafter.drafter import Eagle31Drafter
from eagle31_hf.drafting import planner
from eagle31_hf.generate.warm_up import warm_up
from eagle31_hf.graphs.ahead import kept as kept_folder
from eagle31_hf.graphs.ahead import packages
from eagle31_hf.graphs.ahead.compiler_processes import CompilerProcesses
from eagle31_hf.loop.pair import Pair
from helpers import GROUPED, assert_same_text, left_padded, random_drafter, random_prompts, random_target

SETTINGS: dict[str, Any] = {
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",  # a target so small is quicker without drafts, and meets no graph then
    "speculation_loop": "own",
}
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 9}


def leave_the_compiler_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_sizes, "SLOT_BUCKET", 128)
    monkeypatch.setattr(planner, "VAIN_ROUNDS", 1000)
    monkeypatch.setattr(CompilerProcesses, "compile", write_exported)
    monkeypatch.setattr(packages, "load_package", load_exported)


def write_exported(processes: CompilerProcesses, exported: Any) -> Callable[[], Path]:
    name, module = uuid.uuid4().hex, exported.module(check_guards=False)
    _WRITTEN[name] = module, {name: weight.clone() for name, weight in module.state_dict().items()}
    package = Path(processes._folder.name) / f"{name}.pt2"
    package.write_text(name)
    return lambda: package


_WRITTEN: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {}
"""Exported steps and their weights, which stand for packages, by what their files say: to save them takes seconds."""


def exported_in(package: Path) -> tuple[nn.Module, dict[str, Tensor]]:
    return _WRITTEN[package.read_text()]


def load_exported(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    module, weights = exported_in(path)

    def run(tensors: list[Tensor]) -> list[Tensor]:
        outputs = torch.func.functional_call(module, weights, tuple(tensors))
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    return run


@cache
def kept_target() -> Any:
    """A target of two layers: to export a step takes as long as it has layers. Shared: leave it as it is."""
    return random_target(LlamaConfig(**GROUPED | {"num_hidden_layers": 2}))


def make_pair(target: Any = None, **fields: Any) -> Eagle31Drafter:
    return settle(random_drafter(target or kept_target(), aux_layers=[0, 1, 2], **fields))


def settle(drafter: Eagle31Drafter) -> Eagle31Drafter:
    for name, value in SETTINGS.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def forgotten(drafter: Eagle31Drafter) -> Eagle31Drafter:
    Pair.of(drafter).graphs = None
    return drafter


def write(drafter: Eagle31Drafter | None, seed: int = 0, rows: int = 1, target: Any = None, **how: Any) -> Tensor:
    target = target or kept_target()
    torch.manual_seed(seed)
    inputs = left_padded(random_prompts(rows, seed=seed))
    return target.generate(**inputs, assistant_model=drafter, **{"max_new_tokens": 40, **GREEDY, **how})


def assert_plain(drafter: Eagle31Drafter, seed: int = 0, rows: int = 1, target: Any = None, **how: Any) -> Tensor:
    """As `write`: our loop's text is plain's."""
    inputs = left_padded(random_prompts(rows, seed=seed))
    how = {"max_new_tokens": 40, **GREEDY, **how}
    return assert_same_text(target or kept_target(), drafter, inputs, seed=seed, **how)


def kinds(drafter: Eagle31Drafter) -> set[str]:
    made = Pair.of(drafter).graphs
    return set() if made is None else {key.kind for key in made.keys}


def kept_files(ending: str) -> list[Path]:
    return sorted((kept_folder.cache_folder() / "graphs").rglob(f"*{ending}"))


def failing(failure: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise failure

    return fail


def keep_graphs(
    folder: Path,
    patch: pytest.MonkeyPatch,
    make: Callable[[], Eagle31Drafter] = make_pair,
    ways: Sequence[dict[str, Any]] = (GREEDY, SAMPLING),
) -> Path:
    """`folder`, with a pair's graphs for texts whose tokens are chosen in these ways."""
    patch.setenv(kept_folder.CACHE_VARIABLE, str(folder))
    leave_the_compiler_out(patch)
    for how in ways:
        assert len(warm_up(make(), tokens=100, **how)) >= 2
    return folder
