"""A Llama of 8B with random weights, drafts accepted by lot: what rounds take, beside the bytes that must be read."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import is_bitsandbytes_available

from eagle31_hf import Eagle31Drafter, NoDrafter, plan_memory
from eagle31_hf.decoding.decoder import SpeculativeDecoder
from eagle31_hf.decoding.default_length import default_length
from eagle31_hf.decoding.pair import Pair
from eagle31_hf.decoding.request import DecodingRequest
from eagle31_hf.generation_config import Eagle31GenerationConfig
from eagle31_hf.measure.methods import Prompts
from eagle31_hf.measure.synthetic import SyntheticRequest, random_target, synthetic_decoder, target_config
from eagle31_hf.trees.shape import DraftShape

from .machine import Machine, to_ms
from .notes import Notes
from .recordings import Recordings, allow_captures, launches

SHAPE_8B = "hidden=4096,layers=32,heads=32,kv=8,intermediate=14336,vocab=128256"
SHAPE_TINY = "hidden=64,layers=3,heads=4,kv=2,intermediate=128,vocab=512"
LOT = (0.8, 0.75, 0.7, 0.7, 0.65, 0.65, 0.6)
"""Chance of each draft position to be accepted: about what EAGLE-3 heads publish."""


def check_bf16(machine: Machine, notes: Notes) -> None:
    """In bf16."""
    check_large(machine, notes, four_bit=False)


def check_nf4(machine: Machine, notes: Notes) -> None:
    """Packed to nf4 by bitsandbytes."""
    if not is_bitsandbytes_available():
        notes.put("nf4", "left out: bitsandbytes is not here (make_carry.sh packs it)")
        return
    check_large(machine, notes, four_bit=True)


def check_large(machine: Machine, notes: Notes, *, four_bit: bool) -> None:
    """Rounds at one row and several, short and long contexts, captured and eager; what was planned against what is
    taken. In the order of worth: the step's time may end before the step does."""
    allow_captures(machine)
    started = time.perf_counter()
    pair = LargePair(machine, four_bit=four_bit)
    notes.put("made", {"s": round(time.perf_counter() - started, 1), **pair.sizes()})
    short, new = pair.prompts(1, machine.size(128, 16)), machine.size(96, 5)

    def rounds(name: str, prompts: Prompts, depth: int, **how: Any) -> None:
        notes.attempt(name, lambda: pair.rounds(prompts, DraftShape(depth), **({"new": new} | how)))

    usual = default_length(pair.drafter, batch_size=1, sampled=False, compiled=True).depth
    notes.put("default length of captured chains", usual)
    notes.attempt("plain generate, ms/token", lambda: pair.plain_ms(short))
    notes.attempt("plain captured", lambda: pair.plain_captured(short, new))
    for depth in dict.fromkeys((usual, *machine.size((3, 5, 7), ()))):
        rounds(f"captured chain of {depth}", short, depth)
        rounds(f"captured chain of {depth}, again", short, depth)
        rounds(f"eager chain of {depth}", short, depth, compiled=False)
    if machine.tiny and four_bit:
        return  # the rest is as in bf16
    tree = DraftShape(5, top_k=2, size=machine.size(20, 8))
    notes.attempt("captured tree 5 deep", lambda: pair.rounds(short, tree, new=new))
    for compiled in machine.size((True, False), (True,)):
        name = f"launches, {'captured' if compiled else 'eager'} chain of 5"
        notes.attempt(name, lambda c=compiled: pair.launches(short, DraftShape(5), compiled=c))
    long = pair.prompts(1, machine.size(2048, 24))
    rounds("captured chain of 5 behind 2k", long, 5)
    rounds("eager chain of 5 behind 2k", long, 5, compiled=False)
    notes.attempt("plain captured behind 2k", lambda: pair.plain_captured(long, new))
    notes.attempt("plan of 4k", lambda: planned(pair))
    for rows in machine.size((4, 16, 32), (2,)):
        several = pair.prompts(rows, machine.size(128, 16))
        rounds(f"captured chain of 3 x{rows}", several, 3)
        rounds(f"eager chain of 3 x{rows}", several, 3, compiled=False)
        pair.forget_graphs()
    deep = pair.prompts(1, machine.size(32000, 48))
    reading = {"new": machine.size(32, 4), "chunk": machine.size(2048, 32)}
    rounds("captured chain of 3 behind 32k", deep, 3, **reading)
    notes.attempt("plain captured behind 32k", lambda: pair.plain_captured(deep, **reading))
    rounds("eager chain of 3 behind 32k", deep, 3, compiled=False, **reading)


