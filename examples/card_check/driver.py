"""Runs the steps one after the other, each in a process of its own that can neither hold up nor break the next one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from .machine import Machine
from .notes import Notes, described

SHORTEST_S = 8
"""A step with less time than this is not begun: it would not get through its own preparations."""

LONGEST_TABLE = 10_800
"""Characters of the last table; who reads only the end of the output must find all steps in it."""

STEPS: dict[str, tuple[str, str, float]] = {
    "texts": ("texts", "check_texts", 120),
    "rounds": ("rounds", "check_embedded", 60),
    "failures": ("texts", "check_failures", 50),
    "large": ("rounds", "check_large", 150),
    "large_nf4": ("rounds", "check_nf4", 130),
    "tests": ("uses", "check_tests", 120),
    "serve": ("uses", "check_serve", 60),
    "static": ("rounds", "check_static_cache", 120),
}
"""A module here, its function `(machine, notes)`, and how many seconds it may take on a card. In the order of their
worth: what comes first must be known even if the machine goes back early."""

COMMAND = [sys.executable, str(Path(__file__).parent)]


def run(
    machine: Machine, out: Path, scratch: Path, budget_s: float, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()
) -> int:
    """Run the steps. Returns the exit status: 1 if anything failed, 2 if a name is no step's.

    Args:
        out: folder for results.
        scratch: folder for notes of steps that are running.
        budget_s: seconds for all steps from now on.
    """
    if unknown := [name for name in (*only, *skip) if name not in STEPS]:
        print(f"got {', '.join(unknown)}; wanted some of {', '.join(STEPS)}", file=sys.stderr)
        return 2
    began, records = time.monotonic(), []
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.jsonl").open("w") as results, (out / "log.txt").open("w") as log:
        for name in (name for name in STEPS if (not only or name in only) and name not in skip):
            left = budget_s - (time.monotonic() - began)
            limit = left if machine.tiny else min(STEPS[name][2], left)  # limits are a card's
            if limit < SHORTEST_S:
                records.append({"step": name, "state": "not begun: no time left", "found": {}})
                continue
            records.append(run_apart(name, machine, scratch / f"{name}.json", limit, log))
            print(f"{name}: {records[-1]['state']}, {records[-1]['s']} s", flush=True)
            print(json.dumps(records[-1], default=str), file=results, flush=True)
            os.fsync(results.fileno())  # the machine may be gone before the next step ends
    total = f"# {time.monotonic() - began:.0f} s in all"
    (out / "summary.txt").write_text(table(total, records, 2000))
    width = 600
    while width and len(table(total, records, width)) > LONGEST_TABLE:
        width -= 20  # of all steps a little rather than of the last ones all
    print(table(total, records, width)[-LONGEST_TABLE:], flush=True)
    return int(any(record["state"] != "ok" for record in records))


def run_apart(name: str, machine: Machine, path: Path, limit: float, log: Any) -> dict[str, Any]:
    """Run one step in a process that is ended, with all it has started, after `limit` seconds; what became of it."""
    print(f"\n===== {name} (limit {limit:.0f} s)", file=log, flush=True)
    command = [*COMMAND, "--step", name, "--notes", str(path), "--device", machine.device]
    started, why = time.monotonic(), ""
    child = subprocess.Popen(command + ["--tiny"] * machine.tiny, stdout=log, stderr=log, start_new_session=True)
    try:
        status = child.wait(limit)
        why = f"ended by signal {-status}" if status < 0 else ""
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        status, why = 124, f"stopped after {limit:.0f} s"
    notes, seconds = Notes(path), round(time.monotonic() - started, 1)
    state = "ok" if status == 0 and not notes.failed else why or f"{len(notes.failed)} failed"
    record = {"step": name, "state": state, "status": status, "why": why, "s": seconds}
    return record | {"failed": notes.failed, "found": notes.found}


def table(total: str, records: list[dict[str, Any]], width: int) -> str:
    """A line for each finding, cut to `width` characters behind its name."""
    lines = [total]
    for record in records:
        lines.append(f"## {record['step']}: {record['state']}" + (f", {record['s']:.0f} s" if "s" in record else ""))
        lines += [f"  {key}: {json.dumps(value, default=str)[:width]}" for key, value in record["found"].items()]
    return "\n".join(lines)


def run_one(name: str, machine: Machine, path: Path) -> int:
    """The step itself, in this process. Returns an exit status."""
    notes, (module, function, _) = Notes(path, clean_up=machine.free), STEPS[name]
    try:
        machine.check()
        getattr(import_module(f".{module}", __package__), function)(machine, notes)
    except BaseException as error:
        traceback.print_exc()
        notes.fail("step", described(error))
        return 1
    return 0
