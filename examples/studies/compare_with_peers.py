"""The same drafter here, in vLLM and in economize, beside transformers' own ways: texts, acceptance, speed in turns.

    make engines                                                     # once: the others in an environment of their own
    python examples/studies/compare_with_peers.py --out study        # the embedded pair on its own prompts
    python examples/studies/compare_with_peers.py --target FOLDER --drafter FOLDER --prompts chats.jsonl --out study
    python examples/studies/compare_with_peers.py --target FOLDER --peers vLLM --out study   # the head inside a target

Every way writes all prompts, one after the other, in each turn; turns begin with another way each time. Texts have a
fixed length. A table goes to standard output and to OUT/comparison.md, all figures to OUT/comparison.json. A peer that
does not take the drafter is left out, and the table says why. The exit code is 1 where texts differ, or acceptance
differs by more than two points at any position.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engines.engine_process import EngineFailedError, EngineProcess, engine_python
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import WRITTEN_FORMATS, inspect_checkpoint
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.drafting import planner
from eagle31_hf.errors import ConfigurationError, Eagle31Error
from eagle31_hf.measure.origin import origin
from eagle31_hf.texts.prompts import read_prompts

TOLERANCE = 0.02
"""How far acceptance at a position may lie from ours, beside what the last round of each text may make: a peer counts
drafts there that lie behind the text's end."""
PLAIN, LOOKUP, OWN_HEAD = "transformers, plain", "transformers, prompt lookup", "transformers, the target's own head"
EAGER, COMPILED = "eagle31, eager", "eagle31, compiled"
WORKERS = {"vLLM": "vllm_worker.py", "economize": "economize_worker.py"}


@dataclass(frozen=True)
class Turn:
    """One way, all prompts once: new tokens of each, seconds, and what was drafted and accepted by position."""

    texts: list[list[int]]
    seconds: float
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)


Way = Callable[[Sequence[list[int]]], Turn]


@dataclass
class Result:
    """One way over all turns. Acceptance is that of the first turn; greedy turns repeat each other."""

    turns: list[Turn] = field(default_factory=list)

    @property
    def tok_per_s(self) -> list[float]:
        return [sum(map(len, turn.texts)) / turn.seconds for turn in self.turns]

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts that reached so far and were accepted, by position."""
        first = self.turns[0]
        return [a / d if d else 0.0 for a, d in zip(first.accepted_at, first.drafted_at, strict=True)]

    @property
    def acceptance_length(self) -> float | None:
        first = self.turns[0]
        rounds = max(first.drafted_at, default=0)
        return 1 + sum(first.accepted_at) / rounds if rounds else None

    def over(self, other: Result) -> list[float]:
        """Its speed over another way's, turn by turn."""
        return [ours / theirs for ours, theirs in zip(self.tok_per_s, other.tok_per_s, strict=True)]

    def equal_texts(self, to: Result) -> int:
        """How many texts are the other's, in every turn."""
        pairs = [zip(turn.texts, to.turns[0].texts, strict=True) for turn in self.turns]
        return min(sum(ours == theirs for ours, theirs in turn) for turn in pairs)


# --- ways to write ----------------------------------------------------------------------------------------------------


@contextmanager
def no_ends(target: Any):
    """While open, no token ends a text."""
    before, target.generation_config.eos_token_id = target.generation_config.eos_token_id, None
    try:
        yield
    finally:
        target.generation_config.eos_token_id = before


def by_transformers(target: Any, new_tokens: int, drafter: Eagle31Drafter | None, **settings: Any) -> Way:
    """Our process: plain `generate`, or with the drafter and these settings of its `generation_config`."""

    def write(prompts: Sequence[list[int]]) -> Turn:
        assistant = {} if drafter is None else {"assistant_model": drafter}
        for name, value in settings.items():
            setattr(drafter.generation_config, name, value)
        texts, drafted, accepted = [], [], []
        started = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = target.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **assistant)
            texts.append(out[0, len(prompt) :].tolist())
            if drafter is not None:
                drafted.append(drafter.stats.drafted_at)
                accepted.append(drafter.stats.accepted_at)
        return Turn(texts, time.perf_counter() - started, add_up(drafted), add_up(accepted))

    return write


