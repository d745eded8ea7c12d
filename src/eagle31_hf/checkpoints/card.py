"""The card of a published drafter, filled from its checkpoint and the record of its training."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..errors import PublishingError
from .checkpoint import CheckpointSummary, inspect_checkpoint
from .files import read_json

CARD_FILE = "README.md"
RECORD_FILE = "training_report.json"
LIBRARY = "eagle31_hf"
DRAFT_TOKENS = 3  # what both engines' own examples draft for several users at once
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
    evidence, curve = _measured(record["stages"])
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
        vllm_line=vllm_command(record["target"], repository),
        sglang_line="" if summary.format == "speculators" else sglang_command(record["target"], repository),
        size=_size(summary.parameters),
        aux=_aux(summary),
        evidence=evidence,
        curve=curve,
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


def _measured(stages: list[Any]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows of the card's tables: everything measured by category and stage, and the learning curve."""
    by_category: dict[str, list[dict[str, str]]] = {}
    curve = []
    try:
        for stage in stages:
            for category, counts in (stage.get("acceptance") or {}).items():
                if (rounds := counts["rounds"]) > 0:
                    length = (counts["accepted"] + rounds) / rounds
                    pairs = zip(counts["accepted_at"], counts["drafted_at"], strict=True)
                    positions = " ".join(f"{accepted / drafted:.2f}" for accepted, drafted in pairs if drafted)
                    row = {"category": category, "drafter": str(stage["name"]), "length": f"{length:.3f}"}
                    by_category.setdefault(category, []).append(row | {"positions": positions})
            for point in stage.get("curve") or ():
                length = f"{point['acceptance_length']:.3f} ± {point['standard_error']:.3f}"
                curve.append({"stage": str(stage["name"]), "tokens": f"{point['tokens']:,}", "length": length})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PublishingError(
            f"{RECORD_FILE} holds stages whose acceptance or curve is none ({type(error).__name__}: {error}); wanted "
            "rounds, accepted, drafted_at and accepted_at by category, and points of tokens, acceptance_length and "
            "standard_error"
        ) from error
    return [row for rows in by_category.values() for row in rows], curve


def is_filled(text: str, folder: Path) -> bool:
    """Whether a card is as it was filled for the drafter in `folder`, whichever repository and licence it names."""
    named = re.search(r'from_pretrained\("(.+)", target=target\)', text)
    if named is None or not (folder / RECORD_FILE).exists():
        return False
    license = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license")
    return text == fill_card(folder, named[1], license=license)


def _size(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B parameters" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M parameters"


def _aux(summary: CheckpointSummary) -> str:
    config = summary.config
    layers = "2, L/2 and L-3 of the target's L layers" if config.aux_layers is None else f"hs {config.aux_layers}"
    norms = {"per_slot": "each normed (`fc_norm`)", "concatenated": "normed as one", "none": "not normed"}
    return f"{layers}, {norms[config.aux_norm]}"


def vllm_command(target: str, drafter: str) -> str:
    """`vllm serve` with a drafter; both are folders or Hub ids. This line has been run (docs/engines.md)."""
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": DRAFT_TOKENS}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def sglang_command(target: str, drafter: str) -> str:
    """SGLang's server with a drafter that drafts chains. As its documentation says; it has not been run."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-steps {DRAFT_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_TOKENS + 1}"
    )
