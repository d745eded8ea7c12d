"""`eagle31 convert`: a drafter in another published layout, and the lines that serve it elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from ..checkpoints import (
    TARGET_MODEL,
    WRITTEN_FORMATS,
    default_format,
    read_checkpoint,
    require_no_checkpoint,
    write_checkpoint,
)
from ..checkpoints.card import carry_records, serving_commands
from ..checkpoints.hub import target_class
from ..checkpoints.layouts import parts_to_copy, written_layout
from ..config import MtpConfig
from ..errors import CheckpointNotFoundError, ConfigurationError, IncompatibleTargetError, config_problem
from .options import argument, command, make_console, option

UNKNOWN_TARGET = "TARGET"


@command
def convert(
    source: str = argument("Folder or Hub id of a drafter."),
    destination: Path = argument("Folder to write.", file_okay=False),
    format: str | None = option(
        None, f"Layout to write: {', '.join(WRITTEN_FORMATS)}; default: mla for latent attention, else plain."
    ),
    target: str | None = option(None, "Folder or Hub id of the target, written down for the loaders that ask for it."),
    force: bool = option(False, "Overwrite a checkpoint.", "--force", "-f"),
    revision: str | None = option(None, "Branch, tag or commit of a Hub id."),
) -> None:
    """Write a drafter checkpoint in another layout; "plain" is the one vLLM and SGLang both read."""
    if not force:
        require_no_checkpoint(destination)
    if format is not None:
        written_layout(format)  # a misspelt name should not cost a download
    checkpoint = read_checkpoint(source, revision=revision)
    if isinstance(checkpoint.config, MtpConfig):
        raise ConfigurationError(f"{source} holds an MTP head, which has one layout: eagle31 mtp {source} --out FOLDER")
    format = format or default_format(checkpoint.config)
    layout = written_layout(format)
    parts: set[str] = set()
    if target is not None:
        described = describe_target(target)
        if Path(target).is_dir() and checkpoint.target:  # whose own name of it says more than a folder of one machine
            described["name_or_path"] = checkpoint.target
        checkpoint.metadata[TARGET_MODEL] = described
        if parts := parts_to_copy(layout, checkpoint.config):
            from ..drafter.drafter import copy_from_target  # a slow import, needed here alone

            model = target_class(AutoConfig.from_pretrained(target)).from_pretrained(target, dtype="auto")
            checkpoint = copy_from_target(checkpoint, model, parts)
    write_checkpoint(checkpoint, destination, format=format)
    carry_records(Path(source).expanduser(), destination)
    console = make_console()
    console.print(f"{source} ({checkpoint.format}) → {destination} ({format})", soft_wrap=True)
    if parts:
        console.print(f"with the target's {' and '.join(sorted(parts))}, which {format} files hold themselves")
    lacks = {"the target's name": not checkpoint.target, "the target's embedding": not checkpoint.config.own_embedding}
    if layout.needs_target and any(lacks.values()):
        wanted = " and ".join(what for what, is_missing in lacks.items() if is_missing)
        advice = (
            f"Engines will not load it: they want {wanted} in {format} checkpoints. Convert again with --target TARGET"
        )
        console.print(advice, soft_wrap=True)
        return
    for engine, line in serving_commands(checkpoint.target or UNKNOWN_TARGET, str(destination), format).items():
        console.print(f"\n{engine}:", markup=False)
        console.print(f"  {line}", soft_wrap=True, markup=False)


def describe_target(name: str) -> dict[str, Any]:
    """What a checkpoint says of its target: `name_or_path` as given, and `architectures` from the target's config.

    Raises:
        CheckpointNotFoundError: there is no such target, or no network to ask for it.
        IncompatibleTargetError: its config holds something else than transformers wants.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"no target at {name!r} ({str(error).splitlines()[0]}); pass the folder or Hub id of the model that the "
            "drafter was trained for"
        ) from error
    except StrictDataclassError as error:
        raise IncompatibleTargetError(f"the config.json of {name!r} is wrong: {config_problem(error)}") from error
    return {"name_or_path": name, "architectures": list(config.architectures or [])}
