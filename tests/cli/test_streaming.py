"""What streaming shows: whole characters, and in green what was drafted."""

from io import StringIO

import pytest
import torch
from command_line import DRAFTER, TARGET, run
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf.cli.options import StreamedText
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
