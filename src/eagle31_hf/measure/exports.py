"""Figures for other tools: acceptance as a CSV, and a profile to lie beside a published checkpoint."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from .summary import MethodSummary, RunSummary

CSV_COLUMNS = ("subset", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_length")
POSITION_COLUMN = "acceptance_at_pos_{}"
PROFILE_NAME = "speculation_profile.json"
PROFILE_FORMAT = 1


def best_drafting(summary: RunSummary) -> MethodSummary:
    """Greedy chain at batch 1 if it was measured, else the first method of our drafter: what other engines draft, too.

    Raises:
        ConfigurationError: no method of our drafter was measured.
    """
    drafting = [method for method in summary.methods if method.drafts and method.acceptance.rounds]
    if not drafting:
        raise ConfigurationError("these records hold no method that drafts with EAGLE; measure chain or tree as well")
    return min(
        drafting,
        key=lambda m: (m.setting.temperature, m.setting.batch_size, m.method != "chain", m.method != "chain compiled"),
    )


def acceptance_rows(method: MethodSummary) -> list[dict[str, Any]]:
    """One row per category in the columns of speculators' acceptance CSV; positions are shares of all drafts."""
    rows = []
    for name, part in method.categories.items():
        counts = part.acceptance
        values = (name, counts.rounds, counts.drafted, counts.accepted, counts.length)
        shares = {POSITION_COLUMN.format(i): accepted / counts.rounds for i, accepted in enumerate(counts.accepted_at)}
        rows.append({**dict(zip(CSV_COLUMNS, values, strict=True)), **shares})
    return rows


def write_acceptance_csv(summary: RunSummary, path: Path) -> None:
    """Write `acceptance_rows` of the method most like what other engines draft."""
    rows = acceptance_rows(best_drafting(summary))
    positions = max(len(row) for row in rows) - len(CSV_COLUMNS)
    columns = [*CSV_COLUMNS, *(POSITION_COLUMN.format(i) for i in range(positions))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval=0.0)
        writer.writeheader()
        writer.writerows(rows)


def profile(summary: RunSummary) -> dict[str, Any]:
    """What a drafter does on which target, for whoever is about to use it: facts, figures and how they were made."""
    run = summary.run
    return {
        "format": PROFILE_FORMAT,
        "made_by": f"eagle31_hf {run['eagle31_hf']}",
        "command": run["command"],
        "versions": {name: run[name] for name in ("torch", "transformers", "python", "commit")},
        "machine": run["machine"],
        **run["pair"],
        "prompts": {"count": len(run["prompts"]), "new_tokens": run["settings"]["new_tokens"]},
        "methods": [_profile_of(method) for method in summary.methods if method.drafts and method.acceptance.rounds],
    }


def _profile_of(method: MethodSummary) -> dict[str, Any]:
    length, gain = method.acceptance_length, method.by_drafter and method.by_drafter.median
    return {
        "method": method.method,
        "temperature": method.setting.temperature,
        "batch_size": method.setting.batch_size,
        "draft_tokens": len(method.acceptance.drafted_at),
        "acceptance_length": length,
        "acceptance_at_position": method.acceptance.cumulative,
        "conditional_acceptance_at_position": method.acceptance.conditional,
        "acceptance_length_by_category": {name: part.acceptance_length for name, part in method.categories.items()},
        "speedup": method.speedup and method.speedup.median,
        "speedup_interval": method.speedup and method.speedup.interval,
        "speedup_by_drafter_alone": gain,
        "refusal": method.refusal,
        "answers": dict(method.verdicts),
        # at which rounds that take what these took would have been as fast as plain decoding
        "break_even_acceptance_length": length / gain if length and gain else None,
    }


def write_profile(summary: RunSummary, path: Path) -> None:
    """Write `profile`; a folder gets a file of the name that is looked for."""
    path = path / PROFILE_NAME if path.is_dir() else path
    path.write_text(json.dumps(profile(summary), indent=2) + "\n", encoding="utf-8")
