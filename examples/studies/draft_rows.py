"""How much of a text a part of a vocabulary can draft: the first ids, or those counted on the same or on other texts.

Run: python draft_rows.py TOKENIZER... --texts FILE... [--json PATH]. Files are conversations (JSONL); every other one
of the answers in a file is counted on, and coverage is that of the rest.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from transformers import AutoTokenizer

from eagle31_hf.texts.conversations import read_conversations

SHARES = (8, 4, 2)


def answers(path: str) -> list[str]:
    """What the assistant says in a file of conversations."""
    chats = read_conversations([path])
    return [m["content"] or "" for chat in chats for m in chat.messages if m["role"] in ("assistant", "text")]


def best(counts: Counter[int], size: int, special: set[int]) -> set[int]:
    """The `size` most frequent ids, filled up in the order of ids."""
    chosen = special | {token for token, _ in counts.most_common(size - len(special))}
    token = 0
    while len(chosen) < size:
        chosen.add(token)
        token += 1
    return chosen


def coverage(tokens: list[int], rows: set[int]) -> float:
    """Share of tokens that can be drafted."""
    return sum(token in rows for token in tokens) / len(tokens)


def study(name: str, files: list[str]) -> list[dict[str, object]]:
    """Coverage of each file's held-out answers, by share of the vocabulary and by how its rows were chosen."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    vocabulary = len(tokenizer)
    special = set(tokenizer.added_tokens_decoder)
    ids = {file: [tokenizer(text, add_special_tokens=False)["input_ids"] for text in answers(file)] for file in files}
    counted = {file: Counter(t for text in texts[::2] for t in text) for file, texts in ids.items()}
    rows = []
    for file, texts in ids.items():
        held_out = [token for text in texts[1::2] for token in text]
        others = Counter[int]()
        for other, counts in counted.items():
            others.update(counts if other != file else {})
        for share in SHARES:
            size = vocabulary // share
            found = {"first ids": set(range(size)), "first ids and special": special | set(range(size - len(special)))}
            found |= {"counted on these": best(counted[file], size, special)}
            found |= {"counted on others": best(others, size, special)} if others else {}
            row = {"tokenizer": name, "vocabulary": vocabulary, "texts": Path(file).stem, "rows": size, "share": share}
            rows.append(row | {how: round(coverage(held_out, chosen), 4) for how, chosen in found.items()})
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizers", nargs="+")
    parser.add_argument("--texts", nargs="+", required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for name in options.tokenizers for row in study(name, options.texts)]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
