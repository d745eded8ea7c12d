"""The command lines that serve a saved drafter in other engines."""

from __future__ import annotations

import json
import shlex

DRAFT_TOKENS = 3  # what both projects' own examples draft for several users at once


def vllm_command(target: str, drafter: str, draft_tokens: int = DRAFT_TOKENS) -> str:
    """`vllm serve` with a drafter. This line has been run (docs/engines.md).

    Args:
        target, drafter: folders or Hub ids. draft_tokens: tokens drafted in a round.
    """
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": draft_tokens}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def sglang_command(target: str, drafter: str, draft_tokens: int = DRAFT_TOKENS) -> str:
    """SGLang's server with a drafter, a chain of `draft_tokens`. As its documentation says; it has not been run."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-steps {draft_tokens} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {draft_tokens + 1}"
    )
