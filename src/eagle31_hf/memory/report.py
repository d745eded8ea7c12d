"""A memory plan as rows and text. Figures come from the plan; nothing is computed here."""

from __future__ import annotations

from dataclasses import replace

from .cards import GIB, MIB
from .ledger import RUNNING, captures_steps
from .plan import MemoryPlan

LEDGER_COLUMNS = ("term", "size", "alive during", "formula")


def size_text(num_bytes: int) -> str:
    """`"5.31 GiB"`, `"112 MiB"`, `"64 B"`."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.0f} MiB" if abs(num_bytes) >= MIB else f"{num_bytes:,} B"


def ledger_rows(plan: MemoryPlan) -> list[tuple[str, ...]]:
    """One row per term under `LEDGER_COLUMNS`, largest first."""
    rows: list[tuple[str, ...]] = []
    for term in sorted(plan.ledger, key=lambda term: -term.num_bytes):
        when = "always" if set(RUNNING) <= set(term.moments) else ", ".join(term.moments)
        rows.append((term.name, size_text(term.num_bytes), when, term.formula))
    return rows


_PARTS = {
    "runtime": ("runtime",),
    "target": ("target weights", "target experts", "one tensor before packing"),
    "drafter": ("drafter weights", "draft head"),
    "keys, values and states": ("target cache", "drafter cache", "target states"),
    "graphs": ("recordings",),
}
"""Of a card at the fullest moment, by how terms begin; all else is working memory."""


def part_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """What fills the card at the fullest moment, in seven parts that add up to it."""
    alive = [term for term in plan.ledger if plan.peak_moment in term.moments]
    sizes = {
        part: sum(term.num_bytes for term in alive if term.name.startswith(names)) for part, names in _PARTS.items()
    }
    sizes["working memory"] = plan.peak_bytes - sum(sizes.values())
    rows = [(part, size_text(num_bytes)) for part, num_bytes in sizes.items() if num_bytes]
    return [*rows, ("left free", size_text(plan.card.total_bytes - plan.peak_bytes))]


def decision_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """What was decided, as (name, value)."""
    settings, target = plan.settings, plan.target
    rows = [
        ("target", f"{target.name}, {target.num_parameters / 1e9:.2f}B parameters, {target.quantization.name}"),
        ("card", f"{plan.card.name}, {size_text(plan.budget_bytes)} of {size_text(plan.card.total_bytes)} to use"),
        ("fits", "yes" if plan.fits else "no"),
        ("peak", f"{size_text(plan.peak_bytes)}, at {plan.peak_moment}"),
        ("context", f"{settings.context:,} tokens" + (f", {settings.batch} rows" if settings.batch > 1 else "")),
        *_longest_rows(plan),
        ("prompt", f"read {settings.prefill_chunk:,} tokens at a time"),
        ("keys, values", "in 8 bits" if settings.cache_type == "int8" else "in the target's precision"),
        ("graphs", "yes" if plan.has_graphs else "no, steps are eager"),
        ("draft", _draft_text(plan)),
    ]
    rows += [("given up", what) for what in plan.given_up]
    return rows + [("would fit", f"{other.what} {other.value}") for other in plan.alternatives]


def _longest_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Up to which context plans look like this one, and up to which they give up graphs."""
    if not plan.longest_by_cache:
        return [("longest", f"{plan.longest_context:,} tokens")]
    rows = []
    for kind, tokens in plan.longest_by_cache:
        settings = replace(plan.settings, cache_type=kind, draft_tokens=plan.settings.draft_tokens or 1)
        graphs = "with" if captures_steps(plan.target, plan.card, settings) else "without"
        stored = ", keys and values in 8 bits" if kind == "int8" else ""
        rows.append((f"longest {graphs} graphs", f"{tokens:,} tokens{stored}"))
    return rows


def _draft_text(plan: MemoryPlan) -> str:
    settings = plan.settings
    if not settings.speculates:
        return "none: no drafter" + ("" if plan.drafter is None else " fits beside the target")
    depth, nodes = settings.draft_tokens, settings.tree_size
    if settings.draft_is_usual:
        shape = f"chains of up to {depth} tokens" + (f", trees of {nodes} nodes for sampled texts" if nodes else "")
    else:
        shape = f"tree of {nodes} nodes, depth {depth}" if nodes else f"chain of {depth} tokens"
    return f"{shape}, drafter in {settings.drafter_precision} precision (+{size_text(plan.drafter_bytes)})"
