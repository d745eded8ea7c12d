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
from pathlib import Path
from typing import Any

import torch
from policy_replay import (
    KEPT,
    LONGEST,
    Counts,
    DraftTrace,
    KeptText,
    counts_as_rows,
    default_counts,
    read_kept,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path
from eagle31_hf.texts.prompts import Prompt, read_prompts
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
) -> list[KeptText]:
    """All texts as each drafter meets them."""
    found = []
    binding = drafters["trained"].binding
    for kind, prompts in openings.items():
        for temperature in (0.0, 1.0):
            asked = [EvaluationPrompt(ids, kind) for ids in prompts]
            texts = write_texts(binding, asked, temperature, max_new_tokens=new_tokens)
            for name, drafter in drafters.items():
                traces = [DraftTrace.of(known, chains_along(drafter, known, texts, LONGEST)) for known in texts.texts]
                found += [KeptText(kind, temperature, name, trace) for trace in traces]
    return found


def as_row(text: KeptText) -> dict[str, Any]:
    """JSON-ready."""
    trace = text.trace
    numbers: dict[int, int] = {}
    ids = [numbers.setdefault(token, len(numbers)) for token in (*trace.prompt, *trace.written)]
    return {
        "kind": text.kind,
        "temperature": text.temperature,
        "drafter": text.drafter,
        "right": trace.right,
        "sure": [_percents(draft) for draft in trace.sure],
        "prompt": ids[: len(trace.prompt)],
        "written": ids[len(trace.prompt) :],
    }


def _percents(draft: tuple[float, ...]) -> list[int]:
    kept, product = [], 1.0
    for chance in draft:
        if product < SUREST_KEPT:
            break
        kept.append(round(100 * chance))
        product *= chance
    return kept


def copying(prompt: Prompt) -> list[dict[str, str]]:
    """A chat that asks for a prompt's own words again."""
    words = "\n".join(message["content"] for message in prompt.messages)
    return [{"role": "user", "content": f"Repeat the following word by word, twice:\n{words}"}]


def opening_ids(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Prompts of each kind."""
    chats = [(prompt.suite, prompt.opening) for prompt in read_prompts(options.prompts, options.limit)]
    chats += [(prompt.suite, copying(prompt)) for prompt in read_prompts(options.copy, options.limit)]
    found: dict[str, list[list[int]]] = {}
    for kind, chat in chats:
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        found.setdefault(kind, []).append(ids)
    return found


def write_file(path: Path, rows: list[dict[str, Any]], counts: dict[str, dict[str, list[Counts]]]) -> None:
    """A text a line."""
    texts = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    by_way = json.dumps(counts_as_rows(counts), separators=(",", ":"))
    path.write_bytes(gzip.compress(f'{{"texts":[\n{texts}\n],\n"counts":{by_way}}}\n'.encode(), mtime=0))


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
    texts = kept_texts(drafters, opening_ids(tokenizer, options), options.new_tokens)
    rows = [as_row(text) for text in texts]
    write_file(options.out, rows, {})
    stored = read_kept(options.out).texts  # as they will be replayed
    write_file(options.out, rows, {"default": default_counts(stored)})


if __name__ == "__main__":
    main()
