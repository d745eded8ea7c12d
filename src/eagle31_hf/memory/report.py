"""A memory plan as rows and text. Figures come from the plan; nothing is computed here."""

from __future__ import annotations

from .cards import GIB, MIB
from .ledger import RUNNING
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


def decision_rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """What was decided, as (name, value)."""
    settings, target = plan.settings, plan.target
    rows = [
        ("target", f"{target.name}, {target.num_parameters / 1e9:.2f}B parameters, {target.quantization.name}"),
        ("card", f"{plan.card.name}, {size_text(plan.budget_bytes)} of {size_text(plan.card.total_bytes)} to use"),
        ("fits", "yes" if plan.fits else "no"),
        ("peak", f"{size_text(plan.peak_bytes)}, at {plan.peak_moment}"),
        ("largest term", f"{plan.largest_term.name}, {size_text(plan.largest_term.num_bytes)}"),
        ("context", f"{settings.context:,} (longest that fits: {plan.longest_context:,})"),
        ("batch", str(settings.batch)),
        ("prefill chunk", f"{settings.prefill_chunk:,}"),
        ("cache", f"{settings.cache_type}, {settings.cache_capacity:,} slots per row"),
        ("draft", _draft_text(plan)),
    ]
    rows += [("would fit", f"{other.what} {other.value}") for other in plan.alternatives]
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
