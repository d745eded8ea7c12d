"""The same drafter here, in vLLM and in economize, beside transformers' own ways: texts, acceptance, speed in turns.

    make engines                                                     # once: the others in an environment of their own
    python examples/studies/compare_with_peers.py --out study        # the embedded pair on its own prompts
    python examples/studies/compare_with_peers.py --target FOLDER --drafter FOLDER --prompts chats.jsonl --out study
    python examples/studies/compare_with_peers.py --target FOLDER --peers vLLM --out study   # the head inside a target

Every way writes all prompts, one after the other, in each turn; turns begin with another way each time. Texts have a
fixed length. A table goes to standard output, all figures to OUT/comparison.json. A peer that does not take the drafter
is left out, and the table says why. The exit code is 1 where texts differ, or acceptance differs by more than two
points at any position.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engines.engine_process import engine_python, start_engine
from engines.json_lines import EndedError, Worker
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.drafting import planner
from eagle31_hf.errors import Eagle31Error
from eagle31_hf.generate.warm_up import warm_up
from eagle31_hf.measure.origin import origin
from eagle31_hf.stats import Acceptance
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

    @property
    def tok_per_s(self) -> float:
        return sum(map(len, self.texts)) / self.seconds

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts that reached so far and were accepted, by position."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def acceptance_length(self) -> float | None:
        rounds = max(self.drafted_at, default=0)
        return 1 + sum(self.accepted_at) / rounds if rounds else None


Way = Callable[[Sequence[list[int]]], Turn]
Turns = dict[str, list[Turn]]
"""Of each way. Acceptance is that of its first turn; greedy turns repeat each other."""


def ratios(ours: Sequence[Turn], theirs: Sequence[Turn]) -> list[float]:
    """Speed over another way's, turn by turn."""
    return [here.tok_per_s / there.tok_per_s for here, there in zip(ours, theirs, strict=True)]


def equal_texts(turns: Sequence[Turn], plain: Sequence[Turn]) -> int:
    """How many texts are the other way's, in every turn."""
    return min(sum(map(list.__eq__, turn.texts, plain[0].texts)) for turn in turns)


# --- ways to write ----------------------------------------------------------------------------------------------------


def by_generate(target: Any, new_tokens: int, **how: Any) -> Way:
    """Our process: `generate` with these arguments."""

    def write(prompts: Sequence[list[int]]) -> Turn:
        texts, started = [], time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            out = target.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **how)
            texts.append(out[0, len(prompt) :].tolist())
        return Turn(texts, time.perf_counter() - started)

    return write


def by_drafter(target: Any, new_tokens: int, drafter: Eagle31Drafter, acceleration: str, draft_tokens: int) -> Way:
    """The drafter, by chains of one length."""
    write_by_it = by_generate(target, new_tokens, assistant_model=drafter)

    def write(prompts: Sequence[list[int]]) -> Turn:
        settings = drafter.generation_config
        settings.acceleration, settings.num_assistant_tokens = acceleration, draft_tokens
        settings.num_assistant_tokens_schedule, settings.draft_min_confidence = "constant", 0.0
        turns, stats = [], []
        if acceleration == "compile" and target.device.type == "cpu":
            warm_up(drafter, tokens=max(map(len, prompts)) + new_tokens, do_sample=False)
        for prompt in prompts:
            turns.append(write_by_it([prompt]))
            stats.append(drafter.stats)
        texts, counts = [text for turn in turns for text in turn.texts], Acceptance.of(stats)
        return Turn(texts, sum(turn.seconds for turn in turns), counts.drafted_at, counts.accepted_at)

    return write


def by_own_head(target: Any, new_tokens: int) -> Way:
    """Transformers' own use of the head inside the target, which drafts one token a pass."""
    write_by_it = by_generate(target, new_tokens, use_mtp=True)

    def write(prompts: Sequence[list[int]]) -> Turn:
        passes: list[int] = []
        counting = target.get_decoder().register_forward_hook(lambda *_: passes.append(1))
        turn = write_by_it(prompts)
        counting.remove()
        rounds = len(passes) - len(prompts)  # the first pass of each reads its prompt and writes a token
        return Turn(turn.texts, turn.seconds, [rounds], [sum(map(len, turn.texts)) - len(passes)])

    return write


# --- the study --------------------------------------------------------------------------------------------------------


def load_prompts(tokenizer: Any, files: Sequence[str], limit: int) -> list[list[int]]:
    """Token ids of `limit` conversations of each file, spread over it; without a file, of the embedded ones."""
    chats = [list(prompt.messages) for prompt in read_prompts(files, limit)] or list(CONVERSATIONS[:limit])
    options = {"add_generation_prompt": True, "return_dict": True}
    return [list(tokenizer.apply_chat_template(chat, **options)["input_ids"]) for chat in chats]


def all_ways(
    given: argparse.Namespace, target: Any, drafter: Eagle31Drafter, engines: dict[str, Worker]
) -> dict[str, Way]:
    planner.VAIN_ROUNDS = sys.maxsize  # others draft in every round, in vain or not: counts are compared
    ways = {PLAIN: by_generate(target, given.new_tokens)}
    if not getattr(target, "_is_stateful", False):  # recurrent ones, which transformers does not assist
        ways[LOOKUP] = by_generate(target, given.new_tokens, prompt_lookup_num_tokens=10)
    if given.use_mtp:
        ways[OWN_HEAD] = by_own_head(target, given.new_tokens)
    for name, acceleration in [(EAGER, "eager"), (COMPILED, "compile")][: 1 if given.eager else 2]:
        ways[name] = by_drafter(target, given.new_tokens, drafter, acceleration, given.draft_tokens)
    for name, engine in engines.items():
        ways[name] = lambda prompts, engine=engine: Turn(**engine.ask(prompts=prompts, new_tokens=given.new_tokens))
    return ways


