"""Is one version of the code slower than another? Both write the same texts in turns, each in a process of its own.

    python examples/studies/two_commits.py main~3 .                            # a commit and this folder
    python examples/studies/two_commits.py ../before . --accelerations eager --target ORG/MODEL --drafter ORG/DRAFTER

A version is a folder that holds `src/eagle31_hf`, or a commit of the repository one stands in, which is checked out
into a temporary folder. Text by text each version writes with the drafter, first one and then the other, the next time
the other way round. Nothing but the public interface is used, so that versions far apart can be compared. A version's
graphs are compiled once, into a folder of its own: minutes on a CPU. Ends with status 1 if texts differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engines.json_lines import Worker, answer_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

WORKER = "--worker"
LONGEST_PROMPT = 128
PROMPTS = (
    "I would like to reserve a table for two at an Italian restaurant in Oakland, tomorrow at 7 pm.",
    "A shop sells apples at 3 dollars a bag and pears at 4 dollars a bag. How much are 5 bags of apples?",
    "Explain why the sky is blue during the day and red in the evening.",
    "Repeat the following word by word: the committee met on Tuesday at 9 am in room 14, and 37 of 52 members came.",
)


def started(folder: Path, cache: str, options: argparse.Namespace) -> Worker:
    """A process that writes by one version's code, a text at a time."""
    paths = [str(folder / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "EAGLE31_CACHE": cache}
    pair = {"target": options.target, "drafter": options.drafter, "dtype": options.dtype}
    for temperature in options.temperatures if "compile" in options.accelerations else []:
        told = {**pair, "tokens": str(LONGEST_PROMPT + options.tokens), "temperature": str(temperature)}
        words = [word for name, value in told.items() if value for word in (f"--{name}", value)]
        command = [sys.executable, "-m", "eagle31_hf", "warmup", *words]  # on a card it refuses
        subprocess.run(command, env=os.environ | environment, check=False)
    return Worker([sys.executable, __file__, WORKER], pair, environment)


def load(pair: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Target, tokenizer and drafter."""
    import eagle31_hf  # of the version

    demo = Path(eagle31_hf.__file__).parent / "demo"
    name = pair["target"] or demo / "target"
    target = AutoModelForCausalLM.from_pretrained(name, dtype=pair["dtype"])
    target = target.to("cuda" if torch.cuda.is_available() else "cpu")
    target.generation_config.eos_token_id = None  # texts are equally long
    eagle = eagle31_hf.Eagle31Drafter.from_pretrained(pair["drafter"] or demo / "drafter", target=target)
    return target, AutoTokenizer.from_pretrained(name), eagle


def write(loaded: tuple[Any, Any, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Tokens and seconds of one text."""
    target, tokenizer, eagle = loaded
    chat = [{"role": "user", "content": request["prompt"]}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    eagle.generation_config.acceleration = request["acceleration"]
    how = {"do_sample": True, "temperature": request["temperature"]} if request["temperature"] else {}
    how |= {"max_new_tokens": request["tokens"], "pad_token_id": 0, "assistant_model": eagle}
    torch.manual_seed(request["seed"])
    began = time.perf_counter()
    out = target.generate(**inputs.to(target.device), **how)
    tokens = out[0, inputs["input_ids"].shape[1] :].tolist()  # waits for the device
    return {"tokens": tokens, "seconds": time.perf_counter() - began}


@contextmanager
def checked_out(version: str):
    """The folder of a version: itself, or a temporary one with the commit's files."""
    if (Path(version) / "src" / "eagle31_hf").is_dir():
        yield Path(version).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        where = str(Path(folder) / "checkout")
        added = subprocess.run(
            ["git", "worktree", "add", "--detach", where, version], capture_output=True, text=True, check=False
        )
        if added.returncode:
            reason = added.stderr.strip().splitlines()[-1]
            raise SystemExit(f"got {version!r}, which is no folder with src/eagle31_hf, and no commit: {reason}")
        try:
            yield Path(where)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", where], capture_output=True, check=False)


def measure(
    acceleration: str, temperature: float, versions: list[Worker], options: argparse.Namespace
) -> dict[str, Any]:
    """All turns of one way to write. Medians and ranges are over turns; the ratio is of the two versions within a turn,
    second over first. The first writing of each prompt warms up and is compared only."""
    tok_per_s: tuple[list[float], list[float]] = ([], [])
    different = 0
    for turn in range(-1, options.turns):
        seconds, tokens = [0.0, 0.0], [0, 0]
        for seed, prompt in enumerate(PROMPTS[: options.prompts]):
            request = {"prompt": prompt, "seed": seed, "tokens": options.tokens}
            request |= {"acceleration": acceleration, "temperature": temperature}
            texts: list[list[int]] = [[], []]
            for at in (0, 1) if (turn + seed) % 2 else (1, 0):
                written = versions[at].ask(**request)
                texts[at] = written["tokens"]
                seconds[at], tokens[at] = seconds[at] + written["seconds"], tokens[at] + len(texts[at])
            different += texts[0] != texts[1]
        if turn >= 0:
            for speeds, count, spent in zip(tok_per_s, tokens, seconds, strict=True):
                speeds.append(count / spent)
    ratios = [after / before for before, after in zip(*tok_per_s, strict=True)]
    return {
        "method": f"{acceleration} {f'temperature {temperature:g}' if temperature else 'greedy'}",
        "tok_per_s": [median(speeds) for speeds in tok_per_s],
        "spread": [[min(speeds), max(speeds)] for speeds in tok_per_s],
        "ratio": median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
        "different_texts": different,
    }


def show(found: dict[str, Any]) -> None:
    """One line."""
    (before, after), (low, high) = found["tok_per_s"], found["ratio_spread"]
    same = f"{found['different_texts']} TEXTS DIFFER" if found["different_texts"] else "texts are equal"
    ranges = " and ".join(f"{least:.1f} to {most:.1f}" for least, most in found["spread"])
    speeds = f"{before:8.1f} -> {after:8.1f} tokens/s ({ranges})"
    print(f"{found['method']:24} {speeds}: {found['ratio']:.3f} ({low:.3f} to {high:.3f}), {same}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs=2, metavar="FOLDER_OR_COMMIT")
    parser.add_argument("--target", help="folder or Hub id; default: each version's embedded pair")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--accelerations", nargs="+", default=["eager", "compile"], help="eager, auto, compile")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the built-in ones")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if (options.target is None) != (options.drafter is None):
        parser.error("got one of --target and --drafter; pass both, or none for the embedded pair")
    methods = []
    with ExitStack() as stack:
        folders = [stack.enter_context(checked_out(version)) for version in options.versions]
        caches = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in folders]
        versions = [stack.enter_context(started(*each, options)) for each in zip(folders, caches, strict=True)]
        for acceleration, temperature in product(options.accelerations, options.temperatures):
            methods.append(measure(acceleration, temperature, versions, options))
            show(methods[-1])
    if options.json:
        record = {"versions": options.versions, "methods": methods}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(method["different_texts"] for method in methods))


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        answer_lines(load, write, ("eagle31_hf",))
    else:
        sys.exit(main())
