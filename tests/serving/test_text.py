"""Text as it grows, and where it ends: stop strings across tokens, lengths, ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.serving.text import Request, StopScanner, Writer


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
