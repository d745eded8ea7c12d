"""`eagle31 push`: a drafter's folder to the Hub. Shows what would go, and uploads only when told to."""

from __future__ import annotations

from pathlib import Path

from rich.markdown import Markdown

from ..checkpoints.card import prepare_upload, upload
from .options import argument, command, make_console, option, plain_table


@command
def push(
    folder: Path = argument("Folder of the drafter.", exists=True, file_okay=False),
    repository: str = argument("Hub id, owner/name; made if it does not exist."),
    really: bool = option(False, "Upload; without it nothing leaves this machine.", "--upload"),
    license: str | None = option(None, "Licence of the drafter, e.g. apache-2.0, for its card."),
    private: bool | None = option(None, "Of a repository made now.", "--private/--public"),
    revision: str | None = option(None, "Branch; default: main."),
    create_pr: bool = option(False, "Propose the files instead of committing them."),
) -> None:
    """Publish a drafter with its card and records; shows what would be uploaded unless told to upload."""
    prepared = prepare_upload(folder, repository, license=license)
    console = make_console()
    table = plain_table((name, f"{size:,} bytes") for name, size in prepared.files.items())
    if not really:
        console.print(Markdown(prepared.card.partition("\n---\n")[2]))
        console.print(f"\nwould be uploaded to {repository} (add --upload to do it):")
        console.print(table)
        return
    console.print(table)
    address = upload(prepared, private=private, revision=revision, create_pr=create_pr)
    console.print(f"uploaded: {address}", soft_wrap=True)
