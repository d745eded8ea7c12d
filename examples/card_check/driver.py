"""Runs the steps one after the other, each in a process of its own that can neither hold up nor break the next one.

The parent imports what all steps need and forks, so that imports are waited for once. It never uses the card: a process
that has done so cannot fork.
"""

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .machine import Machine
from .notes import Notes, described
from .steps import STEPS

SHORTEST_S = 8
"""A step with less time than this is not begun: it would not get through its own preparations."""

LONGEST_TABLE = 10_800
"""Characters of the last table; who reads only the end of the output must find all steps in it."""


@dataclass(frozen=True)
class Ended:
    """How a step's process ended: its exit status, and why if it was not by itself."""

    status: int
    why: str = ""


@dataclass
class Driver:
    """One run of the check.

    Args:
        machine: what steps run on.
        out: folder for the results.
        scratch: folder for notes of steps that are running.
        budget_s: seconds for all steps from now on.
    """

    machine: Machine
    out: Path
    scratch: Path
    budget_s: float
    began: float = field(default_factory=time.monotonic)
    forks: bool = True
    told: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def run(self, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> int:
        """Run the steps. Returns the exit status: 1 if anything failed, 2 if a name is no step's."""
        if unknown := [name for name in (*only, *skip) if name not in STEPS]:
            print(f"got {', '.join(unknown)}; wanted some of {', '.join(STEPS)}", file=sys.stderr)
            return 2
        self.out.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "log.txt"):
            (self.out / name).write_text("")
        self.forks = import_all(self.machine)
        print(f"imported after {self._passed_s():.1f} s", flush=True)
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
            self.told.append((name, "not begun: no time left", {}))
            return False
        with (self.out / "log.txt").open("a") as log:
            log.write(f"\n===== {name} (limit {limit:.0f} s)\n")
        started = time.monotonic()
        ended, notes = self._ended(name, limit)
        seconds = time.monotonic() - started
        record = {"step": name, "status": ended.status, "why": ended.why, "s": round(seconds, 1)}
        with (self.out / "results.jsonl").open("a") as results:
            results.write(json.dumps(record | {"failed": notes.failed, "found": notes.found}, default=str) + "\n")
            results.flush()
            os.fsync(results.fileno())  # the machine may be gone before the next step ends
        good = ended.status == 0 and not notes.failed
        state = "ok" if good else ended.why or f"{len(notes.failed)} failed"
        self.told.append((name, f"{state}, {seconds:.0f} s", notes.found))
        print(f"{name}: {state}, {seconds:.1f} s", flush=True)
        return good

    def _ended(self, name: str, limit: float) -> tuple[Ended, Notes]:
        path = self.scratch / f"{name}.json"
        if self.forks:
            ended = self._in_a_fork(name, limit, path)
            notes = Notes.read(path)
            if "re-initialize CUDA" not in json.dumps(notes.found):
                return ended, notes
            self.forks = False  # something has woken the card here
            path.unlink()
        return self._in_a_new_process(name, limit, path), Notes.read(path)

    def _in_a_fork(self, name: str, limit: float, notes: Path) -> Ended:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child:
            return waited_for(child, limit)
        status = 1
        try:
            os.setsid()  # what it starts can then be ended with it
            log = os.open(self.out / "log.txt", os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = run_one(name, self.machine, notes)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _in_a_new_process(self, name: str, limit: float, notes: Path) -> Ended:
        """Slower by the imports."""
        folder = str(Path(__file__).parent)
        command = [sys.executable, folder, "--step", name, "--notes", str(notes), "--device", self.machine.device]
        with (self.out / "log.txt").open("a") as log:
            started = subprocess.Popen(
                command + ["--tiny"] * self.machine.tiny, stdout=log, stderr=log, start_new_session=True
            )
        return waited_for(started.pid, limit)

    def _passed_s(self) -> float:
        return time.monotonic() - self.began

    def _table(self, width: int) -> str:
        lines = [f"# {self._passed_s():.0f} s in all"]
        for name, state, found in self.told:
            lines.append(f"## {name}: {state}")
            lines += [f"  {key}: {json.dumps(value, default=str)[:width]}" for key, value in found.items()]
        return "\n".join(lines)


def run_one(name: str, machine: Machine, path: Path) -> int:
    """The step itself, in this process. Returns an exit status."""
    notes = Notes(path, clean_up=machine.free)
    try:
        machine.check()
        STEPS[name].run(machine, notes)
    except BaseException as error:
        traceback.print_exc()
        notes.fail("step", described(error))
        return 1
    return 0


def import_all(machine: Machine) -> bool:
    """Import what steps need, without a call to the card. Whether all of it could be imported: if not, each step is a
    process from scratch, and one that needs less may still run."""
    try:
        import torch._dynamo
        import torch.profiler  # noqa: F401
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

        import eagle31_hf.generation.own_loop
        import eagle31_hf.measure.synthetic
        import eagle31_hf.memory
        import eagle31_hf.serving.engine
        import eagle31_hf.training.distillation.training_model  # noqa: F401
    except Exception:
        traceback.print_exc()
        return False
    if not machine.is_cuda and find_spec("bitsandbytes"):
        import_module("bitsandbytes")  # which asks a card about itself
    return True


def waited_for(child: int, limit: float) -> Ended:
    """Wait for a process of ours, which leads a session, and end it with all it has started when time is over."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return Ended(code, f"ended by signal {-code}" if code < 0 else "")
        time.sleep(0.05)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # it does not lead one yet
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return Ended(124, f"stopped after {limit:.0f} s")
