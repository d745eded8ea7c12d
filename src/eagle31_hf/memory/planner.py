"""Does it fit? Bytes of target, drafter, caches and activations before anything is loaded, and the settings that fit.

`plan_memory` needs no GPU and no weights. It keeps the context that was asked for and gives up the cheapest things
first: prefill chunk, drafter precision, cache precision, and at last the drafter itself. If nothing fits, the plan is a
refusal that names the largest term and the nearest plans that do.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from ..drafting.shape import LONGEST_OF_GRAPHS, USUAL_TREE, DraftShape
from ..errors import MemoryPlanError
from ..settings import CACHE_TYPES, Eagle31GenerationConfig
from .cards import CARDS, Card, find_card
from .drafter_facts import DrafterFacts, drafter_to_plan, read_drafter
from .ledger import DRAFTER_PRECISIONS, MemorySettings, captures_steps
from .plan import LARGEST_CONTEXT, MemoryPlan, size_text
from .target_facts import TargetFacts, read_target
from .weights import Quantization, scheme

STORED_TYPES = CACHE_TYPES[1:]  # of keys and values, best first; "auto" leaves the choice to a plan
PREFILL_CHUNKS = (2048, 1024, 512, 256)
DEFAULT_CONTEXT = 8192
_LIMITS = {"context": LARGEST_CONTEXT, "prefill_chunk": LARGEST_CONTEXT}  # of all else 4096
# Tried, in this order, when the asked-for quantisation does not fit.
_SMALLER_SCHEMES = ("8bit", "4bit")


@dataclass(frozen=True)
class _Request:
    """What to plan for. `drafting`: the drafts asked for; `asked`: all else that was. The planner chooses the rest."""

    target: TargetFacts
    drafter: DrafterFacts | None
    card: Card
    margin_bytes: int
    drafting: Eagle31GenerationConfig
    asked: Mapping[str, Any]

    @cached_property
    def candidates(self) -> list[MemoryPlan]:
        """All that may be chosen, best first: speed before fidelity, and the drafter given up last."""
        asked = self.asked

        def tried(name: str, choices: tuple) -> tuple:
            return (asked[name],) if name in asked else choices

        caches, chunks = tried("cache_type", STORED_TYPES), tried("prefill_chunk", PREFILL_CHUNKS)
        precisions = tried("drafter_precision", (*DRAFTER_PRECISIONS,))
        choices = list(product(caches, precisions, (asked.get("draft_tokens"),), chunks))
        if "draft_tokens" not in asked:
            choices += product(caches, ("full",), (0,), chunks)
        found = []
        for cache, precision, depth, chunk in choices:
            settings = MemorySettings(
                asked["context"], asked["batch"], cache_type=cache, drafter_precision=precision, prefill_chunk=chunk
            )
            settings = _with_draft(self, depth, settings)
            found.append(MemoryPlan(self.target, self.drafter, self.card, settings, self.margin_bytes))
        return found

    def choose(self) -> MemoryPlan:
        """The first that fits; if none does, the last and smallest."""
        first, smallest = self.candidates[0], self.candidates[-1]
        if not (first.fits or smallest.fits):
            return smallest
        return next(plan for plan in self.candidates if plan.fits)


def plan_memory(
    target: Any,
    *,
    quantization: Any = None,
    drafter: Any = None,
    card: str | int | Card | None = None,
    context: int | None = None,
    batch: int = 1,
    draft_tokens: int | None = None,
    tree_width: int | None = None,
    tree_size: int | None = None,
    prefill_chunk: int | None = None,
    cache_type: str | None = None,
    drafter_precision: str | None = None,
    margin: int | None = None,
) -> MemoryPlan:
    """Plan a run's memory. Needs no GPU and no weights.

    Args:
        target: Hub id, folder, name (`known_targets`), configuration, or loaded model (its storages are
            then measured).
        quantization: name (`SCHEMES`) or `quantization_config`; `None`: what the target's config says, else its dtype.
        drafter: folder, Hub id, `Eagle31Config` or drafter; `"mtp"`: the head inside the target; `None`: that head,
            where the target is given by a folder, id or name and has one, else one shaped like a layer of the target,
            with a draft vocabulary of 32,000.
        card: name (`CARDS`), bytes or e.g. `"24GiB"`; `None` and `"this machine"` measure this one.
        context: tokens of the longest row, prompt and new ones; `None`: 8,192, or what the target was trained for if
            that is less.
        batch: rows.
        draft_tokens: depth of a draft, 0 for none; `None`: what is drafted by default (chains of up to 7 tokens and
            trees of 8 nodes where steps are captured, chains of 12 on a CPU, else of 6).
        tree_width: children per node of a tree; 1 is a chain, and `None` two if `tree_size` is given.
        tree_size: nodes verified per round, root included; `None`: by depth and width, or a chain, if `draft_tokens`
            alone was asked for.
        prefill_chunk: prompt tokens per forward; `None`: the largest of 2048 to 256 that fits.
        cache_type: of the target's cache, `"full"` or `"int8"`; else full, or int8 where that does not fit.
        drafter_precision: `"full"`, `"int8"` or `"nf4"`; `None`: the first that fits of those that load.
        margin: bytes of the card to leave free; `None`: 3 % (1.5 GiB at least where the driver spills to main memory).

    Returns:
        The plan. It may be a refusal (`plan.fits` is false): `plan.require_fit()` raises then, with the nearest plans.

    Raises:
        MemoryPlanError: unknown card or quantisation, a size out of range, a config that lacks a field.
        ConfigurationError: as of `Eagle31GenerationConfig`, for trees and types of a cache that there are not.
    """
    sizes = {"context": context, "batch": batch, "draft_tokens": draft_tokens, "tree_width": tree_width,
             "tree_size": tree_size, "prefill_chunk": prefill_chunk}  # fmt: skip
    asked = {**sizes, "cache_type": cache_type, "drafter_precision": drafter_precision}
    _check_sizes(sizes)
    if drafter_precision not in (None, *DRAFTER_PRECISIONS):
        known = ", ".join(DRAFTER_PRECISIONS)
        raise MemoryPlanError(f"got drafter_precision={drafter_precision!r}; wanted one of {known}")
    drafting = Eagle31GenerationConfig(num_assistant_tokens=draft_tokens or None, draft_top_k=tree_width,
                                       draft_tree_size=tree_size, cache_type=cache_type or "auto")  # fmt: skip
    drafting.check()
    found_card = find_card(card)
    facts = read_target(target, quantization)
    asked["context"] = context = context or min(DEFAULT_CONTEXT, facts.max_position_embeddings or DEFAULT_CONTEXT)
    warnings = _warnings(facts, found_card, context)
    if not facts.loaded and (reason := _unpacked_reason(facts.quantization, found_card)):
        packed, facts = facts, read_target(target, "bf16")
        warnings.insert(0, f"{packed.quantization.method} is unpacked to bf16 while loading, because {reason}: "
                           f"{size_text(packed.weights.total)} become {size_text(facts.weights.total)}")  # fmt: skip
    request = _Request(
        target=facts,
        drafter=None if draft_tokens == 0 else read_drafter(drafter_to_plan(drafter, target, facts), facts),
        card=found_card,
        margin_bytes=_checked_margin(margin, found_card),
        drafting=drafting,
        asked={name: value for name, value in asked.items() if value not in (None, "auto")},
    )
    plan = request.choose()
    if not plan.fits:
        plan = replace(plan, alternatives=_alternatives(request, target))
    return replace(
        plan,
        longest_by_cache=_longest_by_cache(request) if plan.fits else (),
        given_up=_given_up(request, plan),
        warnings=tuple(warnings),
    )


# --- checking what was asked ------------------------------------------------------------------------------------------


def _check_sizes(sizes: dict[str, int | None]) -> None:
    for name, value in sizes.items():
        if value is None:
            continue
        least, most = {"draft_tokens": 0, "tree_size": 2}.get(name, 1), _LIMITS.get(name, 4096)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise MemoryPlanError(f"got {name}={value!r}; wanted a whole number from {least} to {most:,}")


def _checked_margin(margin: int | None, card: Card) -> int:
    if margin is None:
        return card.default_margin_bytes
    if not isinstance(margin, int) or not 0 <= margin < card.usable_bytes:
        raise MemoryPlanError(f"got margin={margin!r}; wanted bytes, from 0 to below the card's {card.usable_bytes:,}")
    return margin


def _unpacked_reason(packing: Quantization, card: Card) -> str | None:
    """Why transformers would silently unpack these weights on this card, if it would."""
    capability = card.compute_capability
    if packing.method == "fp8":
        if card.kind != "cuda":
            return f"FP8 kernels need a CUDA card, and {card.name} is none"
        if capability is not None and capability < (8, 9):
            return f"FP8 kernels need compute capability 8.9, and {card.name} has {capability[0]}.{capability[1]}"
    if packing.method == "mxfp4":
        if card.kind == "mps" or (capability is not None and capability < (7, 5)):
            return f"MXFP4 kernels do not run on {card.name}"
        missing = [name for name in ("triton", "kernels") if card.measured and importlib.util.find_spec(name) is None]
        if missing:
            return f"MXFP4 needs the packages {missing}, which are not installed"
    return None


def _warnings(target: TargetFacts, card: Card, context: int) -> list[str]:
    packing, weights, found = target.quantization, target.weights, []
    if weights.experts and packing.method != "none":
        found.append(
            f"{packing.name} packs linear layers only: the experts stay {packing.dtype} and take "
            f"{size_text(weights.experts)} of {size_text(weights.total)}; use a checkpoint whose format packs experts "
            "(FP8, MXFP4)"
        )
    if packing.method == "mxfp4" and not card.measured:
        found.append(
            "MXFP4 stays packed only with the packages triton (3.4 or later) and kernels; else it becomes bf16"
        )
    if packing.method == "fp8" and card.kind == "cuda" and card.compute_capability is None:
        found.append("FP8 stays packed only from compute capability 8.9 on (RTX 40 series); else it becomes bf16")
    trained = target.max_position_embeddings
    if trained and context > trained:
        found.append(f"context {context:,} is longer than the {trained:,} positions the target was trained for")
    return found


# --- deciding ---------------------------------------------------------------------------------------------------------


def _with_draft(request: _Request, depth: int | None, settings: MemorySettings) -> MemorySettings:
    """With the largest draft of a round, as a drafter's settings have it: for greedy texts and for sampled ones.

    Where steps are captured trees are usual for sampled texts, if they pay: packed weights make a product dearer with
    its rows, and layers that keep states verify chains alone.
    """
    if depth == 0:
        return replace(settings, draft_tokens=0)
    target, drafter = request.target, request.drafting
    by_graphs: list[DraftShape | None] = [None]
    if captures_steps(target, request.card, settings):
        by_graphs = [DraftShape(LONGEST_OF_GRAPHS), *([USUAL_TREE] if target.quantization.method == "none" else [])]
    kind, rows = request.card.kind, settings.batch
    shapes = [drafter.draft_shape(device_type=kind, rows=rows, by_graphs=usual) for usual in by_graphs]
    if target.forward.has_states:
        shapes = [shape.as_chain() for shape in shapes]
    tree = next((shape for shape in shapes if shape.is_tree), DraftShape(0))
    return replace(
        settings,
        draft_tokens=max(shape.depth for shape in shapes),
        tree_size=tree.size or None,
        draft_top_k=tree.top_k if tree.size else drafter.draft_top_k,
        draft_is_usual=depth is None and drafter.asked_top_k in (None, 1),
    )


def _longest_by_cache(request: _Request) -> tuple[tuple[str, int], ...]:
    """With the smallest chunks, by type of the cache; packed drafters take room to be unpacked, so any may be the
    smallest."""
    drafting = [plan for plan in request.candidates if plan.settings.speculates]
    longest: dict[str, int] = {}
    for plan in drafting:
        if plan.settings.prefill_chunk == drafting[-1].settings.prefill_chunk:
            kind = plan.settings.cache_type
            longest[kind] = max(plan.longest_context, longest.get(kind, 0))
    return tuple(longest.items())


def _given_up(request: _Request, plan: MemoryPlan) -> tuple[str, ...]:
    """What the first candidate had and the chosen one has not."""
    wanted, got = request.candidates[0], plan.settings
    best, said = wanted.settings, []
    if best.speculates and not got.speculates:
        said.append("the drafter, so there are no drafts")
    elif got.draft_tokens < best.draft_tokens:
        said.append(f"drafts of more than {got.draft_tokens} tokens")
    if got.speculates and got.drafter_precision != best.drafter_precision:
        said.append(f"the drafter's precision: it is packed as {got.drafter_precision}")
    if got.cache_type != best.cache_type:
        said.append("keys and values in full precision: they are stored in 8 bits, which may change the text")
    if wanted.has_graphs and got.speculates and not plan.has_graphs:
        said.append("graphs: steps are eager")
    if got.prefill_chunk < best.prefill_chunk:
        said.append(
            f"reading the prompt {best.prefill_chunk:,} tokens at a time: it is read {got.prefill_chunk:,} at a time"
        )
    return tuple(said)


def _alternatives(request: _Request, target: Any) -> tuple[tuple[str, str], ...]:
    """Nearby plans that fit: a shorter context, a smaller quantisation, a larger card."""
    found = []
    if shorter := request.candidates[-1].longest_context:
        found.append(("context", f"{shorter:,}"))
    schemes = () if request.target.loaded else _SMALLER_SCHEMES
    packed = {each: replace(request, target=read_target(target, scheme(each))) for each in schemes}
    weights = request.target.weights.total
    fitting = (name for name, each in packed.items() if each.target.weights.total < weights and each.choose().fits)
    smaller, larger = next(fitting, None), _larger_card(request)
    if smaller:
        found.append(("quantization", smaller))
    if larger:
        found.append(("card", larger))
    if packed and not smaller:  # both at once
        name = _SMALLER_SCHEMES[-1]
        if (card := _larger_card(packed[name])) not in (None, larger):
            found.append(("card", f"{card} with quantization {name}"))
    return tuple(found)


def _larger_card(request: _Request) -> str | None:
    by_size = sorted((card for card in CARDS.values() if card.kind == "cuda"), key=lambda card: card.usable_bytes)
    for card in by_size:
        if card.usable_bytes <= request.card.usable_bytes or _unpacked_reason(request.target.quantization, card):
            continue
        if replace(request, card=card, margin_bytes=card.default_margin_bytes).choose().fits:
            return card.name
    return None
