"""Commands take the options that pages show them with, and the API page holds all that is public."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import typer.main
from transformers import AutoModelForCausalLM

from eagle31_hf import Eagle31Drafter
from eagle31_hf.cli.app import LazyCommand, app
from eagle31_hf.demo import drafter_path, target_path
from test_architecture import MODULES, import_graph

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "model_cards").rglob("*.md"),
                *(ROOT / "examples").rglob("*.md")])  # fmt: skip
BLOCK = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"`(eagle31 [^`\n]+)`")
COMMAND = re.compile(r"^(?:[\w./-]+/)?eagle31 .*$", re.M)


def shown_commands(page: Path) -> list[str]:
    """What a page tells to type, each in one line."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    return COMMAND.findall(blocks) + INLINE.findall(text)


def unknown_options(line: str) -> list[str]:
    """What of a command line the command does not know."""
    words = shlex.split(line, comments=True)[1:]
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        name = words.pop(0)
        if name not in command.commands:
            return [name]
        command = command.commands[name]
        command = command.load() if isinstance(command, LazyCommand) else command
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_take_the_options_they_are_shown_with(page: Path) -> None:
    wrong = {line: unknown for line in shown_commands(page) if (unknown := unknown_options(line))}
    assert not wrong


def test_an_option_that_is_not_there_is_seen() -> None:
    assert unknown_options("eagle31 doctor --targt T --drift --json=x  # --words") == ["--targt"]
    assert unknown_options("eagle31 benches --json x") == ["benches"]


WITHOUT_COMMANDS = {"api.md"}
"""Pages to look things up in."""


@pytest.mark.parametrize(
    "path", ["README.md", "pyproject.toml", "src/eagle31_hf/__init__.py", "src/eagle31_hf/cli/app.py"]
)
def test_where_the_same_text_is_promised_rounding_is_mentioned(path: str) -> None:
    """In the first sentence, since many read no further."""
    told = re.sub(r"[\s\"]+", " ", (ROOT / path).read_text(encoding="utf-8"))
    promised = re.search(r"the same text.*?faster", told)
    assert promised, "the promise has moved: look for it there"
    assert "in half precision up to rounding" in promised.group()


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert len(text.encode()) <= 9_000


def test_pages_are_few_and_their_words_together_too() -> None:
    """Each topic is told once: README, ten pages, and those for developers."""
    pages = [*(ROOT / "docs").glob("*.md")]
    assert len(pages) <= 10
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(text.read_text(encoding="utf-8").split()) for text in texts) <= 22_000


@pytest.mark.parametrize("page", [page for page in PAGES if "docs" in page.parts[:-1]], ids=lambda page: page.name)
def test_pages_are_short_and_begin_with_what_to_type(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    opening = re.split(r"^## |^\|", text, maxsplit=1, flags=re.M)[0]
    if page.name not in WITHOUT_COMMANDS and page.parent.name == "docs":
        assert "```" in opening, "a page begins with the command or the line of code it is about"


def documented() -> dict[str, list[str]]:
    """Path of each object on the API page, and the members it is shown with."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found = re.findall(r"^::: (\S+)\n((?:    .*\n|\n)*)", page, re.M)
    members = {path: re.search(r"members: \[(.*)\]", options) for path, options in found}
    return {path: shown[1].split(", ") if shown else [] for path, shown in members.items()}


def named(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


PUBLIC = ("eagle31_hf", "eagle31_hf.serving.session", "eagle31_hf.generate.warm_up", "eagle31_hf.training.train")
"""Modules whose `__all__` is promised; so are the errors."""


def test_the_page_holds_every_public_name_and_no_other() -> None:
    from eagle31_hf import errors

    shown = {path: named(path) for path in documented()}
    assert errors in shown.values(), "errors are shown as a module"
    modules = [importlib.import_module(name) for name in PUBLIC]
    public = {f"{module.__name__}.{name}": getattr(module, name) for module in modules for name in module.__all__}
    assert not [name for name, thing in public.items() if thing not in (*shown.values(), errors.Eagle31Error)]
    assert not [path for path, thing in shown.items() if thing not in (*public.values(), errors)]


def test_whatever_is_shown_is_explained() -> None:
    silent = []
    for path, members in documented().items():
        thing = named(path)
        parts = {path: thing, **{f"{path}.{name}": inspect.getattr_static(thing, name) for name in members}}
        if inspect.isclass(thing) and not members:
            public = {name: part for name, part in vars(thing).items() if not name.startswith("_")}
            kinds = (property, classmethod, FunctionType)
            parts |= {f"{path}.{name}": part for name, part in public.items() if isinstance(part, kinds)}
        silent += [name for name, part in parts.items() if not inspect.getdoc(part)]
    assert not silent


def test_methods_that_pages_speak_of_are_shown() -> None:
    spoken = {name for page in PAGES for name in re.findall(r"Eagle31Drafter\.([a-z]\w+)", page.read_text("utf-8"))}
    assert spoken <= set(documented()["eagle31_hf.drafter.drafter.Eagle31Drafter"])


@pytest.mark.parametrize("page", [page for page in PAGES if "docs" in page.parts[:-1]], ids=lambda page: page.name)
def test_modules_that_pages_name_are_there(page: Path) -> None:
    """As `room/file` or `room/file.py`."""
    rooms = {name.partition(".")[0] for name in MODULES}
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)+)(?:\.py)?`", page.read_text(encoding="utf-8")))
    named = {path.replace("/", ".") for path in named if path.partition("/")[0] in rooms}
    assert not named - set(MODULES)


WALKS = ("generate", "chat request", "training row")
MOST_ENTERED = 50
"""Modules of which an eager `generate` call runs code, what it holds and asks on the way included (49 today)."""


def walk(which: str) -> list[str]:
    """Modules of a walk on the architecture page, from the first column of its table."""
    page = (ROOT / "docs" / "developing" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## Three walks")[2].partition("\n## ")[0]
    table = section.split("| file | what happens there |")[1 + WALKS.index(which)]
    return [path.replace("/", ".") for path in re.findall(r"^\| `(\S+)\.py` \|", table, re.M)]


@pytest.mark.parametrize("which", WALKS)
def test_each_file_of_a_walk_is_reached_from_one_before_it(which: str) -> None:
    modules, graph = walk(which), import_graph()
    assert len(modules) >= 8
    unreached = [
        each for place, each in enumerate(modules[1:], 1) if not any(each in graph[b] for b in modules[:place])
    ]
    assert not unreached


def test_a_generate_call_takes_the_walk() -> None:
    """By a call after the first, which also imports and tries things once."""
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32)
    eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)
    eagle.generation_config.acceleration = "eager"
    names, entered = {str(path): name for name, path in MODULES.items()}, dict[str, None]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename in names:
            entered.setdefault(names[frame.f_code.co_filename])

    prompt, endless = torch.arange(1, 20)[None], {"eos_token_id": None, "pad_token_id": 0}
    for tracer in (None, note):
        sys.setprofile(tracer)
        try:
            target.generate(prompt, assistant_model=eagle, do_sample=False, max_new_tokens=8, **endless)
        finally:
            sys.setprofile(None)
    assert eagle.stats is not None
    assert eagle.stats.rounds, "the text did not end with its first token"
    assert not set(walk("generate")) - set(entered)
    assert len(entered) <= MOST_ENTERED, [*entered]
