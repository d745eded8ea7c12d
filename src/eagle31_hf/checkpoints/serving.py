"""The command lines that serve a saved drafter in other engines."""

from __future__ import annotations

import json
import shlex

DRAFT_TOKENS = 3  # what both projects' own examples draft for several users at once


def vllm_command(target: str, drafter: str) -> str:
    """`vllm serve` with a drafter; both are folders or Hub ids. This line has been run (docs/engines.md)."""
    speculative = {"method": "eagle3", "model": drafter, "num_speculative_tokens": DRAFT_TOKENS}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(speculative))}"


def sglang_command(target: str, drafter: str) -> str:
    """SGLang's server with a drafter that drafts chains. As its documentation says; it has not been run."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-steps {DRAFT_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_TOKENS + 1}"
    )
