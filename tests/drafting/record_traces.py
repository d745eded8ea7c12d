"""Record what the embedded drafter would draft at each token of texts of four kinds, for `recorded_traces.json`.

    python tests/drafting/record_traces.py

The target writes greedily, one token a round; before each the drafter drafts a whole chain, which is compared with
what is written then and thrown away. How sure the drafter was is kept in percent: its product says where doubt would
have ended the chain.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch
from draft_traces import LONGEST
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path
from eagle31_hf.drafter import propose
from eagle31_hf.drafting.draft_tree import DraftTree
from eagle31_hf.drafting.plan import DraftPlan
from eagle31_hf.drafting.shape import DraftShape
from eagle31_hf.generate.warm_up import InTurn
from eagle31_hf.loop import decoder, drafting
from eagle31_hf.loop.choosing import RoundBatch
from eagle31_hf.loop.round import Round

WHERE = Path(__file__).with_name("recorded_traces.json")
TOKENS = 300  # of each kind

SENTENCES = (
    "The committee met on Tuesday at 9 am in room 14. Mr Hansen reported that 37 of 52 members had paid their dues. "
    "The new roof of the library costs 8,450 dollars and is to be finished on the 3rd of May."
)
CODE = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return "
KINDS = {
    "in domain": [list(chat) for chat in CONVERSATIONS],
    "out of domain": [
        [{"role": "user", "content": text}]
        for text in (
            "Explain in four paragraphs why the sky is blue during the day and red in the evening.",
            "Write a letter of a lighthouse keeper to his sister about a storm in winter.",
            "Describe how a bill becomes a law, and what a veto is.",
        )
    ],
    "copy-heavy": [[{"role": "user", "content": f"Repeat this text word by word: {SENTENCES}"}]] * 2,
    "code": [[{"role": "user", "content": f"Continue this Python module:\n{CODE}"}]] * 2,
}


class Recorder(Round):
    """Notes every draft and how sure it was, and lets the target write without it."""

    def __init__(self, *made_of):
        super().__init__(*made_of)
        self.drafts: list[list[int]] = []
        self.sure: list[list[int]] = []

    def draft(self, batch: RoundBatch) -> DraftTree:
        certainties: list[float] = []
        most_probable = propose.most_probable

        def noting(scores):
            largest, best = most_probable(scores)
            certainties.append(float(largest[0]))
            return largest, best

        with mock.patch.object(propose, "most_probable", noting):
            tree = super().draft(batch)
        self.drafts.append(tree.tokens[0, 1:].tolist())
        self.sure.append([round(100 * chance) for chance in certainties])
        if self.caches.drafter is not None:
            self.caches.drafter.forget_draft()
        return DraftTree.chain(batch.roots[:, None])


def record(target, eagle, inputs) -> dict[str, list]:
    """`right[t]`, `sure[t]` of a draft that begins behind token `t` of the answer."""
    recorders: list[Recorder] = []

    def recording(*made_of):
        recorders.append(Recorder(*made_of))
        return recorders[-1]

    plan = DraftPlan(DraftShape(depth=LONGEST, min_confidence=1e-12))
    with (
        mock.patch.object(decoder, "Round", recording),
        mock.patch.object(drafting, "planner_of", return_value=InTurn(plan)),
    ):
        out = target.generate(
            **inputs, max_new_tokens=160, eos_token_id=None, pad_token_id=0, do_sample=False, assistant_model=eagle
        )
    text = out[0, inputs["input_ids"].shape[1] :].tolist()
    right, sure = [], []
    for at, (draft, certainty) in enumerate(zip(recorders[0].drafts, recorders[0].sure, strict=True), 1):
        hits = [guess == token for guess, token in zip(draft, text[at:], strict=False)]
        if len(hits) == LONGEST:
            right.append(next((place for place, hit in enumerate(hits) if not hit), LONGEST))
            sure.append(certainty)
    return {"right": right, "sure": sure}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype=torch.float32)
    eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)
    recorded = {}
    for kind, chats in KINDS.items():
        right: list[int] = []
        sure: list[list[int]] = []
        for chat in chats:
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            answer = record(target, eagle, inputs)
            right, sure = right + answer["right"], sure + answer["sure"]
        recorded[kind] = {"right": right[:TOKENS], "sure": sure[:TOKENS]}
        print(kind, len(right), f"{sum(right) / max(len(right), 1):.2f} right on average")
    WHERE.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
