"""`acceleration="auto"`: on a GPU captured graphs, on a CPU those that an earlier `eagle31 warmup` has left.

Whether a generation is computed by them is decided before it begins, by its length and by what lies in the folder then,
so nothing about a text depends on how long anything took. Nothing is compiled while somebody waits for a token.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafting.shape import DraftShape
from ..errors import ConfigurationError
from ..graphs.ahead.compiler_processes import CompilerProcesses
from ..graphs.ahead.own_files import make_own_folder, why_not_ours
from ..graphs.ahead.packages import GraphPackages, name_of, prefix_of, tensors_by_name, tensors_of
from ..graphs.captured import CAPTURES, CapturesSteps
from ..graphs.graphs import PACKED_BYTES, Graphs
from ..graphs.round_graphs import RoundGraph
from ..graphs.seen_state import ModelState
from ..graphs.steps import GraphKey, GraphMaker, Step
from ..graphs.verify import why_states_are_eager
from ..sampling.logits_processing import ScoreProcessing
from .kept_folder import CACHE_VARIABLE, cache_folder, digest_of, pair_key, setting_of
from .pair import Pair, current_graphs

logger = logging.getLogger(__name__)
_said: set[str] = set()

FOLDER = "graphs"
STEPS = 3
"""Counted up when steps take other inputs: packages of before are not theirs."""

LENT_WEIGHTS = "weights-lent"
"""Folder of graphs that serve whatever weights a pair of these shapes has."""


@dataclass(frozen=True)
class LoadsKept(GraphMaker):
    """A `GraphMaker` that compiles nothing: it has what lay in the folder when the generation began."""

    packages: GraphPackages
    names: frozenset[str]
    failure = "a kept graph cannot be used (`eagle31 warmup` renews it)"
    weights_seen = True  # to find the packages

    def can_make(self, key: GraphKey) -> bool:
        return name_of(key) in self.names

    def make(self, key: GraphKey, step: Step, inputs: tuple) -> Step:
        return self.packages.load(key, step)


@dataclass(frozen=True)
class CompilesAhead(GraphMaker):
    """A `GraphMaker` that lets what is not kept yet be compiled beside this process, and keeps it.

    Until a graph is there its step stands in for it: the text is the same, and every graph it wants is met, so that
    they are compiled at once and not one after the other.

    Attributes:
        on_compile: told of each graph before it is compiled.
        on_made: told how many are compiled, and of how many that were begun.
        made: what was compiled, in this order.
        begun: what is being compiled; each waits until it is kept.
    """

    drafter: Assistant
    packages: GraphPackages
    processes: CompilerProcesses
    on_compile: Callable[[GraphKey], None]
    on_made: Callable[[int, int], None]
    made: list[GraphKey] = field(default_factory=list)
    begun: dict[GraphKey, Callable[[], None]] = field(default_factory=dict)
    failure = "compiling failed"

    def can_make(self, key: GraphKey) -> bool:
        return True

    def make(self, key: GraphKey, step: Step, inputs: tuple) -> Step:
        if name_of(key) in self.packages.names():
            with suppress(OSError, ValueError, LookupError, TypeError, RuntimeError):  # broken: made anew
                loaded = self.packages.load(key, step)
                if key in self.made or loaded.takes(tensors_of(inputs)):
                    return loaded
        if key not in self.begun:
            self.on_compile(key)
            self.begun[key] = self.packages.compile(key, step, inputs, self.processes)
        if not self.packages.tries_products:
            return step
        self._keep(key)
        return self.packages.load(key, step)

    def until_compiled(self, work: Callable[[], object]) -> None:
        """Do `work`, and again as long as graphs that it wants were not there yet."""
        with nullcontext() if self.packages.tries_products else _one_thread():
            work()
        while self.finish():
            work()

    def finish(self) -> bool:
        """Wait for what is being compiled; whether there was anything that the next generation can load.

        What could not be compiled is why `Graphs.disabled_reason` says that steps stay eager.
        """
        begun, graphs = list(self.begun), current_graphs(self.drafter)
        graphs.forget(begun)
        try:
            for key in begun:
                self._keep(key)
        except Exception as failure:  # whatever a compiler stumbles over, texts must go on
            self.begun.clear()
            graphs.give_up(failure, self.failure)
            return False
        return bool(begun)

    def _keep(self, key: GraphKey) -> None:
        self.begun.pop(key)()
        self.made.append(key)
        self.on_made(len(self.made), len(self.made) + len(self.begun))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Beside processes that keep all cores busy, two threads take two to three times as long as one: they wait for each
    other, and keep cores from those processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


FEWEST_CAPTURED_TOKENS = 48
"""New tokens from which on the first text's steps are captured, which takes about as long as half a dozen rounds."""


