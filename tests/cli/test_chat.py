"""`eagle31 chat` fed with lines: answers, commands, mistakes; and what is shown of thoughts."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from eagle31_hf.cli import app
from eagle31_hf.cli import chat as command
from eagle31_hf.cli.chat import _AnswerView
from eagle31_hf.serving.session import ChatSession, Piece

QUESTION = "What is the weather going to be like in Portland this weekend?"


def chat(*lines, arguments=()):
    told = CliRunner().invoke(app, ["chat", *arguments], input="\n".join(lines) + "\n", env={"COLUMNS": "100"})
    if told.exception is not None and not isinstance(told.exception, SystemExit):
        raise told.exception
    return told


def test_a_conversation_with_commands():
    out = chat(
        QUESTION, "/stats", "/undo", "/retry", "/wrong", "/temperature warm", "/temperature 0.7", "/system Be brief.",
        QUESTION, "/save chat.json", "/plan", "/help", "/quit", "never read",
    ).stdout  # fmt: skip
    assert "degrees Fahrenheit" in " ".join(out.split())
    assert f"you › {QUESTION}\n  ‹ " in out, "a file's questions stand beside the answers"
    for told in ("read 17 of 17", "tokens a pass", "taken back: What is", "nothing has been said yet",
                 "got /wrong", "got temperature 'warm'", "temperature 0.7", "Be brief.",
                 "chat /save was removed in 0.2.0", "chat /plan was removed in 0.2.0", "/temperature"):  # fmt: skip
        assert told in " ".join(out.split()), told
    mistake = out.partition("got /wrong")[2].partition("got temperature")[0]
    assert {"/stats,", "/temperature,", "/quit"} <= set(mistake.split()), "a command's name is not torn at the edge"
    assert "never read" not in out


@pytest.mark.parametrize("are_kept", [False, True])
def test_kept_graphs_are_loaded_before_the_first_answer(monkeypatch, are_kept):
    sessions, ask = [], ChatSession.ask
    monkeypatch.setattr(command, "kept_packages", lambda _pair: object() if are_kept else None)
    monkeypatch.setattr(ChatSession, "ask", lambda self, *said: sessions.append(self) or ask(self, *said))
    told = chat("/stats", QUESTION, arguments=["--temperature", "0.7"])
    assert len(set(sessions)) == 1 + are_kept
    assert "nothing has been answered yet" in told.stdout, "what was written for that is no part of the conversation"
    assert "read 17 of 17" in " ".join(told.stdout.split())


@pytest.mark.parametrize("drafter", [(), ("--drafter", "none")], ids=str)
def test_a_plan_is_shown_before_anything_is_loaded_and_kept_to(drafter):
    told = chat(QUESTION, arguments=["--memory", "auto", "--context", "256", "--no-colour", *drafter])
    out = " ".join(told.stdout.split())
    assert "tokens a pass" in out
    assert out.count("context 256 tokens") == 1
    assert out.index("context 256 tokens") < out.index("lists commands")
    assert "read 17 of 17" in out


def test_a_template_that_wants_more_than_one_message_is_strict_and_not_broken(tmp_path):
    strict = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('say who I am') }}{% endif %}Hello"
    (tmp_path / "strict.jinja").write_text(strict)
    template = ["--chat-template", str(tmp_path / "strict.jinja"), "--max-new-tokens", "4"]
    told = chat("Hi.", arguments=[*template, "--system", "Be brief."])
    assert "takes no chat of one message, but says 'say who I am'" in " ".join(told.stderr.split())
    assert "4 tokens, cut off (--max-new-tokens)" in told.stdout


@pytest.mark.parametrize("shows", [True, False])
def test_thoughts_are_folded_unless_they_are_asked_for(shows):
    console = Console(file=StringIO(), width=80, record=True)
    view = _AnswerView(console, colour=False, thoughts=shows)
    for text, thought in (("Let me ", True), ("see.", True), ("\n\n", False), ("Yes, ", False), ("it is.", False)):
        view.add(Piece(text, drafted=False, thought=thought))
    view.end()
    out = console.export_text()
    assert ("Let me see." in out) == shows
    assert ("thought 3 words" in out) != shows
    assert out.rstrip().endswith("Yes, it is.")


def test_the_count_of_folded_thoughts_is_one_line_in_a_terminal():
    console = Console(file=StringIO(), width=80, force_terminal=True, record=True)
    view = _AnswerView(console, colour=False, thoughts=False)
    for word in ("Let ", "me ", "see."):
        view.add(Piece(word, drafted=False, thought=True))
    view.end()
    assert "thinking …" in console.file.getvalue()
    assert console.file.getvalue().rpartition("\x1b[2K")[2].count("words") == 1, "what was shown meanwhile is erased"
