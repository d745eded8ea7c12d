"""Do drafts that adapt pay on every kind of text? The default against plain decoding and every fixed length, in turns.

    python examples/studies/adaptive_drafts_pay.py --prompts domain=chats.jsonl other=questions.jsonl code=code.jsonl \\
        --copy copy=chats.jsonl --json docs/records/adaptive.json

Each way writes every prompt, one way after the other and another one first each time: plain decoding, drafts of fixed
lengths, the default (calibrated first), prompt lookup alone, and the default with a drafter that was never trained.
Ratios are of all tokens per second of all texts, with intervals (95 %) by drawing texts again: where tokens are drawn
each way writes texts of its own. The best fixed setting is chosen for each text by the others: the luckiest of several
says more of luck than of settings. All is eager, as plain decoding is; with --graphs all is computed by graphs that are
kept (made first, which takes minutes), plain decoding by one over single tokens, chains have one length, and prompts
longer than an answer are left out, since graphs are made for twice that length. Without
--target the embedded pair writes; three prompts of each kind take a quarter of an hour on two cores. Run it on a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eagle31_hf import Eagle31Drafter, NoDrafter
from eagle31_hf.cli.pairs import LoadedPair, PairSource, encode, load_pair
from eagle31_hf.decoding.calibration.unasked import calibrate
from eagle31_hf.demo import drafter_path
from eagle31_hf.generation.warm_up import warm_up
from eagle31_hf.measure.gauges import TokenClock, ends_off
from eagle31_hf.measure.provenance import machine, origin, pair_facts
from eagle31_hf.stats import variation, window_speeds, windows
from eagle31_hf.texts.prompts import Prompt, read_prompts

FIXED = (2, 4, 8)
PLAIN, DEFAULT, LOOKUP, RANDOM = "plain", "default", "prompt lookup", "random drafter"
DOUBT, FIXED_LENGTH = "until doubt", "fixed length"
MOST_SLOWER = 0.97
"""What the default may fall to, of plain decoding and of the best fixed setting."""

DRAWS = 2000
"""Of texts, for an interval."""


@dataclass(frozen=True)
class Way:
    """How to write: with which drafter and settings of it, or what else `generate` is told."""

    name: str
    drafter: Eagle31Drafter | NoDrafter | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)


@dataclass
class Written:
    """One way's texts of one kind at one temperature. In order: tokens and seconds of each; over all: the rest."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    rounds: int = 0
    accepted: int = 0
    skipped: int = 0
    equal_texts: int = 0

    def tok_per_s(self, texts: Sequence[int] | None = None) -> float:
        """Over these texts, or all of them."""
        chosen = range(len(self.tokens)) if texts is None else texts
        return sum(self.tokens[i] for i in chosen) / sum(self.seconds[i] for i in chosen)


def ways_of(pair: LoadedPair, given: Any) -> list[Way]:
    """All of them, plain first."""
    constant = {"num_assistant_tokens_schedule": "constant"}
    untrained = Way(RANDOM, untrained_drafter(pair, given.drafter))
    if given.graphs:
        alone = Way(PLAIN, NoDrafter(pair.target), {"num_assistant_tokens_schedule": "constant"})
        return [alone, Way(FIXED_LENGTH, pair.drafter, constant), Way(DEFAULT, pair.drafter), untrained]
    fixed = [Way(f"fixed {k}", pair.drafter, {**constant, "num_assistant_tokens": k}) for k in FIXED]
    doubt, lookup = Way(DOUBT, pair.drafter, constant), Way(LOOKUP, told={"prompt_lookup_num_tokens": 10})
    return [Way(PLAIN), *fixed, doubt, Way(DEFAULT, pair.drafter), lookup, untrained]


def untrained_drafter(pair: LoadedPair, like: str | None) -> Eagle31Drafter:
    """Of the size of `like`, or of the embedded one."""
    untrained = Eagle31Drafter.from_pretrained(like or drafter_path(), target=pair.target)
    untrained.generation_config.acceleration = pair.drafter.generation_config.acceleration
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in untrained.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
    return untrained


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


def write(pair: LoadedPair, way: Way, inputs: dict[str, Any], told: dict[str, Any], seed: int):
    """New tokens, seconds, and when they came."""
    clock, assistant = TokenClock(), {} if way.drafter is None else {"assistant_model": way.drafter}
    torch.manual_seed(seed)
    with configured(way):
        started = time.perf_counter()
        out = pair.target.generate(**inputs, **told, **way.told, **assistant, streamer=clock)
        new = out[:, inputs["input_ids"].shape[1] :]
        return new[0].tolist(), time.perf_counter() - started, started, clock


