"""`eagle31 report`: records as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError
from ..measure.record_file import read_records
from ..measure.report.content import make_page
from ..measure.report.render import to_html, write_markdown
from .options import TracebackOption, make_console, readable_errors, writable_json
from .progress import waiting_for


@readable_errors
def report(
    *,
    records: Annotated[list[Path], typer.Argument(help="Files that `eagle31 bench run` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(dir_okay=False, callback=writable_json, help="The page; .html or .md.")] = Path(
        "report.html"
    ),
    markdown: Annotated[
        Path | None,
        typer.Option(dir_okay=False, callback=writable_json, help="Also as Markdown, its plots in a folder beside it."),
    ] = None,
    title: Annotated[str, typer.Option(help="Its heading.")] = "EAGLE 3.1: speculative decoding, measured",
    price_per_hour: Annotated[float | None, typer.Option(min=0.0, help="Of the machine, for the cost.")] = None,
    traceback: TracebackOption = False,
) -> None:
    """Make one page with tables and plots out of benchmark records; it needs no model and nothing beside it."""
    if out.suffix not in (".html", ".md"):
        raise ConfigurationError(f"got --out {out.name!r}; wanted a name that ends in .html or .md")
    with waiting_for("drawing"):
        page = make_page([read_records(path) for path in records], title=title, price_per_hour=price_per_hour)
        if out.suffix == ".html":
            out.write_text(to_html(page), encoding="utf-8")
        else:
            write_markdown(page, out)
        if markdown is not None:
            write_markdown(page, markdown)
    written = [str(path) for path in (out, markdown) if path is not None]
    make_console().print(f"{', '.join(path.name for path in records)} → {', '.join(written)}", soft_wrap=True)
