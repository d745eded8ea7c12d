"""`eagle31 bench run`: methods against each other on prompts people know, one record per call.

The work is cut into turns: some prompts, one temperature, one batch size, one repeat. In a turn every method writes the
same prompts, one method after the other and another one first each time, so a slow minute of the machine falls on all.
Seeds depend on the turn alone, so a run that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..compiled.captured import CAPTURES
from ..decoding.kept_graphs import CompilesAhead, compiling_ahead
from ..drafter.assistant import NoDrafter
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError, MemoryPlanError, UnsupportedGenerationError, named_line
from ..generation_config import FIXED_DEPTH
from ..memory.apply_plan import plan_of_run
from ..memory.ledger import MemorySettings
from ..sampling.logits_processing import ScoreProcessing
from ..stats import SpeculationStats, windows
from ..target.device_clock import now
from ..target.served_processing import processing_of
from ..texts.prompts import Prompt
from ..training.data.padding import end_ids, until_end
from .bare_meter import BareCosts, BareMeter, drafted_depths, typical_context
from .calls import (
    PLAIN,
    REFERENCE,
    SAMPLED,
    CallRecord,
    Drafting,
    ThinkMarks,
    Verdict,
    digest_of,
    served_by,
    split_rounds,
)  # fmt: skip
from .exactness import SampledBy, judge
from .gauges import EnergyGauge, PassCounter, PeakGauge, TokenClock, ends_off
from .methods import Method, Prompts, all_methods, early_exit_refusal, left_padded
from .run_settings import RunSettings
from .summary import MethodSummary

NEVER_HERE = {
    "Medusa": "it needs heads trained for this very target, which transformers does not load",
    "Lookahead decoding": "its code is for old model files of its own, and transformers has none",
}


Answers = list[list[int]]


@dataclass(frozen=True)
class Task:
    """A prompt and its ids `(T,)`, on the target's device."""

    prompt: Prompt
    ids: Tensor


@dataclass(frozen=True)
class Turn:
    """Tasks that are written together by each method, and how."""

    name: str
    temperature: float
    batch_size: int
    repeat: int
    index: int
    tasks: tuple[Task, ...]


