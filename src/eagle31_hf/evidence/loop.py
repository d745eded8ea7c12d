"""`eagle31 bench loop`: methods of writing the same text against each other, in one process and in turns.

Every method writes the same prompts in every repeat, one batch after the other with all methods in turn, so that
whatever else the machine does falls on all of them; a few bare rounds are timed beside every text. Ratios are formed
within a repeat, and what counts is their median. Texts have a fixed length: end-of-sequence is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..decoding.calibration.bare_meter import BareCosts, BareMeter
from ..drafter.drafter import Eagle31Drafter
from ..errors import ConfigurationError, UnsupportedGenerationError
from ..stats import SpeculationStats
from ..target.binding import TargetBinding
from ..target.device_clock import now
from .bare import drafted_depths
from .calls import PLAIN, PLAIN_COMPILED
from .methods import LoopSettings, Method, Output, all_methods, early_exit_refusal
from .prompt_batches import PromptBatch, batches_of
from .records import LoopRecord, LoopReport, RoundSplit, Sample, add_up

Key = tuple[str, int]  # a method's name, a batch size


@dataclass
class Tally:
    """What one method took in one repeat, added up over its calls."""

    seconds: float = 0.0
    new_tokens: int = 0
    calls: int = 0
    target_passes: int = 0
    stats: list[SpeculationStats] = field(default_factory=list)

    def add(self, seconds: float, written: Output, target_passes: int) -> None:
        self.seconds += seconds
        self.new_tokens += written.tokens.numel()
        self.calls += 1
        self.target_passes += target_passes
        if written.stats is not None:
            self.stats.append(written.stats)

    def sample(self, batch_size: int, *, bare: BareCosts | None) -> Sample:
        total = add_up(self.stats)
        # Each call reads its prompts in one more pass. Our loops know their passes: a compiled one is not seen here.
        rounds = total.passes if self.stats else self.target_passes - self.calls
        acceptance_length = (self.new_tokens / batch_size - self.calls) / rounds
        split = None
        if self.stats:
            acceptance_length = total.acceptance_length
            if bare is not None:  # of our own loop
                split = RoundSplit(total.draft_s / rounds, total.verify_s / rounds, total.other_s / rounds)
        return Sample(self.seconds, self.new_tokens, rounds + self.calls, acceptance_length, split, bare)


class LoopBenchmark:
    """Measures all methods on the same prompts.

    Args:
        drafter: attached to the target.
        prompts: ids `(T,)` each, on the target's device.
        settings: what to measure.
        on_step: called between measurements with the share done so far, 0 to 1.

    Raises:
        ConfigurationError: a setting makes no sense, or there are no prompts.
    """

    def __init__(
        self,
        drafter: Eagle31Drafter,
        prompts: Sequence[Tensor],
        settings: LoopSettings,
        on_step: Callable[[float], None] = lambda _: None,
    ):
        settings.check()
        if not prompts:
            raise ConfigurationError("got no prompts to measure on; wanted at least one")
        self.drafter, self.settings, self.on_step = drafter, settings, on_step
        self.binding: TargetBinding = drafter.require_binding()
        pad = self.binding.text_config.pad_token_id or 0
        self.batches = {size: batches_of(prompts, size, pad) for size in dict.fromkeys(settings.batch_sizes)}
        self.context = typical_context(prompts, settings.new_tokens)
        self.passes = PassCounter(self.binding)
        self.texts: dict[Key, list[Tensor]] = {}  # of the first repeat
        self.served_by: dict[Key, str] = {}

    def run(self) -> LoopReport:
        """Everything, methods and bare forwards, `repeats` times."""
        samples: dict[Key, list[Sample]] = {}
        with self.passes.counting(), ends_off(self.binding.model), torch.random.fork_rng():
            methods, left_out = self._warm_up(all_methods(self.drafter, self.settings))
            meters = self._meters(methods)
            for repeat in range(self.settings.repeats):
                for size in self.batches:
                    for name, sample in self._repeat(
                        self._in_turn(methods, size, repeat), size, meters, repeat
                    ).items():
                        samples.setdefault((name, size), []).append(sample)
                    self._tell_progress(repeat, size)
        records = [
            self._record(method, size, samples)
            for size in self.batches
            for method in methods
            if (method.name, size) in samples
        ]
        return LoopReport(tuple(records), left_out)

    def _meters(self, methods: Sequence[Method]) -> dict[Key, BareMeter]:
        """One per method of ours and batch size; accelerated methods are held against accelerated forwards."""
        return {
            (method.name, size): BareMeter(self.drafter, self.context.expand(size, -1), shape, compiled=method.compiled)
            for method in methods
            for size, shape in method.shapes.items()
        }

    def _tell_progress(self, repeat: int, size: int) -> None:
        sizes = list(self.batches)
        self.on_step((repeat + (sizes.index(size) + 1) / len(sizes)) / self.settings.repeats)

    def _warm_up(self, methods: Sequence[Method]) -> tuple[list[Method], dict[str, str]]:
        """Write one batch of each size in every method; transformers' alternatives may fail, and are then left out."""
        able, left_out = [], {}
        for method in methods:
            reason = self._disabled_reason(method)
            if reason:
                left_out[method.name] = reason
                continue
            able.append(method)
            for size, batches in self.batches.items():
                if size == 1 or not method.one_row_only:
                    self._write(method, batches[0])
        return able, left_out

    def _disabled_reason(self, method: Method) -> str:
        if not method.one_row_only:
            return ""
        if 1 not in self.batches:
            return "transformers' assisted loop serves one row at a time, and no batch of 1 was asked for"
        if method.early_exit_layers and (reason := early_exit_refusal(self.binding, method.early_exit_layers)):
            return reason
        text = self.binding.text_config
        layers = text.num_hidden_layers
        try:
            self._write(method, self.batches[1][0])
        except Exception as error:  # of transformers' own code for this target: worth a line, not the whole run
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            text.num_hidden_layers = layers  # an early exit that failed leaves it changed
        return ""

    def _in_turn(self, methods: Sequence[Method], size: int, repeat: int) -> list[Method]:
        """The methods this batch size is for, each repeat beginning with another one."""
        able = [method for method in methods if size == 1 or not method.one_row_only]
        start = repeat % len(able)
        return able[start:] + able[:start]

    def _repeat(
        self, methods: Sequence[Method], size: int, meters: Mapping[Key, BareMeter], repeat: int
    ) -> dict[str, Sample]:
        tallies = {method.name: Tally() for method in methods}
        first_seed = repeat * len(self.batches[size])  # sampled texts differ from repeat to repeat: more of them count
        for index, batch in enumerate(self.batches[size]):
            for method in methods:
                torch.manual_seed(first_seed + index)
                passes, started = self.passes.count, now(self.binding.head_device)
                written = self._write(method, batch)
                seconds = now(self.binding.head_device) - started
                tallies[method.name].add(seconds, written, self.passes.count - passes)
                self._note(method, size, index, written)
                if (meter := meters.get((method.name, size))) is not None:  # at once: machines change by the minute
                    meter.time_rounds(drafted_depths(written.stats))
        samples = {}
        for method in methods:
            tally, meter = tallies[method.name], meters.get((method.name, size))
            bare = None if meter is None else meter.costs(drafted_depths(add_up(tally.stats)))
            samples[method.name] = tally.sample(size, bare=bare)
        return samples

    def _write(self, method: Method, batch: PromptBatch) -> Output:
        written = method.write(batch)
        wanted = (batch.input_ids.shape[0], self.settings.new_tokens)
        if tuple(written.tokens.shape) != wanted:
            raise UnsupportedGenerationError(
                f"{method.name} wrote {tuple(written.tokens.shape)} tokens, not {wanted}: something in the target's "
                "generation config ends its texts early; remove it, since only texts of one length can be compared"
            )
        return written

    def _note(self, method: Method, size: int, index: int, written: Output) -> None:
        """Keep the first repeat's texts, and which loop served."""
        texts = self.texts.setdefault((method.name, size), [])
        if index == len(texts):
            texts.append(written.tokens)
        if written.stats is not None and (method.name, size) not in self.served_by:
            reason = f": {written.stats.reason}" if written.stats.reason else ""
            self.served_by[method.name, size] = f"{written.stats.loop}{reason}"

    def _record(self, method: Method, size: int, samples: Mapping[Key, Sequence[Sample]]) -> LoopRecord:
        texts = torch.cat(self.texts[method.name, size])
        comparable = not self.settings.samples and self.settings.acceptance is None
        equal = (texts == torch.cat(self.texts[PLAIN, size])).all(1).sum()
        return LoopRecord(
            name=method.name,
            batch_size=size,
            samples=tuple(samples[method.name, size]),
            plain=tuple(samples[PLAIN, size]),
            served_by=self.served_by.get((method.name, size), ""),
            equal_texts=int(equal) if comparable else None,
            texts=len(texts),
            compiled_plain=tuple(samples.get((PLAIN_COMPILED, size), ())) if method.compiled else (),
        )


class PassCounter:
    """Counts whole forwards of the target; those of an early exit are drafts, those of a compiled graph unseen."""

    def __init__(self, binding: TargetBinding):
        self.count = 0
        self._binding = binding
        self._layers = binding.text_config.num_hidden_layers

    @contextmanager
    def counting(self) -> Iterator[None]:
        handle = self._binding.model.register_forward_hook(self._after)
        try:
            yield
        finally:
            handle.remove()

    def _after(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # a number that changes would be compiled for again and again
            self.count += self._binding.text_config.num_hidden_layers == self._layers


@contextmanager
def ends_off(model: Any) -> Iterator[None]:
    """While open, no token ends a text."""
    config = model.generation_config
    before = config.eos_token_id
    config.eos_token_id = None
    try:
        yield
    finally:
        config.eos_token_id = before


def typical_context(prompts: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Ids `(1, T)`: as many as a prompt of median length has half-way through its text."""
    length = sorted(len(prompt) for prompt in prompts)[len(prompts) // 2] + new_tokens // 2
    ids = torch.cat(list(prompts))
    return ids.repeat(-(-length // len(ids)))[None, :length]
