"""Sizes and prompts that are benchmarked in no time."""

import torch

from eagle31_hf.trees.shape import DraftShape

SPEC = "hidden=32,layers=4,heads=2,kv=1,intermediate=48,vocab=96"
CHAIN, TREE = DraftShape(4), DraftShape(4, top_k=3, size=14)


def tensors(prompts):
    return [torch.tensor(prompt) for prompt in prompts]
