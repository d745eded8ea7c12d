"""What a way to decide on drafts makes of known texts: rounds counted, seconds by the costs of five machines.

    python examples/studies/policy_replay.py                  # the default of this checkout against the kept counts
    python examples/studies/policy_replay.py --json FILE      # and a file with its counts of each text

Where tokens are drawn, each way of drafting writes texts of its own, and the luck of a text is larger than what good
policies differ by. On a text that is known already they all meet the same tokens, and the same luck of drafts behind
each of them, so few texts tell a hundredth. The policies are those that `generate` runs.

`policy_replay.json.gz` keeps 112 texts of the embedded pair (`policy_texts.py` writes them) and what the default made
of them by each machine's costs when they were written, so that a later default can be compared with it on the same
texts.
"""

from __future__ import annotations

import argparse
import gzip
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from eagle31_hf.drafting.costs import WIDTH, WIDTH_IN_HALF, WIDTH_ON_CPU, RoundCosts
from eagle31_hf.drafting.plan import DraftPlan, DraftPolicy
from eagle31_hf.drafting.planner import Planner
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.loop.text import Sequences, StopRules

STEP_SHARE = 0.1
"""Bytes of a draft step over those of the target, as planners take them to be."""

KEPT = Path(__file__).with_name("policy_replay.json.gz")
LONGEST = 12
"""Draft tokens of a round at most."""


@dataclass(frozen=True)
class Machine:
    """Seconds of what rounds are made of.

    Attributes:
        forward_s: of the target over so many tokens at once, as `(width, seconds)`, widths rising from 1.
        drafter_step_s: each draft step behind the first.
        absorb_s: the drafter over the accepted tokens and their hidden states, which gives the first draft token.
        round_s: everything else in a round with drafts; `plain_round_s` in one without.
        graphs: rounds are computed by graphs: all widths up to a measured one cost as much as that one, and a round
            ends with the drafter reading what was written.
    """

    forward_s: tuple[tuple[int, float], ...]
    drafter_step_s: float
    absorb_s: float
    round_s: float = 0.0
    plain_round_s: float = 0.0
    graphs: bool = False

    def target_s(self, width: int) -> float:
        """The target over `width` tokens; beyond what was measured, as steep as the last stretch."""
        widths = [measured for measured, _ in self.forward_s]
        at = bisect_left(widths, width)
        if at < len(widths) and (widths[at] == width or self.graphs):
            return self.forward_s[at][1]
        at = min(at, len(widths) - 1)
        (low, low_s), (high, high_s) = self.forward_s[at - 1 : at + 1]
        return low_s + (width - low) * (high_s - low_s) / (high - low)

    def seconds(self, drafted: int, *, looked_up: bool = False) -> float:
        """A whole round with a chain of so many tokens, by the drafter or looked up; without any, plain decoding's."""
        if not drafted:
            return self.target_s(1) + self.plain_round_s
        verified_s = self.target_s(drafted + 1) + self.round_s
        return verified_s if looked_up else verified_s + (self.absorb_s + (drafted - 1) * self.drafter_step_s)


MACHINES = {
    # Two AVX2 cores without bf16 arithmetic, SmolLM2-135M: in float32 width is nearly free from 2 on, in bfloat16 dear.
    "float32": Machine(((1, 0.075), (2, 0.121), (8, 0.126), (16, 0.159), (24, 0.177)), 0.006, 0.008, 0.002, 0.001),
    "bfloat16": Machine(((1, 0.050), (2, 0.073), (4, 0.114), (8, 0.199), (24, 0.570)), 0.005, 0.006, 0.002, 0.001),
    # Assumed: a card that waits for its memory; a graph that always verifies 8; no machine in particular.
    "card": Machine(((1, 0.025), (8, 0.026), (16, 0.027), (64, 0.035)), 0.0016, 0.002, 0.001, 0.0005),
    "graphs": Machine(((1, 0.045), (8, 0.055), (16, 0.08)), 0.0032, 0.004, 0.001, 0.001, graphs=True),
    "any": Machine(((1, 1.0), (8, 1.25), (64, 2.0)), drafter_step_s=0.06, absorb_s=0.08, round_s=0.05),
}


@dataclass(frozen=True)
class DraftTrace:
    """One row's text, and what drafts come to behind each of its tokens.

    Attributes:
        right: behind each token that may be a round's root, how many tokens of a draft are right, however long it is.
        sure: the drafter's largest probability of each of them; empty for a drafter that says nothing. A row may end
            where no draft goes on; what is not there is 0.
        prompt: ids up to the first root.
        written: ids behind it, as many as roots; empty if no policy looks at them.
        kind, temperature, drafter: of a kept text, how it was made.
    """

    right: Sequence[int]
    sure: Sequence[Sequence[float]] = ()
    prompt: Sequence[int] = ()
    written: Sequence[int] = ()
    kind: str = ""
    temperature: float = 0.0
    drafter: str = ""

    def __len__(self) -> int:
        return len(self.right)

    def drafted(self, at: int, shape: DraftShape) -> int:
        """Tokens of a chain behind root `at`, which doubt may end; as `draft_chain` ends it."""
        if not shape.min_confidence or not self.sure:
            return shape.depth
        confidence = 1.0
        for length in range(1, shape.depth + 1):
            confidence *= self.sure[at][length - 1] if length <= len(self.sure[at]) else 0.0
            if confidence < shape.min_confidence:
                return length
        return shape.depth

    def plain_s(self, machine: Machine) -> float:
        """Of plain decoding."""
        return len(self) * machine.seconds(0)


class ReplayedRound(NamedTuple):
    """Begun behind root `at`, with so many draft tokens, `looked_up` in the text or by the drafter."""

    at: int
    drafted: int
    accepted: int
    looked_up: bool = False


