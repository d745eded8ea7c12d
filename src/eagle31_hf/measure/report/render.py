"""A page as one HTML file that needs nothing beside it, and as Markdown with its plots in a folder."""

from __future__ import annotations

import base64
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from ..tables import DataTable
from .content import Page, Section
from .plots import Plot


def to_html(page: Page) -> str:
    """One file: styles and plots are inside, nothing is fetched."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data_uri"] = lambda svg: f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8"))
    return template.render(page=page) + "\n"


def write_markdown(page: Page, path: Path) -> None:
    """`path`, and its plots in a folder of its name beside it."""
    folder = path.with_suffix("")
    plots = [plot for section in page.sections for part in section.parts for plot in part.plots]
    if plots:
        folder.mkdir(exist_ok=True)
    for plot in plots:
        (folder / f"{plot.name}.svg").write_text(plot.svg, encoding="utf-8")
    text = "\n\n".join([f"# {page.title}", *(_section_text(section, folder.name) for section in page.sections)])
    path.write_text(text + "\n", encoding="utf-8")


def _section_text(section: Section, folder: str) -> str:
    blocks = [f"## {section.title}", section.conditions]
    for part in section.parts:
        blocks += [f"### {part.title}", part.words] if part.words else [f"### {part.title}"]
        blocks += [_table_text(table) for table in part.tables]
        blocks += [_plot_text(plot, folder) for plot in part.plots]
    if section.notes:
        blocks.append("\n".join(f"- {note}" for note in section.notes))
    return "\n\n".join([*blocks, _table_text(section.provenance)])


def _plot_text(plot: Plot, folder: str) -> str:
    return f"#### {plot.title}\n\n![{plot.words}]({folder}/{plot.name}.svg)\n\n{_table_text(plot.table)}"


def _table_text(table: DataTable) -> str:
    rules = ["---", *("---:" for _ in table.headings[1:])]
    if table.caption == "Provenance":
        rules = ["---"] * len(table.headings)
    lines = [table.headings, rules, *table.rows]
    return f"*{table.caption}*\n\n" + "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
