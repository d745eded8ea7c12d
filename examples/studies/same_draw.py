"""Is sampled text plain `generate`'s, and how few passes does it take? Counted; nothing is timed.

    python examples/studies/same_draw.py sgd=chats.jsonl gsm8k=questions.jsonl --temperatures 0.7 1 --json record.json

Each prompt is written by plain `generate` and with the drafter after the same `torch.manual_seed`, eagerly, by chains
and by trees of a fixed size. A text is the same if every token is, and if the generator is left where plain leaves it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path
from eagle31_hf.texts.prompts import read_prompts

SHAPES: dict[str, dict[str, Any]] = {
    "chain of 5": {"num_assistant_tokens": 5, "draft_top_k": 1, "draft_tree_size": None},
    "chain of 3": {"num_assistant_tokens": 3, "draft_top_k": 1, "draft_tree_size": None},
    "tree of 16 nodes": {"num_assistant_tokens": 5, "draft_top_k": 3, "draft_tree_size": 16},
}


def written(target: Any, inputs: dict[str, Any], seed: int, **how: Any) -> tuple[list[int], list[int]]:
    """Tokens, and the generator's state behind them."""
    torch.manual_seed(seed)
    out = target.generate(**inputs, **how)
    return out[0].tolist(), torch.get_rng_state().tolist()


def study(eagle: Eagle31Drafter, prompts: list[dict[str, Any]], temperature: float, new_tokens: int) -> list[dict]:
    """A record for each shape, over prompts of one kind."""
    how: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": new_tokens}
    how |= {"temperature": temperature, "top_k": 0} if temperature else {}
    target: Any = eagle.binding.model
    plain = [written(target, inputs, seed, **how) for seed, inputs in enumerate(prompts)]
    record = []
    for shape, fields in SHAPES.items():
        for name, value in fields.items():
            setattr(eagle.generation_config, name, value)
        same = rounds = tokens = 0
        for seed, inputs in enumerate(prompts):
            same += written(target, inputs, seed, **how, assistant_model=eagle) == plain[seed]
            assert eagle.stats is not None
            rounds, tokens = rounds + eagle.stats.rounds, tokens + eagle.stats.new_tokens
        found = {"temperature": temperature, "shape": shape, "texts": len(prompts), "same": same}
        record.append(found | {"tokens_per_round": tokens / rounds})
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", metavar="KIND=FILE", help="as `eagle31 bench` takes them")
    parser.add_argument("--target", default=str(target_path()), help="folder or Hub id; default: the embedded pair")
    parser.add_argument("--drafter", default=str(drafter_path()))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype)
    eagle = Eagle31Drafter.from_pretrained(options.drafter, target=target)
    eagle.generation_config.acceleration, eagle.generation_config.num_assistant_tokens_schedule = "eager", "constant"
    by_kind: dict[str, list] = {}
    for prompt in read_prompts(options.prompts, options.limit):
        chat = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        by_kind.setdefault(prompt.suite, []).append(tokenizer.apply_chat_template(prompt.opening, **chat))
    record = []
    for kind, prompts in by_kind.items():
        for temperature in options.temperatures:
            for row in study(eagle, prompts, temperature, options.new_tokens):
                record.append({"kind": kind, **row})
                print(json.dumps(record[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"kinds": record}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
