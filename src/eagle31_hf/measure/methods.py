"""Methods to write the same text: plain `generate`, transformers' alternatives, our drafter in either loop.

Each is a function from prompts to new tokens, so that they can take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..decoding.default_length import default_length
from ..drafter.assistant import Assistant, NoDrafter
from ..drafter.drafter import Eagle31Drafter
from ..generation_config import FIXED_DEPTH, USUAL_TREE
from ..stats import SpeculationStats
from ..target.binding import TargetBinding
from ..trees.shape import DraftShape
from .calls import LOOKUP, PLAIN, PLAIN_COMPILED
from .run_settings import RunSettings
from .synthetic import SyntheticRequest, write_synthetic

LOOKUP_TOKENS = 10  # the proposal of prompt lookup's author


Prompts = dict[str, Tensor]
"""`input_ids` and `attention_mask` `(B, T)`, padded on the left."""


def left_padded(rows: Sequence[Tensor], pad_id: int) -> Prompts:
    """Prompts `(T,)` of any length as `generate` takes a batch."""
    several: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
    return {
        "input_ids": pad_sequence(list(rows), padding_value=pad_id, **several),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], **several),
    }


def requested_shape(
    drafter: Eagle31Drafter, *, batch_size: int, sampled: bool = False, compiled: bool | None = None
) -> DraftShape:
    """What a round drafts at most by the settings; `compiled`: by graphs, of themselves if these ask for them."""
    asked = drafter.generation_config
    compiled = asked.acceleration == "compile" if compiled is None else compiled
    return asked.draft_shape(default_length(drafter, batch_size=batch_size, sampled=sampled, compiled=compiled))


Output = tuple[Tensor, SpeculationStats | None]
"""New tokens `(B, n)`, and our drafter's figures if it helped."""
Write = Callable[[Prompts, Any], Output]
"""Of prompts and a streamer for `generate`, or `None`."""


@dataclass(frozen=True)
class Method:
    """One method to write.

    Attributes:
        shapes: what our own loop drafts, by batch size; empty for the others.
        compiled: whether our own loop is accelerated.
        one_row_only: transformers' assisted loop, which takes no batches.
        early_exit_layers: layers of the target that draft for it, 0 for other methods.
        follows_seed: samples by plain `generate`'s own noise; transformers' assisted modes take others.
    """

    name: str
    write: Write
    shapes: Mapping[int, DraftShape] = field(default_factory=dict)
    compiled: bool = False
    one_row_only: bool = False
    early_exit_layers: int = 0
    follows_seed: bool = True