def graph_maker(
    drafter: Assistant, shape: DraftShape, processing: ScoreProcessing, *, rows: int, sampled: bool, new_tokens: int
) -> GraphMaker | None:
    """Where a generation's graphs come from, by the drafter's `acceleration`; `None` if it is to be eager.

    Args:
        shape: the largest draft where rounds are computed by graphs.
        processing: the call's.
        rows: of the batch.
        sampled: whether tokens are drawn.
        new_tokens: that a row may get.
    """
    asked, binding = drafter.generation_config.acceleration, drafter.binding
    if asked == "eager":
        return None
    if ahead := Pair.of(drafter).ahead:
        return ahead
    captures = binding.head_device.type in CAPTURES
    if why_unsuited(drafter, shape, processing) and not (captures and asked == "compile"):
        return None
    if captures:
        graphs = captured_graphs(drafter)
        pays = graphs is not None and (asked == "compile" or new_tokens >= FEWEST_CAPTURED_TOKENS or graphs.keys)
        return graphs.maker if graphs is not None and pays else None
    packages = kept_packages(drafter)
    names = frozenset() if packages is None else packages.names()
    first = GraphKey("verify", rows, 1)  # what rounds by graphs cannot do without
    if isinstance(drafter, Eagle31Drafter):
        first = GraphKey("advance", rows, shape.nodes, sampling=(sampled, processing.draft_warping.key))
    wanted = prefix_of(first)
    if packages is None or not any(name.startswith(wanted) for name in names):
        return None
    return LoadsKept(packages, names)


def captured_graphs(drafter: Assistant) -> Graphs | None:
    """Those of a pair whose steps are captured as they are met; `None` where they are not."""
    binding, config = drafter.binding, drafter.generation_config
    capture = CAPTURES.get(binding.head_device.type)
    if capture is None or config.acceleration == "eager" or config.stored_cache_type != "full":
        return None
    graphs = current_graphs(drafter)
    if graphs.disabled_reason or code_of_others(graphs.state, recorded=True):
        return None
    return graphs.made_by(CapturesSteps(capture))


def why_given_up(drafter: Assistant) -> str:
    """What keeps the graphs of this pair from being made or used, though they could be had; empty if nothing does."""
    graphs = Pair.of(drafter).graphs
    if graphs is None or drafter.generation_config.acceleration == "eager":
        return ""
    captures = drafter.binding.head_device.type in CAPTURES
    why = code_of_others(graphs.state, recorded=True) if captures else ""
    return graphs.disabled_reason or (why and f"steps are not captured: {why}")


def why_unsuited(drafter: Assistant, shape: DraftShape, processing: ScoreProcessing) -> str:
    """Why graphs do not serve a generation; empty where rounds always draft one shape.

    A processor that looks at prefixes is asked by eager code. Compiled graphs then do not pay; captured ones do, of
    verification and draft steps. Arguments are `graph_maker`'s.
    """
    schedule, binding = drafter.generation_config.num_assistant_tokens_schedule, drafter.binding
    captures = binding.head_device.type in CAPTURES
    if why := why_states_are_eager(binding, capturing=captures):
        return why
    if not isinstance(drafter, Eagle31Drafter):  # verification alone
        return ""
    if not RoundGraph.serves(shape):
        return "graphs draft chains of one length and dynamic trees, and doubt may end these drafts earlier"
    if not (captures or processing.warps_drafts):
        return "a logits processor of this call asks for the tokens before each position, which graphs do not tell"
    if schedule == "pid":
        return f"graphs draft one length, and num_assistant_tokens_schedule={schedule!r} steers it"
    return ""


def kept_packages(drafter: Assistant) -> GraphPackages | None:
    """Those of this pair on this machine, if there are any."""
    if not (cache_folder() / FOLDER).is_dir():  # a look at the models takes longer
        return None
    state = network_of(drafter)
    folder = pair_folder(drafter, state)
    graphs = current_graphs(drafter, state) if folder.is_dir() else None
    if graphs is None or refusal(drafter, graphs):
        return None
    packages = packages_in(folder, drafter, graphs)
    if packages.folder.is_dir() and (why := why_not_ours(packages.folder)):
        _say(f"kept graphs are machine code, and those in {folder} are not loaded: {why}")
        return None
    return packages


def _say(what: str) -> None:
    if what not in _said:
        _said.add(what)
        logger.warning("eagle31: %s; steps stay eager", what)


def packages_in(folder: Path, drafter: Assistant, graphs: Graphs) -> GraphPackages:
    """Those of this pair that lie there. Graphs that hold weights have a folder for each state these were ever in."""
    own = folder / (weights_digest(drafter, graphs) if graphs.settings else LENT_WEIGHTS)
    models = nn.ModuleList([drafter.binding.model, drafter])
    return GraphPackages(own, models, graphs.cutter, graphs.settings)


