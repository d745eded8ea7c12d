"""Does a drafter help where a grammar decides what may be written? JSON by xgrammar, with and without, in turns.

    python examples/studies/json_under_grammar.py --repeats 5 --json docs/records/json-grammar.json

Three ways take turns on every prompt: plain decoding, drafts that know nothing of the grammar (the processor is
wrapped, so that nobody can copy it), and drafts drawn inside the grammar. Texts are compared. Needs xgrammar.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.measure.provenance import origin

WORDS = {"type": "string", "pattern": "^[A-Za-z0-9 ]{1,24}$"}
SCHEMAS = {
    "fixed keys": {
        "type": "object",
        "properties": {name: WORDS for name in ("restaurant_name", "city", "date", "time", "number_of_people")},
        "required": ["restaurant_name", "city", "date", "time", "number_of_people"],
        "additionalProperties": False,
    },
    "free text": {
        "type": "object",
        "properties": {"answer": {"type": "string", "maxLength": 160}},
        "required": ["answer"],
        "additionalProperties": False,
    },
}
WAYS = ("plain", "outside", "inside")


class Opaque(LogitsProcessor):
    """A processor that cannot be copied."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, input_ids, scores):
        return self.inner(input_ids, scores)


def write(pair, inputs, grammar, way, new_tokens):
    """A text, its seconds, and what became of the drafts."""
    target, eagle = pair
    processor = xgrammar.contrib.hf.LogitsProcessor(grammar)
    started = time.perf_counter()
    text = target.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=new_tokens,
        logits_processor=[Opaque(processor) if way == "outside" else processor],
        assistant_model=None if way == "plain" else eagle,
    )
    return text, time.perf_counter() - started, None if way == "plain" else eagle.stats


def measure(pair, prompts, grammar, repeats, new_tokens):
    """Of every way: tokens per second of each repeat and acceptance length; and how many texts are plain's."""
    speeds, rounds = {way: [] for way in WAYS}, {way: [0, 0] for way in WAYS}
    equal = total = tokens = 0
    for repeat in range(-1, repeats):  # the first one warms up
        seconds, tokens = dict.fromkeys(WAYS, 0.0), 0
        for inputs in prompts:
            texts = {}
            for way in WAYS if repeat % 2 else reversed(WAYS):
                texts[way], took, stats = write(pair, inputs, grammar, way, new_tokens)
                seconds[way] += took
                if stats is not None:
                    rounds[way][0] += stats.rounds
                    rounds[way][1] += stats.accepted
            equal += sum(torch.equal(texts[way], texts["plain"]) for way in WAYS[1:])
            total += len(WAYS) - 1
            tokens += texts["plain"].shape[1] - inputs["input_ids"].shape[1]
        if repeat >= 0:
            for way in WAYS:
                speeds[way].append(tokens / seconds[way])
    ratios = {way: [ours / plain for ours, plain in zip(speeds[way], speeds["plain"], strict=True)] for way in WAYS}
    return {
        "texts_equal": equal,
        "texts": total,
        "tokens": tokens,
        "ways": [
            {
                "way": way,
                "tokens_per_s": median(speeds[way]),
                "speedup": {"median": median(ratios[way]), "min": min(ratios[way]), "max": max(ratios[way])},
                "acceptance_length": 1.0 + rounds[way][1] / rounds[way][0] if rounds[way][0] else 1.0,
            }
            for way in WAYS
        ],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype=arguments.dtype)
    eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)
    prompts = [
        tokenizer.apply_chat_template(list(chat), add_generation_prompt=True, return_tensors="pt", return_dict=True)
        for chat in CONVERSATIONS
    ]
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    compiler, record = xgrammar.GrammarCompiler(info), {**origin(), "dtype": arguments.dtype, "schemas": []}
    for name, schema in SCHEMAS.items():
        grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        measured = measure((target, eagle), prompts, grammar, arguments.repeats, arguments.new_tokens)
        record["schemas"].append({"schema": name, **measured})
        print(f"{name}: {measured['texts_equal']} of {measured['texts']} texts are plain's")
        for way in measured["ways"]:
            speedup = way["speedup"]
            print(
                f"  {way['way']:8} {way['tokens_per_s']:6.1f} tokens/s, {speedup['median']:.2f}x "
                f"({speedup['min']:.2f} to {speedup['max']:.2f}), acceptance length {way['acceptance_length']:.2f}"
            )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