class BenchmarkRun:
    """Measures all methods on all tasks.

    Args:
        drafter: attached to the target.
        tasks: what to write.
        settings: how.
        marks: how the target's tokenizer writes `<think>`, if it does.
        note: takes what is not a call: the methods left out, the seconds of a first call (compiling among them).
        on_made: told how many graphs are compiled, of how many that were begun.

    Raises:
        ConfigurationError: a setting makes no sense, there are no tasks, or a method is not known.
    """

    def __init__(
        self,
        drafter: Eagle31Drafter,
        tasks: Sequence[Task],
        settings: RunSettings,
        *,
        marks: ThinkMarks | None = None,
        note: Callable[[dict[str, Any]], None] = lambda _: None,
        on_made: Callable[[int, int], None] = lambda made, of: None,
    ):
        settings.check()
        if not tasks:
            raise ConfigurationError("got no prompts to measure on; wanted at least one")
        self.drafter, self.tasks, self.settings, self.marks, self.note = drafter, tasks, settings, marks, note
        self.binding, self._on_made = drafter.binding, on_made
        device = self.binding.head_device
        self.peak, self.energy = PeakGauge(device), EnergyGauge(device)
        self._pad = self.binding.text_config.pad_token_id or 0
        self._passes = PassCounter(self.binding)
        self._judged: dict[tuple[str, ...], Verdict] = {}
        self._warping: dict[float, ScoreProcessing] = {}  # by temperature
        self._warm: dict[tuple[float, int], list[Method]] = {}
        self._meters: dict[tuple[str, int], BareMeter] = {}  # by method and batch size
        self._bare: dict[tuple[str, int], list[BareCosts]] = {}
        self._left_out: set[str] = set()
        self._compilers: list[CompilesAhead] = []
        self._no_graphs = ""  # why there are none
        self._alone = NoDrafter(self.binding.model)

    # --- the plan ---------------------------------------------------------------------------------------------------

    @property
    def turns(self) -> list[Turn]:
        """In the order they are measured."""
        return [
            Turn(f"repeat {repeat}, temperature {heat:g}, batch {size}, {index}", heat, size, repeat, index, tasks)
            for repeat in range(self.settings.repeats)
            for heat in self.settings.temperatures
            for size in dict.fromkeys(self.settings.batch_sizes)
            for index, tasks in enumerate(self._batches(size))
        ]

    def _batches(self, size: int) -> Iterator[tuple[Task, ...]]:
        """Neighbours together, of one category where they are sorted; the last batch is filled up from the first."""
        count = -(-len(self.tasks) // size)
        rows = [self.tasks[index % len(self.tasks)] for index in range(count * size)]
        for start in range(0, len(rows), size):
            yield tuple(rows[start : start + size])

    def ledger(self) -> dict[str, Any] | None:
        """What a plan says of the largest of these calls at its peak, by term; `None` where it cannot be had."""
        settings = self.settings
        longest = max(len(task.ids) for task in self.tasks) + settings.new_tokens
        wanted = MemorySettings(
            context=longest,
            batch=max(settings.batch_sizes),
            draft_tokens=settings.depth or FIXED_DEPTH,
            prefill_chunk=longest - settings.new_tokens,
        )
        try:
            plan = plan_of_run(self.drafter, wanted)
        except MemoryPlanError:
            return None
        alive = [term for term in plan.ledger if plan.peak_moment in term.moments]
        terms = [{"name": term.name, "bytes": term.num_bytes} for term in alive]
        return {"kind": "ledger", "moment": plan.peak_moment, "context": longest, "batch": wanted.batch, "terms": terms}

    # --- measuring --------------------------------------------------------------------------------------------------

    def measure(self, skip: frozenset[str] = frozenset()) -> Iterator[list[CallRecord]]:
        """Each turn's calls, but for those of the turns to `skip`."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(self._passes.counting())
            if self.settings.ignore_eos:
                stack.enter_context(ends_off(self.binding.model))
            if self.settings.compiled and self.binding.head_device.type not in CAPTURES:
                self._open_compiler(stack)
            for turn in self.turns:
                if turn.name not in skip:
                    yield self._measure(turn)

    def _open_compiler(self, stack: ExitStack) -> None:
        try:
            both = self.drafter, self._alone
            self._compilers = [stack.enter_context(compiling_ahead(each, on_made=self._on_made)) for each in both]
        except ConfigurationError as refused:
            self._no_graphs = str(refused)

    def _measure(self, turn: Turn) -> list[CallRecord]:
        batch = left_padded([task.ids for task in turn.tasks], self._pad)
        methods = self._methods(turn)
        first = (turn.repeat + turn.index) % len(methods)
        written = {method.name: self._call(method, turn, batch) for method in methods[first:] + methods[:first]}
        _, plain = written[PLAIN]
        return [self._judge(method, *written[method.name], turn, plain) for method in methods]

    def _call(self, method: Method, turn: Turn, batch: Prompts) -> tuple[CallRecord, Answers]:
        seed = self.settings.seed + 100_003 * turn.repeat + turn.index
        torch.manual_seed(seed)
        clock, passes, joules = TokenClock(), self._passes.count, self.energy.read()
        self.peak.reset()
        started = now(self.binding.head_device)
        tokens, stats = method.write(batch, clock)
        seconds = now(self.binding.head_device) - started
        used = None if joules is None else (self.energy.read() or 0.0) - joules
        answers = self._answers(tokens)
        bare = self._time_bare(method, turn.batch_size, stats)
        if bare is not None:
            self._bare.setdefault((method.name, turn.batch_size), []).append(bare)
        record = CallRecord(
            turn=turn.name,
            method=method.name,
            temperature=turn.temperature,
            seed=seed,
            batch_size=turn.batch_size,
            repeat=turn.repeat,
            prompts=[task.prompt.id for task in turn.tasks],
            suite=_common(task.prompt.suite for task in turn.tasks),
            category=_common(task.prompt.category for task in turn.tasks),
            prompt_tokens=sum(len(task.ids) for task in turn.tasks),
            new_tokens=sum(map(len, answers)),
            seconds=seconds,
            first_token_s=clock.arrivals[0][0] - started if clock.arrivals else seconds,
            texts=[digest_of(answer) for answer in answers],
            drafting=Drafting.of(stats),
            target_passes=self._passes.count - passes if stats is None and not method.compiled else None,
            peak_bytes=self.peak.read(),
            energy_j=used,
            bare_round_s=None if bare is None else bare.round_s,
            served_by=served_by(stats),
        )
        if turn.batch_size == 1:
            record = replace(record, window_s=windows(clock.arrivals))
            if stats is not None:
                blocks, prompt = clock.blocks, turn.tasks[0].ids.tolist()
                thinking, answering = split_rounds(blocks, answers[0], prompt, self.marks)
                record = replace(record, blocks=blocks, thinking=thinking, answering=answering)
        return record, answers

    def _time_bare(self, method: Method, size: int, stats: SpeculationStats | None) -> BareCosts | None:
        """The bare forwards of a round as deep as this call's were; `None` where nobody asked for them."""
        shape = method.shapes.get(size)
        if not self.settings.ceilings or shape is None or stats is None or stats.loop != "own":
            return None
        if (method.name, size) not in self._meters:
            context = typical_context([task.ids for task in self.tasks], self.settings.new_tokens).expand(size, -1)
            self._meters[method.name, size] = BareMeter(self.drafter, context, shape, compiled=method.compiled)
        meter, depths = self._meters[method.name, size], drafted_depths(stats)
        meter.time_rounds(depths)
        return meter.costs(depths)

    def bare_costs(self, method: MethodSummary) -> BareCosts | None:
        """Of a method's calls, each field's median; `None` where they were not timed."""
        costs = self._bare.get((method.method, method.setting.batch_size))
        if costs is None:
            return None
        return BareCosts(**{f.name: median(getattr(cost, f.name) for cost in costs) for f in fields(BareCosts)})

    def _answers(self, tokens: Tensor) -> Answers:
        """Each row of `(B, n)` up to and with its end."""
        if self.settings.ignore_eos:
            if tokens.shape[1] != self.settings.new_tokens:
                raise UnsupportedGenerationError(
                    f"a text has {tokens.shape[1]} tokens, not {self.settings.new_tokens}: something in the target's "
                    "generation config ends its texts early; remove it, since only texts of one length are compared"
                )
            return tokens.tolist()
        ends = end_ids(self.binding.model)
        return [until_end(row, ends) for row in tokens.tolist()]

    # --- methods ----------------------------------------------------------------------------------------------------

    def _methods(self, turn: Turn) -> list[Method]:
        """Those that can run here, each having written once what is not counted."""
        key = (turn.temperature, turn.batch_size)
        if key not in self._warm:
            wanted = self._wanted(turn.temperature)
            self._compile_ahead([method for method in wanted if method.compiled], turn)
            self._warm[key] = [method for method in wanted if self._warm_up(method, turn)]
        return self._warm[key]

    def _wanted(self, temperature: float) -> list[Method]:
        known = all_methods(self.drafter, self.settings.at(temperature), self._alone)
        names = [method.name for method in known]
        unknown = [name for name in self.settings.methods if name not in names]
        if unknown:
            more = "" if self.settings.compiled else "; --compile adds the compiled ones"
            raise ConfigurationError(f"no method is called {unknown[0]!r}; there are {', '.join(names)}{more}")
        return [method for method in known if not self.settings.methods or method.name in self.settings.methods]

    def _compile_ahead(self, methods: Sequence[Method], turn: Turn) -> None:
        """Let the graphs of all methods be compiled at once, and be kept, where that can be."""
        if not self._compilers or not methods:
            return

        def write() -> None:
            for method in methods:
                self._write_once(method, turn)

        started, before = time.perf_counter(), sum(len(ahead.made) for ahead in self._compilers)
        for ahead in self._compilers:
            ahead.until_compiled(write)
        if count := sum(len(ahead.made) for ahead in self._compilers) - before:
            self.note({"kind": "compiled", "graphs": count, "seconds": round(time.perf_counter() - started, 3)})

    def _write_once(self, method: Method, turn: Turn) -> None:
        """One text for each length that graphs are made for, and the bare rounds beside it."""
        for batch in self._unlike_batches(turn.batch_size):
            torch.manual_seed(self.settings.seed)
            _, stats = method.write(batch, None)
            self._time_bare(method, turn.batch_size, stats)

    def _warm_up(self, method: Method, turn: Turn) -> bool:
        if method.one_row_only and turn.batch_size > 1:
            alone = "transformers' assisted loop serves one row at a time, and no batch of 1 was asked for"
            return False if 1 in self.settings.batch_sizes else self._leave_out(method.name, alone)
        if method.compiled and self._no_graphs:
            return self._leave_out(method.name, self._no_graphs)
        layers = self.binding.text_config.num_hidden_layers
        started = time.perf_counter()
        try:
            self._write_once(method, turn)
        except Exception as error:
            if not method.one_row_only:
                raise
            return self._leave_out(method.name, named_line(error))  # of transformers' own code for this target
        finally:
            self.binding.text_config.num_hidden_layers = layers  # an early exit that failed leaves it changed
        if method.early_exit_layers and (reason := early_exit_refusal(self.binding, method.early_exit_layers)):
            return self._leave_out(method.name, reason)
        seconds = round(time.perf_counter() - started, 3)
        where = {"method": method.name, "temperature": turn.temperature, "batch_size": turn.batch_size}
        self.note({"kind": "warm-up", **where, "seconds": seconds})
        return True

    def _unlike_batches(self, size: int) -> list[Prompts]:
        """The longest and the shortest batch for each power of two of their length: graphs are made by length."""
        batches = [left_padded([task.ids for task in tasks], self._pad) for tasks in self._batches(size)]
        by_length: dict[int, list[Prompts]] = {}
        for batch in sorted(batches, key=lambda batch: batch["input_ids"].shape[1]):
            length = batch["input_ids"].shape[1] + self.settings.new_tokens
            by_length.setdefault((length - 1).bit_length(), []).append(batch)
        return [batch for group in by_length.values() for batch in (group[0], *group[1:][-1:])]

    def _leave_out(self, name: str, reason: str) -> bool:
        if name not in self._left_out:
            self._left_out.add(name)
            self.note({"kind": "left-out", "method": name, "reason": reason})
        return False

    # --- exactness --------------------------------------------------------------------------------------------------

    def _judge(self, method: Method, record: CallRecord, answers: Answers, turn: Turn, plain: Answers) -> CallRecord:
        if record.method == PLAIN:
            verdicts = [Verdict(REFERENCE)] * len(answers)
        elif self.settings.acceptance is not None or (turn.temperature and not method.follows_seed):
            verdicts = [Verdict(SAMPLED)] * len(answers)  # type: ignore[arg-type]
        else:
            rows = enumerate(zip(turn.tasks, answers, plain, strict=True))
            verdicts = [self._verdict(*row, self._sampled(turn, record.seed, place)) for place, row in rows]
        return replace(record, verdicts=verdicts)

    def _sampled(self, turn: Turn, seed: int, row: int) -> SampledBy | None:
        """How a row was sampled."""
        if not turn.temperature:
            return None
        if turn.temperature not in self._warping:
            told = self.settings.at(turn.temperature).to_generate()
            told.pop("max_new_tokens")
            self._warping[turn.temperature] = processing_of(self.binding.model, **told)
        processing = self._warping[turn.temperature]
        if not processing.fits_draft_vocabulary:  # more than scores: a difference could not be judged
            return None
        return SampledBy(seed, row, len(turn.tasks), processing.draft_warping)

    def _verdict(self, task: Task, answer: list[int], plain: list[int], sampled: SampledBy | None) -> Verdict:
        key = (task.prompt.id, digest_of(answer), digest_of(plain))
        if key not in self._judged:
            seen = (method for methods in self._warm.values() for method in methods)
            widest = max((shape.nodes for method in seen for shape in method.shapes.values()), default=8)
            self._judged[key] = judge(self.binding.model, task.ids, answer, plain, blocks=(8, widest), sampled=sampled)
        return self._judged[key]


def _common(names: Iterable[str]) -> str:
    found = set(names)
    return found.pop() if len(found) == 1 else "mixed"
