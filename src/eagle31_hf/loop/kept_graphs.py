"""Which graphs compute a generation: on a GPU captured ones, on a CPU those that an earlier `eagle31 warmup` has left.

That is decided before it begins, by its length and by what lies in the folder then, so nothing about a text depends on
how long anything took. Nothing is compiled while a text waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ..drafter.assistant import Assistant
from ..drafter.drafter import Eagle31Drafter
from ..drafting.shape import DraftShape
from ..errors import ConfigurationError
from ..graphs.ahead import kept
from ..graphs.ahead.compiler_processes import CompilerProcesses
from ..graphs.ahead.packages import GraphPackages, make_own_folder, prefix_of, why_not_ours
from ..graphs.captured import CAPTURES, CapturesSteps
from ..graphs.graphs import Graphs
from ..graphs.round_graphs import RoundStep
from ..graphs.seen import ModelState, weights_of
from ..graphs.steps import GraphKey
from ..sampling.logits_processing import ScoreProcessing

FEWEST_CAPTURED_TOKENS = 48
"""New tokens from which on the first text's steps are captured, which takes about as long as half a dozen rounds."""

NONE_KEPT = "no graphs are kept for such a text; `eagle31 warmup` compiles them, for single rows"


class PairGraphs:
    """The graphs of an assistant and its target.

    Attributes:
        graphs: those that were last asked for; `None` before, and once memory ran out.
    """

    def __init__(self, drafter: Assistant) -> None:
        self.graphs: Graphs | None = None
        self._drafter = weakref.ref(drafter)  # which holds this, by its binding

    @property
    def drafter(self) -> Assistant:
        """The assistant, attached."""
        drafter = self._drafter()
        assert drafter is not None, "a pair does not outlive its assistant"
        return drafter

    def current_graphs(self, state: ModelState | None = None) -> Graphs:
        """The graphs for the weights, and the target's state, as they are now: both are built into graphs.

        Args:
            state: the target's, if it was just looked at.
        """
        model = self.drafter.binding.model
        weights, state = weights_of(model, self.drafter), state or ModelState(model)
        if self.graphs is None or not self.graphs.weights.are_still(weights):
            self.graphs = Graphs(self.drafter, weights, state)
        self.graphs.use(state)
        return self.graphs


def graphs_for(
    pair: PairGraphs, shape: DraftShape, processing: ScoreProcessing, *, rows: int, sampled: bool, new_tokens: int
) -> tuple[Graphs | None, str]:
    """A generation's graphs, by the drafter's `acceleration`, or why it is eager though there could be some.

    Args:
        shape: the largest draft where rounds are computed by graphs.
        processing: the call's.
        rows: of the batch.
        sampled: whether tokens are drawn.
        new_tokens: that a row may get.
    """
    drafter, acceleration = pair.drafter, pair.drafter.generation_config.acceleration
    if acceleration == "eager":
        return None, ""
    unsuited = why_unsuited(pair, shape, processing)
    if drafter.binding.head_device.type not in CAPTURES:
        graphs = None if unsuited else _kept_graphs(pair, shape, processing, rows=rows, sampled=sampled)
        if graphs is None and acceleration == "compile":
            why = unsuited or kept.refusal(drafter, pair.current_graphs()) or NONE_KEPT
            return None, f"steps are not compiled: {why}"
        return graphs, "" if graphs or not pair.graphs else pair.graphs.disabled_reason
    if unsuited and acceleration != "compile":
        return None, f"steps are not captured: {unsuited}"
    graphs, why = captured_graphs(pair)
    pays = acceleration == "compile" or new_tokens >= FEWEST_CAPTURED_TOKENS or (graphs and graphs.keys)
    return graphs if pays else None, why


