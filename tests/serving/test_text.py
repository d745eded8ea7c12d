"""Text as it grows: stop strings across tokens, characters across tokens."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle31_hf.serving.text import Request, StopScanner, Writer
from eagle31_hf.texts.decoder import IncrementalDecoder, TokenTexts


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_text_goes_through_up_to_the_first_stop_however_it_is_cut(text, stops, data):
    scanner, shown, at = StopScanner(stops), "", 0
    while at < len(text) and not scanner.found:
        step = data.draw(st.integers(1, 5))
        shown += scanner.feed(text[at : at + step])
        at += step
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    if scanner.found:
        assert first is not None
        assert shown == text[:first] or any(text[:at].find(stop) == len(shown) for stop in stops)
    else:
        assert first is None
        assert shown + scanner.feed("", is_last=True) == text


def writer_of(pair, most, **request):
    return Writer(pair.tokenizer, Request((1,), most, end_ids=frozenset([2]), **request))


def test_a_text_ends_in_the_middle_of_a_round(pair):
    ids = pair.tokenizer("We like bread and butter", add_special_tokens=False)["input_ids"]
    writer = writer_of(pair, 3)
    added, shown = writer.append(ids)
    assert (added, writer.finish, writer.remaining) == (3, "length", 0)
    assert shown == pair.tokenizer.decode(ids[:3])
    writer = writer_of(pair, 30, stop=("bread",))
    added, shown = writer.append([*ids, 2])
    assert (writer.finish, shown) == ("stop", "We like ")
    assert added < len(ids)
    writer = writer_of(pair, 30, stop=("breadcrumbs",))
    assert writer.append([*ids, 2, 5])[0] == len(ids) + 1
    assert (writer.finish, writer.tokens[-1]) == ("stop", 2)


def test_what_ends_a_text_stays_in_it_where_that_is_asked_for(pair):
    ids = pair.tokenizer("We like bread and butter", add_special_tokens=False)["input_ids"]
    kept = writer_of(pair, 30, stop=("bread",), keep_stop=True)
    assert kept.append([*ids, 2])[1] == "We like bread"
    special = writer_of(pair, 30, keep_stop=True, skip_special_tokens=False)
    assert special.append([*ids, 2])[1] == f"We like bread and butter{pair.tokenizer.decode([2])}"
    assert writer_of(pair, 30, skip_special_tokens=False).append([*ids, 2])[1] == "We like bread and butter"


def test_before_its_least_length_nothing_ends_a_text(pair):
    ids = pair.tokenizer("We like bread and bread and bread", add_special_tokens=False)["input_ids"]
    early = pair.tokenizer("We like bread", add_special_tokens=False)["input_ids"]
    writer = writer_of(pair, 30, stop=("bread",), min_new_tokens=len(early))
    assert writer.append([*ids, 2])[1] == "We like bread and "


@pytest.fixture(scope="module")
def sentencepiece():
    """As SentencePiece's tokenizers are: a word's space is a mark before it, rare characters are bytes."""
    words = ["▁Once", "▁upon", "▁a", "▁time", "s", ",", "▁"]
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE({word: i for i, word in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def ids_of(tokenizer, *words):
    return tokenizer.convert_tokens_to_ids(list(words))


def test_a_text_begins_with_the_space_that_its_first_word_has(sentencepiece):
    prompt = ids_of(sentencepiece, "<s>", "▁Once")
    request = Request(tuple(prompt), 30)
    words = ids_of(sentencepiece, "▁upon", "▁a", "▁time", "s")
    assert Writer(sentencepiece, request).append(words)[1] == " upon a times"
    alone = Writer(sentencepiece, Request((1,), 30))
    assert alone.append(words)[1] + alone.append([2])[1] == "upon a times", "at a text's beginning there is no space"


def test_tokens_have_their_own_spaces_and_whole_characters(sentencepiece):
    prompt = ids_of(sentencepiece, "<s>", "▁Once")
    texts = TokenTexts(sentencepiece, prompt)
    accent = ids_of(sentencepiece, *(f"<0x{byte:02X}>" for byte in "中".encode()))
    words = [*ids_of(sentencepiece, "▁upon", "▁a"), *accent, *ids_of(sentencepiece, "s", "</s>")]
    assert texts.of(words[1]) == " a", "what may come next is told the same way"
    offsets, told = [], []
    for word in words:
        offsets.append(texts.length)
        told.append(texts.add(word))
    assert told == [" upon", " a", "", "", "中", "s", "</s>"]
    assert offsets == [0, 5, 7, 7, 7, 8, 9]


@pytest.fixture(scope="module")
def bytewise():
    """Each byte of a character a token, as byte-level tokenizers have rare characters."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({character: i for i, character in enumerate(characters)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


CHARACTERS = st.text(st.sampled_from("aé日本🌶 \n"), max_size=12)


@pytest.mark.parametrize("made_by", ["bytewise", "sentencepiece"])
def test_each_character_belongs_to_one_token(made_by, request):
    tokenizer = request.getfixturevalue(made_by)

    @given(CHARACTERS.filter(bool), CHARACTERS.filter(bool), st.data())
    def check(prompt, text, data):
        prompt_ids, ids = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (prompt, text))
        moved = data.draw(st.integers(0, min(3, len(prompt_ids) - 1)))  # the prompt may end within a character
        everything = [*prompt_ids, *ids]
        cut = len(prompt_ids) - moved
        whole = tokenizer.decode(everything)
        unfinished = next(n for n in range(4) if not tokenizer.decode(everything[: cut - n]).endswith("\ufffd"))
        wanted = whole[len(tokenizer.decode(everything[: cut - unfinished])) :]
        texts = TokenTexts(tokenizer, everything[:cut])
        told = "".join(texts.add(token) for token in everything[cut:])
        decoder = IncrementalDecoder(tokenizer, prompt=everything[:cut])
        shown = "".join(decoder.feed(token) for token in everything[cut:])
        assert told == shown == wanted
        assert texts.length == len(wanted)

    check()


def test_what_does_not_complete_a_prompts_character_is_shown_alone(bytewise):
    prompt = bytewise("a日")["input_ids"][:-1]
    decoder = IncrementalDecoder(bytewise, prompt=prompt)
    assert "".join(decoder.feed(token) for token in bytewise("b c")["input_ids"]) == "b c"
    assert IncrementalDecoder(bytewise, prompt=prompt).flush() == ""
