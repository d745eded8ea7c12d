"""What needs no model: who reads and who writes next (order, limits and turns); text as it grows, and where it ends."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from eagle31_hf.serving.api_errors import ApiError
from eagle31_hf.serving.batch import EngineSettings
from eagle31_hf.serving.rows import ServedText
from eagle31_hf.serving.scheduler import Scheduler
from eagle31_hf.serving.text import Event, Request, StopScanner, Writer


class NotedBatch:
    """A batch without a model; prompts are as long as `lengths` says, or of one token."""

    def __init__(self, lengths, settings):
        self.lengths, self.settings = list(lengths), settings
        self.texts, self.reading, self.to_read = [], None, 0
        self.began, self.log, self.ending, self.fails, self.keeps = [], [], [], False, False

    def begin(self, text):
        self.began.append(text)
        self.reading, self.to_read = text, self.lengths.pop(0) if self.lengths else 1
        if self.fails:
            raise ValueError("tried in a test")

    def read(self, num_tokens):
        self.log.append(num_tokens)
        self.to_read -= num_tokens

    def join(self):
        self.log.append("join")
        self.texts.append(self.reading)
        self.reading = None
        return Event(tokens=(1,))

    def drop_reading(self):
        self.reading = None

    def leave(self, text, *, trusted=True):
        if self.keeps:
            raise ValueError("tried in a test")
        self.texts.remove(text)

    def round(self):
        self.log.append("round")
        ended = [text for text in self.ending if text in self.texts]
        for text in ended:
            self.texts.remove(text)
        return [(text, Event(finish="stop")) for text in ended]

    def reset(self):
        self.texts.clear()


def scheduler(lengths=(), *, max_rows=2, max_waiting=4, prefill_chunk=8):
    settings = EngineSettings(max_rows=max_rows, max_waiting=max_waiting, prefill_chunk=prefill_chunk)
    return Scheduler(NotedBatch(lengths, settings))


def submit(made, told=None):
    def on_event(event):
        if event.tokens:
            made.batch.log.append("first token")
        if told is not None and event.finish is not None:
            told.append((text, event.finish))

    text = ServedText(Request(prompt=(1,), max_new_tokens=1), on_event)
    made.submit(text)
    return text


def test_a_long_prompt_is_read_in_pieces_while_others_write_and_at_once_while_nobody_does():
    made = scheduler([30, 30])
    log = made.batch.log
    submit(made)
    made.turn()
    assert log == [30, "join", "first token", "round"], "it need not wait for the others' round"
    submit(made)
    for _ in range(4):
        made.turn()
    pieces = [8, "round", 8, "round", 8, "round", 6, "join", "first token", "round"]
    assert log[4:] == pieces, "the others write between them"


def test_short_prompts_join_together_between_two_rounds():
    """One a round would leave rows empty: a text here takes fewer rounds than there are rows."""
    made = scheduler([5] * 12, max_rows=16, max_waiting=16, prefill_chunk=80)
    for _ in range(12):
        submit(made)
    begun = [0]
    for _ in range(3):
        made.turn()
        begun.append(len(made.batch.began))
    assert [now - before for before, now in itertools.pairwise(begun)] == [5, 4, 3]


@given(st.data())
def test_every_request_ends_and_limits_hold_whatever_happens(data):
    """Arrivals, cancellations, failures and ends in any order: nobody is lost or served twice, in order of arrival."""
    made = scheduler(max_rows=data.draw(st.integers(1, 4)), max_waiting=data.draw(st.integers(1, 6)))
    batch, arrived, told, settings = made.batch, [], [], made.settings
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["submit", "cancel", "turn", "end"]))
        if what == "submit":
            try:
                arrived.append(submit(made, told))
            except ApiError:
                assert len(made.waiting) == settings.max_waiting + settings.max_rows - made.running
        elif what == "cancel" and arrived:
            data.draw(st.sampled_from(arrived)).cancelled = True
        elif what == "end" and batch.texts:
            batch.ending.append(data.draw(st.sampled_from(batch.texts)))
        else:
            batch.lengths = data.draw(st.lists(st.integers(1, 30), min_size=5, max_size=5))
            batch.fails, batch.keeps = (data.draw(st.integers(0, 4)) == 0 for _ in range(2))
            made.turn()
        assert len(batch.texts) <= settings.max_rows
        assert len(made.waiting) <= settings.max_waiting + settings.max_rows - made.running
    turns = [arrived.index(text) for text in batch.began]
    assert turns == sorted(turns)
    assert sorted(map(arrived.index, [*(text for text, _ in told), *made.texts])) == [*range(len(arrived))]


# --- stop strings across tokens, lengths, ends ------------------------------------------------------------------------


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
