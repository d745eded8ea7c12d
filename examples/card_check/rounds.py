"""What rounds take, captured and eager: of the embedded pair, and of a random 8B beside the bytes that must be read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import is_bitsandbytes_available

from eagle31_hf import NoDrafter, plan_memory
from random_pair import counted_on, counting_drafter, random_prompts, random_target

from .machine import Machine, launches, recordings, to_ms, waits
from .notes import Notes
from .texts import CHAIN, EmbeddedPair, complaints, drafting


def check_embedded(machine: Machine, notes: Notes) -> None:
    """Three generations of each kind: graphs are recorded in the first alone. Then where the host waits."""
    pair, new = EmbeddedPair(machine, torch.bfloat16), machine.size(256, 10)
    prompts = pair.prompts(1)
    # Not `min_new_tokens`: its processor looks at the text, and rounds would not be captured.
    pair.target.generation_config.eos_token_id = None
    ways = {"captured": {"acceleration": "auto", **CHAIN}, "eager": {"acceleration": "eager", **CHAIN}, "default": {}}

    def write(fields: dict[str, Any] | None) -> None:
        pair.write(prompts, fields, max_new_tokens=new)

    def generations(name: str) -> None:
        for turn in range(1, machine.size(3, 2) + 1):
            with recordings() as counted:
                seconds = machine.seconds(lambda: write(ways[name]))
            rounds, recorded = pair.drafter.stats.rounds, counted["recorded"]
            found = {"ms/token": to_ms(seconds / new), "rounds": rounds, "ms/round": to_ms(seconds / max(rounds, 1))}
            notes.put(f"{name}, generation {turn}", found | {"recorded": recorded})
            if machine.is_cuda and name == "captured" and bool(recorded) != (turn == 1):
                wanted = "each step once" if turn == 1 else "nothing"
                notes.fail(f"{name}, generation {turn}, recordings", f"{recorded}; wanted {wanted}")

    notes.attempt("plain, ms/token", lambda: to_ms(machine.seconds(lambda: write(None)) / new))
    for name, fields in ways.items():
        notes.attempt(f"{name} generations", lambda name=name: generations(name))
        if machine.is_cuda and fields:
            notes.attempt(f"launches, {name}", lambda f=fields: launches(machine, lambda: write(f)))
            notes.attempt(f"waits, {name}", lambda f=fields: waits(lambda: write(f)))
    if machine.is_cuda:
        notes.attempt("memory after ten texts more", lambda: grown_mib(pair, ways["captured"]))


def grown_mib(pair: EmbeddedPair, fields: dict[str, Any]) -> dict[str, int]:
    """cuBLAS keeps a workspace for each stream it has met; ten more texts should meet no new one."""
    pair.machine.free()
    before = torch.cuda.memory_allocated()
    for extra in range(10):
        pair.write(pair.prompts(1), fields, max_new_tokens=64 + 16 * extra)
    pair.machine.free()
    return {"grew": (torch.cuda.memory_allocated() - before) >> 20, "reserved": torch.cuda.memory_reserved() >> 20}


# --- a random 8B ------------------------------------------------------------------------------------------------------


def check_nf4(machine: Machine, notes: Notes) -> None:
    """Packed to nf4 by bitsandbytes."""
    if not is_bitsandbytes_available():
        notes.put("nf4", "left out: bitsandbytes is not here (make_carry.sh packs it)")
        return
    check_large(machine, notes, four_bit=True)


def check_large(machine: Machine, notes: Notes, *, four_bit: bool = False) -> None:
    """Rounds at one row and several, short and long contexts, captured and eager; what was planned against what is
    taken. In the order of worth: the step's time may end before the step does."""
    pair = LargePair(machine, four_bit=four_bit)
    notes.put("read by a pass, GB", {name: round(size / 1e9, 3) for name, size in pair.reads.items()})
    short, new = pair.prompts(1, machine.size(128, 16)), machine.size(96, 6)

    def both(name: str, prompts: dict[str, Tensor], fields: dict[str, Any], **how: Any) -> None:
        for way, acceleration in machine.accelerations.items():
            told = {**fields, "acceleration": acceleration}
            notes.attempt(f"{name}, {way}", lambda t=told: pair.rounds(prompts, t, **how))

    notes.attempt("plain generate, ms/token", lambda: pair.plain_ms(short))
    both("default", short, {}, new=new)
    for depth in machine.size((3, 5, 7), (3,)):
        both(f"chain of {depth}", short, {"num_assistant_tokens": depth}, new=new)
    both("without a drafter", short, {"num_assistant_tokens_schedule": "constant"}, new=new, alone=True)
    notes.attempt("plan", lambda: planned(pair))
    both("tree", short, {"num_assistant_tokens": 5, "draft_top_k": 2, "draft_tree_size": 20}, new=new)
    if machine.is_cuda:
        chain = {"num_assistant_tokens": 5, "acceleration": "compile"}
        work = lambda: pair.rounds(short, chain, new=12)  # noqa: E731
        notes.attempt("launches, captured chain of 5", lambda: launches(machine, work))
    for rows in machine.size((4, 16), (2,)):
        several = pair.prompts(rows, machine.size(128, 16))
        both(f"chain of 3 x{rows}", several, {"num_assistant_tokens": 3}, new=new)
    deep, chunk = pair.prompts(1, machine.size(32000, 48)), machine.size(2048, 32)
    fields = {"num_assistant_tokens": 3, "prefill_chunk_size": chunk}
    both("chain of 3 behind a long prompt", deep, fields, new=machine.size(32, 4))


