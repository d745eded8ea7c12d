"""Drafts from the text itself, against a search over all of it; and when they are preferred to the drafter's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.drafting.lookup import (
    LONGEST_MATCH,
    NOTHING,
    PLACES_TRIED,
    SHORTEST_MATCH,
    Lookup,
    LookupRates,
    RepeatingText,
    TextIndex,
)

TEXTS = st.lists(st.integers(0, 4), max_size=60)


def searched(text: list[int], length: int) -> Lookup:
    """The same by looking at every place, the latest of the last few places of the pair only."""
    best, at = 0, -1
    places = [end for end in range(len(text) - 1, SHORTEST_MATCH - 1, -1) if text[end - 2 : end] == text[-2:]]
    for end in places[:PLACES_TRIED]:
        match = 0
        while match < min(LONGEST_MATCH, end) and text[end - 1 - match] == text[len(text) - 1 - match]:
            match += 1
        if match > best:
            best, at = match, end
    if at < 0 or len(text) < SHORTEST_MATCH:
        return NOTHING
    following = list(text)
    while len(following) < at + length:
        following.append(following[len(following) - len(text) + at])
    return Lookup(best, tuple(following[at : at + length]))


@given(TEXTS, st.integers(1, 12))
def test_finds_what_a_search_finds(text: list[int], length: int) -> None:
    assert TextIndex(text).lookup(length) == searched(text, length)


@given(TEXTS, TEXTS, TEXTS)
def test_tokens_that_were_taken_back_leave_no_trace(prompt: list[int], wrong: list[int], right: list[int]) -> None:
    text = RepeatingText(prompt, 0)
    for new in ([3], [3, *wrong], [3]):
        text.look_up(new, 5)
    assert text.look_up([3, *right], 5) == TextIndex([*prompt, 3, *right]).lookup(5)


def test_lookups_are_judged_without_being_drafted() -> None:
    rates = LookupRates()
    before = rates.reach(4, 3)
    for _ in range(20):
        rates.record(4, [1, 2, 3], [1, 2, 3])
    better = rates.reach(4, 3)
    assert all(a > b for a, b in zip(better, before, strict=True))
    for _ in range(100):
        rates.record(4, [1, 2, 3], [7])
    assert rates.reach(4, 3)[0] < 0.2
    assert rates.reach(2, 1)[0] == LookupRates().reach(2, 1)[0], "short matches were not tried"


def test_reach_falls_with_depth_and_longer_matches_are_likelier_right() -> None:
    reach = LookupRates().reach(2, 10)
    assert reach == sorted(reach, reverse=True)
    first = [LookupRates().reach(match, 1)[0] for match in (2, 4, LONGEST_MATCH, LONGEST_MATCH + 1)]
    assert first == pytest.approx([1 / 2, 2 / 3, 4 / 5, 4 / 5])
