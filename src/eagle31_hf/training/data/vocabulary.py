"""The draft vocabulary: the target's most frequent tokens among those the drafter is trained to predict."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import ConfigurationError, TrainingError
from .rendering import Document

VOCABULARY_FILE = "draft_vocabulary.json"
"""In a run's folder."""


@dataclass(frozen=True)
class DraftVocabulary:
    """Which target ids can be drafted."""

    ids: Tensor  # `(Vd,)` int64 target ids, ascending; row `i` of the draft head stands for `ids[i]`
    vocab_size: int  # the target's `V`
    coverage: float | None = None  # share of the supervised tokens that can be drafted; `None` if they were not counted

    @property
    def d2t(self) -> Tensor:
        """`(Vd,)` int64 offsets as checkpoints store them: `target_id = i + d2t[i]`."""
        return self.ids - torch.arange(len(self.ids))

    def save(self, path: Path) -> None:
        """Write as JSON: `vocab_size`, `draft_ids`, `coverage`."""
        content = {"vocab_size": self.vocab_size, "draft_ids": self.ids.tolist(), "coverage": self.coverage}
        path.write_text(json.dumps(content), encoding="utf-8")


def count_supervised(documents: Iterable[Document], vocab_size: int) -> Tensor:
    """How often each target id is supervised, `(V,)` int64.

    Raises:
        TrainingError: a document holds an id the target does not have.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for document in documents:
        ids = torch.tensor(document.input_ids)[torch.tensor(document.loss_mask)]
        if len(ids) and int(ids.max()) >= vocab_size:
            raise TrainingError(
                f"{document.id} holds token id {int(ids.max())}, but the target's vocabulary ends at {vocab_size - 1}; "
                "use the target's own tokenizer"
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def build_vocabulary(counts: Tensor, size: int) -> DraftVocabulary:
    """The `size` most frequent ids (ties and never-seen ids: the lower id first), reference §1.3 of EAGLE-3's scripts.

    Raises:
        ConfigurationError: `size` is not between 1 and `V`.
    """
    vocab_size = len(counts)
    if not 1 <= size <= vocab_size:
        raise ConfigurationError(f"draft vocabulary size is {size}; wanted 1..{vocab_size} (the target's vocabulary)")
    ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    total = int(counts.sum())
    return DraftVocabulary(ids, vocab_size, int(counts[ids].sum()) / total if total else None)


def read_vocabulary(path: Path) -> DraftVocabulary:
    """Read what `DraftVocabulary.save` wrote.

    Raises:
        TrainingError: no such file, or it does not hold a draft vocabulary.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids = torch.tensor(content["draft_ids"], dtype=torch.long)
        vocab_size = int(content["vocab_size"])
    except (OSError, ValueError, OverflowError, KeyError, TypeError, RuntimeError) as error:
        raise TrainingError(
            f"{path} is no draft vocabulary ({type(error).__name__}: {error}); build it again"
        ) from error
    ascending = ids.ndim == 1 and len(ids) > 0 and bool((ids.diff() > 0).all())
    if not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise TrainingError(
            f"{path}: draft_ids must rise from 0 to at most {vocab_size - 1}, each once; build it again"
        )
    return DraftVocabulary(ids, vocab_size, content.get("coverage"))


def check_vocabulary(vocabulary: DraftVocabulary, draft_ids: Tensor | None, vocab_size: int, where: str) -> None:
    """A vocabulary must be the head's: its rows are tied to the mapping they were trained with.

    Args:
        draft_ids: `(Vd,)` target ids of the head's rows; `None` for a full vocabulary.
        where: names the vocabulary in the message.

    Raises:
        TrainingError: they disagree.
    """
    rows = torch.arange(vocab_size) if draft_ids is None else draft_ids.cpu()
    if vocabulary.vocab_size == vocab_size and torch.equal(vocabulary.ids, rows):
        return
    same = torch.isin(vocabulary.ids, rows).sum().item()
    raise TrainingError(
        f"{where} holds {len(vocabulary.ids)} draft ids of a vocabulary of {vocabulary.vocab_size}; the drafter's head "
        f"has {len(rows)} rows of {vocab_size}, and {same} ids agree. Use the vocabulary the drafter was made with, or "
        "start a fresh drafter"
    )
