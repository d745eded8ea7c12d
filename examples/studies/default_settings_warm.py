"""What a second process gets by default settings after `eagle31 warmup`, in turns with plain decoding.

    python examples/studies/default_settings_warm.py --prompts chats.jsonl --json docs/records/default-warm.json

A fresh process runs `eagle31 warmup` (twice: the second finds everything kept), this one then writes with the default
settings for 15 seconds after its first token, and times it and plain decoding in turns on the same prompts. Without
--target the embedded pair writes. Run it on a machine that does nothing else, and with EAGLE31_CACHE at an empty folder
to see the first warm-up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from eagle31_hf.cli.pairs import LoadedPair, PairSource, encode, load_pair
from eagle31_hf.measure.gauges import TokenClock, ends_off
from eagle31_hf.measure.provenance import machine, origin, pair_facts
from eagle31_hf.texts.prompts import read_prompts

WARM_S = 15.0
PLAIN, AUTO = "plain", "default"


def warm_up(given: argparse.Namespace) -> float:
    """Seconds that `eagle31 warmup` takes, its start included."""
    program = str(Path(sys.executable).with_name("eagle31"))
    command = [program, "warmup", "--tokens", str(given.tokens), "--dtype", given.dtype]
    for name in ("target", "drafter"):
        if getattr(given, name):
            command += [f"--{name}", getattr(given, name)]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def write(pair: LoadedPair, inputs: dict[str, Any], new_tokens: int, *, with_drafter: bool) -> dict[str, Any]:
    """A greedy text, its seconds and when its first token came."""
    clock, assistant = TokenClock(), {"assistant_model": pair.drafter} if with_drafter else {}
    started = time.perf_counter()
    out = pair.target.generate(**inputs, **assistant, streamer=clock, max_new_tokens=new_tokens, do_sample=False)
    text = out[0, inputs["input_ids"].shape[1] :].tolist()
    return {
        "text": text,
        "seconds": time.perf_counter() - started,
        "first_token_s": clock.arrivals[0][0] - started,
    }


def first_seconds(pair: LoadedPair, inputs: list[dict[str, Any]], new_tokens: int) -> dict[str, Any]:
    """Texts of a process that has just begun: the first one's token, and how fast each of the first seconds' was."""
    since, speeds, first = None, [], None
    while since is None or time.perf_counter() - since < WARM_S:
        written = write(pair, inputs[len(speeds) % len(inputs)], new_tokens, with_drafter=True)
        first = written["first_token_s"] if first is None else first
        since = time.perf_counter() - written["seconds"] + first if since is None else since
        speeds.append(len(written["text"]) / written["seconds"])
    return {"first_token_s": first, "tokens_per_s": speeds}


def in_turns(pairs: dict[str, LoadedPair], inputs: list[dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    """All ways on all prompts, another one first each time; the first pass warms up."""
    names = list(pairs)
    seconds: dict[str, list[float]] = {name: [0.0] * given.repeats for name in names}
    tokens, equal = [0] * given.repeats, dict.fromkeys(names, 0)
    for repeat in range(-1, given.repeats):
        for number, each in enumerate(inputs):
            first = (repeat + number) % len(names)
            written = {
                name: write(pairs[name], each, given.new_tokens, with_drafter=name != PLAIN)
                for name in names[first:] + names[:first]
            }
            if repeat >= 0:
                tokens[repeat] += given.new_tokens
                for name in names:
                    seconds[name][repeat] += written[name]["seconds"]
                    equal[name] += written[name]["text"] == written[PLAIN]["text"]
    told = {
        name: {
            "tokens_per_s": median(count / s for count, s in zip(tokens, seconds[name], strict=True)),
            "over_plain": ratio(seconds[PLAIN], seconds[name]),
            "equal_texts": equal[name],
        }
        for name in names
    }
    return {"ways": told}


def ratio(theirs: list[float], ours: list[float]) -> dict[str, float]:
    found = [other / own for other, own in zip(theirs, ours, strict=True)]
    return {"median": median(found), "min": min(found), "max": max(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub id; default: the embedded pair")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="[KIND=]FILE", help="as `bench run` takes them")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=512, help="longest text to warm up for")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warm_up_s = [warm_up(given), warm_up(given)]
    source = PairSource(target=given.target, drafter=given.drafter, dtype=given.dtype)
    auto = load_pair(source)
    inputs = [encode(auto, prompt.opening) for prompt in read_prompts(given.prompts, given.limit)]
    with ends_off(auto.target):
        begun = first_seconds(auto, inputs, given.new_tokens)
        turns = in_turns({PLAIN: auto, AUTO: auto}, inputs, given)
    record = {
        **origin(),
        "machine": machine(auto.drafter.binding),
        "pair": pair_facts(auto.drafter, auto.tokenizer, (given.target, given.drafter)),
        "warm_up_s": warm_up_s,
        "first_15_s": begun,
        **turns,
    }
    print(f"warm-up {warm_up_s[0]:.0f} s, again {warm_up_s[1]:.0f} s; first token after {begun['first_token_s']:.2f} s")
    for name, way in turns["ways"].items():
        over = way["over_plain"]
        print(
            f"{name:8} {way['tokens_per_s']:7.1f} tokens/s, {over['median']:.2f} x plain "
            f"({over['min']:.2f} to {over['max']:.2f}), {way['equal_texts']} texts are plain's"
        )
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