@dataclass(frozen=True)
class BytesRead:
    """Of weights: by a pass of the target, by a draft step, and by the drafter once a round."""

    target: float
    step: float
    once: float

    def round_ms(self, depth: int, bytes_per_s: float) -> float:
        """The least that a round with a chain takes; reading weights is not the only work."""
        return to_ms((self.target + depth * self.step + self.once) / bytes_per_s)


class LargePair:
    """Target and drafter of random weights.

    Args:
        four_bit: pack the target's layers to nf4.
    """

    def __init__(self, machine: Machine, *, four_bit: bool):
        self.machine = machine
        config = target_config(machine.size(SHAPE_8B, SHAPE_TINY))
        self.target: PreTrainedModel = random_target(
            config, dtype=torch.bfloat16, device=machine.device, four_bit=four_bit
        )
        vocabulary = machine.size(32000, 128)
        self.drafter = Eagle31Drafter.from_target(self.target, draft_vocab_size=vocabulary).eval()
        self.drafter.generation_config = Eagle31GenerationConfig(num_assistant_tokens_schedule="constant")
        self.reads = self._reads()
        self._bytes_per_s = machine.copy_bytes_per_s()
        machine.free()

    def _reads(self) -> BytesRead:
        target: Any = self.target
        embedding = target.get_input_embeddings().weight
        passed = sum(each.nbytes for each in (*target.parameters(), *target.buffers())) - embedding.nbytes
        own = {name: each.nbytes for name, each in self.drafter.named_parameters() if "embed_tokens" not in name}
        once = sum(num_bytes for name, num_bytes in own.items() if name.startswith("fc."))
        return BytesRead(passed, sum(own.values()) - once, once)

    def sizes(self) -> dict[str, float]:
        reads = self.reads
        told = {"target": reads.target, "draft step": reads.step, "drafter once a round": reads.once}
        return {f"{name}, GB read": round(num_bytes / 1e9, 3) for name, num_bytes in told.items()}

    def prompts(self, rows: int, length: int) -> Prompts:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.target.config.vocab_size - 1, (rows, length), generator=generator)
        ids = ids.to(self.machine.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def plain_ms(self, prompts: Prompts) -> float:
        """A token of plain `generate`."""
        target: Any = self.target
        new = self.machine.size(32, 4)

        def write(count: int) -> None:
            how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
            target.generate(**prompts, **how)

        write(4)
        return to_ms(self.machine.seconds(lambda: write(new)) / new)

    def plain_captured(self, prompts: Prompts, new: int, chunk: int | None = None) -> dict[str, Any]:
        """The target alone, by captured steps of one token; the second of two texts, which records nothing."""
        make = partial(SpeculativeDecoder, NoDrafter(self.target), compiled=True)
        for _ in range(2):
            request = SyntheticRequest(new, DraftShape(0), LOT, prefill_chunk=chunk).to_decoding(prompts)
            found = self._timed(request, make)
        return found | {"least_ms": to_ms(self.reads.target / self._bytes_per_s)}

    def rounds(
        self, prompts: Prompts, shape: DraftShape, *, new: int, compiled: bool = True, chunk: int | None = None
    ) -> dict[str, Any]:
        """Our loop, its drafts accepted by lot: prefill and rounds, timed as they come."""
        self.drafter.generation_config.acceleration = "compile" if compiled else "eager"  # captured where it can be
        request = SyntheticRequest(new, shape, LOT, seed=1, prefill_chunk=chunk).to_decoding(prompts)
        found = self._timed(request, lambda request: synthetic_decoder(self.drafter, request, acceptance=LOT, seed=1))
        least = {} if shape.is_tree else {"least_ms": self.reads.round_ms(shape.depth, self._bytes_per_s)}
        return found | least

    def _timed(self, request: DecodingRequest, make: Callable[[DecodingRequest], SpeculativeDecoder]) -> dict[str, Any]:
        machine, times = self.machine, []
        masked = self.drafter.binding.masked_attention()
        with torch.no_grad(), masked, Recordings(machine) as recordings:
            decoder = make(request)
            prefill_s = machine.seconds(decoder.prefill)
            started = time.perf_counter()
            while decoder.rows:
                begun = time.perf_counter()
                decoder.step()  # ends in its one wait for the device
                times.append(time.perf_counter() - begun)
            decoder.finish()
            machine.sync()
            whole_s = time.perf_counter() - started
        if request.stats.fallbacks:
            raise RuntimeError(f"not as asked: {request.stats.fallbacks}")
        written = request.stats.new_tokens
        return {
            "round_ms": to_ms(statistics.median(times)),
            "tok/s": round(written / whole_s, 1),
            "tokens/round": round(written / len(times), 2),
            "prefill_ms": to_ms(prefill_s),
            "slowest_ms": [to_ms(seconds) for seconds in sorted(times)[-4:]],
            **recordings.to_dict(),
        }

    def launches(self, prompts: Prompts, shape: DraftShape, *, compiled: bool) -> dict[str, Any]:
        new = self.machine.size(12, 3)
        self.rounds(prompts, shape, new=new, compiled=compiled)  # recorded before
        return launches(self.machine, lambda: self.rounds(prompts, shape, new=new, compiled=compiled))

    def forget_graphs(self) -> None:
        """Graphs of a shape that will not come again, with their memory."""
        Pair.of(self.drafter).graphs = None
        self.machine.free()


def planned(pair: LargePair) -> dict[str, Any]:
    """A plan against what eager and captured rounds take of the card."""
    machine = pair.machine
    context, new, depth = machine.size(4096, 64), machine.size(64, 4), 5
    pair.forget_graphs()
    plan = plan_memory(
        pair.target, drafter=pair.drafter, card="80GiB", context=context, draft_tokens=depth, prefill_chunk=context // 4
    )
    found: dict[str, Any] = {"planned_gib": round((plan.peak_bytes - plan.card.context_bytes) / 2**30, 3)}
    if machine.is_cuda:
        found["weights_gib"] = round(torch.cuda.memory_allocated() / 2**30, 3)
    prompts = pair.prompts(1, context - new)
    for compiled, name in ((False, "eager"), (True, "captured")):
        machine.free()
        machine.peak_gib()  # from now on
        run = pair.rounds(prompts, DraftShape(depth), new=new, compiled=compiled, chunk=context // 4)
        found[f"{name}_round_ms"] = run["round_ms"]
        if machine.is_cuda:
            found[f"{name}_reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
            free, total = torch.cuda.mem_get_info()
            found[f"{name}_device_used_gib"] = round((total - free) / 2**30, 3)
        found[f"{name}_allocated_gib"] = machine.peak_gib()
    pair.forget_graphs()
    return found


def check_static_cache(machine: Machine, notes: Notes) -> None:
    """What transformers alone makes of an 8B with a static cache and `torch.compile`: the bar to beat."""
    config = target_config(machine.size(SHAPE_8B, SHAPE_TINY))
    target: Any = random_target(config, dtype=torch.bfloat16, device=machine.device)
    ids = torch.randint(0, config.vocab_size - 1, (1, machine.size(128, 16)), device=machine.device)
    new = machine.size(96, 4)
    how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    how |= {"cache_implementation": "static", "disable_compile": not machine.is_cuda}

    def write() -> None:
        target.generate(ids, attention_mask=torch.ones_like(ids), **how)

    def seconds() -> dict[str, float]:
        first = machine.seconds(write)
        return {"first_s": round(first, 1), "ms/token": to_ms(machine.seconds(write) / new)}

    notes.attempt("static cache, compiled", seconds)
