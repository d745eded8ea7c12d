"""Is sampled text plain `generate`'s, and how few passes does it take? Counted; nothing is timed.

    python examples/studies/same_draw.py --dtype fp32 --prompts sgd=chats.jsonl gsm8k=questions.jsonl \\
        --temperatures 0.7 1 --limit 12 --new-tokens 48 --json docs/records/same-draw.json

Each prompt is written by plain `generate` and with the drafter after the same `torch.manual_seed`, eagerly, by chains
and by trees of a fixed size. A text is the same if every token is, and if the generator is left where plain leaves it.
"""

from __future__ import annotations

from typing import Any

import torch
from adaptive_drafts_pay import parser_of, prompts_and_pair, write_record

from eagle31_hf.cli.pairs import LoadedPair, encode
from eagle31_hf.texts.prompts import Prompt

SHAPES: dict[str, dict[str, Any]] = {
    "chain of 5": {"num_assistant_tokens": 5, "draft_top_k": 1, "draft_tree_size": None},
    "chain of 3": {"num_assistant_tokens": 3, "draft_top_k": 1, "draft_tree_size": None},
    "tree of 16 nodes": {"num_assistant_tokens": 5, "draft_top_k": 3, "draft_tree_size": 16},
}


def written(pair: LoadedPair, prompt: Prompt, seed: int, **how: Any) -> tuple[list[int], list[int]]:
    """Tokens, and the generator's state behind them."""
    torch.manual_seed(seed)
    out = pair.target.generate(**encode(pair, prompt.opening), **how)
    return out[0].tolist(), torch.get_rng_state().tolist()


def study(pair: LoadedPair, prompts: list[Prompt], temperature: float, new_tokens: int) -> list[dict[str, Any]]:
    """A record for each kind of text and shape."""
    how: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": new_tokens}
    how |= {"temperature": temperature, "top_k": 0} if temperature else {}
    record = []
    for kind in dict.fromkeys(prompt.suite for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.suite == kind]
        plain = [written(pair, prompt, seed, **how) for seed, prompt in enumerate(own)]
        for shape, fields in SHAPES.items():
            for name, value in fields.items():
                setattr(pair.drafter.generation_config, name, value)
            same = rounds = tokens = 0
            for seed, prompt in enumerate(own):
                same += written(pair, prompt, seed, **how, assistant_model=pair.drafter) == plain[seed]
                stats = pair.drafter.stats
                assert stats is not None
                rounds, tokens = rounds + stats.rounds, tokens + stats.new_tokens
            found = {"kind": kind, "temperature": temperature, "shape": shape, "texts": len(own), "same": same}
            record.append(found | {"tokens_per_round": tokens / rounds})
            print(f"{kind}, temperature {temperature:g}, {shape}: {same} of {len(own)} the same, {tokens / rounds:.2f}")
    return record


def main() -> None:
    parser = parser_of(__doc__, limit=12)
    given = parser.parse_args()
    prompts, pair = prompts_and_pair(parser, given)
    settings = pair.drafter.generation_config
    settings.acceleration, settings.num_assistant_tokens_schedule = "eager", "constant"
    record = [each for t in given.temperatures for each in study(pair, prompts, t, given.new_tokens)]
    write_record(given, pair, prompts, record)


if __name__ == "__main__":
    main()
