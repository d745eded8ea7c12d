"""Do drafts that adapt pay on every kind of text? The default against plain decoding and every fixed length, in turns.

    python examples/studies/adaptive_drafts_pay.py --prompts domain=chats.jsonl other=questions.jsonl code=code.jsonl \\
        --copy copy=chats.jsonl --json docs/records/adaptive.json

Each way writes every prompt, one way after the other and another one first each time: plain decoding, drafts of fixed
lengths, the default (calibrated first), prompt lookup alone, and the default with a drafter that was never trained.
Ratios are of one repeat's tokens per second to plain decoding's in that repeat. The best fixed setting is chosen for
each repeat by the others: the luckiest of several in a repeat says more of luck than of settings. All is eager, as
plain decoding is. Without --target the embedded pair writes, in about a quarter of an hour on two cores. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eagle31_hf import Eagle31Drafter
from eagle31_hf.benchmark.gauges import TokenClock
from eagle31_hf.benchmark.loop import ends_off
from eagle31_hf.benchmark.prompts import Prompt, read_prompts
from eagle31_hf.benchmark.provenance import machine, origin, pair_facts
from eagle31_hf.cli.pairs import Pair, PairSource, encode, load_pair
from eagle31_hf.decoding.pair_history import PairHistory
from eagle31_hf.demo import drafter_path
from eagle31_hf.stats import variation, window_speeds, windows

FIXED = (2, 4, 8)
PLAIN, DEFAULT, LOOKUP, RANDOM, DOUBT = "plain", "default", "prompt lookup", "random drafter", "until doubt"
MOST_SLOWER = 0.97
"""What the default may fall to, of plain decoding and of the best fixed setting."""


@dataclass(frozen=True)
class Way:
    """How to write: with which drafter and settings of it, or what else `generate` is told."""

    name: str
    drafter: Eagle31Drafter | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)


@dataclass
class Written:
    """One way's texts of one kind at one temperature. By repeat: tokens and seconds; over all: the rest."""

    tokens: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    first_token_s: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    rounds: int = 0
    accepted: int = 0
    skipped: int = 0
    equal_texts: int = 0
    texts: int = 0

    def tok_per_s(self, repeat: int) -> float:
        return self.tokens[repeat] / self.seconds[repeat]


def ways_of(pair: Pair, given: Any) -> list[Way]:
    """All of them, plain first."""
    untrained = Eagle31Drafter.from_pretrained(given.drafter or drafter_path(), target=pair.target)
    untrained.generation_config.acceleration = "eager"
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in untrained.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
    constant = {"num_assistant_tokens_schedule": "constant"}
    fixed = [Way(f"fixed {k}", pair.drafter, {**constant, "num_assistant_tokens": k}) for k in FIXED]
    return [
        Way(PLAIN),
        *fixed,
        Way(DOUBT, pair.drafter, constant),
        Way(DEFAULT, pair.drafter),
        Way(LOOKUP, told={"prompt_lookup_num_tokens": 10}),
        Way(RANDOM, untrained),
    ]


