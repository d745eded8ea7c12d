"""Runs the steps one after the other, each in a process of its own that can neither hold up nor break the next one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from .machine import Machine
from .notes import Notes, described

SHORTEST_S = 8
"""A step with less time than this is not begun: it would not get through its own preparations."""

LONGEST_TABLE = 10_800
"""Characters of the last table; who reads only the end of the output must find all steps in it."""


@dataclass(frozen=True)
class Step:
    """A function `(machine, notes)` of a module here, which may take `limit_s` seconds on a card."""

    module: str
    function: str
    limit_s: float


STEPS = {
    "texts": Step("texts", "check_texts", 120),
    "rounds": Step("rounds", "check_embedded", 60),
    "failures": Step("texts", "check_failures", 50),
    "large": Step("rounds", "check_bf16", 150),
    "large_nf4": Step("rounds", "check_nf4", 130),
    "tests": Step("uses", "check_tests", 120),
    "serve": Step("uses", "check_serve", 60),
    "static": Step("rounds", "check_static_cache", 120),
}
"""In the order of their worth: what comes first must be known even if the machine goes back early."""


@dataclass
class Driver:
    """One run of the check: on a machine, with a folder for results, one for notes of steps that are running, and
    seconds for all steps from now on."""

    machine: Machine
    out: Path
    scratch: Path
    budget_s: float
    began: float = field(default_factory=time.monotonic)
    ended: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def run(self, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> int:
        """Run the steps. Returns the exit status: 1 if anything failed, 2 if a name is no step's."""
        if unknown := [name for name in (*only, *skip) if name not in STEPS]:
            print(f"got {', '.join(unknown)}; wanted some of {', '.join(STEPS)}", file=sys.stderr)
            return 2
        self.out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "log.txt"):
            (self.out / name).write_text("")
        states = [self._step(name) for name in STEPS if (not only or name in only) and name not in skip]
        (self.out / "summary.txt").write_text(self._table(2000))
        widths = (600, 400, 300, 220, 160, 120, 90, 60, 30, 0)  # of all steps a little rather than of the last ones all
        fitting = (table for table in map(self._table, widths) if len(table) < LONGEST_TABLE)
        print(next(fitting, self._table(0))[-LONGEST_TABLE:], flush=True)
        return int(not all(states))

    def _step(self, name: str) -> bool:
        """Run one step, keep its results, and say whether all of it went well."""
        left = self.budget_s - self._passed_s()
        limit = left if self.machine.tiny else min(STEPS[name].limit_s, left)  # limits are a card's
        if limit < SHORTEST_S:
            self.ended.append((name, "not begun: no time left", {}))
            return False
        path, started = self.scratch / f"{name}.json", time.monotonic()
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n===== {name} (limit {limit:.0f} s)\n")
            log.flush()
            command = [*self._command(), "--step", name, "--notes", str(path), "--device", self.machine.device]
            child = subprocess.Popen(
                command + ["--tiny"] * self.machine.tiny, stdout=log, stderr=log, start_new_session=True
            )
            status, why = waited_for(child, limit)
        seconds, notes = time.monotonic() - started, Notes.read(path)
        record = {"step": name, "status": status, "why": why, "s": round(seconds, 1)}
        with (self.out / "results.jsonl").open("a") as results:
            results.write(json.dumps(record | {"failed": notes.failed, "found": notes.found}, default=str) + "\n")
            results.flush()
            os.fsync(results.fileno())  # the machine may be gone before the next step ends
        good = status == 0 and not notes.failed
        state = "ok" if good else why or f"{len(notes.failed)} failed"
        self.ended.append((name, f"{state}, {seconds:.0f} s", notes.found))
        print(f"{name}: {state}, {seconds:.1f} s", flush=True)
        return good

    @staticmethod
    def _command() -> list[str]:
        return [sys.executable, str(Path(__file__).parent)]

    def _passed_s(self) -> float:
        return time.monotonic() - self.began

    def _table(self, width: int) -> str:
        lines = [f"# {self._passed_s():.0f} s in all"]
        for name, state, found in self.ended:
            lines.append(f"## {name}: {state}")
            lines += [f"  {key}: {json.dumps(value, default=str)[:width]}" for key, value in found.items()]
        return "\n".join(lines)


def run_one(name: str, machine: Machine, path: Path) -> int:
    """The step itself, in this process. Returns an exit status."""
    notes = Notes(path, clean_up=machine.free)
    try:
        machine.check()
        getattr(import_module(f".{STEPS[name].module}", __package__), STEPS[name].function)(machine, notes)
    except BaseException as error:
        traceback.print_exc()
        notes.fail("step", described(error))
        return 1
    return 0


def waited_for(child: subprocess.Popen, limit: float) -> tuple[int, str]:
    """Exit status of a process that leads a session, and why it ended if not by itself. After `limit` seconds it is
    ended with all it has started."""
    try:
        code = child.wait(limit)
        return code, f"ended by signal {-code}" if code < 0 else ""
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return 124, f"stopped after {limit:.0f} s"