def all_methods(drafter: Eagle31Drafter, settings: RunSettings, alone: NoDrafter) -> list[Method]:
    """Plain first; then transformers' alternatives, its assisted loop with our drafter, and our loop.

    Args:
        alone: the same target without a drafter.
    """
    methods = [Method(PLAIN, _by_generate(drafter, settings))]
    if settings.acceptance is None:
        exit_layers = max(1, drafter.binding.text_config.num_hidden_layers // 2)
        lookup = _by_generate(drafter, settings, prompt_lookup_num_tokens=LOOKUP_TOKENS)
        early_exit = _by_generate(drafter, settings, assistant_early_exit=exit_layers)
        stock = _by_assistant(drafter, settings, {"speculation_loop": "stock"})
        methods += [
            Method("prompt lookup", lookup, one_row_only=True, follows_seed=False),
            Method("early exit", early_exit, one_row_only=True, early_exit_layers=exit_layers, follows_seed=False),
            Method("stock loop", stock, one_row_only=True),
        ]
        methods += _by_our_loop_alone(alone, settings)
    tree = {"draft_top_k": settings.tree_width, "draft_tree_size": settings.tree_size}
    tree["num_assistant_tokens"] = settings.depth or USUAL_TREE.depth
    for acceleration in ("eager", "compile") if settings.compiled else ("eager",):
        for name, shape in (("chain", {}), ("tree", tree)):
            methods.append(_own_loop(drafter, settings, name, {**shape, "acceleration": acceleration}))
    return methods


def _own_loop(drafter: Eagle31Drafter, settings: RunSettings, name: str, overrides: dict[str, Any]) -> Method:
    overrides = {"speculation_loop": "own", **overrides}
    with _configured(drafter, settings, overrides):
        sampled = settings.samples
        shapes = {size: requested_shape(drafter, batch_size=size, sampled=sampled) for size in settings.batch_sizes}
    own = _by_assistant if settings.acceptance is None else _by_synthetic_acceptance
    compiled = overrides["acceleration"] == "compile"
    return Method(f"{name}{' compiled' * compiled}", own(drafter, settings, overrides), shapes, compiled)


def _by_our_loop_alone(alone: NoDrafter, settings: RunSettings) -> list[Method]:
    """Our loop without a drafter: with drafts that are looked up and, by graphs, with none, one token a step. What a
    drafter is worth beside a compiler is told by the latter alone."""
    ways = [(LOOKUP, "calibrated", "eager")]
    if settings.compiled:
        ways += [(PLAIN_COMPILED, "constant", "compile"), (f"{LOOKUP} compiled", "calibrated", "compile")]
    methods = []
    for name, schedule, how in ways:
        told = {"num_assistant_tokens_schedule": schedule, "acceleration": how, "speculation_loop": "own"}
        methods.append(Method(name, _by_assistant(alone, settings, told), compiled=how == "compile"))
    return methods


def _by_generate(drafter: Assistant, settings: RunSettings, **how: Any) -> Write:
    model: Any = drafter.binding.model

    def write(prompts: Prompts, streamer: Any) -> Output:
        ids = model.generate(**prompts, **settings.to_generate(), **how, streamer=streamer)
        return ids[:, prompts["input_ids"].shape[1] :], None

    return write


def _by_assistant(assistant: Assistant, settings: RunSettings, overrides: dict[str, Any]) -> Write:
    generate = _by_generate(assistant, settings, assistant_model=assistant)

    def write(prompts: Prompts, streamer: Any) -> Output:
        with _configured(assistant, settings, overrides):
            tokens, _ = generate(prompts, streamer)
            return tokens, assistant.stats

    return write


def _by_synthetic_acceptance(drafter: Eagle31Drafter, settings: RunSettings, overrides: dict[str, Any]) -> Write:
    assert settings.acceptance is not None, "only synthetic acceptance is drawn by lot"
    acceptance = settings.acceptance

    def write(prompts: Prompts, streamer: Any) -> Output:
        with _configured(drafter, settings, overrides):
            seed = int(torch.randint(2**31, ()))  # another for each prompt and repeat, the same for all methods
            request = SyntheticRequest(
                settings.new_tokens,
                requested_shape(drafter, batch_size=len(prompts["input_ids"]), sampled=settings.samples),
                acceptance,
                seed=seed,
                samples=settings.samples,
            )
            return write_synthetic(drafter, prompts, request)

    return write


@contextmanager
def _configured(assistant: Assistant, settings: RunSettings, overrides: dict[str, Any]) -> Iterator[None]:
    """The generation_config with other values for a while."""
    config = assistant.generation_config
    # A random drafter doubts everything: with synthetic acceptance drafts have one length.
    depth = settings.depth if settings.acceptance is None else settings.depth or FIXED_DEPTH
    usual = {"num_assistant_tokens": depth, "draft_min_confidence": None, "draft_top_k": 1, "draft_tree_size": None}
    before = vars(config).copy()
    try:
        for name, value in (usual | overrides).items():
            setattr(config, name, value)
        config.check()
        yield
    finally:
        vars(config).update(before)


def early_exit_refusal(binding: TargetBinding, layers: int) -> str:
    """Why the target's first `layers` layers cannot draft for it; empty if they can."""
    text, ran = binding.text_config, []
    whole = text.num_hidden_layers
    handle = binding.layers[-1].register_forward_hook(lambda *_: ran.append(True))
    try:
        text.num_hidden_layers = layers  # what transformers' early exit does
        with torch.no_grad():
            binding.model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=binding.input_device), use_cache=False)
    except Exception as error:  # a family may break in any method here
        return f"{type(binding.model).__name__} does not run with fewer layers ({type(error).__name__}: {error})"
    finally:
        text.num_hidden_layers = whole
        handle.remove()
    return f"{type(binding.model).__name__} runs all its layers whatever its config says" if ran else ""
