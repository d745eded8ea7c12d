"""What a step has found so far, on disk after every word: a step that is stopped has not run in vain."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Notes:
    """Findings of one step by name: values that JSON knows, `{"FAILED": why}` of what went wrong.

    Args:
        path: of the file they are in; what an earlier process has left there is read.
        clean_up: called after a part of the step has failed; the next part must have the memory it held.
    """

    def __init__(self, path: Path, clean_up: Callable[[], None] = lambda: None):
        self.path, self.clean_up = path, clean_up
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    @property
    def failed(self) -> list[str]:
        return [name for name, value in self.found.items() if isinstance(value, dict) and "FAILED" in value]

    def put(self, name: str, value: Any) -> None:
        """Keep a finding, over an earlier one of this name."""
        self.found[name] = value
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.found, default=str))
        unfinished.replace(self.path)
        print(f"    {name}: {json.dumps(value, default=str)[:400]}", flush=True)

    def fail(self, name: str, why: Any) -> None:
        """Keep a finding that ought to be another one."""
        self.put(name, {"FAILED": why})

    def attempt(self, name: str, work: Callable[[], Any]) -> None:
        """Keep what `work()` returns, unless it is `None`, or why it failed; the step goes on."""
        started = time.perf_counter()
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            self.fail(name, described(error) | {"s": round(time.perf_counter() - started, 2)})
        else:
            if found is not None:
                self.put(name, found)
            return
        self.clean_up()  # not before the error, which holds what its frames held, is gone


def described(error: BaseException) -> dict[str, str]:
    """Kind and first line of an error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}", "at": where}
