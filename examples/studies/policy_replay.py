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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eagle31_hf.drafting.costs import WIDTH, WIDTH_IN_HALF, WIDTH_ON_CPU, RoundCosts
from eagle31_hf.drafting.plan import DraftPlan, DraftPolicy, RoundState, RoundStats
from eagle31_hf.drafting.planner import Planner
from eagle31_hf.drafting.shape import DraftShape

STEP_SHARE = 0.1
"""Bytes of a draft step over those of the target, as planners take them to be."""

KEPT = Path(__file__).with_name("policy_replay.json.gz")
LONGEST = 12
"""Draft tokens of a round at most."""


class RoundSeconds(NamedTuple):
    """Seconds of rounds by the number of tokens drafted; the first entries, without a draft, are plain decoding's.

    Attributes:
        speculative_s: the drafter drafted them.
        lookup_s: they were taken from the text itself.
        reading_s: of the drafter over what it has missed.
    """

    speculative_s: tuple[float, ...]
    lookup_s: tuple[float, ...]
    reading_s: float = 0.0


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

    def rounds(self, longest: int = LONGEST) -> RoundSeconds:
        """What whole rounds of one text take, with chains of up to `longest` tokens."""
        plain_s = self.target_s(1) + self.plain_round_s
        lookup_s = [self.target_s(depth + 1) + self.round_s for depth in range(1, longest + 1)]
        drafted_s = [self.absorb_s + step * self.drafter_step_s for step in range(longest)]
        return RoundSeconds(
            speculative_s=(plain_s, *(a + b for a, b in zip(lookup_s, drafted_s, strict=True))),
            lookup_s=(plain_s, *lookup_s),
            reading_s=self.absorb_s,
        )


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
    """

    right: tuple[int, ...]
    sure: tuple[tuple[float, ...], ...] = ()
    prompt: tuple[int, ...] = ()
    written: tuple[int, ...] = ()

    @classmethod
    def of(cls, known: Any, chains: Any) -> DraftTrace:
        """Of a `KnownText` and its `KnownChains`."""
        ids, first = known.text.ids.tolist(), known.text.prompt_length + 1
        return cls(
            right=tuple(chains.kept.tolist()),
            sure=tuple(map(tuple, chains.sure.tolist())),
            prompt=tuple(ids[:first]),
            written=tuple(ids[first:]),
        )

    def __len__(self) -> int:
        return len(self.right)

    def drafted(self, at: int, shape: DraftShape) -> int:
        """Tokens of a chain behind root `at`, which doubt may end; as `propose_chain` ends it."""
        if not shape.min_confidence or not self.sure:
            return shape.depth
        confidence = 1.0
        for length in range(1, shape.depth + 1):
            confidence *= self.sure[at][length - 1] if length <= len(self.sure[at]) else 0.0
            if confidence < shape.min_confidence:
                return length
        return shape.depth


class WrittenText:
    """The text so far, as policies see it (`ReadTexts`)."""

    def __init__(self, prompt: Sequence[int]):
        self.prompt = list(prompt)
        self.new: list[list[int]] = [[]]

    def text(self, row: int) -> list[int]:
        """Prompt and new tokens."""
        return self.prompt + self.new[row]

    def identity(self, row: int) -> Hashable:
        """There is one."""
        return row


@dataclass(frozen=True)
class ReplayedRound:
    """Begun behind root `at`, with so many draft tokens, `looked_up` in the text or by the drafter."""

    at: int
    drafted: int
    accepted: int
    looked_up: bool = False


@dataclass(frozen=True)
class Counts:
    """What a text took."""

    rounds: int
    drafted: int
    accepted: int
    rests: int
    looked_up: int
    seconds: float


@dataclass(frozen=True)
class ReplayedText:
    """A policy's way through a trace, and what it took by the table of costs."""

    seconds: float
    rounds: tuple[ReplayedRound, ...]

    @property
    def counts(self) -> Counts:
        """Added up."""
        return Counts(
            rounds=len(self.rounds),
            drafted=sum(done.drafted for done in self.rounds),
            accepted=sum(done.accepted for done in self.rounds),
            rests=sum(not done.drafted for done in self.rounds),
            looked_up=sum(done.looked_up for done in self.rounds),
            seconds=self.seconds,
        )


def replay(
    policy: DraftPolicy,
    trace: DraftTrace,
    table: RoundSeconds,
    largest: DraftShape,
    *,
    clock: Callable[[], float] = lambda: 1.0,
) -> ReplayedText:
    """Write the trace's text by the policy's plans for one row of chains.

    The drafter's first draft after a round without any waits until it has read what it missed.

    Args:
        policy: a new one, as for a generation of its own.
        table: seconds of rounds, for drafts as long as `largest`.
        largest: the largest draft that the policy is offered.
        clock: by how much the seconds that the policy is given exceed those of the table, as on a busy machine.
    """
    tokens = trace.written or (0,) * len(trace)
    sequences = WrittenText(trace.prompt or (0,))
    (new,) = sequences.new
    seconds, rounds = 0.0, []
    missed = False  # whether the drafter has not read what the last round wrote
    while len(new) < len(tokens):
        remaining = len(tokens) - len(new)
        state = RoundState(largest, [0], sequences, remaining)
        plan = policy.next_draft(state) if remaining > 1 else None
        done = _round(plan, trace, len(new), remaining)
        rounds.append(done)
        round_s = (table.lookup_s if done.looked_up else table.speculative_s)[done.drafted]
        if missed and done.drafted and not done.looked_up:
            round_s += table.reading_s
        missed = not done.drafted
        seconds += round_s
        new.extend(tokens[done.at : done.at + done.accepted + 1])
        if plan is not None:
            policy.record(RoundStats(plan, done.drafted, (0,), (done.accepted,), round_s * clock()))
    return ReplayedText(seconds, tuple(rounds))


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


