"""Write the texts that `policy_replay.py` counts on, and what the default makes of them: its kept file.

    python examples/studies/policy_texts.py --prompts domain=chats.jsonl other=questions.jsonl code=code.jsonl \\
        --copy copy=chats.jsonl

The target answers 14 prompts of each kind, greedily and at temperature 1. What drafts behind each token come to follows
from passes of the drafter, by the noise that the text was sampled by, and of a second drafter that was never trained.
Of a text only its repetitions are kept: its tokens are numbered in the order of their first appearance.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from policy_replay import KEPT, LONGEST, MACHINES, CountsByMachine, planned, read_kept
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path
from eagle31_hf.texts.prompts import read_prompts
from eagle31_hf.training.measure import EvaluationPrompt, chains_along, write_texts

SUREST_KEPT = 0.005
"""A chain's product of probabilities below which no more of them are kept: no default drafts on in such doubt."""


def untrained(drafter: Eagle31Drafter) -> Eagle31Drafter:
    """One of the same size that was never trained."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02)
    return drafter


def kept_texts(
    drafters: dict[str, Eagle31Drafter], openings: dict[str, list[list[int]]], new_tokens: int
) -> Iterator[dict[str, Any]]:
    """All texts as each drafter meets them, by the fields of `DraftTrace`."""
    for (kind, prompts), temperature in product(openings.items(), (0.0, 1.0)):
        asked = [EvaluationPrompt(ids, kind) for ids in prompts]
        texts = write_texts(drafters["trained"].binding, asked, temperature, max_new_tokens=new_tokens)
        for (name, drafter), known in product(drafters.items(), texts):
            chains = chains_along(drafter, known, LONGEST)
            made = {"kind": kind, "temperature": temperature, "drafter": name}
            yield made | as_row(known.text.ids.tolist(), known.text.prompt_length + 1, chains)


def as_row(ids: list[int], first: int, chains: Any) -> dict[str, Any]:
    """What is kept of a text's ids, `first` of them up to the first root, and its `KnownChains`."""
    numbers: dict[int, int] = {}
    ids = [numbers.setdefault(token, len(numbers)) for token in ids]
    sure = [_percents(draft) for draft in chains.sure.tolist()]
    return {"right": chains.kept.tolist(), "sure": sure, "prompt": ids[:first], "written": ids[first:]}


def _percents(draft: list[float]) -> list[int]:
    kept, product = [], 1.0
    for chance in draft:
        if product < SUREST_KEPT:
            break
        kept.append(round(100 * chance))
        product *= chance
    return kept


def opening_ids(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Prompts of each kind."""
    chats = [(prompt.suite, list(prompt.messages)) for prompt in read_prompts(options.prompts, options.limit)]
    for prompt in read_prompts(options.copy, options.limit):
        words = "\n".join(message["content"] for message in prompt.messages)
        request = f"Repeat the following word by word, twice:\n{words}"
        chats.append((prompt.suite, [{"role": "user", "content": request}]))
    found: dict[str, list[list[int]]] = defaultdict(list)
    for kind, chat in chats:
        found[kind].append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    return found


def write_file(path: Path, rows: list[dict[str, Any]], counts: CountsByMachine) -> None:
    """A text a line."""
    texts = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    by_default = json.dumps({"default": counts}, separators=(",", ":"))
    path.write_bytes(gzip.compress(f'{{"texts":[\n{texts}\n],\n"counts":{by_default}}}\n'.encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="*", default=[], metavar="KIND=FILE")
    parser.add_argument("--copy", nargs="*", default=[], metavar="KIND=FILE", help="to be repeated word by word")
    parser.add_argument("--limit", type=int, default=14, help="prompts of each kind")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=KEPT)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32)
    target.generation_config.eos_token_id = None  # texts are equally long
    drafters = {
        "trained": Eagle31Drafter.from_pretrained(drafter_path(), target=target).eval(),
        "untrained": untrained(Eagle31Drafter.from_pretrained(drafter_path(), target=target)).eval(),
    }
    rows = list(kept_texts(drafters, opening_ids(tokenizer, options), options.new_tokens))
    write_file(options.out, rows, {})
    stored, _ = read_kept(options.out)  # as they will be replayed
    write_file(options.out, rows, {name: planned(stored, machine) for name, machine in MACHINES.items()})


if __name__ == "__main__":
    main()
