"""A chat request passes the files that docs/developing/architecture.md lists, and no other of the server's."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import eagle31_hf.serving
from loopback import chat, serving

FOLDER = Path(eagle31_hf.serving.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "developing" / "architecture.md"
MOST = 9


def test_a_chat_request_passes_few_files(pair):
    entered: set[str] = set()
    watches = False

    def note(frame: Any, event: str, _argument: Any) -> None:
        path = frame.f_code.co_filename
        if watches and event == "call" and path.startswith(str(FOLDER)) and frame.f_code.co_name != "<module>":
            entered.add(Path(path).name)

    threading.setprofile(note)
    try:
        with serving(pair) as made:
            client = made.client()
            chat(client, max_tokens=4)  # what is made once for all requests
            watches = True
            chat(client, max_tokens=4)
            watches = False
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    walk = PAGE.read_text().partition("A chat request, from")[2].partition("A training row")[0]
    assert entered == set(re.findall(r"^\| `serving/(\w+\.py)` \|", walk, re.MULTILINE))
    assert len(entered) <= MOST
