"""Can this target verify drafts? Asked once, when a drafter is attached, by trying it.

One four-node tree is verified in one forward and compared with plain forwards along its two paths. The answer decides
between our loop and plain decoding, so it is measured and not looked up in a list of model families.

Where layers keep states, two rows of unlike length read a prompt in two chunks (some layers begin anew in a second one:
Mamba 1), verify two chains and a single token, and keep unlike parts of them. After that not only the logits must be
those of plain decoding, a prompt at once and a token at a time over a stock cache, but the states, too: a layer that
forgets fast would hide a state that was left behind.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import DynamicCache

from ..cache.speculative import SpeculativeCache
from ..cache.states import StateKey
from ..cache.stock import read_stock_layers
from ..drafting.draft_tree import DraftTree, ancestors_from_parents
from ..errors import Eagle31Error, named_line
from .binding import TargetBinding, Verification
from .quantized import holds_packed_weights
from .rotation import rotations_left_alone
from .taps import UnreadableStatesError

LONGEST_PROBE = 128
"""A sliding window is worth crossing in the probe only if it is shorter than this."""

FAILURES = (
    KeyError, TypeError, ValueError, RuntimeError, IndexError, AttributeError, AssertionError, Eagle31Error,
)  # fmt: skip
"""What targets raise that cannot do what is tried."""


@torch.no_grad()
def probe_tree_verification(binding: TargetBinding) -> None:
    """Set `binding.masks_by_type` and `binding.tree_unsupported_reason` (empty if trees are verified right).

    Raises:
        IncompatibleTargetError: there are no states between its layers that a drafter could read.
    """
    why = _seen_without_a_forward(binding)
    if not why:
        alone = rotations_left_alone(binding.decoder)
        reading = binding.capturing() if binding.aux_layers else nullcontext()  # as rounds read states for a drafter
        with alone, reading, binding.masked_attention(), binding.one_token_arithmetic.active():
            for masks_by_type in (None, True, False):
                binding.masks_by_type = masks_by_type
                wrong = _why_wrong(binding)
                if not wrong:
                    return
                why = why or wrong
    binding.tree_unsupported_reason = f"the target failed the tree self-test ({why})"


def _why_wrong(binding: TargetBinding) -> str:
    """What is wrong with drafts by the masks that are tried: they fail, or give other logits; empty if nothing is."""
    try:
        error = _state_error(binding) if binding.has_states else _tree_error(binding)
    except KeyError as failure:
        kinds = sorted(set(getattr(binding.text_config, "layer_types", None) or ()))
        return f"its forward looks for {failure}, which we do not hand on; its config names layers of types {kinds}"
    except UnreadableStatesError:
        raise
    except FAILURES as failure:
        return named_line(failure)
    return "" if error <= tolerance(binding) else f"logits differ by {error:.2g} of their range"


def _seen_without_a_forward(binding: TargetBinding) -> str:
    """What a target lacks, in words; empty if that is not seen.

    Without positions it counts tokens where they lie, pads too. Windows under names that the cache does not know the
    model's own code masks by, counting keys where they lie and not at their positions (GPT-Neo): in a batch,
    or where a tree branches, it sees too little, and only in texts that are longer than any that is tried here.
    """
    takes_positions = "position_ids" in inspect.signature(binding.model.forward).parameters
    if not (takes_positions or binding.has_states):  # states are never shown a pad
        return "its forward takes no position_ids"
    longest = getattr(binding.text_config, "max_position_embeddings", None) or math.inf
    for name, value in vars(binding.text_config).items():
        is_window = "window" in name and name != "sliding_window" and not name.endswith(("pattern", "layers"))
        if is_window and type(value) is int and 0 < value < longest:
            return f"its layers have a window of {value} tokens, {name}, which our cache does not keep"
    return ""


def _tree_error(binding: TargetBinding) -> float:
    """Largest difference between tree and path logits, as a share of the logits' range, of two rows that are alike."""
    rows = 2  # some models want a mask for each
    window = getattr(binding.text_config, "sliding_window", None)
    length = min(window + 3, LONGEST_PROBE) if window else 6  # more than a window's if that is short
    tokens = probe_tokens(binding, length + 4)
    prefix, nodes = tokens[:, :length], tokens[:, length:]  # (1, length), (1, 4): root, its children a and b, c below a
    cache = probe_cache(binding, rows=rows, length=length)
    read_prompts(binding, cache, prefix.expand(rows, -1), None)
    found = Verification(binding, cache)(probe_tree(nodes.expand(rows, -1))).logits.float()  # (rows, 4, V)

    long_path = _plain_logits(binding, torch.cat((prefix, nodes[:, [0, 1, 3]]), 1))[-3:]
    short_path = _plain_logits(binding, torch.cat((prefix, nodes[:, [0, 2]]), 1))[-1:]
    wanted = torch.cat((long_path[:2], short_path, long_path[2:]))  # (4, V) in node order
    return logits_error(found, wanted)