class LargePair:
    """A target that counts and its drafter, which is right about 70 % of the tokens (`random_pair`)."""

    def __init__(self, machine: Machine, *, four_bit: bool):
        self.machine, size = machine, machine.size("8b", "tiny")
        self.target: Any = random_target(size, dtype=torch.bfloat16, device=machine.device, four_bit=four_bit)
        self.vocabulary = machine.size(32000, 512)
        self.drafter = counting_drafter(self.target, draft_vocabulary=self.vocabulary)
        self.alone = NoDrafter(self.target)
        embedding = self.target.get_input_embeddings().weight.nbytes
        target = sum(each.nbytes for each in (*self.target.parameters(), *self.target.buffers())) - embedding
        self.reads = {"target": target, "drafter": sum(each.nbytes for each in self.drafter.parameters())}
        self._bytes_per_s = machine.copy_bytes_per_s()
        machine.free()

    def prompts(self, rows: int, length: int) -> dict[str, Tensor]:
        return random_prompts(rows, length, self.vocabulary, self.machine.device)

    def plain_ms(self, prompts: dict[str, Tensor]) -> float:
        """A token of plain `generate`."""
        how = {**prompts, "do_sample": False}
        new = self.machine.size(32, 4)
        self.target.generate(**how, max_new_tokens=4)
        return to_ms(self.machine.seconds(lambda: self.target.generate(**how, max_new_tokens=new)) / new)

    def rounds(
        self, prompts: dict[str, Tensor], fields: dict[str, Any], *, new: int, alone: bool = False
    ) -> dict[str, Any]:
        """The second of two texts, which records nothing; it must count, as plain's does."""
        drafter = self.alone if alone else self.drafter
        drafter.generation_config = drafting(fields)
        how = {**prompts, "do_sample": False, "max_new_tokens": new, "assistant_model": drafter}
        out: list[Tensor] = [self.target.generate(**how)]
        with recordings() as counted:
            seconds = self.machine.seconds(lambda: out.append(self.target.generate(**how)))
        stats: Any = drafter.stats
        if complaints(stats) or stats.loop != "own":
            raise RuntimeError(f"not as it was set: {[stats.loop, *complaints(stats)]}")
        if not counted_on(out[1], prompts["input_ids"].shape[1], self.target.config.vocab_size):
            raise RuntimeError(f"another text than plain's: {out[1][:, -new:].tolist()}")
        rounds_s, passes = seconds - stats.first_token_s, max(stats.passes, 1)
        read = self.reads["target"] + (0 if alone else stats.drafted / max(stats.rounds, 1) * self.reads["drafter"])
        return {
            "round_ms": to_ms(rounds_s / passes),
            "least_ms": to_ms(read / self._bytes_per_s),
            "tok/s": round(stats.new_tokens / rounds_s, 1),
            "tokens/round": round(stats.new_tokens / max(stats.rounds, 1), 2),
            "prefill_ms": to_ms(stats.first_token_s),
            "recorded again": counted["recorded"],
        }


def planned(pair: LargePair) -> dict[str, Any]:
    """A plan against what eager and captured rounds take of the card."""
    machine = pair.machine
    context, new, depth = machine.size(4096, 64), machine.size(64, 4), 5
    plan = plan_memory(
        pair.target, drafter=pair.drafter, card="80GiB", context=context, draft_tokens=depth, prefill_chunk=context // 4
    )
    found: dict[str, Any] = {"planned_gib": round((plan.peak_bytes - plan.card.context_bytes) / 2**30, 3)}
    prompts = pair.prompts(1, context - new)
    for name, acceleration in reversed(machine.accelerations.items()):  # graphs keep their memory
        machine.free()
        machine.peak_gib()  # from now on
        fields = {"num_assistant_tokens": depth, "prefill_chunk_size": context // 4, "acceleration": acceleration}
        found[f"{name}_round_ms"] = pair.rounds(prompts, fields, new=new)["round_ms"]
        found[f"{name}_allocated_gib"] = machine.peak_gib()
    return found


def check_static_cache(machine: Machine, notes: Notes) -> None:
    """What transformers alone makes of an 8B with a static cache and `torch.compile`: the bar to beat."""
    target: Any = random_target(machine.size("8b", "tiny"), dtype=torch.bfloat16, device=machine.device)
    prompts, new = random_prompts(1, machine.size(128, 16), 1000, machine.device), machine.size(96, 4)
    how = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static"}
    write = partial(target.generate, **prompts, **how, disable_compile=not machine.is_cuda)
    notes.attempt("static cache, compiled, first_s", lambda: round(machine.seconds(write), 1))
    notes.attempt("static cache, compiled, ms/token", lambda: to_ms(machine.seconds(write) / new))
