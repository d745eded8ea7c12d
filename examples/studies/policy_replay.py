"""What a draft policy makes of a known text: rounds counted, with seconds from a calibration. Nothing is generated.

Where tokens are drawn, each way of drafting writes texts of its own, and the luck of a text is larger than what good
policies differ by. On a text that is known already they all meet the same tokens, and the same luck of drafts behind
each of them, so few texts tell a hundredth. The policies are those that `generate` runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle31_hf.decoding.adaptive.costs import RoundTable
from eagle31_hf.decoding.draft_policy import DraftPlan, DraftPolicy, RoundState, RoundStats
from eagle31_hf.decoding.text import Sequences, StopRules
from eagle31_hf.drafter.hindsight import MOST_JUDGED, Hindsight
from eagle31_hf.training.distillation.known_texts import KnownChains, KnownText
from eagle31_hf.trees.shape import DraftShape


@dataclass(frozen=True)
class DraftTrace:
    """One row's text, and what drafts come to behind each of its tokens.

    Attributes:
        right: behind each token that may be a round's root, how many tokens of a draft are right, however long it is.
        sure: the drafter's largest probability of each of them; empty for a drafter that says nothing.
        prompt: ids up to the first root.
        written: ids behind it, as many as roots; empty if no policy looks at them.
    """

    right: tuple[int, ...]
    sure: tuple[tuple[float, ...], ...] = ()
    prompt: tuple[int, ...] = ()
    written: tuple[int, ...] = ()

    @classmethod
    def of(cls, known: KnownText, chains: KnownChains) -> DraftTrace:
        """Of a known text's chains."""
        ids, first = known.text.ids.tolist(), known.text.prompt_length + 1
        return cls(
            right=tuple(chains.kept.tolist()),
            sure=tuple(map(tuple, chains.sure.tolist())),
            prompt=tuple(ids[:first]),
            written=tuple(ids[first:]),
        )

    def __len__(self) -> int:
        return len(self.right)

    def judged(self, at: int, unread: int) -> Hindsight:
        """A drafter that reads, before root `at`, so many positions: behind the last of them nothing is written yet."""
        first = at - min(max(unread - 1, 0), MOST_JUDGED)
        return Hindsight(at - first, sum(right > 0 for right in self.right[first:at]))

    def drafted(self, at: int, shape: DraftShape) -> int:
        """Tokens of a chain behind root `at`, which doubt may end; as `propose_chain` ends it."""
        confidence = 1.0
        for length, chance in enumerate(self.sure[at] if shape.min_confidence and self.sure else (), 1):
            confidence *= chance
            if length == shape.depth or confidence < shape.min_confidence:
                return length
        return shape.depth


@dataclass(frozen=True)
class ReplayedRound:
    """Begun behind root `at`, with so many draft tokens, `looked_up` in the text or by the drafter."""

    at: int
    drafted: int
    accepted: int
    looked_up: bool = False


@dataclass(frozen=True)
class ReplayedText:
    """A policy's way through a trace, and what it took by the table of costs."""

    seconds: float
    rounds: tuple[ReplayedRound, ...]


def replay(
    policy: DraftPolicy,
    trace: DraftTrace,
    table: RoundTable,
    largest: DraftShape,
    *,
    reading_s: float | None = None,
    reads_at_once: bool = False,
) -> ReplayedText:
    """Write the trace's text by the policy's plans for one row of chains.

    The drafter's first draft after a round without any waits until it has read what it missed, unless it was judged
    just before, for which it reads as much. Behind a round of other drafts it takes what the table says of resuming.

    Args:
        policy: a new one, as for a generation of its own.
        table: seconds of rounds, for drafts as long as `largest`.
        largest: the largest draft that the policy is offered.
        reading_s: of the drafter over what it has missed; default: as the table says.
        reads_at_once: a round of its own drafts ends with the drafter reading what was written, as by graphs; else it
            reads that before it drafts again, which the table's rounds count.
    """
    reading_s = table.reading_s if reading_s is None else reading_s
    tokens = trace.written or (0,) * len(trace)
    prompt = torch.tensor([trace.prompt or (0,)])
    sequences = Sequences(prompt, [0], StopRules(prompt.shape[1] + len(tokens)), None)
    (new,) = sequences.new
    seconds, rounds = 0.0, []
    unread = 0  # positions that the drafter has not read
    resume_s = 0.0  # what its next draft takes beyond others
    while len(new) < len(tokens):
        remaining = len(tokens) - len(new)
        state = RoundState(largest, [0], sequences, remaining)
        plan = policy.next_draft(state) if remaining > 1 else None
        if plan is not None and plan.looks_back:
            policy.record_hindsight(trace.judged(len(new), unread))
            seconds, unread, resume_s = seconds + reading_s, 0, max(table.resume_s - reading_s, 0.0)
            plan = policy.next_draft(state)
        done = _round(plan, trace, len(new), remaining)
        rounds.append(done)
        seconds += (table.lookup_s if done.looked_up else table.speculative_s)[done.drafted]
        is_its_own = done.drafted > 0 and not done.looked_up
        if is_its_own:
            seconds, unread, resume_s = seconds + resume_s, 0, 0.0
        else:
            resume_s = table.resume_s if done.drafted else max(table.resume_s, reading_s)
        unread += 0 if is_its_own and reads_at_once else done.accepted + 1
        new.extend(tokens[done.at : done.at + done.accepted + 1])
        if plan is not None:
            policy.record(RoundStats(plan, done.drafted, done.drafted, (0,), (done.accepted,)))
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
