"""The repository's tests and `eagle31 serve`, on the device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from eagle31_hf.demo import CONVERSATIONS

from .machine import Machine
from .notes import Notes

REPOSITORY = Path(__file__).resolve().parents[2]


class Outcomes:
    """A plugin of pytest that remembers what became of the tests."""

    def __init__(self) -> None:
        self.counts, self.failed = Counter[str](), []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed.append(f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1][:200]}")


def check_tests(machine: Machine, notes: Notes) -> None:
    """The tests marked gpu, but for those that make targets of 8B; on a CPU one of them."""
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        notes.put("tests", f"left out: {' and '.join(missing)} are not here")
        return
    import pytest

    os.chdir(REPOSITORY)
    which = ["-m", "gpu", "-k", "not test_runs_take_what_was_planned"]
    which = which if machine.is_cuda else ["-k", "cache_in_eight_bits and not cuda"]
    outcomes = Outcomes()
    status = pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", *which, "tests/test_gpu.py"], [outcomes])
    notes.put("outcomes", outcomes.counts)
    if status != pytest.ExitCode.OK:
        notes.fail("tests", {"status": int(status), "failed": outcomes.failed[:20]})


def check_serve(machine: Machine, notes: Notes) -> None:
    """Tokens per second of `eagle31 serve` with the embedded pair: one client, and many."""
    command = [sys.executable, "-m", "eagle31_hf", "serve", "--port", "0", "--device", machine.device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            found = (re.search(r"http://\S+", line) for line in server.stdout or ())
            match, new = next(filter(None, found), None), machine.size(96, 4)
            if match is None:
                raise RuntimeError("the server ended before it answered; see the log")
            for clients in machine.size((1, 8, 32), (2,)):
                ask = partial(answered, match[0], clients, new=new)
                ask(clients)  # libraries set themselves up, graphs are recorded
                notes.attempt(f"{clients} clients, tok/s", partial(ask, 2 * clients))
        finally:
            server.terminate()


def answered(address: str, clients: int, requests: int, new: int) -> float:
    """Tokens per second of so many requests, so many at a time."""
    with urlopen(f"{address}/models", timeout=10) as listed:
        model = json.load(listed)["data"][0]["id"]

    def ask(number: int) -> int:
        chat = [dict(message) for message in CONVERSATIONS[number % len(CONVERSATIONS)]]
        body = {"model": model, "messages": chat, "max_tokens": new, "temperature": 0}
        header = {"Content-Type": "application/json"}
        with urlopen(Request(f"{address}/chat/completions", json.dumps(body).encode(), header), timeout=60) as response:
            return json.load(response)["usage"]["completion_tokens"]

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        tokens = sum(pool.map(ask, range(requests)))
    return round(tokens / (time.perf_counter() - started), 1)