def start_engines(
    given: argparse.Namespace, target: str, drafter: Path, stack: ExitStack
) -> tuple[dict[str, Worker], dict[str, str]]:
    """Other engines by the way they write, and why peers were left out."""
    running, left_out = {}, {}
    for peer, drafts in product(given.peers, (None, str(drafter.resolve()))):
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
            running[name] = stack.enter_context(start_engine(WORKERS[peer], settings, log))
        except EndedError as error:
            left_out[name] = str(error).splitlines()[-1]
    return running, left_out


def take_turns(ways: dict[str, Way], prompts: Sequence[list[int]], turns: int) -> Turns:
    """Every way `turns` times, each turn beginning with another one; a first text of each is not counted."""
    for name, write in ways.items():
        print(f"warming up {name} ...", file=sys.stderr, flush=True)
        write(prompts[:1])
    results, names = {name: [] for name in ways}, list(ways)
    for turn in range(turns):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            results[name].append(ways[name](prompts))
            speed = results[name][-1].tok_per_s
            print(f"turn {turn + 1} of {turns}, {name}: {speed:.1f} tokens/s", file=sys.stderr, flush=True)
    return results


def findings(results: Turns) -> list[str]:
    """What is not as it should be, in words; empty if all is."""
    ours, wrong = results[EAGER][0], []
    count = len(ours.texts)
    for name, turns in results.items():
        if different := count - equal_texts(turns, results[PLAIN]):
            wrong.append(f"{name}: {different} of {count} texts differ from plain generate's")
    for peer in (peer for peer in WORKERS if f"{peer}, drafter" in results):
        pairs = zip(ours.acceptance, results[f"{peer}, drafter"][0].acceptance, ours.drafted_at, strict=True)
        for position, (here, there, reached) in enumerate(pairs, 1):
            if abs(here - there) > TOLERANCE + count / max(reached, 1):
                wrong.append(f"acceptance at position {position}: {there:.3f} in {peer}, {here:.3f} here")
    return wrong


def table(ways: Sequence[dict[str, Any]], prompts: int, left_out: dict[str, str]) -> str:
    """Markdown: medians over the turns, their range, over plain, texts equal to plain, acceptance."""
    lines = [
        "| | tokens/s, median (range) | over plain | ours over it (range) | texts as plain | acceptance length | "
        "accepted at 1, 2, ... |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for way in ways:
        cells = [way["way"], in_words(spread(way["tok_per_s"]), 1), f"{way['over_plain']['median']:.2f}"]
        cells += [in_words(way["ours_over_it"], 2), f"{way['equal_texts']} of {prompts}"]
        cells.append("" if way["acceptance_length"] is None else f"{way['acceptance_length']:.3f}")
        cells.append(" ".join(f"{value:.3f}" for value in way["acceptance"]))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [line for name, why in left_out.items() for line in ("", f"Left out: {name}: {why}")]
    return "\n".join(lines)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def in_words(spread: dict[str, float], digits: int) -> str:
    return "{median:.{0}f} ({min:.{0}f} to {max:.{0}f})".format(digits, **spread)


def way_record(name: str, results: Turns) -> dict[str, Any]:
    turns, plain = results[name], results[PLAIN]
    return {
        "way": name.replace(",", ""),
        "tok_per_s": [turn.tok_per_s for turn in turns],
        "over_plain": spread(ratios(turns, plain)),
        "ours_over_it": spread(ratios(results.get(COMPILED, results[EAGER]), turns)),
        "equal_texts": equal_texts(turns, plain),
        "acceptance": turns[0].acceptance,
        "acceptance_length": turns[0].acceptance_length,
        "turns": [{**asdict(turn), "texts": None} for turn in turns],
    }


def study(given: argparse.Namespace) -> int:
    if given.peers:
        engine_python()  # before minutes are spent on anything else
    given.out.mkdir(parents=True, exist_ok=True)
    name = given.target or str(target_path())
    folder = Path(given.drafter or given.target or drafter_path())  # a head may be inside the target
    target = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, given.dtype)).eval()
    target.generation_config.eos_token_id = None
    drafter = Eagle31Drafter.from_pretrained(folder, target=target)
    prompts = load_prompts(AutoTokenizer.from_pretrained(name), given.prompts, given.limit)
    given.context = max(512, max(map(len, prompts)) + given.new_tokens + given.draft_tokens + 1)
    with ExitStack() as stack:
        engines, left_out = start_engines(given, name, folder, stack)
        results = take_turns(all_ways(given, target, drafter, engines), prompts, given.turns)
    record = {
        **origin(),
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "versions": {name.replace(",", ""): engine.versions for name, engine in engines.items()},
        "left_out": left_out,
        "load_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "prompts": len(prompts),
        "ways": [way_record(name, results) for name in results],
        "findings": findings(results),
    }
    (given.out / "comparison.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(table(record["ways"], len(prompts), left_out))
    for finding in record["findings"]:
        print(finding, file=sys.stderr)
    return 1 if record["findings"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: the embedded target")
    parser.add_argument("--drafter", help="its drafter; default: the head inside the target, or the embedded one")
    parser.add_argument("--use-mtp", action="store_true", help="transformers drafts by the target's own head, too")
    parser.add_argument("--prompts", nargs="+", default=[], help="JSON lines of conversations; default: the embedded")
    parser.add_argument("--peers", nargs="*", choices=list(WORKERS), default=list(WORKERS), help="default: all")
    parser.add_argument("--limit", type=int, default=25, help="conversations of each file")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
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
