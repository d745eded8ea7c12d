"""What streaming shows: whole characters, whole words, and in green what was drafted."""

from io import StringIO

import pytest
import torch
from command_line import DRAFTER, TARGET, run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf.cli import terminal
from eagle31_hf.cli.wrapped_writer import WrappedWriter


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
    decoder = terminal.IncrementalDecoder(tokenizer)
    pieces = [decoder.feed(token) for token in ids]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def stream(tokenizer, blocks, width=100):
    console = Console(file=StringIO(), record=True, width=width, force_terminal=True, color_system="standard")
    streamer = terminal.AcceptanceStreamer(tokenizer, console)
    streamer.put(torch.zeros(1, 5, dtype=torch.long))  # the prompt
    for block in blocks:
        streamer.put(torch.tensor(block))
    streamer.end()
    return console.export_text(clear=False, styles=True), console.export_text()


def test_accepted_tokens_are_green_and_the_last_of_a_block_is_not(tokenizer):
    first, second, third = tokenizer("We like bread", add_special_tokens=False)["input_ids"][:3]
    styled, plain = stream(tokenizer, [[first], [second, third]])
    words = [tokenizer.decode([token]).strip() for token in (first, second, third)]
    assert plain.strip() == tokenizer.decode([first, second, third])
    assert f"\x1b[32m{words[1]}\x1b[0m" in styled
    assert f"\x1b[32m{words[0]}" not in styled
    assert f"\x1b[32m{words[2]}" not in styled


def test_lines_break_between_words_and_lose_nothing(tokenizer):
    text = "The number of pencils in the box is 24 and the rest of them are somewhere else.\n#### 24"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    _, plain = stream(tokenizer, [ids[i : i + 3] for i in range(0, len(ids), 3)], width=20)
    assert max(map(len, plain.splitlines())) <= 20
    assert plain.split() == text.split()
    assert not any(line.endswith(" ") for line in plain.splitlines())


def test_lines_behind_the_first_are_indented_and_a_label_waits_for_a_word():
    console = Console(file=StringIO(), width=20, record=True)
    writer = WrappedWriter(console, 20, "  > ", 4)
    assert not console.export_text(clear=False), "what is logged before the text has a line of its own"
    writer.add("The number of pencils\n\nis 24.")
    writer.end()
    assert console.export_text() == "  > The number of\n    pencils\n\n    is 24.\n"


def test_a_base_model_goes_on_with_its_prompt_and_no_roles_are_shown(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = None
    AutoModelForCausalLM.from_pretrained(TARGET).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    out = run("generate", "--target", tmp_path, "--drafter", DRAFTER, "--prompt", "The weather in Portland",
              "--no-compare", "--max-new-tokens", 4).stdout  # fmt: skip
    assert "The weather in Portland" in out
    assert not {"user:", "assistant:"} & set(out.split())
