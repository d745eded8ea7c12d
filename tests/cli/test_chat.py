"""What is shown while a text is written (whole characters, and in green what was drafted), and `eagle31 chat` fed with
lines: answers, commands, mistakes, thoughts."""

from __future__ import annotations

from io import StringIO

import pytest
import torch
from command_line import DRAFTER, PROMPT, TARGET, run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf.cli import chat as command
from eagle31_hf.cli.chat import _AnswerView
from eagle31_hf.cli.options import StreamedText
from eagle31_hf.serving.session import ChatSession, Piece
from eagle31_hf.texts.decoder import IncrementalDecoder, RoundStreamer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_decoded_text_and_never_split_a_character(tokenizer, data):
    text = data.draw(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=20))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if data.draw(st.booleans()):  # any ids at all, broken characters among them
        ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.feed(token) for token in ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def stream(tokenizer, blocks):
    console = Console(file=StringIO(), record=True, width=100, force_terminal=True, color_system="standard")
    writer = StreamedText(console)
    streamer = RoundStreamer(
        IncrementalDecoder(tokenizer), lambda text, accepted: writer.add(text, "green" if accepted else "")
    )
    streamer.put(torch.zeros(1, 5, dtype=torch.long))  # the prompt
    for block in blocks:
        streamer.put(torch.tensor(block))
    streamer.end()
    return console.export_text(clear=False, styles=True), console.export_text()


def test_accepted_tokens_are_green_and_the_last_of_a_block_is_not(tokenizer):
    first, second, third = tokenizer("We like bread", add_special_tokens=False)["input_ids"][:3]
    styled, plain = stream(tokenizer, [[first], [second, third]])
    assert plain.strip() == tokenizer.decode([first, second, third])
    assert styled.count("\x1b[32m") == 1
    assert f"\x1b[32m {tokenizer.decode([second]).strip()}\x1b[0m" in styled


def test_a_label_waits_for_the_first_piece_and_nothing_is_lost():
    console = Console(file=StringIO(), width=20, record=True)
    streamed = StreamedText(console, "  > ")
    streamed.add("")
    assert not console.export_text(clear=False), "what is logged before the text has a line of its own"
    text = "The number of [pencils] in the box is\n\n24  and more."
    for piece in (text[:7], text[7:30], text[30:]):
        streamed.add(piece)
    streamed.end()
    assert console.export_text() == f"  > {text}\n"


def test_a_base_model_goes_on_with_its_prompt_and_no_roles_are_shown(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(TARGET).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    out = run("generate", "--target", tmp_path, "--drafter", DRAFTER, "--prompt", "The weather in Portland",
              "--no-compare", "--max-new-tokens", 4).stdout  # fmt: skip
    assert "The weather in Portland" in out
    assert not {"user:", "assistant:"} & set(out.split())


# --- chat -------------------------------------------------------------------------------------------------------------


def chat(*lines, arguments=()):
    return run("chat", *arguments, given="\n".join(lines) + "\n")


def test_a_conversation_with_commands():
    out = chat(
        PROMPT, "/stats", "/undo", "/retry", "/wrong", "/temperature warm", "/temperature 0.7", "/system Be brief.",
        PROMPT, "/save chat.json", "/plan", "/help", "/quit", "never read",
    ).stdout  # fmt: skip
    assert "degrees Fahrenheit" in " ".join(out.split())
    assert f"you › {PROMPT}\n  ‹ " in out, "a file's questions stand beside the answers"
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
    told = chat("/stats", PROMPT, arguments=["--temperature", "0.7"])
    assert len(set(sessions)) == 1 + are_kept
    assert "nothing has been answered yet" in told.stdout, "what was written for that is no part of the conversation"
    assert "read 17 of 17" in " ".join(told.stdout.split())


@pytest.mark.parametrize("drafter", [(), ("--drafter", "none")], ids=str)
def test_a_plan_is_shown_before_anything_is_loaded_and_kept_to(drafter):
    told = chat(PROMPT, arguments=["--memory", "auto", "--context", "256", "--no-colour", *drafter])
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
    assert "4 tokens, cut off (--max-new-tokens, or the context is full)" in " ".join(told.stdout.split())


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
