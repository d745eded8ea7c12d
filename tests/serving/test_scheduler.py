"""Who reads and who writes next: order, limits and turns, without a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.serving.scheduler import QueueFullError, Scheduler
from eagle31_hf.serving.text import Request


def scheduler(**sizes):
    return Scheduler(**{"max_rows": 2, "max_waiting": 4, "read_budget": 8, **sizes})


def submit(made):
    return made.submit(Request(prompt=(1,), max_new_tokens=1), lambda event: None)


def read_to_the_end(made, tokens):
    """Take the first that waits up to where it writes. Sizes of the pieces its prompt was read in; 0 for a round."""
    begun = made.next_step()
    if begun.round:
        begun = made.next_step()
    assert begun.begin is not None
    made.begun(tokens)
    turns = []
    while made.reading is not None:
        step = made.next_step()
        turns.append(step.read)
        if not step.round:
            made.has_read(step.read)
    return turns


def test_first_come_first_served_and_no_more_than_there_are_rows():
    made = scheduler()
    tickets = [submit(made) for _ in range(3)]
    read_to_the_end(made, 3)
    read_to_the_end(made, 3)
    assert made.writing == tickets[:2]
    step = made.next_step()
    assert (step.begin, step.round) == (None, True)
    made.leave(tickets[0])
    assert made.next_step().begin is tickets[2]


def test_a_long_prompt_is_read_in_pieces_while_others_write_and_at_once_while_nobody_does():
    made = scheduler()
    submit(made)
    assert read_to_the_end(made, 30) == [30]
    submit(made)
    assert read_to_the_end(made, 30) == [8, 0, 8, 0, 8, 0, 6], "the others write between the pieces"


def test_short_prompts_join_together_between_two_rounds():
    """One a round would leave rows empty: a text here takes fewer rounds than there are rows."""
    made = scheduler(max_rows=16, max_waiting=16, read_budget=80)
    for _ in range(12):
        submit(made)
    read_to_the_end(made, 5)
    begun_between_rounds = []
    for _ in range(3):
        begun = 0
        while not (step := made.next_step()).round:
            if step.begin is not None:
                begun += 1
                made.begun(5)
            else:
                made.has_read(step.read)
        begun_between_rounds.append(begun)
    assert begun_between_rounds == [4, 4, 3]


def test_a_burst_fills_the_free_rows_before_the_queue():
    made = scheduler(max_rows=8, max_waiting=20)
    for _ in range(28):
        submit(made)
    with pytest.raises(QueueFullError, match="20 requests"):
        submit(made)
    read_to_the_end(made, 1)  # who has begun was counted before
    with pytest.raises(QueueFullError, match="20 requests"):
        submit(made)


def test_a_full_queue_refuses_and_a_place_that_is_free_again_is_given_away():
    made = scheduler(max_rows=1, max_waiting=1)
    first, _ = submit(made), submit(made)
    with pytest.raises(QueueFullError, match="1 requests"):
        submit(made)
    first.cancelled = True
    assert made.next_step().dropped == (first,)
    submit(made)


def test_what_is_cancelled_while_it_is_read_makes_way():
    made = scheduler()
    first, second = submit(made), submit(made)
    made.next_step()
    made.begun(50)
    first.cancelled = True
    step = made.next_step()
    assert step.dropped == (first,)
    assert step.begin is second


@given(st.data())
def test_every_request_ends_and_limits_hold_whatever_happens(data):
    """Arrivals, cancellations and ends in any order: nobody is lost or served twice, in order of arrival."""
    made = scheduler(max_rows=data.draw(st.integers(1, 4)), max_waiting=data.draw(st.integers(1, 6)))
    arrived, began, gone = [], [], []
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["submit", "cancel", "step", "end"]))
        if what == "submit":
            try:
                arrived.append(submit(made))
            except QueueFullError:
                assert len(made.waiting) == made.max_waiting + made.free_rows
        elif what == "cancel" and arrived:
            data.draw(st.sampled_from(arrived)).cancelled = True
        elif what == "end" and made.writing:
            ended = made.writing[data.draw(st.integers(0, len(made.writing) - 1))]
            made.leave(ended)
            gone.append(ended)
        else:
            step = made.next_step()
            gone += step.dropped
            if step.begin is not None:
                began.append(step.begin)
                made.begun(data.draw(st.integers(1, 30)))
            elif step.read:
                made.has_read(step.read)
        assert len(made.writing) <= made.max_rows
        assert len(made.waiting) <= made.max_waiting + made.free_rows
    turns = [arrived.index(ticket) for ticket in began]
    assert turns == sorted(turns)
    held = [*made.waiting, *made.writing, *([made.reading] if made.reading else [])]
    assert sorted(arrived.index(ticket) for ticket in [*gone, *held]) == [*range(len(arrived))]
