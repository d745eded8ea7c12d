"""Can drafts be taken back on a target whose layers keep states? Asked by trying, in the place of the tree self-test.

Two rows of unlike length read a prompt in two chunks (some layers begin anew in a second one: Mamba 1), verify two
chains and a single token, and keep unlike parts of them. After that not only the logits must be those of plain
decoding, a prompt at once and a token at a time over a stock cache, but the states, too: a layer that forgets fast
would hide a state that was left behind.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import DynamicCache

from ..cache.speculative import SpeculativeCache
from ..cache.states import StateKey
from ..cache.stock import read_stock_layers
from ..drafting.draft_tree import DraftTree
from .binding import TargetBinding, Verification

PREFIX, SHORTER = 9, 5  # tokens of the two prompts: more than convolutions look back
CHUNK = 6  # of the first chunk, in which one of them ends
KEPT = ((3, 2), (1, 0))  # of two chains, by each row
TINY = torch.finfo(torch.float32).tiny
ALL_STATES = Mapping[int, Mapping[StateKey, Tensor]]


def state_error(binding: TargetBinding) -> float:
    """Largest difference between our rounds and plain decoding, as a share of the range of what is compared."""
    ids = probe_tokens(binding, PREFIX + 7)[0]
    prompts = [ids[:PREFIX], ids[1 : SHORTER + 1]]
    chains, last = (ids[PREFIX : PREFIX + 4], ids[PREFIX + 4 : PREFIX + 6]), ids[PREFIX + 6 : PREFIX + 7]
    plain = []
    for prompt, counts in zip(prompts, zip(*KEPT, strict=True), strict=True):
        text = [chain[:count] for chain, count in zip(chains, counts, strict=True)]
        plain.append(PlainText(binding, prompt, torch.cat([*text, last])))
    cache = probe_cache(binding, rows=len(prompts), length=PREFIX)
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    read_prompts(binding, cache, padded[:, :CHUNK], [CHUNK, SHORTER])
    read_prompts(binding, cache, padded[:, CHUNK:], [PREFIX - CHUNK, 0])
    verify, errors, ends = Verification(binding, cache), [0.0], [0, 0]
    for chain, counts in zip(chains, KEPT, strict=True):
        found = verify(DraftTree.chain(chain.expand(2, -1))).logits
        cache.commit(counts)
        for row, count in enumerate(counts):
            wanted = plain[row].logits[ends[row] : ends[row] + count]
            ends[row] += count
            errors += [logits_error(found[row, :count], wanted)] if count else []
            errors.append(_states_error(cache, row, plain[row].states[ends[row]]))
    found = verify(DraftTree.chain(last.expand(2, -1))).logits
    errors += [logits_error(found[row], text.logits[-1:]) for row, text in enumerate(plain)]
    return max(errors)


class PlainText:
    """A text as plain decoding reads it: the prompt `(n,)` at once, then `tokens` `(m,)` one by one.

    Attributes:
        logits: `(m, V)` after each of the tokens.
        states: all states after so many of the tokens.
    """

    def __init__(self, binding: TargetBinding, prompt: Tensor, tokens: Tensor):
        cache = DynamicCache(config=binding.text_config)
        steps = [prompt, *(token[None] for token in tokens)]
        logits, end = [], 0
        self.states: list[ALL_STATES] = []
        for step in steps:
            positions = torch.arange(end, end + len(step), device=step.device)[None]
            end += len(step)
            logits.append(binding.plain_forward(step[None], positions, cache).logits[0, -1:])
            held = read_stock_layers(cache, 1)
            self.states.append({i: {k: s.clone() for k, s in layer.states.items()} for i, layer in held.items()})
        self.logits = torch.cat(logits[1:])


def probe_tokens(binding: TargetBinding, count: int) -> Tensor:
    """Unlike ids `(1, n)` without touching a random generator."""
    vocabulary = binding.text_config.vocab_size
    ids = (torch.arange(1, count + 1, device=binding.input_device) * 7919) % vocabulary
    return ids[None]


def probe_cache(binding: TargetBinding, *, rows: int, length: int) -> SpeculativeCache:
    """For prompts of so many tokens and a few more."""
    return SpeculativeCache.from_config(
        binding.text_config, batch_size=rows, capacity=length + 8, block=max(length, 4), device=binding.input_device,
        masks_by_type=binding.masks_by_type,
    )  # fmt: skip


def read_prompts(binding: TargetBinding, cache: SpeculativeCache, tokens: Tensor, counts: list[int] | None) -> None:
    """Read and commit `tokens` `(B, n)`, of which each row has so many; default: all."""
    cache.place(tokens.shape[1], counts=counts)
    mask = cache.attention_mask(dtype=binding.compute_dtype, none_is_causal=binding.none_is_causal)
    last = torch.tensor([tokens.shape[1] - 1], device=tokens.device)
    binding.forward(tokens, cache.position_ids(), mask, cache, logits_to_keep=last)
    cache.commit(tokens.shape[1] if counts is None else counts)


def logits_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference between logits, as a share of the range of those that are wanted."""
    found, wanted = found.float(), wanted.float()
    return ((found - wanted).abs().max() / (wanted.max() - wanted.min())).item()


def _states_error(cache: SpeculativeCache, row: int, wanted: ALL_STATES) -> float:
    found = {layer.index: layer.held_states(row) for layer in cache.with_states}
    pairs = [(found[index][key], state) for index, states in wanted.items() for key, state in states.items()]
    errors = [(ours.float() - state.float()).abs().max() / state.abs().max().clamp(min=TINY) for ours, state in pairs]
    return max(error.item() for error in errors)
