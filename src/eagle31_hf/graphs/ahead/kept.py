"""Graphs of a pair that are kept on disk: where, by what they are known again, and who makes those that are missing.

Packages are machine code, so they are loaded from files that the user, or root, alone can write.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ... import __version__
from ...drafter.assistant import Assistant
from ...drafter.drafter import Eagle31Drafter
from ..captured import CAPTURES
from ..graphs import PACKED_BYTES, Graphs
from ..seen import ModelState, weights_of
from ..steps import GraphKey, GraphMaker, Step
from .compiler_processes import CompilerProcesses
from .packages import GraphPackages, tensors_of
from .packed_weights import PackedWeights

CACHE_VARIABLE = "EAGLE31_CACHE"
FORMAT = 10
"""Counted up when steps take or give something else, or files say it: packages of before are not theirs."""


def refusal(drafter: Assistant, graphs: Graphs) -> str:
    """Why no graphs are kept for this pair; empty if they can be."""
    device = drafter.binding.head_device.type
    if drafter.generation_config.stored_cache_type != "full":
        return "its keys and values are stored in 8 bits, which graphs cannot read"
    if drafter.binding.has_states:
        return "its target keeps recurrent states, which graphs for a CPU do not move on"
    if device != "cpu" or device in CAPTURES:
        return f"it runs on {device}, and graphs are kept for a CPU alone"
    if not graphs.may_pack:
        return f"its weights are quantized, or take more than {PACKED_BYTES >> 20} MiB, and graphs read a copy of them"
    if drafter.binding.rotates_alike_up_to is not None:
        return "what its positions are rotated by depends on the text's length, and graphs on disk would not look"
    return graphs.state.why_no_graph() or graphs.disabled_reason


# --- the folder -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """`$EAGLE31_CACHE`, else `eagle31` in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle31"


def graphs_folder() -> Path:
    """Of all pairs."""
    return cache_folder() / "graphs"


def packages_of(drafter: Assistant, graphs: Graphs) -> GraphPackages:
    """Those of this pair."""
    binding = drafter.binding
    if isinstance(drafter, Eagle31Drafter):
        _ = drafter.draft_ids  # a tensor that is made when it is first asked for: it counts whenever that was
    if graphs.packed is None:
        graphs.packed = PackedWeights(weights_of(binding.model, drafter))
    models, layers = nn.ModuleList([binding.model, drafter]), {type(layer) for layer in binding.layers}
    return GraphPackages(pair_folder(drafter, graphs.state), models, layers, graphs.packed)


def pair_folder(drafter: Assistant, state: ModelState) -> Path:
    """Of a pair's graphs in this `state` of the target, whatever its weights: by all else that they depend on."""
    binding = drafter.binding
    # That put code of theirs into models.
    libraries = [name for name in ("transformers", "peft", "accelerate") if find_spec(name) is not None]
    key: dict[str, Any] = {
        "format": FORMAT,
        "processor": [platform.node(), *_processor()],
        "threads": torch.get_num_threads(),
        "target": _digest_of_config(binding.text_config),
        "network": state.told,
        "attention": binding.attention,
        "dtype": binding.model.dtype,
        "versions": [torch.__version__, __version__, *(f"{name} {version(name)}" for name in libraries)],
    }
    if isinstance(drafter, Eagle31Drafter):
        key["drafter"] = _digest_of_config(drafter.config), drafter.dtype, drafter.packing
    return graphs_folder() / hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def _digest_of_config(config: PreTrainedConfig) -> str:
    """Wherever the model was loaded from: a folder that was moved is no change."""
    fields = json.loads(config.to_json_string(use_diff=False))
    fields.pop("_name_or_path", None)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@cache
def _processor() -> tuple[str, ...]:
    """Model and abilities of the CPU: code that is compiled for one may be more than another one knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine(), platform.processor()
    wanted = {"model name", "flags", "Features"}
    return tuple(sorted({line for line in lines if line.partition(":")[0].strip() in wanted}))


# --- who makes graphs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompilesAhead(GraphMaker):
    """A `GraphMaker` that lets what is not kept yet be compiled beside this process, and keeps it.

    Until a graph is there its step stands in for it: the text is the same, and every graph it wants is met, so that
    they are compiled at once and not one after the other.

    Attributes:
        on_compile: told of each graph before it is compiled.
        made: what was compiled, in this order.
        begun: what is being compiled; each waits until it is kept.
    """

    packages: GraphPackages
    processes: CompilerProcesses
    on_compile: Callable[[GraphKey], None]
    made: list[GraphKey] = field(default_factory=list)
    begun: dict[GraphKey, Callable[[], None]] = field(default_factory=dict)
    failure = "compiling failed (it takes a C++ compiler, g++, and room in the cache folder)"

    def can_make(self, key: GraphKey) -> bool:
        return True

    def make(self, key: GraphKey, step: Step, inputs: tuple, outputs: Any) -> Step:
        if key in self.made:  # what is wrong with it would be wrong with the next one, too
            return self.packages.make(key, step, inputs, outputs)
        with suppress(Exception):  # not there, or broken: made anew
            loaded = self.packages.make(key, step, inputs, outputs)
            if loaded.takes(tensors_of(inputs)):
                return loaded
        if key not in self.begun:
            self.on_compile(key)
            self.begun[key] = self.packages.compile(key, step, inputs, self.processes)
        return step

    def until_compiled(self, graphs: Graphs, meet: Callable[[Graphs], object]) -> None:
        """Let `meet` want some of these graphs, and again as long as any were not there yet.

        What could not be compiled is why `graphs.disabled_reason` says that steps stay eager.
        """
        try:
            meet(graphs)
            while self.begun:
                graphs.forget(self.begun)  # their steps stood in for them
                for key in [*self.begun]:
                    self.begun.pop(key)()
                    self.made.append(key)
                meet(graphs)
        except (OSError, RuntimeError) as failure:
            graphs.give_up(failure, self.failure)
        finally:
            graphs.forget(self.begun)