def refusal(drafter: Assistant, graphs: Graphs) -> str:
    """Why no graphs are kept for this pair; empty if they can be."""
    device = drafter.binding.head_device.type
    if drafter.generation_config.stored_cache_type != "full":
        return "its keys and values are stored in 8 bits, which graphs cannot read"
    if why := why_states_are_eager(drafter.binding, capturing=False):
        return why
    if device != "cpu":
        return f"it runs on {device}, and graphs are kept for a CPU alone"
    if not graphs.settings and graphs.cutter is None:
        return f"its weights are quantized, or take more than {PACKED_BYTES >> 20} MiB, and graphs read a copy of them"
    if drafter.binding.rotates_alike_up_to is not None:
        return "what its positions are rotated by depends on the text's length, and graphs on disk would not look"
    return code_of_others(graphs.state) or graphs.disabled_reason


def pair_folder(drafter: Assistant, state: ModelState) -> Path:
    """Of a pair's graphs in this `state` of the target, whatever its weights: by configurations, precision, versions
    and machine."""
    names, binding = Pair.of(drafter).folder_names, drafter.binding
    network = repr(state.told)
    # What the key is made of, as it lies there: to make the key takes a millisecond.
    own = str(vars(drafter.config)) if isinstance(drafter, Eagle31Drafter) else ""
    known_by = setting_of(drafter), network, str(vars(binding.text_config)), own
    if known_by not in names:
        key = pair_key(drafter) | {"processor": _processor(), "network": network}
        key["steps"] = STEPS
        key["adapters"] = _versions_of("peft", "accelerate")
        names[known_by] = digest_of(key)
    return cache_folder() / FOLDER / names[known_by]


def weights_digest(drafter: Assistant, graphs: Graphs) -> str:
    """Of all weights, bit for bit; a second or two for a gigabyte, once as long as they do not change."""
    if not graphs.digest:
        digest = hashlib.blake2b(digest_size=16)
        if isinstance(drafter, Eagle31Drafter):
            _ = drafter.draft_ids  # a tensor that is made when it is first asked for: it counts whenever that was
        for name, tensor in tensors_by_name(nn.ModuleList([drafter.binding.model, drafter])).items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        graphs.digest = digest.hexdigest()
    return graphs.digest


def network_of(drafter: Assistant) -> ModelState:
    """A target's modules, what hangs on them and how they are set: adapters and hooks change what graphs compute."""
    return ModelState(drafter.binding.model)


def code_of_others(state: ModelState, *, recorded: bool = False) -> str:
    """Why a graph could not stand for what this target does; empty if it can.

    Args:
        recorded: by this process, which would notice if a function were exchanged; a hook it would not run again.
    """
    if state.autocast:  # a recording would read weights that were cast for it and are gone
        return f"autocast is on ({state.autocast}), and graphs compute in the dtype of the weights"
    if state.hooks:
        return f"a hook of somebody else's code sees the target ({state.hooks[0]}), and graphs would not run it"
    if state.replaced and not recorded:
        return f"the target computes by somebody else's code ({state.replaced[0]}), which graphs on disk cannot know"
    return ""


def _versions_of(*libraries: str) -> dict[str, str]:
    """Of those that put code of theirs into models."""
    return {name: version(name) for name in libraries if find_spec(name) is not None}


@cache
def _processor() -> tuple[str, ...]:
    """Model and abilities of the CPU: code that is compiled for one may be more than another one knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine(), platform.processor()
    wanted = {"model name", "flags", "Features"}
    return tuple(sorted({line for line in lines if line.partition(":")[0].strip() in wanted}))


@contextmanager
def compiling_ahead(
    drafter: Assistant,
    on_compile: Callable[[GraphKey], None] = lambda key: None,
    on_made: Callable[[int, int], None] = lambda made, of: None,
) -> Iterator[CompilesAhead]:
    """While open, this pair's generations compile each graph they meet, and keep it for later processes.

    Args:
        on_compile, on_made: as of `CompilesAhead`.

    Raises:
        ConfigurationError: graphs of this pair cannot be kept, or the folder takes nothing.
    """
    pair, graphs = Pair.of(drafter), current_graphs(drafter)
    if reason := refusal(drafter, graphs):
        raise ConfigurationError(f"no graphs can be kept for this pair: {reason}")
    packages = packages_in(pair_folder(drafter, graphs.state), drafter, graphs)
    try:
        make_own_folder(packages.folder)
    except OSError as error:
        raise ConfigurationError(
            f"graphs cannot be kept in {packages.folder} ({error.strerror}); name another folder by ${CACHE_VARIABLE}"
        ) from error
    if why := why_not_ours(packages.folder):
        raise ConfigurationError(
            f"graphs are machine code, and what is kept in {packages.folder} could be exchanged: {why}; or name "
            f"another folder by ${CACHE_VARIABLE}"
        )
    processes = CompilerProcesses(1) if packages.tries_products else CompilerProcesses.one_a_core()
    with processes:
        pair.ahead = ahead = CompilesAhead(drafter, packages, processes, on_compile, on_made)
        try:
            yield ahead
            ahead.finish()
        finally:
            current_graphs(drafter).forget(ahead.begun)
            pair.ahead = None
