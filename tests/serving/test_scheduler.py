"""Who reads and who writes next: order, limits and turns, without a model."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.serving.scheduler import QueueFullError, Scheduler
from eagle31_hf.serving.text import Request


class Told:
    """An engine that keeps what it is told; prompts are as long as `lengths` says, or of one token."""

    def __init__(self, made, lengths=()):
        self.made, self.lengths, self.log = made, list(lengths), []
        self.began, self.gone, self.fails = [], [], False

    def drop(self, ticket):
        self.made.leave(ticket)
        self.gone.append(ticket)

    def begin(self, ticket):
        self.began.append(ticket)
        if self.fails:
            raise ValueError("tried in a test")
        return self.lengths.pop(0) if self.lengths else 1

    def read(self, ticket, num_tokens):
        self.log.append(num_tokens)

    def join(self, ticket):
        self.log.append("join")

    def reading_failed(self, ticket, error):
        self.drop(ticket)

    def round(self):
        self.log.append("round")


def scheduler(**sizes):
    return Scheduler(**{"max_rows": 2, "max_waiting": 4, "read_budget": 8, **sizes})


def submit(made):
    return made.submit(Request(prompt=(1,), max_new_tokens=1), lambda event: None)


def test_first_come_first_served_and_no_more_than_there_are_rows():
    made = scheduler()
    told, tickets = Told(made, [3, 3, 3]), [submit(made) for _ in range(3)]
    made.turn(told)
    assert made.writing == tickets[:2]
    made.leave(tickets[0])
    made.turn(told)
    assert made.writing == tickets[1:]


def test_a_long_prompt_is_read_in_pieces_while_others_write_and_at_once_while_nobody_does():
    made = scheduler()
    told = Told(made, [30, 30])
    submit(made)
    made.turn(told)
    assert told.log == [30, "join", "round"]
    submit(made)
    for _ in range(4):
        made.turn(told)
    assert told.log[3:] == [8, "round", 8, "round", 8, "round", 6, "join", "round"], "the others write between pieces"


def test_short_prompts_join_together_between_two_rounds():
    """One a round would leave rows empty: a text here takes fewer rounds than there are rows."""
    made = scheduler(max_rows=16, max_waiting=16, read_budget=80)
    told = Told(made, [5] * 12)
    for _ in range(12):
        submit(made)
    begun = [0]
    for _ in range(3):
        made.turn(told)
        begun.append(len(told.began))
    assert [now - before for before, now in itertools.pairwise(begun)] == [5, 4, 3]


def test_a_burst_fills_the_free_rows_before_the_queue():
    made = scheduler(max_rows=8, max_waiting=20)
    for _ in range(28):
        submit(made)
    with pytest.raises(QueueFullError, match="20 requests"):
        submit(made)
    made.turn(Told(made))  # who has begun was counted before
    with pytest.raises(QueueFullError, match="20 requests"):
        submit(made)


def test_what_is_cancelled_or_fails_makes_way():
    made = scheduler(max_rows=1, max_waiting=1)
    told = Told(made, [50, 50])
    first, second = submit(made), submit(made)
    with pytest.raises(QueueFullError, match="1 requests"):
        submit(made)
    first.cancelled = True
    made.turn(told)
    assert (told.gone, made.writing) == ([first], [second])
    third = submit(made)
    made.leave(second)
    told.fails = True
    made.turn(told)
    assert (told.gone, made.tickets) == ([first, third], [])


@given(st.data())
def test_every_request_ends_and_limits_hold_whatever_happens(data):
    """Arrivals, cancellations, failures and ends in any order: nobody is lost or served twice, in order of arrival."""
    made = scheduler(max_rows=data.draw(st.integers(1, 4)), max_waiting=data.draw(st.integers(1, 6)))
    told, arrived = Told(made), []
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["submit", "cancel", "turn", "end"]))
        if what == "submit":
            try:
                arrived.append(submit(made))
            except QueueFullError:
                assert len(made.waiting) == made.max_waiting + made.free_rows
        elif what == "cancel" and arrived:
            data.draw(st.sampled_from(arrived)).cancelled = True
        elif what == "end" and made.writing:
            told.drop(data.draw(st.sampled_from(made.writing)))
        else:
            told.lengths = data.draw(st.lists(st.integers(1, 30), min_size=5, max_size=5))
            told.fails = data.draw(st.integers(0, 4)) == 0
            made.turn(told)
        assert len(made.writing) <= made.max_rows
        assert len(made.waiting) <= made.max_waiting + made.free_rows
    turns = [arrived.index(ticket) for ticket in told.began]
    assert turns == sorted(turns)
    assert sorted(map(arrived.index, [*told.gone, *made.tickets])) == [*range(len(arrived))]