def captured_graphs(pair: PairGraphs) -> tuple[Graphs | None, str]:
    """Those of a pair whose steps are captured as they are met; or why they are not, though they could be."""
    binding, config = pair.drafter.binding, pair.drafter.generation_config
    capture = CAPTURES.get(binding.head_device.type)
    if capture is None or config.acceleration == "eager":
        return None, ""
    if config.stored_cache_type != "full":
        return None, "steps are not captured over a cache in 8 bits"
    graphs = pair.current_graphs()
    if graphs.disabled_reason:
        return None, graphs.disabled_reason
    if why := graphs.state.why_no_graph(recorded=True):
        return None, f"steps are not captured: {why}"
    return graphs.made_by(CapturesSteps(capture)), ""


def why_unsuited(pair: PairGraphs, shape: DraftShape, processing: ScoreProcessing) -> str:
    """Why graphs do not serve a generation; empty where rounds always draft one shape.

    A processor that looks at prefixes is asked by eager code. Compiled graphs then do not pay; captured ones do, of
    verification. Arguments are `graphs_for`'s.
    """
    drafter = pair.drafter
    schedule = drafter.generation_config.num_assistant_tokens_schedule
    captures = drafter.binding.head_device.type in CAPTURES
    if not isinstance(drafter, Eagle31Drafter):  # verification alone
        return ""
    if not RoundStep.serves(shape):
        return "graphs draft chains of one length and dynamic trees, and doubt may end these drafts earlier"
    if not (captures or processing.warps_drafts):
        return "a logits processor of this call asks for the tokens before each position, which graphs do not tell"
    if schedule == "pid":
        return f"graphs draft one length, and num_assistant_tokens_schedule={schedule!r} steers it"
    return ""


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def _kept_graphs(
    pair: PairGraphs, shape: DraftShape, processing: ScoreProcessing, *, rows: int, sampled: bool
) -> Graphs | None:
    """Those of a generation that lie in the folder now, if what its rounds cannot do without is among them."""
    packages = kept_packages(pair)
    if packages is None or pair.graphs is None:
        return None
    first = GraphKey("verify", rows, 1)
    if isinstance(pair.drafter, Eagle31Drafter):
        first = GraphKey("advance", rows, shape.nodes, sampling=(sampled, processing.draft_warping.key))
    if not any(name.startswith(prefix_of(first)) for name in packages.names):
        return None
    return pair.graphs.made_by(packages)


def kept_packages(pair: PairGraphs) -> GraphPackages | None:
    """Those of this pair on this machine, if there are any."""
    if not kept.graphs_folder().is_dir():  # a look at the models takes longer
        return None
    drafter = pair.drafter
    state = ModelState(drafter.binding.model)
    if not kept.pair_folder(drafter, state).is_dir():
        return None
    graphs = pair.current_graphs(state)
    return None if kept.refusal(drafter, graphs) else kept.packages_of(drafter, graphs)


def compile_ahead(
    pair: PairGraphs, meet: Callable[[Graphs], object], on_compile: Callable[[GraphKey], None]
) -> list[GraphKey]:
    """Compile all graphs that `meet` wants of those it is given, and keep them for later processes.

    Args:
        meet: writes texts by graphs; repeated until all that it wants are there.
        on_compile: told of each graph before it is compiled.

    Returns:
        What was compiled.

    Raises:
        ConfigurationError: graphs of this pair cannot be kept, the folder takes nothing, or compiling failed.
    """
    graphs = pair.current_graphs()
    if reason := kept.refusal(pair.drafter, graphs):
        raise ConfigurationError(f"no graphs can be kept for this pair: {reason}")
    packages = kept.packages_of(pair.drafter, graphs)
    try:
        make_own_folder(packages.folder)
        why = why_not_ours(packages.folder)
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise ConfigurationError(
            f"graphs, which are machine code, cannot be kept safely in {packages.folder}: {why}; or name another "
            f"folder by ${kept.CACHE_VARIABLE}"
        )
    with CompilerProcesses(packages.folder) as processes:
        maker = kept.CompilesAhead(packages, processes, on_compile)
        maker.until_compiled(graphs.made_by(maker), meet)
    if graphs.disabled_reason:
        raise ConfigurationError(graphs.disabled_reason)
    return maker.made
