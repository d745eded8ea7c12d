"""Do our rounds go on from a prompt that the model has read with pictures? Tried once for each pair and kind of input.

The model reads the prompt in its own first forward and then goes on twice: by its own way, a token at a time, as plain
`generate` does, and by ours, with a small tree over what the first forward left behind. A model that keeps something
beside keys, values and positions, or wants an input in every forward, is found out by the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..cache.stock import CACHE_ARGUMENT
from ..drafting.draft_tree import DraftTree
from ..errors import named_line
from ..loop.survive import is_out_of_memory
from ..targets.binding import TargetBinding, Verification
from ..targets.prompt_forward import PromptForward, PromptOutput
from ..targets.self_test import FAILURES, logits_error, probe_cache, probe_tokens, probe_tree, tolerance
from .call import Call, beside_tokens


def why_not_continued(call: Call) -> str | None:
    """Why our rounds cannot go on from what is beside a prompt's tokens, `None` if they can; the first call of a kind
    finds it out."""
    names, known = frozenset(beside_tokens(call)), call.drafter.binding.not_continued
    if names not in known:
        try:
            known[names] = _try(call, PromptForward(call.input_ids, call.padding, call.model_inputs))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return "memory ran out while it was tried whether our loop can go on from the prompt"
    return known[names] or None


@torch.no_grad()
def _try(call: Call, prompts: PromptForward) -> str:
    binding = call.drafter.binding
    with binding.masked_attention():
        read = prompts(binding)  # what it raises, plain generate does
        root = read.logits.argmax(-1)
        children = probe_tokens(binding, 3)[0].to(root.device)
        try:
            found = _our_way(binding, prompts, read, root, children)
            error = logits_error(found, _models_way(call, read, [root, children[:1].expand_as(root)]))
        except FAILURES as failure:
            if is_out_of_memory(failure):
                raise
            why = named_line(failure)
        else:
            if error <= tolerance(binding):
                return ""
            why = f"logits differ by {error:.2g} of their range"
    names = ", ".join(beside_tokens(call))
    return f"the model is given {names}, and our loop cannot go on from there ({why})"


def _our_way(
    binding: TargetBinding, prompts: PromptForward, read: PromptOutput, root: Tensor, children: Tensor
) -> Tensor:
    """Logits `(B, 2, V)` after each root `(B,)` and after the first of its `children` `(3,)`, of a tree of all, or a
    chain where layers keep states."""
    rows, length = prompts.input_ids.shape
    nodes = torch.cat((root[:, None], children.expand(rows, -1)), dim=1).to(binding.input_device)  # (B, 4)
    tree = DraftTree.chain(nodes) if binding.has_states else probe_tree(nodes)
    cache = probe_cache(binding, rows=rows, length=length)
    cache.load_dynamic(read.cache, prompts.padding)
    cache.offset_positions(read.offsets)
    return Verification(binding, cache)(tree).logits[:, :2]


def _models_way(call: Call, read: PromptOutput, tokens: list[Tensor]) -> Tensor:
    """Logits `(B, T, V)` after each of `tokens`, `(B,)` each, read one by one as plain `generate` does."""
    model, ids, cache = call.model, call.input_ids, read.cache
    held: dict[str, Any] = {CACHE_ARGUMENT: cache}
    inputs = {**call.model_inputs, **held}
    logits = []
    for token in tokens:
        ids = torch.cat((ids, token[:, None]), dim=1)
        inputs = model._update_model_kwargs_for_generation(CausalLMOutputWithPast(**held), inputs)
        prepared = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs)
        logits.append(model(**prepared, return_dict=True).logits[:, -1])
    return torch.stack(logits, dim=1)
