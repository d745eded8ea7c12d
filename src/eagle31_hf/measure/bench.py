"""Ways to write the same text against each other: plain `generate`, our loop with and without drafts, by graphs.

The work is cut into turns: some prompts, in one repeat. In a turn every method writes the same prompts, one method
after the other and another one first each time, so a slow minute of the machine falls on all. The seed depends on the
turn alone: sampled texts are compared with plain `generate`'s, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.streamers import BaseStreamer

from ..drafter.assistant import Assistant, NoDrafter
from ..loop.kept_graphs import FEWEST_CAPTURED_TOKENS
from ..loop.pair import Drafting, Pair
from ..sampling.logits_processing import DraftWarping, end_ids, processing_of
from ..stats import SpeculationStats
from ..targets.devices import now
from .exactness import Kind, SampledBy, Verdict, judge
from .results import PLAIN, BenchResult, BenchSettings, Call, Method, Task, Turn, Writer

CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
RESET_PEAK = "5"  # proc(5): the resident set's peak begins anew

Prompts = dict[str, Tensor]
"""`input_ids` and `attention_mask` `(B, T)`, padded on the left."""


class Bench:
    """Measures all methods on all tasks.

    Args:
        assistant: a drafter, or `NoDrafter`, attached to the target.
        tasks: what to write.
        settings: how.
        on_turn: called between measurements with how many are done, and of how many.

    Attributes:
        result: what was measured so far.
    """

    def __init__(
        self,
        assistant: Assistant,
        tasks: Sequence[Task],
        settings: BenchSettings,
        *,
        on_turn: Callable[[int, int], None] = lambda done, of: None,
    ):
        self.tasks, self.settings = tasks, settings
        self._assistant, self._on_turn = assistant, on_turn
        self.binding = assistant.binding
        self.alone = assistant if isinstance(assistant, NoDrafter) else _without_drafter(assistant)
        self._peak = PeakGauge(self.binding.head_device)
        self._judged: dict[tuple[str, str, str], Verdict] = {}
        self.result = BenchResult(settings)

    def run(self) -> BenchResult:
        """Write everything that there is time for: at least one turn with each number of rows."""
        by_rows = [self._turns(rows) for rows in dict.fromkeys(self.settings.rows)]
        result, result.of = self.result, sum(map(len, by_rows))
        with torch.random.fork_rng():
            for turns in by_rows:
                methods = self._ready_methods(turns)
                end = time.monotonic() + 60 * (self.settings.minutes or math.inf) / len(by_rows)
                for place, turn in enumerate(turns):
                    if place and time.monotonic() >= end:
                        break
                    result.calls += self._measure(turn, methods)
                    result.turns += 1
                    self._on_turn(result.turns, result.of)
        return result

    def _turns(self, rows: int) -> list[Turn]:
        """Neighbours of one kind together; the last batch of a kind is filled up from its first."""
        batches: list[tuple[str, tuple[Task, ...]]] = []
        for kind, tasks in tasks_by_kind(self.tasks).items():
            filled = [tasks[index % len(tasks)] for index in range(-(-len(tasks) // rows) * rows)]
            batches += [(kind, tuple(filled[start : start + rows])) for start in range(0, len(filled), rows)]
        return [
            Turn(repeat, index, *batch, seed=self.settings.seed + 100_003 * repeat + index)
            for repeat in range(self.settings.repeats)
            for index, batch in enumerate(batches)
        ]

    # --- before anything counts -------------------------------------------------------------------------------------

    def _ready_methods(self, turns: Sequence[Turn]) -> list[Method]:
        """Those that can run here, each having written what does not count."""
        batches, ready = self._unlike_batches(turns), []
        for method in self.settings.methods:
            for batch in batches:
                torch.manual_seed(self.settings.seed)
                _, stats = self._write(method, batch, None)
            if method.by_graphs and stats is not None and (why := self._why_eager(method, turns[0].rows, stats)):
                self.result.left_out[method.name] = why
            else:
                ready.append(method)
        return ready

    def _why_eager(self, method: Method, rows: int, stats: SpeculationStats) -> str:
        """Why a method has no graphs for so many rows; empty if it has some."""
        assistant = self._assistant_of(method)
        with _overridden(assistant, method.overrides):
            drafting = _drafting_of(assistant, self.settings, rows)
        return "" if drafting.graphs is not None else "; ".join(stats.fallbacks) or stats.reason

    def _unlike_batches(self, turns: Sequence[Turn]) -> list[Prompts]:
        """The longest and the shortest batch for each power of two of their length: graphs are made by length."""
        by_length: dict[int, list[Prompts]] = {}
        for batch in sorted(map(self._batch, turns), key=lambda batch: batch["input_ids"].shape[1]):
            length = batch["input_ids"].shape[1] + self.settings.new_tokens
            by_length.setdefault((length - 1).bit_length(), []).append(batch)
        return [batch for group in by_length.values() for batch in (group[0], *group[1:][-1:])]

    # --- what counts ------------------------------------------------------------------------------------------------

    def _measure(self, turn: Turn, methods: Sequence[Method]) -> list[Call]:
        first = (turn.repeat + turn.index) % len(methods)
        calls = {method: self._call(method, turn) for method in [*methods[first:], *methods[:first]]}
        return [self._judge(calls[method], calls[PLAIN].answers) for method in methods]

    def _call(self, method: Method, turn: Turn) -> Call:
        clock, batch, device = TokenClock(), self._batch(turn), self.binding.head_device
        torch.manual_seed(turn.seed)
        self._peak.reset()
        started = now(device)
        tokens, stats = self._write(method, batch, clock)
        seconds = now(device) - started
        ends = end_ids(self.binding.model)
        return Call(
            method=method,
            turn=turn,
            answers=[until_end(row, ends) for row in tokens.tolist()],
            seconds=seconds,
            first_token_s=clock.moments[0] - started if clock.moments else seconds,
            gaps_s=clock.gaps if turn.rows == 1 else (),  # our loop hands out the tokens of each row apart
            stats=stats,
            peak_bytes=self._peak.read(),
        )

    def _write(self, method: Method, batch: Prompts, streamer: Any) -> tuple[Tensor, SpeculationStats | None]:
        """New tokens `(B, n)`, and our loop's figures if it wrote them."""
        model: Any = self.binding.model
        kwargs = {**batch, **self.settings.to_generate(), "max_new_tokens": self.settings.new_tokens}
        prompt_length = batch["input_ids"].shape[1]
        if method.writer is Writer.GENERATE:
            return model.generate(**kwargs, streamer=streamer)[:, prompt_length:], None
        assistant = self._assistant_of(method)
        with _overridden(assistant, method.overrides):
            tokens = model.generate(**kwargs, streamer=streamer, assistant_model=assistant)[:, prompt_length:]
        return tokens, assistant.stats

    def _assistant_of(self, method: Method) -> Assistant:
        return self._assistant if method.writer is Writer.DRAFTER else self.alone

    def _batch(self, turn: Turn) -> Prompts:
        return left_padded([task.ids for task in turn.tasks], self.binding.text_config.pad_token_id or 0)

    # --- exactness --------------------------------------------------------------------------------------------------

    def _judge(self, call: Call, plain: list[list[int]]) -> Call:
        if call.method == PLAIN:
            return replace(call, verdicts=(Verdict(Kind.REFERENCE),) * len(plain))
        return replace(call, verdicts=tuple(self._verdict(call, row, answer) for row, answer in enumerate(plain)))

    def _verdict(self, call: Call, row: int, plain: list[int]) -> Verdict:
        turn, answer = call.turn, call.answers[row]
        task, warping = turn.tasks[row], self._warping
        key = task.prompt.id, str(answer), str(plain)
        if key not in self._judged:
            sampled = None if warping is None else SampledBy(turn.seed, row, turn.rows, warping)
            blocks = 8, block_size(call.stats)
            self._judged[key] = judge(self.binding.model, task.ids, answer, plain, blocks=blocks, sampled=sampled)
        return self._judged[key]

    @cached_property
    def _warping(self) -> DraftWarping | None:
        """Of sampled texts; `None` of greedy ones, and where more than scores decide: then no tie is proven."""
        if not self.settings.temperature:
            return None
        processing = processing_of(self.binding.model, **self.settings.to_generate())
        return processing.draft_warping if processing.fits_draft_vocabulary else None


