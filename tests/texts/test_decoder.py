"""Token ids as text: words with their spaces, characters across tokens."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle31_hf.texts.decoder import IncrementalDecoder


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
    prompt, words = ids_of(sentencepiece, "<s>", "▁Once"), ids_of(sentencepiece, "▁upon", "▁a", "▁time", "s")
    decoder = IncrementalDecoder(sentencepiece, prompt=prompt)
    assert "".join(map(decoder.feed, words)) == " upon a times"
    alone = IncrementalDecoder(sentencepiece, prompt=(1,))
    assert "".join(map(alone.feed, words)) + alone.flush() == "upon a times", "at a text's beginning there is no space"


def test_tokens_have_their_own_spaces_and_whole_characters(sentencepiece):
    prompt = ids_of(sentencepiece, "<s>", "▁Once")
    texts = IncrementalDecoder(sentencepiece, prompt=prompt, skip_special_tokens=False)
    accent = ids_of(sentencepiece, *(f"<0x{byte:02X}>" for byte in "中".encode()))
    words = [*ids_of(sentencepiece, "▁upon", "▁a"), *accent, *ids_of(sentencepiece, "s", "</s>")]
    assert texts.peek(words[1]) == " a", "what may come next is told the same way"
    offsets, told = [], []
    for word in words:
        offsets.append(texts.length)
        told.append(texts.feed(word))
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
        decoder = IncrementalDecoder(tokenizer, prompt=everything[:cut])
        shown = "".join(decoder.feed(token) for token in everything[cut:])
        assert shown == wanted
        assert decoder.length == len(wanted)

    check()


def test_what_does_not_complete_a_prompts_character_is_shown_alone(bytewise):
    prompt = bytewise("a日")["input_ids"][:-1]
    decoder = IncrementalDecoder(bytewise, prompt=prompt)
    assert "".join(decoder.feed(token) for token in bytewise("b c")["input_ids"]) == "b c"
    assert IncrementalDecoder(bytewise, prompt=prompt).flush() == ""