def note(written: Written, way: Way, result: tuple) -> None:
    text, seconds, started, clock = result
    written.tokens.append(len(text))
    written.seconds.append(seconds)
    written.first_token_s.append(clock.arrivals[0][0] - started)
    written.speeds += window_speeds(windows(clock.arrivals))
    stats = None if way.drafter is None else way.drafter.stats
    if stats is not None:
        written.rounds, written.accepted = written.rounds + stats.rounds, written.accepted + stats.accepted
        written.skipped += stats.skipped_rounds


def measure(
    pair: LoadedPair, ways: list[Way], prompts: list[Prompt], temperature: float, given: Any
) -> dict[str, Written]:
    """All ways on the prompts of one kind; the first repeat warms up."""
    told = {"max_new_tokens": given.new_tokens, **sampling(temperature)}
    found: dict[str, Written] = {way.name: Written() for way in ways}
    inputs = [encode(pair, prompt.opening) for prompt in prompts]
    for repeat in range(-1, given.repeats):
        for number, each in enumerate(inputs[: 1 if repeat < 0 else None]):
            first = (repeat + number) % len(ways)
            results = {}
            for way in ways[first:] + ways[:first]:
                seed = 1000 * max(repeat, 0) + number
                results[way.name] = write(pair, way, each, told, seed)
                if repeat >= 0:
                    note(found[way.name], way, results[way.name])
            for way in ways if repeat >= 0 else ():
                found[way.name].equal_texts += results[way.name][0] == results[PLAIN][0]
    return found


