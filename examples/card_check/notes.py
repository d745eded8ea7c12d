"""What a step has found so far, on disk after every word: a step that is stopped has not run in vain."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Notes:
    """Findings of one step by name.

    Attributes:
        path: of the file they are in.
        found: values that JSON knows.
        failed: names of what went wrong.
        clean_up: called after a part of the step has failed; the next part must have the memory it held.
    """

    path: Path
    found: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    clean_up: Callable[[], None] = lambda: None

    @classmethod
    def read(cls, path: Path) -> Notes:
        """What a step has left there; nothing if it was stopped before its first word."""
        if not path.exists():
            return cls(path)
        kept = json.loads(path.read_text())
        return cls(path, kept["found"], kept["failed"])

    def put(self, name: str, value: Any) -> None:
        """Keep a finding, over an earlier one of this name."""
        self.found[name] = value
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps({"found": self.found, "failed": self.failed}, default=str))
        unfinished.replace(self.path)
        print(f"    {name}: {json.dumps(value, default=str)[:400]}", flush=True)

    def fail(self, name: str, why: Any) -> None:
        """Keep a finding that ought to be another one."""
        if name not in self.failed:
            self.failed.append(name)
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
