"""The card of a published drafter, filled from its checkpoint and the record of its training."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..errors import PublishingError
from .checkpoint import inspect_checkpoint
from .json_files import read_json, shown
from .serving import sglang_command, vllm_command
from .summary import CheckpointSummary, EngineVerdict

CARD_FILE = "README.md"
RECORD_FILE = "training_report.json"
PROFILE_FILE = "speculation_profile.json"  # of eagle31 bench run --profile
LIBRARY = "eagle31_hf"
UNKNOWN_LICENSE = "unknown"
_TEMPLATE = Path(__file__).with_name("card_template.md")
_TAGS = ["eagle3", "speculative-decoding", "drafter"]
_METADATA = ("license", "base_model", "library_name")
_SECTIONS = ("Use", "Evidence", "Training", "Limits")
_MEASURED = re.compile(r"\|\s*\**\d+\.\d+")  # a table cell with a figure


_RECORD = {"target": str, "license": str, "conditions": str, "data": list, "stages": list, "recipe": dict,
           "versions": dict}  # fmt: skip
"""What a card must tell beside the checkpoint: fields of `training_report.json`, as `training.record` writes them.

`stages` holds `{"name": …, "acceptance": {category: {"rounds", "accepted", "drafted_at", "accepted_at"}}}`, with a
`curve` of `{"step", "tokens", "acceptance_length", "standard_error"}` where it was kept. A `command` may stand beside.
"""


def fill_card(folder: Path, repository: str, *, license: str | None = None) -> str:
    """The card of the drafter in `folder`, from its `config.json`, weights' headers and `training_report.json`.

    Args:
        repository: where it will be found: Hub id, or the folder's name.
        license: of the drafter, where the record tells none or another.

    Raises:
        PublishingError: the record lacks evidence or something else a card must tell; all of it is named.
        CheckpointError: the folder holds no drafter.
    """
    summary, record = inspect_checkpoint(folder), _read_record(folder, license)
    vllm, sglang = summary.engines
    data = ModelCardData(
        base_model=record["target"],
        base_model_relation="adapter",
        library_name=LIBRARY,
        license=record["license"],
        pipeline_tag="text-generation",
        tags=[*_TAGS, "eagle3.1"] if summary.config.is_eagle31 else _TAGS,
    )
    card = ModelCard.from_template(
        data,
        template_str="---\n{{ card_data }}\n---\n\n" + _TEMPLATE.read_text(encoding="utf-8"),
        name=repository.rpartition("/")[2],
        repository=repository,
        target=record["target"],
        summary=summary,
        config=summary.config,
        record=record,
        vllm=vllm,
        sglang=sglang,
        vllm_line=vllm_command(record["target"], repository),
        sglang_line=sglang_command(record["target"], repository),
        needs=_needs,
        size=_size(summary.parameters),
        aux=_aux(summary),
        evidence=_evidence_rows(record["stages"]),
        curve=[point for stage in record["stages"] for point in _curve_of(stage)],
        served=_served(folder / PROFILE_FILE),
    )
    return str(card)


def check_card(text: str) -> None:
    """Raise a `PublishingError` if a card lacks metadata, sections or measured figures that users look for."""
    card = ModelCard(text, ignore_metadata_errors=True)
    metadata = card.data.to_dict()
    lacking = [f"{name} in its metadata" for name in _METADATA if metadata.get(name) in (None, "", UNKNOWN_LICENSE)]
    headings = re.split(r"^#{1,3} +(.*)$", card.text, flags=re.MULTILINE)
    sections = dict(zip(headings[1::2], headings[2::2], strict=True))
    lacking += [f"a section {name!r}" for name in _SECTIONS if not sections.get(name, "").strip()]
    if "Evidence" in sections and not _MEASURED.search(sections["Evidence"]):
        lacking.append("a table with measured acceptance under 'Evidence'")
    if lacking:
        raise PublishingError(
            f"the card lacks {', '.join(lacking)}; complete {CARD_FILE}, or remove it to have it filled from "
            f"{RECORD_FILE} (--license names the licence)"
        )


def _read_record(folder: Path, license: str | None) -> dict[str, Any]:
    path = folder / RECORD_FILE
    if not path.exists():
        raise PublishingError(
            f"{folder} has neither {CARD_FILE} nor {RECORD_FILE} to fill one from, so nothing tells how the drafter "
            "was measured; train it with eagle31 train, or write a card with the sections " + ", ".join(_SECTIONS)
        )
    stored = read_json(path)
    stored["license"] = license or stored.get("license") or UNKNOWN_LICENSE
    wrong = [name for name, kind in _RECORD.items() if not isinstance(stored.get(name), kind) or not stored[name]]
    if wrong:
        raise PublishingError(f"{path} lacks {', '.join(wrong)}, which the card must tell; train or measure it again")
    return stored


def _evidence_rows(stages: list[Any]) -> list[dict[str, str]]:
    """Everything measured, by category and stage."""
    by_category: dict[str, list[dict[str, str]]] = {}
    for stage in stages:
        acceptance = stage.get("acceptance") if isinstance(stage, dict) else None
        for category, counts in (acceptance or {}).items():
            if isinstance(counts, dict) and isinstance(counts.get("rounds"), int) and counts["rounds"] > 0:
                row = {"category": category, "drafter": str(stage.get("name"))} | _figures(counts)
                by_category.setdefault(category, []).append(row)
    return [row for rows in by_category.values() for row in rows]


def _curve_of(stage: Mapping[str, Any]) -> list[dict[str, str]]:
    """The learning curve of a stage as the card shows it."""
    try:
        return [
            {
                "stage": str(stage["name"]),
                "tokens": f"{point['tokens']:,}",
                "length": f"{point['acceptance_length']:.3f} ± {point['standard_error']:.3f}",
            }
            for point in stage.get("curve", ())
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PublishingError(
            f"{RECORD_FILE} holds a learning curve that is none ({shown(dict(stage))}); wanted points of step, tokens, "
            "acceptance_length and standard_error"
        ) from error


def _figures(counts: Mapping[str, Any]) -> dict[str, str]:
    try:
        length = (counts["accepted"] + counts["rounds"]) / counts["rounds"]
        pairs = list(zip(counts["accepted_at"], counts["drafted_at"], strict=True))
        positions = " ".join(f"{accepted / drafted:.2f}" for accepted, drafted in pairs if drafted)
    except (KeyError, TypeError, ValueError) as error:
        raise PublishingError(
            f"{RECORD_FILE} holds acceptance that is none ({shown(dict(counts))}); wanted rounds, accepted, drafted_at "
            "and accepted_at"
        ) from error
    return {"length": f"{length:.3f}", "positions": positions}


def _served(path: Path) -> dict[str, Any] | None:
    """What `eagle31 bench run` measured, as the card shows it; `None` where it has not been run."""
    if not path.is_file():
        return None
    profile = read_json(path)
    try:
        machine = profile["machine"]
        return {
            "command": str(profile["command"]),
            "place": f"{machine['device']}, {machine['processor']}, {machine['threads']} threads",
            "methods": [_served_row(method) for method in profile["methods"]],
        }
    except (KeyError, TypeError) as error:
        raise PublishingError(
            f"{path} is no profile ({type(error).__name__}: {error}); write it with eagle31 bench run --profile, or "
            "remove it"
        ) from error


def _served_row(method: Mapping[str, Any]) -> dict[str, str]:
    positions = " ".join(f"{share:.2f}" for share in method["acceptance_at_position"])
    low_high = method["speedup_interval"]
    speedup = "not told: " + str(method["refusal"]) if method["speedup"] is None else f"{method['speedup']:.2f}"
    return {
        "method": f"{method['method']}, temperature {method['temperature']}, batch {method['batch_size']}",
        "length": f"{method['acceptance_length']:.3f}",
        "positions": positions,
        "speedup": speedup + (f" ({low_high[0]:.2f} to {low_high[1]:.2f})" if low_high else ""),
    }


def _needs(engine: EngineVerdict) -> str:
    return f" ({'; '.join(engine.needs)})" if engine.needs else ""


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B parameters" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M parameters"


def _aux(summary: CheckpointSummary) -> str:
    config = summary.config
    layers = "2, L/2 and L-3 of the target's L layers" if config.aux_layers is None else f"hs {config.aux_layers}"
    norms = {"per_slot": "each normed (`fc_norm`)", "concatenated": "normed as one", "none": "not normed"}
    return f"{layers}, {norms[config.aux_norm]}"