class Counts(NamedTuple):
    """What a text took."""

    rounds: int
    drafted: int
    accepted: int
    rests: int
    looked_up: int
    seconds: float


class ReplayedText(NamedTuple):
    """A policy's way through a trace, and what it took."""

    seconds: float
    rounds: list[ReplayedRound]

    @property
    def counts(self) -> Counts:
        """Added up."""
        _, drafted, accepted, looked_up = map(sum, zip(*self.rounds, strict=True))
        rests = sum(not done.drafted for done in self.rounds)
        return Counts(len(self.rounds), drafted, accepted, rests, looked_up, self.seconds)


def replay(
    policy: DraftPolicy,
    trace: DraftTrace,
    machine: Machine,
    *,
    clock: Callable[[], float] = lambda: 1.0,
) -> ReplayedText:
    """Write the trace's text by the policy's plans for one row of chains.

    The drafter's first draft after a round without any waits until it has read what it missed.

    Args:
        policy: a new one, as for a generation of its own.
        machine: what rounds cost.
        clock: by how much the seconds that the policy is given exceed those of the table, as on a busy machine.
    """
    tokens = trace.written or (0,) * len(trace)
    prompt = torch.tensor([[*trace.prompt] or [0]])
    sequences = Sequences(prompt, padding=[0], rules=StopRules(prompt.shape[1] + len(tokens)), pad_id=None)
    (new,) = sequences.new
    seconds, rounds = 0.0, []
    missed = False  # whether the drafter has not read what the last round wrote
    while len(new) < len(tokens):
        remaining = len(tokens) - len(new)
        plan = policy.next_draft([0], sequences, remaining) if remaining > 1 else None
        done = _round(plan, trace, len(new), remaining)
        rounds.append(done)
        round_s = machine.seconds(done.drafted, looked_up=done.looked_up)
        if missed and done.drafted and not done.looked_up:
            round_s += machine.absorb_s
        missed = not done.drafted
        seconds += round_s
        new.extend(tokens[done.at : done.at + done.accepted + 1])
        if plan is not None:
            policy.record(plan, done.drafted, [0], [done.accepted], round_s * clock())
    return ReplayedText(seconds, rounds)


def _round(plan: DraftPlan | None, trace: DraftTrace, at: int, remaining: int) -> ReplayedRound:
    """What becomes of a plan behind root `at`; the target adds a token to what is accepted."""
    if plan is None or not plan.shape.depth:
        return ReplayedRound(at, 0, 0)
    shape = plan.shape.cut_to(remaining - 1)
    if plan.tokens is None:
        drafted = trace.drafted(at, shape)
        return ReplayedRound(at, drafted, min(trace.right[at], drafted))
    guesses = plan.tokens[0][: shape.depth]
    hits = (guess == token for guess, token in zip(guesses, trace.written[at:], strict=False))
    accepted = next((place for place, hit in enumerate(hits) if not hit), len(guesses))
    return ReplayedRound(at, len(guesses), accepted, looked_up=True)


# --- kept texts, and the default of this checkout ---------------------------------------------------------------------

CountsByMachine = dict[str, list[Counts]]
"""Of each text."""


def read_kept(path: Path = KEPT) -> tuple[list[DraftTrace], CountsByMachine]:
    """What `policy_texts.py` wrote: texts, and what the default of then made of them."""
    kept = json.loads(gzip.decompress(path.read_bytes()))
    for text in kept["texts"]:
        text["sure"] = [[percent / 100 for percent in draft] for draft in text["sure"]]
    counts = {machine: [Counts(*row) for row in rows] for machine, rows in kept["counts"].get("default", {}).items()}
    return [DraftTrace(**text) for text in kept["texts"]], counts


def planned(texts: Sequence[DraftTrace], machine: Machine) -> list[Counts]:
    """What the default makes of texts: planners that share what they time, as those of one drafter in a process do."""
    shape = DraftShape(7) if machine.graphs else DraftShape(LONGEST, min_confidence=0.02)
    width = WIDTH_IN_HALF if machine is MACHINES["bfloat16"] else WIDTH_ON_CPU
    costs: dict[str, RoundCosts] = defaultdict(
        lambda: RoundCosts(STEP_SHARE, shape.depth, WIDTH if machine.graphs else width)
    )
    lengths, found = (shape.depth,) if machine.graphs else (), []
    for text in texts:
        planner = Planner(shape, lambda _rows, drafter=text.drafter: costs[drafter], lengths=lengths)
        found.append(replay(planner, text, machine).counts)
    return found


def compare(ours: Sequence[Counts], theirs: Sequence[float]) -> tuple[float, float]:
    """Our speed over that of these seconds: on all texts together, and on the text where it is least."""
    ratios = [other / counts.seconds for counts, other in zip(ours, theirs, strict=True)]
    return sum(theirs) / sum(counts.seconds for counts in ours), min(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="counts of each text, as the kept ones are")
    options = parser.parse_args()
    texts, before = read_kept()
    found = {name: planned(texts, machine) for name, machine in MACHINES.items()}
    print("speed of today's default over the kept one's (least of a text), and over plain decoding")
    for (name, machine), drafter in product(MACHINES.items(), ("trained", "untrained")):
        chosen = [at for at, text in enumerate(texts) if text.drafter == drafter]
        ours = [found[name][at] for at in chosen]
        ratio, least = compare(ours, [before[name][at].seconds for at in chosen])
        over_plain, _ = compare(ours, [texts[at].plain_s(machine) for at in chosen])
        print(f"  {name:9} {drafter:9} {ratio:.3f} ({least:.3f})   {over_plain:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"default": found}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
