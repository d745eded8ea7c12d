"""In a terminal no command is silent for long: counted in processor seconds, so that a busy machine fails no test."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import transformers as hf

from eagle31_hf.cli.app import COMMANDS
from eagle31_hf.demo import target_path
from helpers import random_drafter, random_target
from mtp_targets import target_with_head

MOST_SILENCE_S = 5.0
LOOK_S, MOST_S = 0.1, 600.0
"""A command that has not ended by then hangs, and is killed."""
PUBLISHED = Path(__file__).parents[2] / "model_cards" / "smollm2-135m-instruct-eagle31"
CONVERSATIONS = [
    [{"role": "user", "content": f"What is {n} and {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."}]
    for n in range(6)
]
PAIR = ("--target", "{target}", "--drafter", "{drafter}")
TRAINING = ("--out", "{out}", "--max-steps", "2", "--max-new-tokens", "16", "--eval-new-tokens", "16")
STARTED = {
    "demo": ("--no-compare",),
    "chat": (*PAIR, "--max-new-tokens", "8"),
    "serve": (*PAIR, "--port", "0"),
    "generate": (*PAIR, "--prompt", "Why is the sky blue?", "--max-new-tokens", "8"),
    "plan": ("{target}", "--card", "RTX 4090"),
    "doctor": (*PAIR, "--limit", "2", "--max-new-tokens", "16"),
    "bench": ("{target}", "{drafter}", "--limit", "2", "--max-new-tokens", "8", "--repeats", "1"),
    "train": ("{target}", "--prompts", "{texts}", *TRAINING),
    "train itself": ("{embedded}", "--prompts", "self:8", *TRAINING),  # an untrained target ends no prompt
    "mtp": ("{headed}", "--out", "{out}"),
    "inspect": ("{drafter}",),
    "convert": ("{drafter}", "{out}"),
    "push": ("{published}", PUBLISHED.name),  # as its card calls it
    "warmup": ("{target}", "--drafter", "none", "--tokens", "64"),  # two graphs, of three packages each
}


def ask_and_stop(process: int, output: str) -> None:
    """One request to the server that said where it listens, then Ctrl-C; beside the watch, which goes on."""
    found = re.search(r"http://[\d.:]+/v1", output)
    assert found is not None
    body = json.dumps({"model": "target", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 8}).encode()
    request = urllib.request.Request(
        f"{found[0]}/chat/completions", body, {"Content-Type": "application/json", "Connection": "close"}
    )

    def ask() -> None:
        try:
            urllib.request.urlopen(request, timeout=300).read()
        finally:
            os.kill(process, signal.SIGINT)

    threading.Thread(target=ask, daemon=True).start()


Answer = tuple[str, str | Callable[[int, str], None]]
ANSWERS: dict[str, list[Answer]] = {
    "chat": [("you", "Why is the sky blue?\r"), ("tokens/s", "/quit\r")],
    "serve": [("Ctrl-C to stop", ask_and_stop)],
}


CODES = {"doctor": 1}
"""Other than 0: an untrained drafter is a problem."""


@dataclass
class Watched:
    """What a command wrote into a terminal, and its longest silence.

    Attributes:
        silence_cpu_s: most processor seconds that it and its children took between two writes.
        before: the end of what was on the screen then.
    """

    output: str
    code: int
    silence_cpu_s: float
    before: str


def watch(command: Sequence[str], *, answers: Sequence[Answer] = (), env: Mapping[str, str] = {}) -> Watched:
    """Run a command in a terminal of 100 columns.

    Args:
        answers: what is typed, or called with the process id and the output, when a text appears; each waits for its
            own after the one before.
    """
    screen, theirs = pty.openpty()
    one_thread = {"OMP_NUM_THREADS": "1"}  # its processor seconds pass no faster than the clock's
    settings = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color", **one_thread, **env}
    process = psutil.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    left, looked_from, output, started = list(answers), 0, "", time.monotonic()
    used = used_at_write = 0.0
    silences: list[tuple[float, str]] = []
    while True:
        has_written = bool(select.select([screen], [], [], LOOK_S)[0])
        with suppress(psutil.Error):
            used = max(used, sum(sum(each.cpu_times()[:4]) for each in (process, *process.children(recursive=True))))
        try:
            piece = os.read(screen, 65536).decode(errors="replace") if has_written else ""
        except OSError:  # the terminal is closed
            break
        if time.monotonic() - started > MOST_S:
            process.kill()
        if piece:
            silences.append((used - used_at_write, output[-60:]))
            used_at_write = used
            output += piece
        if left and left[0][0] in output[looked_from:]:
            looked_from, reply = len(output), left.pop(0)[1]
            if isinstance(reply, str):
                os.write(screen, reply.encode())
            else:
                reply(process.pid, output)
    os.close(screen)
    return Watched(output, process.wait(), *max([*silences, (used - used_at_write, output[-60:])]))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random pair of SmolLM2-135M's shape, in bfloat16, with the embedded pair's tokenizer."""
    folder = tmp_path_factory.mktemp("silence")
    config = hf.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    target = random_target(config).to(torch.bfloat16)
    target.save_pretrained(folder / "target")
    hf.AutoTokenizer.from_pretrained(target_path()).save_pretrained(folder / "target")
    random_drafter(target, draft_vocab_size=8192).save_pretrained(folder / "drafter")
    target_with_head("qwen3_5_text", folder / "headed")
    lines = [json.dumps({"conversations": messages}) for messages in CONVERSATIONS]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return {
        "target": folder / "target",
        "drafter": folder / "drafter",
        "texts": folder / "texts.jsonl",
        "published": PUBLISHED,
        "embedded": target_path(),
        "headed": folder / "headed",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_no_command_is_silent_for_long(name: str, paths: dict[str, Path], tmp_path: Path) -> None:
    words = [word.format(**paths, out=tmp_path / "out") for word in STARTED[name]]
    seen = watch(
        [sys.executable, "-m", "eagle31_hf", name.split()[0], *words],
        answers=ANSWERS.get(name, ()),
        env={"HF_HUB_OFFLINE": "1", "EAGLE31_CACHE": str(tmp_path / "cache")},
    )
    assert seen.code == CODES.get(name, 0), seen.output
    assert "Traceback" not in seen.output
    assert "error:" not in seen.output
    if name == "serve":
        assert "target, bfloat16: 8 texts at once" in seen.output
        assert "chat/completions" in seen.output, "its one request was answered"
    assert seen.silence_cpu_s < MOST_SILENCE_S, f"after {seen.before!r}"


def test_every_command_is_watched() -> None:
    assert set(COMMANDS) == {name.split()[0] for name in STARTED}


def test_silence_is_work_without_a_word_and_no_wait() -> None:
    work = "import time\nwhile time.process_time() < 1: pass\nprint('done')"
    assert watch([sys.executable, "-c", work]).silence_cpu_s > 0.5
    assert watch([sys.executable, "-c", "import time; print('on', flush=True); time.sleep(1)"]).silence_cpu_s < 0.5