def _without_drafter(assistant: Assistant) -> NoDrafter:
    """The same target alone, its caches stored and filled as with the drafter."""
    alone = NoDrafter(assistant.binding.model)
    for name in ("cache_type", "prefill_chunk_size"):
        setattr(alone.generation_config, name, getattr(assistant.generation_config, name))
    return alone


@contextmanager
def _overridden(assistant: Assistant, settings: dict[str, Any]) -> Iterator[None]:
    """The assistant's settings with other values for a while."""
    config = assistant.generation_config
    before = vars(config).copy()
    try:
        for name, value in settings.items():
            setattr(config, name, value)
        config.check()
        yield
    finally:
        vars(config).update(before)


def has_graphs(assistant: Assistant, settings: BenchSettings) -> bool:
    """Whether single texts of these settings may be written by graphs here: those that are asked for, captured as they
    are met, or kept by `eagle31 warmup`."""
    asked_for = assistant.generation_config.acceleration == "compile"
    return asked_for or _drafting_of(assistant, settings, rows=1).graphs is not None


def _drafting_of(assistant: Assistant, settings: BenchSettings, rows: int) -> Drafting:
    """What texts of these settings draft, and by which graphs."""
    how = settings.to_generate()
    return Pair.of(assistant).drafting(
        rows=rows,
        sampled=how["do_sample"],
        processing=processing_of(assistant.binding.model, **how),
        new_tokens=max(settings.new_tokens, FEWEST_CAPTURED_TOKENS),
    )


