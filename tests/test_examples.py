"""Every example runs as a person would run it, without a network."""

import json
import os
import re
import runpy
import shlex
import socket
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import typer
from transformers import AutoTokenizer

from eagle31_hf import plan_memory
from eagle31_hf.cli import app
from eagle31_hf.cli.serve import READING_ROWS
from eagle31_hf.demo import target_path
from eagle31_hf.memory.cards import one_card
from eagle31_hf.memory.known_targets import known_targets
from eagle31_hf.training.settings import TrainingSettings
from helpers import seeded
from mtp_targets import target_with_head

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
RECIPES = sorted((FOLDER / "recipes").glob("*.sh"))
INTEGRATIONS = sorted((FOLDER / "integrations").glob("*.py"))
LONG = ("agent_loop",)  # it starts a server
HOME_LAB = sorted((FOLDER / "homelab").glob("*.sh"))
PRINTED = {"agent_loop": "tool: book_table", "train_demo_drafter": "acceptance length"}


def arguments_of(example: Path, folder: Path) -> list[str]:
    """What an example is called with; most need nothing."""
    if example.stem == "mtp":
        tokenizer = AutoTokenizer.from_pretrained(target_path())
        tokenizer.save_pretrained(folder / "target")
        target_with_head("qwen3_5_text", folder / "target", vocab_size=len(tokenizer))
        return [str(folder / "target")]
    if example.stem != "train_demo_drafter":
        return []
    chats = folder / "chats.jsonl"
    turns = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "It is four."}]
    chats.write_text("\n".join(json.dumps({"id": str(i), "conversations": turns}) for i in range(5)))
    return [str(chats), "--out", str(folder / "out"), "--max-steps", "1"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No address but this machine's own can be reached, and the Hub's client knows it."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
            raise OSError(f"an example asks the network for {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}.items():  # of processes it starts
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.thorough] if path.stem in LONG else [])
        for path in (*EXAMPLES, *INTEGRATIONS)
    ],
)
def test_example_runs_offline(example, tmp_path, offline, monkeypatch, capsys):
    for needed in re.findall(
        r"^from (langchain_huggingface|llama_index\.llms\.huggingface)", example.read_text(), re.M
    ):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), *arguments_of(example, tmp_path)])
    with seeded(0):
        runpy.run_path(str(example), run_name="__main__")
    assert PRINTED.get(example.stem, "tokens a pass") in capsys.readouterr().out


def test_examples_are_there_and_stay_short():
    assert (len(RECIPES), len(HOME_LAB), len(EXAMPLES) > 5) == (2, 3, True), "all are found"
    assert not [path.name for path in (*EXAMPLES, *INTEGRATIONS) if len(path.read_text().splitlines()) >= 60]


def told_in(script: Path, command: str) -> tuple[dict, dict[str, str]]:
    """The options of a script's line with `command`, checked by the command line itself, and the script's defaults."""
    lines = re.sub(r"\\\n", " ", script.read_text()).splitlines()
    defaults = dict(re.findall(r"^(\w+)=\$\{\w+:-(.*)\}$", script.read_text(), re.M))
    (line,) = [line for line in lines if re.search(rf"eagle31\W+{command} ", line) and line[0] != "#"]
    words = shlex.split(line.removesuffix('"$@"'))
    known = typer.main.get_command(app).commands[command].load()  # type: ignore[attr-defined]
    return known.make_context(command, words[words.index(command) + 1 :]).params, defaults


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_runs_that_can_be_told(recipe: Path) -> None:
    """Every option of a recipe exists, has the right type, and the settings it makes are sound."""
    told, _ = told_in(recipe, "train")
    known = {field.name for field in fields(TrainingSettings)}
    settings = TrainingSettings(**{
        name: tuple(value) if isinstance(value, list) else value for name, value in told.items() if name in known
    })  # fmt: skip
    settings.check()
    assert settings.target.startswith("meta-llama/")
    assert os.access(recipe, os.X_OK)


@pytest.mark.parametrize("script", HOME_LAB, ids=lambda path: path.stem)
def test_home_lab_plans_fit_and_are_what_is_served(script: Path) -> None:
    """By formula, on the card the script is for: what it plans is what it then serves."""
    planned, defaults = told_in(script, "plan")
    served, _ = told_in(script, "serve")
    assert (served["context"], served["max_batch"] + READING_ROWS) == (planned["context"], planned["batch"])
    assert (served["quantization"] == "4bit") == (planned["quantization"] == "4bit")
    name = defaults["TARGET"].rpartition("/")[2].removesuffix("-Instruct").replace("-", " ")
    plan = plan_memory(
        known_targets()[name],
        quantization=planned["quantization"],
        card=one_card(planned["card"]),
        context=planned["context"],
        batch=planned["batch"],
    )
    assert plan.fits
    assert os.access(script, os.X_OK)