@contextmanager
def configured(way: Way):
    if way.drafter is None:
        yield
        return
    config = way.drafter.generation_config
    before = {name: getattr(config, name) for name in way.settings}
    for name, value in way.settings.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def write(pair: Pair, way: Way, inputs: dict[str, Any], told: dict[str, Any], seed: int):
    """New tokens, seconds, and when they came."""
    clock, assistant = TokenClock(), {} if way.drafter is None else {"assistant_model": way.drafter}
    torch.manual_seed(seed)
    with configured(way):
        started = time.perf_counter()
        out = pair.target.generate(**inputs, **told, **way.told, **assistant, streamer=clock)
        return out[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - started, started, clock


def note(written: Written, way: Way, repeat: int, result: tuple) -> None:
    text, seconds, started, clock = result
    written.tokens[repeat] = written.tokens.get(repeat, 0) + len(text)
    written.seconds[repeat] = written.seconds.get(repeat, 0.0) + seconds
    written.first_token_s.append(clock.arrivals[0][0] - started)
    written.speeds += window_speeds(windows(clock.arrivals))
    written.texts += 1
    stats = None if way.drafter is None else way.drafter.stats
    if stats is not None:
        written.rounds, written.accepted = written.rounds + stats.rounds, written.accepted + stats.accepted
        written.skipped += stats.skipped_rounds


def measure(pair: Pair, ways: list[Way], prompts: list[Prompt], temperature: float, given: Any) -> dict[str, Written]:
    """All ways on the prompts of one kind; the first repeat warms up."""
    sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
    told = {"max_new_tokens": given.new_tokens, "do_sample": temperature > 0, **sampling}
    found: dict[str, Written] = {way.name: Written() for way in ways}
    inputs = [encode(pair, prompt.opening) for prompt in prompts]
    for repeat in range(-1, given.repeats):
        for number, each in enumerate(inputs[: 1 if repeat < 0 else None]):
            first = (repeat + number) % len(ways)
            results = {}
            for way in ways[first:] + ways[:first]:
                results[way.name] = write(pair, way, each, told, seed=1000 * max(repeat, 0) + number)
                if repeat >= 0:
                    note(found[way.name], way, repeat, results[way.name])
            for way in ways if repeat >= 0 else ():
                found[way.name].equal_texts += results[way.name][0] == results[PLAIN][0]
    return found


def summary(found: dict[str, Written]) -> list[dict[str, Any]]:
    """A row for each way."""
    plain, rows = found[PLAIN], []
    slow_plain = median(plain.speeds)
    for name, written in found.items():
        ratios = [written.tok_per_s(repeat) / plain.tok_per_s(repeat) for repeat in plain.tokens]
        slowest = sorted(written.speeds)[len(written.speeds) // 20]
        rows.append(
            {
                "way": name,
                "tokens_per_s": median(written.tok_per_s(repeat) for repeat in plain.tokens),
                "over_plain": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
                "over_plain_by_repeat": ratios,
                "acceptance_length": 1.0 + written.accepted / written.rounds if written.rounds else 1.0,
                "skipped_rounds": written.skipped,
                "first_token_s": median(written.first_token_s),
                "speed_variation": variation(written.speeds),
                "slowest_twentieth_over_plain": slowest / slow_plain,
                "equal_texts": written.equal_texts,
                "texts": written.texts,
            }
        )
    return rows


def verdicts(kind: str, rows: list[dict[str, Any]]) -> list[str]:
    """What must hold, each with its figure."""
    over = {row["way"]: row["over_plain"]["median"] for row in rows}
    by_repeat = {row["way"]: row["over_plain_by_repeat"] for row in rows}
    fixed = [name for name in over if name.startswith("fixed") or name == DOUBT]
    told = [
        _verdict("the default against plain", over[DEFAULT], MOST_SLOWER),
        _verdict("a random drafter against plain", over[RANDOM], MOST_SLOWER),
        _verdict("the default against the best fixed setting", against_best(by_repeat, fixed), MOST_SLOWER),
    ]
    if "copy" in kind:
        better = against_best(by_repeat, [LOOKUP, DOUBT])
        told.append(_verdict("the default against the better of lookup and EAGLE alone", better, 1.0))
    return told


def against_best(by_repeat: dict[str, list[float]], others: list[str]) -> float:
    """The default's speed over that of the best of `others`, chosen for each repeat by all the other repeats."""
    ratios = []
    for repeat, ours in enumerate(by_repeat[DEFAULT]):
        elsewhere = {name: sum(by_repeat[name]) - by_repeat[name][repeat] for name in others}
        best = max(elsewhere, key=elsewhere.__getitem__)
        ratios.append(ours / by_repeat[best][repeat])
    return median(ratios)


def _verdict(what: str, figure: float, least: float) -> str:
    return f"{'holds' if figure >= least else 'FALLS SHORT'}: {what} {figure:.2f} (wanted {least})"


def copying(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts that ask for their own words again."""
    made = []
    for prompt in prompts:
        words = "\n".join(message["content"] for message in prompt.messages)
        message = {"role": "user", "content": f"Repeat the following word by word, twice:\n{words}"}
        made.append(Prompt(prompt.id, prompt.suite, prompt.category, (message,)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: the embedded pair")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="KIND=FILE", help="as `bench run` takes them")
    parser.add_argument("--copy", nargs="*", default=[], metavar="KIND=FILE", help="to be repeated word by word")
    parser.add_argument("--limit", type=int, default=3, help="prompts of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.prompts and not given.copy:
        parser.error("got no prompts; pass --prompts KIND=FILE ... for each kind of text, and --copy KIND=FILE")
    kinds = read_prompts(given.prompts, given.limit) + copying(read_prompts(given.copy, given.limit))
    pair = load_pair(PairSource(target=given.target, drafter=given.drafter, dtype=given.dtype))
    pair.drafter.generation_config.acceleration = "eager"
    ways, record = ways_of(pair, given), []
    PairHistory.of(pair.drafter).calibrate(
        pair.drafter, compiled=False
    )  # of the untrained one, too: as many operations
    with ends_off(pair.target):
        for kind in dict.fromkeys(prompt.suite for prompt in kinds):
            for temperature in given.temperatures:
                prompts = [prompt for prompt in kinds if prompt.suite == kind]
                rows = summary(measure(pair, ways, prompts, temperature, given))
                told = verdicts(kind, rows)
                record.append({"kind": kind, "temperature": temperature, "ways": rows, "verdicts": told})
                show(kind, temperature, rows, told)
    if given.json is not None:
        facts = {
            **origin(),
            "machine": machine(pair.drafter.require_binding()),
            "pair": pair_facts(pair.drafter, pair.tokenizer, (given.target, given.drafter)),
            "prompts": [prompt.id for prompt in kinds],
        }
        given.json.write_text(json.dumps({**facts, "kinds": record}, indent=1) + "\n", encoding="utf-8")


def show(kind: str, temperature: float, rows: list[dict[str, Any]], told: list[str]) -> None:
    print(f"\n{kind}, temperature {temperature:g}")
    for row in rows:
        over = row["over_plain"]
        print(
            f"  {row['way']:15} {row['tokens_per_s']:7.1f} tokens/s  {over['median']:.2f} x plain "
            f"({over['min']:.2f} to {over['max']:.2f})  accepted {row['acceptance_length']:.2f}  "
            f"slowest twentieth {row['slowest_twentieth_over_plain']:.2f} x plain"
        )
    for line in told:
        print(f"  {line}")


if __name__ == "__main__":
    main()
