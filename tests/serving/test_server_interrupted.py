"""Clients that go, a queue that is full, a server that is stopped, a round that fails, and many clients at once."""

from __future__ import annotations

import json
import logging
import runpy
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2
import openai
import pytest

from eagle31_hf import NoDrafter
from loopback import MESSAGES, MODEL, QUESTION, SIZES, chat, error_of, serving


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def test_a_full_queue_says_when_to_come_back(pair):
    with serving(pair, replace(SIZES, max_rows=1, max_waiting=1)) as small:
        slow_down(small.engine)  # the first goes on
        client = small.client()
        endless = {"stream": True, "extra_body": {"ignore_eos": True}}
        first = chat(client, **endless)
        next(iter(first))
        second = threading.Thread(target=lambda: chat(client, max_tokens=2))
        second.start()
        wait_until(lambda: len(small.engine.scheduler.waiting) == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            chat(client)
        assert caught.value.response.headers["retry-after"] == "5"
        with pytest.raises(openai.BadRequestError, match="got 3 texts; wanted at most 2 in a request"):
            chat(client, n=3)
        first.close()
        second.join(timeout=30)
        assert not second.is_alive()
        assert chat(client, max_tokens=2).choices[0].message.content


def test_a_server_that_is_stopped_finishes_what_runs(pair):
    """Of a target without a drafter, too."""
    with serving(pair._replace(drafter=NoDrafter(pair.target)), stopping={"grace_s": 20.0}) as made:
        client = made.client()
        stream = chat(client, stream=True)
        pieces = iter(stream)
        first = next(pieces)
    text = (first.choices[0].delta.content or "") + "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == pair.answer(QUESTION)
    assert not made.engine.is_alive


def test_a_failure_in_a_round_ends_its_texts_and_no_others(served, client, monkeypatch):
    def fail():
        raise RuntimeError("a card has caught fire")

    monkeypatch.setattr(served.engine.batch, "round", fail)
    assert "fire" in error_of(client, 500)["message"]
    monkeypatch.undo()
    assert chat(client, max_tokens=4).choices[0].finish_reason == "length"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("grace_s", "signals"), [(0.2, 1), (60.0, 2)])
def test_a_text_that_does_not_end_within_the_grace_is_told_so_by_a_clean_last_event(pair, caplog, grace_s, signals):
    """A second Ctrl-C leaves it none."""
    told = []
    with serving(pair, stopping={"grace_s": grace_s, "on_stop": told.append}) as made:
        body = {"model": MODEL, "messages": MESSAGES, "stream": True, "ignore_eos": True, "temperature": 0}
        request = httpx2.stream("POST", f"{made.url}/v1/chat/completions", json=body, timeout=60)
        stream = request.__enter__()
        lines = (line for line in stream.iter_lines() if line)
        first = next(lines)
        slow_down(made.engine)
        for _ in range(signals):
            made.server.handle_exit(signal.SIGINT, None)
    events = [first, *lines]
    request.__exit__(None, None, None)
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "shut down" in error["message"]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert told == [1], "who stops a server is told what it waits for"


def test_what_is_asked_while_a_server_stops_is_told_so_as_is_an_answer_that_is_not_finished(pair):
    with serving(pair, stopping={"grace_s": 1.0}) as made, ThreadPoolExecutor() as pool:
        slow_down(made.engine)
        asked = {"json": {"messages": MESSAGES, "ignore_eos": True}, "timeout": 60}
        unfinished = pool.submit(httpx2.post, f"{made.url}/v1/chat/completions", **asked)
        wait_until(lambda: made.engine.batch.texts)
        made.server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: not made.engine.is_alive)
        late = httpx2.post(f"{made.url}/v1/chat/completions", **asked)
        assert httpx2.get(f"{made.url}/health").status_code == 503
        for told, says in ((late, "takes no new requests"), (unfinished.result(), "before this text was finished")):
            assert (told.status_code, told.json()["error"]["code"]) == (503, "shutting_down")
            assert says in told.json()["error"]["message"]
            assert told.headers["retry-after"] == "30"


def slow_down(engine):
    """A round takes long enough that a text outlasts any grace."""
    round_of = engine.batch.round

    def slowly():
        time.sleep(0.05)
        return round_of()

    engine.batch.round = slowly


@pytest.mark.slow
@pytest.mark.thorough
def test_nothing_is_lost_or_wrong_in_a_crowd(tmp_path, monkeypatch):
    study, record = Path(__file__).parents[2] / "examples" / "studies" / "load_on_server.py", tmp_path / "load.json"
    told = ["--seconds", "15", "--clients", "8", "--requests", "20", "--json", str(record)]
    monkeypatch.setattr(sys, "argv", [str(study), *told])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(study), run_name="__main__")
    assert not left.value.code
    seen = json.loads(record.read_text())
    assert (seen["wrong"], seen["lost"]) == (0, 0)
    assert min(seen["right"], seen["cancelled"], seen["refused"]) >= 1
    # Masks grow with the most rows that ever met, which is left to chance; a row of texts is an eighth of it all.
    assert seen["counted"]["cache_bytes_after"] < 1.01 * seen["counted"]["cache_bytes_before"]
    assert seen["counted"]["texts_per_round"] > 3 > 1.01 > seen["counted_alone"]["texts_per_round"]
