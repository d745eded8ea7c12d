"""`eagle31 mtp`: the multi-token-prediction head of a target, alone or back in a fine-tune that has lost it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..checkpoints import (
    Checkpoint,
    holds_checkpoint,
    read_checkpoint,
    require_head,
    resolve_checkpoint,
    write_checkpoint,
)
from ..checkpoints.graft import graft_head
from ..errors import ConfigurationError
from .options import TracebackOption, count, make_console, readable_errors


@readable_errors
def mtp(
    *,
    base: Annotated[str, typer.Argument(help="Folder or Hub id of a target that holds a head.", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write the head to, alone, as a drafter in bfloat16.", file_okay=False),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(help="Folder of a fine-tune of BASE to put the head back into.", file_okay=False, exists=True),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="With --out: overwrite a checkpoint.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Take the MTP head out of a target, or put it back into a fine-tune that was saved without it."""
    if (out is None) == (into is None):
        raise ConfigurationError(
            "got " + ("neither --out nor --into" if out is None else "both") + "; pass one of them"
        )
    require_head(base)
    console = make_console()
    if into is not None:
        names = graft_head(resolve_checkpoint(base), into)
        console.print(
            f"{count(len(names), 'tensor')} of {base}'s MTP head → {into}; its other files are as they were",
            soft_wrap=True,
        )
        return
    assert out is not None, "asked above"
    if holds_checkpoint(out) and not force:
        raise ConfigurationError(f"{out} holds a checkpoint already; name another folder, or pass --force")
    head = read_checkpoint(base)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in head.tensors.items()}
    write_checkpoint(Checkpoint(head.config, tensors, "mtp"), out, format="mtp")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    console.print(f"{base}'s MTP head → {out} ({size / 1e6:,.1f} MB); pass this folder as the drafter", soft_wrap=True)