# --- kept texts and counts --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptText:
    """A text of a kind, greedy or drawn, as the drafter of that name meets it."""

    kind: str
    temperature: float
    drafter: str
    trace: DraftTrace


@dataclass(frozen=True)
class Kept:
    """The texts, and the counts of each by `counts[way][machine]`."""

    texts: list[KeptText]
    counts: dict[str, dict[str, list[Counts]]]


def read_kept(path: Path = KEPT) -> Kept:
    """What `policy_texts.py` wrote."""
    stored = json.loads(gzip.decompress(path.read_bytes()))
    texts = []
    for each in stored["texts"]:
        sure = tuple(tuple(percent / 100 for percent in draft) for draft in each["sure"])
        trace = DraftTrace(tuple(each["right"]), sure, tuple(each["prompt"]), tuple(each["written"]))
        texts.append(KeptText(each["kind"], each["temperature"], each["drafter"], trace))
    counts = {
        way: {machine: [Counts(*row) for row in rows] for machine, rows in by_machine.items()}
        for way, by_machine in stored["counts"].items()
    }
    return Kept(texts, counts)


def plain_s(text: KeptText, machine: Machine) -> float:
    """Of plain decoding."""
    return len(text.trace) * machine.rounds(1).speculative_s[0]


MakePolicy = Callable[[KeptText, Machine], tuple[DraftPolicy, DraftShape]]
"""A new policy for a text of its own, and the largest draft that it is offered."""


def count(make: MakePolicy, texts: Sequence[KeptText], machine: Machine) -> list[Counts]:
    """Of each text."""
    found = []
    for text in texts:
        policy, largest = make(text, machine)
        replayed = replay(policy, text.trace, machine.rounds(), largest)
        found.append(replayed.counts)
    return found


# --- the default of this checkout -------------------------------------------------------------------------------------


def planner_of(machine: Machine) -> MakePolicy:
    """Planners that share what they time, as the texts of a process do."""
    shape = DraftShape(7) if machine.graphs else DraftShape(LONGEST, min_confidence=0.02)
    width = WIDTH_IN_HALF if machine is MACHINES["bfloat16"] else WIDTH_ON_CPU
    costs = RoundCosts(STEP_SHARE, shape.depth, WIDTH if machine.graphs else width)
    lengths = (shape.depth,) if machine.graphs else ()
    return lambda _text, _machine: (Planner(shape, lambda _rows: costs, lengths=lengths), shape)


def default_counts(texts: Sequence[KeptText]) -> dict[str, list[Counts]]:
    """By machine, of each text; those of one drafter are written by one process."""
    found: dict[str, list[Counts]] = {}
    for name, machine in MACHINES.items():
        made = {drafter: planner_of(machine) for drafter in dict.fromkeys(text.drafter for text in texts)}
        found[name] = count(lambda text, each, made=made: made[text.drafter](text, each), texts, machine)
    return found


def compare(ours: Sequence[Counts], theirs: Sequence[float]) -> dict[str, float]:
    """Our speed over theirs: on all texts together, and on the text where it is least."""
    ratios = [other / counts.seconds for counts, other in zip(ours, theirs, strict=True)]
    return {"ratio": sum(theirs) / sum(counts.seconds for counts in ours), "least": min(ratios)}


def show(kept: Kept, found: dict[str, list[Counts]]) -> None:
    """A line for each kept way, machine and drafter."""
    for way, by_machine in kept.counts.items():
        print(f"speed of today's default over the kept {way!r} (least of a text), and over plain decoding")
        for name, before in by_machine.items():
            for drafter in dict.fromkeys(text.drafter for text in kept.texts):
                chosen = [at for at, text in enumerate(kept.texts) if text.drafter == drafter]
                ours = [found[name][at] for at in chosen]
                then = compare(ours, [before[at].seconds for at in chosen])
                over = compare(ours, [plain_s(kept.texts[at], MACHINES[name]) for at in chosen])
                print(f"  {name:9} {drafter:9} {then['ratio']:.3f} ({then['least']:.3f})   {over['ratio']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="counts of each text, as the kept ones are")
    options = parser.parse_args()
    kept = read_kept()
    found = default_counts(kept.texts)
    show(kept, found)
    if options.json:
        options.json.write_text(json.dumps(counts_as_rows({"planned": found})) + "\n", encoding="utf-8")


def counts_as_rows(counts: dict[str, dict[str, list[Counts]]]) -> dict[str, dict[str, list[list[float]]]]:
    """As the kept file holds them."""
    return {
        way: {machine: [[*astuple(each)] for each in rows] for machine, rows in by_machine.items()}
        for way, by_machine in counts.items()
    }


if __name__ == "__main__":
    main()