def probe_tree(nodes: Tensor) -> DraftTree:
    """A root, its children 1 and 2, and a node below 1. `nodes`: `(B, 4)`."""
    parents = torch.tensor([(0, 0, 0, 1)] * len(nodes), device=nodes.device)
    ancestors = ancestors_from_parents(parents, max_depth=2)
    return DraftTree(nodes, parents, ancestors.sum(2) - 1, ancestors, max_depth=2, is_chain=False)


def _plain_logits(binding: TargetBinding, tokens: Tensor) -> Tensor:
    return binding.model(input_ids=tokens, use_cache=False).logits[0].float()


PREFIX, SHORTER = 9, 5  # tokens of the two prompts: more than convolutions look back
CHUNK = 6  # of the first chunk, in which one of them ends
KEPT = ((3, 2), (1, 0))  # of two chains, by each row
TINY = torch.finfo(torch.float32).tiny
ALL_STATES = Mapping[int, Mapping[StateKey, Tensor]]


def _state_error(binding: TargetBinding) -> float:
    """Largest difference between our rounds and plain decoding, as a share of the range of what is compared."""
    ids = probe_tokens(binding, PREFIX + 7)[0]
    prompts = [ids[:PREFIX], ids[1 : SHORTER + 1]]
    chains, last = (ids[PREFIX : PREFIX + 4], ids[PREFIX + 4 : PREFIX + 6]), ids[PREFIX + 6 : PREFIX + 7]
    plain = []
    for prompt, counts in zip(prompts, zip(*KEPT, strict=True), strict=True):
        text = [chain[:count] for chain, count in zip(chains, counts, strict=True)]
        plain.append(_plain_text(binding, prompt, torch.cat([*text, last])))
    cache = probe_cache(binding, rows=len(prompts), length=PREFIX)
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    read_prompts(binding, cache, padded[:, :CHUNK], [CHUNK, SHORTER])
    read_prompts(binding, cache, padded[:, CHUNK:], [PREFIX - CHUNK, 0])
    verify, errors, ends = Verification(binding, cache), list[float](), [0, 0]
    for chain, counts in zip(chains, KEPT, strict=True):
        found = verify(DraftTree.chain(chain.expand(2, -1))).logits
        cache.commit(counts)
        for row, count in enumerate(counts):
            logits, states = plain[row]
            if count:
                errors.append(logits_error(found[row, :count], logits[ends[row] : ends[row] + count]))
            ends[row] += count
            errors.append(_states_error(cache, row, states[ends[row]]))
    found = verify(DraftTree.chain(last.expand(2, -1))).logits
    return max(*errors, *(logits_error(found[row], logits[-1:]) for row, (logits, _) in enumerate(plain)))


def _plain_text(binding: TargetBinding, prompt: Tensor, tokens: Tensor) -> tuple[Tensor, list[ALL_STATES]]:
    """A text as plain decoding reads it, the prompt `(n,)` at once, then `tokens` `(m,)` one by one: logits `(m, V)`
    after each of these, and all states after so many of them."""
    cache, end = DynamicCache(config=binding.text_config), 0
    logits, states = list[Tensor](), list[ALL_STATES]()
    for step in (prompt, *tokens.split(1)):
        positions = torch.arange(end, end + len(step), device=step.device)[None]
        end += len(step)
        arguments = {"input_ids": step[None], "position_ids": positions, binding.cache_argument: cache}
        logits.append(binding.model(**arguments, use_cache=True, return_dict=True).logits[0, -1:])
        held = read_stock_layers(cache, 1)
        states.append({i: {k: s.clone() for k, s in layer.states.items()} for i, layer in held.items()})
    return torch.cat(logits[1:]), states


def _states_error(cache: SpeculativeCache, row: int, wanted: ALL_STATES) -> float:
    found = {layer.index: layer.held_states(row) for layer in cache.with_states}
    pairs = [(found[index][key], state) for index, states in wanted.items() for key, state in states.items()]
    errors = [(ours.float() - state.float()).abs().max() / state.abs().max().clamp(min=TINY) for ours, state in pairs]
    return max(error.item() for error in errors)


def tolerance(binding: TargetBinding) -> float:
    """A wrong mask changes logits by tenths of their range; rounding by far less, that of packed weights too."""
    exact = binding.compute_dtype in (torch.float32, torch.float64) and not holds_packed_weights(binding.model)
    return 1e-3 if exact else 5e-2


# --- what is read for it ----------------------------------------------------------------------------------------------


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