def tasks_by_kind(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """By data set, or by category where there is one data set alone."""
    several = len({task.prompt.suite for task in tasks}) > 1
    by_kind: dict[str, list[Task]] = {}
    for task in tasks:
        by_kind.setdefault(task.prompt.suite if several else task.prompt.category, []).append(task)
    return by_kind


def block_size(stats: SpeculationStats | None) -> int:
    """Tokens of the largest block a round of this call may have verified, by the mean of all."""
    if stats is None or not stats.rounds:
        return 1
    return 1 + max(len(stats.drafted_at), -(-stats.drafted // stats.rounds))


def left_padded(rows: Sequence[Tensor], pad_id: int) -> Prompts:
    """Prompts `(T,)` of any length as `generate` takes a batch."""
    several: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
    return {
        "input_ids": pad_sequence(list(rows), padding_value=pad_id, **several),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], **several),
    }


def until_end(answer: list[int], ends: set[int]) -> list[int]:
    """An answer up to and with its end."""
    stop = next((place for place, token in enumerate(answer, 1) if token in ends), len(answer))
    return answer[:stop]


# --- gauges -----------------------------------------------------------------------------------------------------------


class TokenClock(BaseStreamer):
    """A `generate` streamer that notes when tokens are handed out."""

    takes_rows_apart = True  # of a batch: a row's block of tokens each time, as our loop writes them

    def __init__(self) -> None:
        self.moments: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.moments.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between two times."""
        return tuple(later - earlier for earlier, later in pairwise(self.moments))


class PeakGauge:
    """Most memory between `reset` and `read`, weights included.

    CUDA: `torch.cuda.max_memory_allocated`. Elsewhere the process's resident set, where the kernel lets its peak be
    reset (Linux); `read` gives `None` where neither can be had.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._can_read = "VmHWM" in STATUS.read_text()
        except OSError:
            self._can_read = False

    def read(self) -> int | None:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not self._can_read:
            return None
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
