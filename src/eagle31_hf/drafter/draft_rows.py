"""Which rows of its target's LM head a head inside the target drafts from.

Beside a target that is packed in 4 bits, the LM head over a vocabulary of 150,000 tokens and more costs several times
what the head's own layer does, once for every drafted token. A tokenizer whose ids were given in the order of its
merges has frequent tokens first, so the first rows of the LM head are most of what is ever drafted, and they are there
already: nothing is copied. A token behind them is never drafted and costs a rejection; the text stays the target's.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..checkpoints import Checkpoint
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

SHARE_OF_ROWS = 4
"""Of a vocabulary that costs more than the rest of a draft step, one row in so many is kept."""
ROW_BLOCK = 64
"""Rows are a multiple of this, as matrix products like them."""
SMALLEST_CUT = 65_536
"""Tokens of a vocabulary that is cut unasked. A quarter of a smaller one leaves out more than it saves."""
LEAST_ASCENDING = 0.99
"""Of a tokenizer's merges, the share whose tokens must have ascending ids."""


def follows_merges(tokenizer_file: Path) -> bool:
    """Whether ids of a byte-level BPE tokenizer ascend in the order of its merges; false where there is no such file.

    Unigram tokenizers, and vocabularies to which blocks of words were added later, do not follow any order of use.
    """
    try:
        model = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]
        vocabulary, merges = model["vocab"], model["merges"]
        if model["type"] != "BPE" or not isinstance(vocabulary, dict):
            return False
        ids = _merged_ids(vocabulary, merges)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    ascending = sum(before < after for before, after in itertools.pairwise(ids))
    return len(ids) > 1 and ascending >= LEAST_ASCENDING * (len(ids) - 1) and len(ids) > len(vocabulary) // 2


def _merged_ids(vocabulary: Mapping[str, int], merges: Sequence[Any]) -> list[int]:
    """The ids of what merges make, in their order; a merge is `"a b"` or `["a", "b"]`."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    words = ("".join(pair) for pair in pairs)
    return [vocabulary[word] for word in words if word in vocabulary]


def with_draft_rows(checkpoint: Checkpoint, size: int | None = None) -> Checkpoint:
    """The head with the first `size` rows of its target's LM head to draft from.

    Args:
        checkpoint: an MTP head, of `read_checkpoint`.
        size: default: a quarter of the vocabulary, where the LM head has more bytes than the head itself, the
            vocabulary is large and its ids follow merges; else all.

    Raises:
        ConfigurationError: `size` is not between 1 and the vocabulary, or the rows were chosen when it was saved.
    """
    config = checkpoint.config
    vocabulary = cast(int, config.vocab_size)
    if size is not None and not 1 <= size <= vocabulary:
        raise ConfigurationError(f"draft_vocab_size is {size}; wanted 1 to {vocabulary}, the target's vocabulary")
    if "d2t" in checkpoint.tensors:
        if size in (None, config.draft_vocab_size):
            return checkpoint
        raise ConfigurationError(
            f"draft_vocab_size is {size}, but this head was saved with {config.draft_vocab_size} draft rows; leave it "
            "out, or take the head from its target"
        )
    if size is None:
        tokenizer_file = checkpoint.metadata.get("tokenizer_file")
        if not _costs_most(checkpoint) or tokenizer_file is None or not follows_merges(Path(tokenizer_file)):
            return checkpoint
        size = min(vocabulary, ROW_BLOCK * math.ceil(vocabulary / SHARE_OF_ROWS / ROW_BLOCK))
    if size == vocabulary:
        return checkpoint
    return with_rows(checkpoint, torch.arange(size))


def with_rows(checkpoint: Checkpoint, ids: Tensor) -> Checkpoint:
    """The head drafting from these target ids alone, `(Vd,)`, ascending."""
    config = type(checkpoint.config).from_dict(checkpoint.config.to_dict() | {"draft_vocab_size": len(ids)})
    return replace(checkpoint, config=config, tensors={**checkpoint.tensors, "d2t": ids - torch.arange(len(ids))})


def _costs_most(checkpoint: Checkpoint) -> bool:
    """Whether the target's LM head has more bytes than a draft step's other weights."""
    config = checkpoint.config
    vocabulary, width = cast(int, config.vocab_size), config.hidden_size
    own = sum(tensor.numel() for name, tensor in checkpoint.tensors.items() if not name.endswith("d2t"))
    return vocabulary >= SMALLEST_CUT and vocabulary * width > own
