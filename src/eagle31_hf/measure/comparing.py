"""`bench run --compare A B`: whether the difference of two runs is larger than their noise.

What is compared is each method's speedup over plain decoding of its own run, so a machine that was slower as a whole on
one day does not count. Prompts and repeats of both runs are drawn anew, over and over; a difference is larger than the
noise where 95 % of those draws lie on one side of none. Draws from one process know nothing of what differs between
processes (where memory lies, which kernels were chosen), so speedups must differ by more than that, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigurationError
from ..stats import Acceptance
from .calls import PLAIN, CallRecord
from .ratios import RESAMPLES, drawn_anew, interval_of, ratio
from .record_file import Records, differences
from .summary import MethodSummary, Setting, summarise

MUST_AGREE = ("machine.device", "machine.processor", "machine.threads", "pair.target", "pair.dtype",
              "pair.quantisation", "pair.template", "settings.new_tokens", "settings.ignore_eos")  # fmt: skip
"""What two runs must share to be compared without being told to: figures of unlike things say nothing."""


PROCESSES_DIFFER = 0.05
"""Share by which speedups of one code differ from process to process: up to 4.4 % was measured."""


@dataclass(frozen=True)
class Difference:
    """One method in one setting in two runs, over the `prompts` that are in both.

    `interval` is the middle 95 % of `after` over `before`.
    """

    what: str
    method: str
    setting: Setting
    before: float
    after: float
    interval: tuple[float, float]
    prompts: int

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def verdict(self) -> str:
        if self.interval[0] <= 1 <= self.interval[1]:
            return "noise"
        if self.what == "speedup" and abs(self.ratio - 1) <= PROCESSES_DIFFER:
            return "processes differ so"
        return "better" if self.ratio > 1 else "worse"

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what, "method": self.method, "temperature": self.setting.temperature,
            "batch_size": self.setting.batch_size, "before": self.before, "after": self.after, "ratio": self.ratio,
            "interval": list(self.interval), "prompts": self.prompts, "verdict": self.verdict,
        }  # fmt: skip


@dataclass(frozen=True)
class ComparedRuns:
    """All differences, and in what else the runs differ."""

    differences: tuple[Difference, ...]
    told: tuple[str, ...]


def compare_runs(before: Records, after: Records, *, allow: Iterable[str] = ()) -> ComparedRuns:
    """Speedups and acceptance of the methods that both runs measured on the same prompts.

    Args:
        allow: of `MUST_AGREE`, what may differ.

    Raises:
        ConfigurationError: the runs are of unlike things, or share no method on at least two prompts.
    """
    changed = [line for line in differences(before.run, after.run, ignored=("kind", "format", "started", "command"))]
    forbidden = [line for line in changed if line.startswith(tuple(set(MUST_AGREE) - set(allow)))]
    if forbidden:
        names = ", ".join(sorted({name for name in MUST_AGREE for line in forbidden if line.startswith(name)}))
        raise ConfigurationError(
            f"{before.name} and {after.name} are not of the same thing ({'; '.join(forbidden[:4])}), so that their "
            f"difference says nothing of the code; to compare all the same, pass --allow {names}"
        )
    earlier = {(m.method, m.setting): m for m in summarise(before).methods}
    found: list[Difference] = []
    for later in summarise(after).methods:
        one = earlier.get((later.method, later.setting))
        if one is not None:
            found += _differences(one, later)
    if not found:
        raise ConfigurationError(
            f"{before.name} and {after.name} share no method on two prompts or more in one setting; nothing to compare"
        )
    return ComparedRuns(tuple(found), tuple(changed))


def _differences(one: MethodSummary, other: MethodSummary) -> list[Difference]:
    runs = (one, other)
    calls = [_by_prompt(run.calls) for run in runs]
    names = [name for name in calls[0] if name in calls[1]]
    if len(names) < 2:
        return []

    def difference(what: str, figures: Sequence[float], draws: Sequence[np.ndarray]) -> Difference:
        before, after = figures
        return Difference(what, one.method, one.setting, before, after, interval_of(draws[1] / draws[0]), len(names))

    found = []
    if one.method != PLAIN and not one.refusal and not other.refusal:
        plain = [_by_prompt(run.plain) for run in runs]
        # Repeats of one run have nothing to do with those of another.
        draws = [_speedup_draws(calls[i], plain[i], names, seed=1 + i) for i in range(2)]
        found.append(difference("speedup", [_speedup(run, names) for run in runs], draws))
    if one.acceptance.length and other.acceptance.length:
        draws = [_acceptance_draws(each, names) for each in calls]
        lengths = [Acceptance.of(c.drafting for name in names for c in each[name]).acceptance_length for each in calls]
        found.append(difference("acceptance length", lengths, draws))
    return found


def _speedup(run: MethodSummary, names: Sequence[Any]) -> float:
    ours, plain = ([c for c in each if tuple(c.prompts) in set(names)] for each in (run.calls, run.plain))
    found = ratio(ours, plain)
    return float("nan") if found is None else found.median


def _speedup_draws(ours: _ByPrompt, plain: _ByPrompt, names: Sequence[Any], *, seed: int) -> np.ndarray:
    """`(R,)` speedups of repeats and prompts drawn anew; the same prompts for both runs."""
    prompts = drawn_anew(len(names))
    num_repeats = len(ours[names[0]])
    repeats = np.random.default_rng(seed).integers(num_repeats, size=(RESAMPLES, num_repeats))
    speed = []
    for calls in (ours, plain):
        table = np.array([[(c.new_tokens, c.seconds) for c in calls[name]] for name in names], dtype=float)
        drawn = table[prompts[:, :, None], repeats[:, None, :]].sum((1, 2))  # (P, repeats, 2) -> (R, 2)
        speed.append(drawn[:, 0] / drawn[:, 1])
    return speed[0] / speed[1]


def _acceptance_draws(calls: _ByPrompt, names: Sequence[Any]) -> np.ndarray:
    drafted = [[c.drafting for c in calls[name] if c.drafting is not None] for name in names]
    rounds = np.array([sum(d.rounds for d in each) for each in drafted])
    accepted = np.array([sum(d.accepted for d in each) for each in drafted])
    prompts = drawn_anew(len(names))
    return 1 + accepted[prompts].sum(1) / np.maximum(rounds[prompts].sum(1), 1)


_ByPrompt = dict[Any, list[CallRecord]]


def _by_prompt(calls: Iterable[CallRecord]) -> _ByPrompt:
    found: _ByPrompt = {}
    for call in sorted(calls, key=lambda call: call.repeat):
        found.setdefault(tuple(call.prompts), []).append(call)
    fewest = min(map(len, found.values()), default=0)  # a run that was stopped has whole repeats, and a part of one
    return {name: each[:fewest] for name, each in found.items()}
