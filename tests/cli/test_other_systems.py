"""Where POSIX's own modules are missing, and where output goes to a file in an encoding of few characters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITHOUT_POSIX = """
import os, signal, subprocess, multiprocessing, sys
import torch, torch._dynamo, torch._inductor, prompt_toolkit, rich.console, typer  # may do as they like
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, PreTrainedModel
for name in ("termios", "fcntl", "resource", "pwd", "grp", "tty", "pty", "readline"):
    sys.modules[name] = None
for name in ("fork", "killpg", "getuid", "geteuid", "getgid", "setsid", "getpgid", "getloadavg", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
del signal.SIGKILL, signal.SIGHUP
sys.argv = ["eagle31", *sys.argv[1:]]
from eagle31_hf.cli import main
main()
"""


def run(*arguments: str, code: str, given: bytes = b"", **environment: str) -> tuple[bytes, bytes]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=given,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"} | environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("chat",), b"tokens a pass"),
        (("generate", "--prompt", "I need a table", "--max-new-tokens", "8"), b"tokens"),
    ],
)
def test_commands_run_without_what_posix_alone_has(arguments, says):
    out, _ = run(*arguments, code=WITHOUT_POSIX, given=b"I need a table for two.\n/quit\n")
    assert says in out


ENCODED = "from eagle31_hf.cli import main; main()"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["utf-8", "cp1251", "cp932", "gbk"])
def test_a_chat_goes_on_in_any_encoding(encoding):
    given = b"I need a table for two.\n\xff\xff\x98\xa0\nThank you.\n/system \xa9\xe9\n/help\n/quit\n"
    out, err = run("chat", code=ENCODED, given=given, PYTHONIOENCODING=encoding)
    assert b"tokens a pass" in out
    assert b"Traceback" not in err
    assert encoding != "utf-8" or b"is no character" in out, "a line that is no text gets one line"