def summary(found: dict[str, Written]) -> list[dict[str, Any]]:
    """A row for each way."""
    plain, rows = found[PLAIN], []
    slow_plain = median(plain.speeds)
    for name, written in found.items():
        slowest = sorted(written.speeds)[len(written.speeds) // 20]
        rows.append(
            {
                "way": name,
                "tokens_per_s": written.tok_per_s(),
                "over_plain": ratio(written, [plain] * len(plain.tokens)),
                "acceptance_length": 1.0 + written.accepted / written.rounds if written.rounds else 1.0,
                "skipped_rounds": written.skipped,
                "first_token_s": median(written.first_token_s),
                "speed_variation": variation(written.speeds),
                "slowest_twentieth_over_plain": slowest / slow_plain,
                "equal_texts": written.equal_texts,
                "texts": len(written.tokens),
            }
        )
    return rows


def verdicts(kind: str, found: dict[str, Written]) -> list[dict[str, Any]]:
    """What must hold, each with its figure."""
    plain = [found[PLAIN]] * len(found[PLAIN].tokens)
    fixed = [written for name, written in found.items() if name.startswith("fixed") or name == DOUBT]
    told = [
        _verdict("the default against plain", ratio(found[DEFAULT], plain), MOST_SLOWER),
        _verdict("a random drafter against plain", ratio(found[RANDOM], plain), MOST_SLOWER),
        _verdict("the default against the best fixed setting", against_best(found[DEFAULT], fixed), MOST_SLOWER),
    ]
    if "copy" in kind and LOOKUP in found:
        better = against_best(found[DEFAULT], [found[LOOKUP], found[DOUBT]])
        told.append(_verdict("the default against the better of lookup and EAGLE alone", better, 1.0))
    return told


def against_best(ours: Written, others: Sequence[Written]) -> dict[str, float]:
    """Our speed over that of the best of `others`, chosen for each text by all the other texts (a single one by it)."""
    texts = range(len(ours.tokens))

    def best_without(text: int) -> Written:
        judges = [each for each in texts if each != text] or texts
        return max(others, key=lambda way: way.tok_per_s(judges))

    return ratio(ours, [best_without(text) for text in texts])


def ratio(ours: Written, theirs: Sequence[Written]) -> dict[str, float]:
    """Speed of our texts over theirs, each of which another way may have written, with a 95 % interval."""

    def of(texts: Sequence[int]) -> float:
        their_speed = sum(theirs[i].tokens[i] for i in texts) / sum(theirs[i].seconds[i] for i in texts)
        return ours.tok_per_s(texts) / their_speed

    texts, dice = range(len(ours.tokens)), random.Random(0)
    drawn = sorted(of(dice.choices(texts, k=len(texts))) for _ in range(DRAWS))
    return {"ratio": of(texts), "low": drawn[DRAWS // 40], "high": drawn[-1 - DRAWS // 40]}


def _verdict(what: str, figure: dict[str, float], least: float) -> dict[str, Any]:
    return {"what": what, **figure, "wanted": least}


def make_graphs(ways: list[Way], given: Any) -> None:
    """For texts that may be twice as long as what is written, greedy and drawn; calibrated."""
    for drafter in {id(way.drafter): way.drafter for way in ways if way.drafter is not None}.values():
        for temperature in given.temperatures:
            warm_up(drafter, tokens=2 * given.new_tokens, **sampling(temperature))


def sampling(temperature: float) -> dict[str, Any]:
    """What `generate` is told."""
    return {"do_sample": temperature > 0, **({"temperature": temperature, "top_k": 0} if temperature else {})}


def copying(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts that ask for their own words again."""
    made = []
    for prompt in prompts:
        words = "\n".join(message["content"] for message in prompt.messages)
        message = {"role": "user", "content": f"Repeat the following word by word, twice:\n{words}"}
        made.append(Prompt(prompt.id, prompt.suite, prompt.category, (message,)))
    return made


def parser_of(description: str | None, *, limit: int) -> argparse.ArgumentParser:
    """What both studies of drafts that adapt are told; `limit` is the default one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: the embedded pair")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="KIND=FILE", help="as `bench run` takes them")
    parser.add_argument("--copy", nargs="*", default=[], metavar="KIND=FILE", help="to be repeated word by word")
    parser.add_argument("--limit", type=int, default=limit, help="prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--json", type=Path)
    return parser


def prompts_and_pair(parser: argparse.ArgumentParser, given: argparse.Namespace) -> tuple[list[Prompt], LoadedPair]:
    """As they were asked for."""
    if not given.prompts and not given.copy:
        parser.error("got no prompts; pass --prompts KIND=FILE ... for each kind of text, and --copy KIND=FILE")
    prompts = read_prompts(given.prompts, given.limit) + copying(read_prompts(given.copy, given.limit))
    return prompts, load_pair(PairSource(target=given.target, drafter=given.drafter, dtype=given.dtype))


def write_record(
    given: argparse.Namespace, pair: LoadedPair, prompts: list[Prompt], kinds: list[dict[str, Any]]
) -> None:
    """Figures with all they depend on, if somebody wants a file."""
    if given.json is None:
        return
    facts = {
        **origin(),
        "machine": machine(pair.drafter.binding),
        "pair": pair_facts(pair.drafter, pair.tokenizer, (given.target, given.drafter)),
        "prompts": [prompt.id for prompt in prompts],
    }
    given.json.write_text(json.dumps({**facts, "kinds": kinds}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = parser_of(__doc__, limit=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--graphs", action="store_true", help="all by graphs that are kept")
    given = parser.parse_args()
    kinds, pair = prompts_and_pair(parser, given)
    pair.drafter.generation_config.acceleration = "auto" if given.graphs else "eager"
    if given.graphs:
        kinds = [prompt for prompt in kinds if encode(pair, prompt.opening)["input_ids"].shape[1] <= given.new_tokens]
    ways, record = ways_of(pair, given), []
    if given.graphs:
        make_graphs(ways, given)
    else:
        calibrate(pair.drafter, compiled=False)  # the untrained one's, too: it is as large
    with ends_off(pair.target):
        for kind in dict.fromkeys(prompt.suite for prompt in kinds):
            for temperature in given.temperatures:
                prompts = [prompt for prompt in kinds if prompt.suite == kind]
                found = measure(pair, ways, prompts, temperature, given)
                rows, told = summary(found), verdicts(kind, found)
                record.append({"kind": kind, "temperature": temperature, "ways": rows, "verdicts": told})
                show(kind, temperature, rows, told)
    write_record(given, pair, kinds, record)


def show(kind: str, temperature: float, rows: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
    print(f"\n{kind}, temperature {temperature:g}")
    for row in rows:
        over = row["over_plain"]
        print(
            f"  {row['way']:15} {row['tokens_per_s']:7.1f} tokens/s  {over['ratio']:.2f} x plain "
            f"({over['low']:.2f} to {over['high']:.2f})  accepted {row['acceptance_length']:.2f}  "
            f"slowest twentieth {row['slowest_twentieth_over_plain']:.2f} x plain"
        )
    for each in told:
        verdict = "holds" if each["ratio"] >= each["wanted"] else "FALLS SHORT"
        print(
            f"  {verdict}: {each['what']} {each['ratio']:.2f} ({each['low']:.2f} to {each['high']:.2f}, "
            f"wanted {each['wanted']})"
        )


if __name__ == "__main__":
    main()
