"""What the site is made of beside docs/: README as its first page, and the model cards. Used by mkdocs.

In the repository links point where the files lie; on the site they point to its pages, and what is no page is named
instead of linked.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BESIDE_README = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?( \"[^\"]*\")?\)")
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/."""
    pages = {"index.md": ROOT / "README.md"} | {name: ROOT / name for name in BESIDE_README}
    pages |= {f"model_cards/{card.name}": card for card in sorted((ROOT / "model_cards").glob("*.md"))}
    for name, source in pages.items():
        text = FRONT_MATTER.sub("", source.read_text(encoding="utf-8"))
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Let links point to pages of the site."""
    place = page.file.src_uri
    in_repository = {"index.md": "README.md"}.get(place, place)
    if place not in ("index.md", *BESIDE_README) and not place.startswith("model_cards/"):
        in_repository = f"docs/{place}"

    def turned(found: re.Match[str]) -> str:
        is_image, text, target, anchor, title = found.groups(default="")
        path = normpath(PurePosixPath(in_repository).parent / target)
        inside = "index.md" if path == "README.md" else path.removeprefix("docs/")
        if files.get_file_from_path(inside) is None or inside.endswith(".py"):
            return text if path.rstrip("/") in text else f"{text} (`{path}`)"
        return f"{is_image}[{text}]({relpath(inside, str(PurePosixPath(place).parent))}{anchor}{title})"

    return LINK.sub(turned, markdown)