def add_up(rows: Sequence[list[int]]) -> list[int]:
    """Sums by position; shorter rows end early."""
    return [sum(row[i] for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]


def by_own_drafts(target: Any, new_tokens: int, **settings: Any) -> Way:
    """Transformers' own drafts: looked up in the text, or by a head inside the target, one a pass."""

    def write(prompts: Sequence[list[int]]) -> Turn:
        texts, passes = [], 0
        how = {"max_new_tokens": new_tokens, "do_sample": False, **settings}

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        counting, started = target.get_decoder().register_forward_hook(count), time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = target.generate(ids, attention_mask=torch.ones_like(ids), **how)
            texts.append(out[0, len(prompt) :].tolist())
        seconds = time.perf_counter() - started
        counting.remove()
        if "use_mtp" not in settings:
            return Turn(texts, seconds)
        rounds = passes - len(prompts)  # the first pass of each reads its prompt and writes a token
        return Turn(texts, seconds, [rounds], [sum(map(len, texts)) - passes])

    return write


def by_engine(engine: EngineProcess, new_tokens: int) -> Way:
    def write(prompts: Sequence[list[int]]) -> Turn:
        answer = engine.ask({"prompts": list(prompts), "new_tokens": new_tokens})
        counts = answer["counts"]
        accepted = [int(count) for count in counts.get("accepted_at", [])]
        drafted = counts.get("drafted_at") or [int(counts.get("drafts", 0))] * len(accepted)
        return Turn(answer["texts"], answer["seconds"], drafted, accepted)

    return write


# --- the study --------------------------------------------------------------------------------------------------------


def load_prompts(tokenizer: Any, files: Sequence[str], limit: int) -> list[list[int]]:
    """Token ids of `limit` conversations of each file, spread over it; without a file, of the embedded ones."""
    chats = [prompt.opening for prompt in read_prompts(files, limit)] or list(CONVERSATIONS[:limit])
    options = {"add_generation_prompt": True, "return_dict": True}
    return [list(tokenizer.apply_chat_template(chat, **options)["input_ids"]) for chat in chats]


def saved_drafter(given: argparse.Namespace, target: Any) -> Path:
    """The drafter's folder: the one named, or a fresh one, which is as good as random, made for this target."""
    if given.target and not (given.drafter or given.random_drafter):
        return Path(given.target)  # the head inside it
    if not given.random_drafter:
        folder = Path(given.drafter or drafter_path())
    else:
        torch.manual_seed(0)
        folder = given.out / "random-drafter"
        Eagle31Drafter.from_target(target).save_pretrained(folder)
    format = inspect_checkpoint(folder).format
    if "vLLM" in given.peers and format not in WRITTEN_FORMATS:
        raise ConfigurationError(f"{folder} has {format}'s layout, which vLLM may not read: `eagle31 convert` it first")
    return folder


def all_ways(
    given: argparse.Namespace, target: Any, drafter: Eagle31Drafter, engines: dict[str, EngineProcess]
) -> dict[str, Way]:
    planner.VAIN_ROUNDS = sys.maxsize  # others draft in every round, in vain or not: counts are compared
    chain = {
        "num_assistant_tokens": given.draft_tokens,
        "num_assistant_tokens_schedule": "constant",
        "draft_min_confidence": 0.0,
    }
    ways = {PLAIN: by_transformers(target, given.new_tokens, None)}
    if not getattr(target, "_is_stateful", False):  # recurrent ones, which transformers does not assist
        ways[LOOKUP] = by_own_drafts(target, given.new_tokens, prompt_lookup_num_tokens=10)
    if given.use_mtp:
        ways[OWN_HEAD] = by_own_drafts(target, given.new_tokens, use_mtp=True)
    for name, acceleration in ((EAGER, "eager"), (COMPILED, "compile")):
        if acceleration == "eager" or not given.eager:
            ways[name] = by_transformers(target, given.new_tokens, drafter, acceleration=acceleration, **chain)
    return ways | {name: by_engine(engine, given.new_tokens) for name, engine in engines.items()}


@dataclass
class Engines:
    """Other engines' processes by the way they write, and why peers were left out."""

    running: dict[str, EngineProcess] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def start_engines(given: argparse.Namespace, target: str, drafter: Path, stack: ExitStack) -> Engines:
    engines = Engines()
    for peer, drafts in ((peer, drafts) for peer in given.peers for drafts in (None, str(drafter.resolve()))):
        name = f"{peer}, {'plain' if drafts is None else 'drafter'}"
        settings = {
            "target": target,
            "drafter": drafts,
            "draft_tokens": given.draft_tokens,
            "dtype": given.dtype,
            "max_model_len": given.context,
            "compiled": not given.eager,
        }
        log = given.out / f"{name.replace(', ', '-')}.log"
        print(f"loading {name} (its log: {log}) ...", file=sys.stderr, flush=True)
        try:
            engines.running[name] = stack.enter_context(EngineProcess(WORKERS[peer], settings, log))
        except EngineFailedError as error:
            engines.left_out[name] = str(error).splitlines()[-1]
    return engines


def take_turns(ways: dict[str, Way], prompts: Sequence[list[int]], turns: int) -> dict[str, Result]:
    """Every way `turns` times, each turn beginning with another one; a first text of each is not counted."""
    for name, write in ways.items():
        print(f"warming up {name} ...", file=sys.stderr, flush=True)
        write(prompts[:1])
    results, names = {name: Result() for name in ways}, list(ways)
    for turn in range(turns):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            results[name].turns.append(ways[name](prompts))
            speed = results[name].tok_per_s[-1]
            print(f"turn {turn + 1} of {turns}, {name}: {speed:.1f} tokens/s", file=sys.stderr, flush=True)
    return results


def findings(results: dict[str, Result]) -> list[str]:
    """What is not as it should be, in words; empty if all is."""
    wrong, count = [], len(results[PLAIN].turns[0].texts)
    for name, result in results.items():
        equal = result.equal_texts(results[PLAIN])
        if equal < count:
            wrong.append(f"{name}: {count - equal} of {count} texts differ from plain generate's")
    for peer, result in ((peer, results.get(f"{peer}, drafter")) for peer in WORKERS):
        pairs = [] if result is None else zip(results[EAGER].acceptance, result.acceptance, strict=True)
        for position, (here, there) in enumerate(pairs, 1):
            reached = results[EAGER].turns[0].drafted_at[position - 1]
            if abs(here - there) > TOLERANCE + len(results[EAGER].turns[0].texts) / max(reached, 1):
                wrong.append(f"acceptance at position {position}: {there:.3f} in {peer}, {here:.3f} here")
    return wrong


def table(results: dict[str, Result], left_out: dict[str, str]) -> str:
    """Markdown: medians over the turns, their range, over plain, texts equal to plain, acceptance."""
    count = len(results[PLAIN].turns[0].texts)
    lines = [
        "| | tokens/s, median (range) | over plain | texts as plain | acceptance length | accepted at 1, 2, ... |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, result in results.items():
        speeds, length = result.tok_per_s, result.acceptance_length
        positions = " ".join(f"{value:.3f}" for value in result.acceptance)
        lines.append(
            f"| {name} | {median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f}) | "
            f"{median(result.over(results[PLAIN])):.2f} | "
            f"{result.equal_texts(results[PLAIN])} of {count} | {'' if length is None else f'{length:.3f}'} | "
            f"{positions} |"
        )
    ours = COMPILED if COMPILED in results else EAGER
    for name in (name for name in results if name.endswith(", drafter")):
        ratios = ", ".join(f"{ratio:.2f}" for ratio in results[ours].over(results[name]))
        lines += ["", f"{ours} over {name}, turn by turn: {ratios}."]
    lines += [line for name, why in left_out.items() for line in ("", f"Left out: {name}: {why}")]
    return "\n".join(lines)


def spread(ratios: Sequence[float]) -> dict[str, float]:
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


def record(given: argparse.Namespace, results: dict[str, Result], engines: Engines) -> dict[str, Any]:
    """Everything, with what it was measured on."""
    ours, plain = results[COMPILED if COMPILED in results else EAGER], results[PLAIN]
    ways = [
        {
            "way": name.replace(",", ""),
            "tok_per_s": result.tok_per_s,
            "over_plain": spread(result.over(plain)),
            "ours_over_it": spread(ours.over(result)),
            "equal_texts": result.equal_texts(plain),
            "acceptance": result.acceptance,
            "acceptance_length": result.acceptance_length,
            "turns": [{**asdict(turn), "texts": None} for turn in result.turns],
        }
        for name, result in results.items()
    ]
    return {
        **origin(),
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "versions": {name.replace(",", ""): engine.facts["versions"] for name, engine in engines.running.items()},
        "left_out": engines.left_out,
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "prompts": len(results[PLAIN].turns[0].texts),
        "ways": ways,
        "findings": findings(results),
    }


def study(given: argparse.Namespace) -> int:
    if given.peers:
        engine_python()  # before minutes are spent on anything else
    given.out.mkdir(parents=True, exist_ok=True)
    name = given.target or str(target_path())
    target = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, given.dtype)).eval()
    folder = saved_drafter(given, target)
    drafter = Eagle31Drafter.from_pretrained(folder, target=target)
    prompts = load_prompts(AutoTokenizer.from_pretrained(name), given.prompts, given.limit)
    longest = max(map(len, prompts)) + given.new_tokens + given.draft_tokens + 1
    given.context = given.context or max(512, longest)
    with ExitStack() as stack:
        stack.enter_context(no_ends(target))
        engines = start_engines(given, name, folder, stack)
        results = take_turns(all_ways(given, target, drafter, engines.running), prompts, given.turns)
        everything = record(given, results, engines)
    text = table(results, engines.left_out)
    (given.out / "comparison.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    (given.out / "comparison.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    for finding in everything["findings"]:
        print(finding, file=sys.stderr)
    return 1 if everything["findings"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: the embedded target")
    parser.add_argument("--drafter", help="its drafter; default: the head inside the target, or the embedded one")
    parser.add_argument("--use-mtp", action="store_true", help="transformers drafts by the target's own head, too")
    parser.add_argument("--random-drafter", action="store_true", help="a fresh drafter for the target in its place")
    parser.add_argument("--prompts", nargs="+", default=[], help="JSON lines of conversations; default: the embedded")
    parser.add_argument("--peers", nargs="*", choices=list(WORKERS), default=list(WORKERS), help="default: all")
    parser.add_argument("--limit", type=int, default=25, help="conversations of each file")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--context", type=int, help="longest text engines make room for; default: as needed")
    parser.add_argument("--eager", action="store_true", help="compile nothing, neither here nor elsewhere")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        return study(given)
    except Eagle31Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
