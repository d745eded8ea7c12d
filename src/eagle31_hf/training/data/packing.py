"""Documents side by side in rows of one length, none cut, none seeing its neighbour."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .rendering import Document


@dataclass(frozen=True)
class PackedBatch:
    """Packed rows."""

    input_ids: Tensor  # `(B, T)` token ids; padding holds 0
    loss_mask: Tensor  # `(B, T)` bool: the token is supervised; never true on padding
    document_ids: Tensor  # `(B, T)`: equal numbers in a row are one document; padding is a document of its own
    position_ids: Tensor  # `(B, T)` position within the document
    # `(B, T)` temperature at which the target wrote the token itself; `NOT_WRITTEN` where it did not, or at a
    # temperature that is not known
    written_at: Tensor
    # aux, head_input: stored features, `(B, T, A*Ht)` and `(B, T, Ht)`; `None` where the target is run for them
    aux: Tensor | None = None
    head_input: Tensor | None = None


NOT_WRITTEN = -1.0


def pack(lengths: Sequence[int], row_length: int, *, seed: int) -> list[list[int]]:
    """Which documents share a row: best fit in random order, so every row mixes what the data has side by side.

    Args:
        lengths: tokens per document, none above `row_length`.

    Returns:
        Document numbers per row; each document once.
    """
    assert max(lengths, default=0) <= row_length, "documents were cut to the row length before"
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free tokens -> rows with so many
    for document in order:
        length = lengths[document]
        # Rows with less room than any document needs stay in the table; it has at most `row_length` keys.
        fit = min((free for free, numbers in open_rows.items() if free >= length and numbers), default=None)
        if fit is None:
            rows.append([document])
            open_rows.setdefault(row_length - length, []).append(len(rows) - 1)
        else:
            row = open_rows[fit].pop()
            rows[row].append(document)
            open_rows.setdefault(fit - length, []).append(row)
    return rows


class PackedDocuments(Dataset):
    """Rows of packed documents, as tensors `(T,)` under the field names of `PackedBatch`."""

    def __init__(self, documents: Sequence[Document], row_length: int, *, seed: int):
        self.documents, self.row_length = documents, row_length
        self.rows = pack([len(document.input_ids) for document in documents], row_length, seed=seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return pack_row([self.documents[number] for number in self.rows[index]], self.row_length)


def pack_row(documents: Sequence[Document], row_length: int) -> dict[str, Tensor]:
    """One row `(T,)` of each field of `PackedBatch`."""
    free = row_length - sum(len(document.input_ids) for document in documents)
    parts = [_fields(document, number) for number, document in enumerate(documents)]
    parts.append(_fields(Document("padding", [0] * free, [False] * free), -1))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _fields(document: Document, number: int) -> dict[str, Tensor]:
    length = len(document.input_ids)
    written_at = torch.full((length,), NOT_WRITTEN)
    if document.written_from is not None and document.temperature is not None:
        written_at[document.written_from :] = document.temperature
    return {
        "input_ids": torch.tensor(document.input_ids, dtype=torch.long),
        "loss_mask": torch.tensor(document.loss_mask, dtype=torch.bool),
        "document_ids": torch.full((length,), number),
        "position_ids": torch.arange(length),
        "written_at": written_at,
    }


def collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Rows `(T, ...)` to a batch `(B, T, ...)`."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
