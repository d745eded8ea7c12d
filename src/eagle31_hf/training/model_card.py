"""The card of a trained drafter: what it is, the evidence, and how to use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from .evaluation import AcceptanceCounts


@dataclass(frozen=True)
class Evidence:
    """One drafter's served acceptance by category."""

    name: str
    by_category: dict[str, AcceptanceCounts]


@dataclass(frozen=True)
class CardFacts:
    """What a card states beside the evidence.

    Attributes:
        repository: where the drafter will be found: Hub id, or the folder's name.
        target: the target's id.
        recipe: name and value of what the run was told.
        conditions: how acceptance was measured, in words.
    """

    repository: str
    target: str
    recipe: dict[str, str]
    conditions: str


def model_card(facts: CardFacts, evidence: Sequence[Evidence]) -> str:
    """Markdown with Hub metadata. The first row of each category is the target without a drafter: 1 token per pass."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("eagle31-hf", "torch", "transformers"))
    recipe = "\n".join(f"| {name} | {value} |" for name, value in facts.recipe.items())
    return f"""---
base_model: {facts.target}
library_name: transformers
tags: [eagle3, eagle31, speculative-decoding]
---

# EAGLE 3.1 drafter for {facts.target}

## Acceptance

{facts.conditions}

{_evidence_table(evidence)}

## Use

transformers, with eagle31-hf:

    model.generate(**inputs, assistant_model=Eagle31Drafter.from_pretrained("{facts.repository}", target=model))

vLLM:

    vllm serve {facts.target} --speculative-config '{{"method": "eagle3", "model": "{facts.repository}", \
"num_speculative_tokens": 3}}'

SGLang:

    python -m sglang.launch_server --model {facts.target} --speculative-algorithm EAGLE3 \
--speculative-draft-model-path {facts.repository} --speculative-num-steps 3 --speculative-eagle-topk 1 \
--speculative-num-draft-tokens 4

## Training

| setting | value |
|---|---|
{recipe}

{versions}
"""


def _evidence_table(evidence: Sequence[Evidence]) -> str:
    lines = ["| prompts | drafter | acceptance length | cumulative acceptance by position |", "|---|---|---|---|"]
    for category in dict.fromkeys(name for entry in evidence for name in entry.by_category):
        lines.append(f"| {category} | none | 1.000 | |")
        for entry in evidence:
            if category in entry.by_category:
                counts = entry.by_category[category]
                positions = " ".join(f"{value:.2f}" for value in counts.cumulative_acceptance)
                lines.append(f"| {category} | {entry.name} | {counts.acceptance_length:.3f} | {positions} |")
    return "\n".join(lines)
