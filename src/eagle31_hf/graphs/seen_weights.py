"""Whether weights are still those that graphs have built in: asked before every generation, so answered quickly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def modules_of(*modules: nn.Module) -> list[nn.Module]:
    """These and all within them, each once, always in the same order.

    `modules()` makes their names, too, which takes three times as long.
    """
    found: dict[nn.Module, None] = {}
    left = [*modules]
    while left:
        module = left.pop()
        if module not in found:  # shared, or in a module that it holds itself
            found[module] = None
            left.extend(part for part in module._modules.values() if part is not None)
    return list(found)


def weights_of(*modules: nn.Module) -> list[Tensor]:
    """Parameters and buffers; those that several modules hold as often as that."""
    held = (of for part in modules_of(*modules) for of in (part._parameters, part._buffers))
    return [tensor for of in held for tensor in of.values() if tensor is not None]


class SeenWeights:
    """Weights as they were when this was made.

    Of each matrix the sum of each row is compared: any one element changes it, and rows that change places are seen.
    Columns that do so leave sums alone, so one row is compared element by element. It takes as long as reading them
    all from memory does.

    Args:
        weights: the tensors.
        by_content: read elements, too: writes through `.data`, as adapters are merged and rows of new tokens set,
            leave a tensor's version alone. The weights must be on the CPU.
    """

    def __init__(self, weights: Sequence[Tensor], *, by_content: bool):
        self._versions = [version_of(tensor) for tensor in weights]
        self._samples: dict[torch.dtype, list[Tensor]] = {}  # views, so that all are read by one call for each dtype
        self._rows: list[Tensor] = []  # (n, words) views; of a tensor that has gaps, itself
        for tensor in {tensor.data_ptr(): tensor.detach() for tensor in weights}.values() if by_content else ():
            self._samples.setdefault(tensor.dtype, []).append(_one_row(tensor))
            if tensor.dim() > 1:
                dense = _in_memory_order(tensor)
                self._rows.append(_as_integers(dense) if dense.is_contiguous() else tensor)
        self._contents = self._read()

    def are_still(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, and nothing was written to them."""
        if [version_of(tensor) for tensor in weights] != self._versions:
            return False
        return all(map(torch.equal, self._read(), self._contents))

    def _read(self) -> list[Tensor]:
        samples = [torch.cat(each).view(torch.uint8) for each in self._samples.values()]
        sums = [_integers(rows).sum(dim=-1) for rows in self._rows]
        return [*samples, torch.cat(sums)] if sums else samples


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Where it lies, and how often it was written to in ways that torch counts."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _one_row(tensor: Tensor) -> Tensor:
    """From the middle, `(n,)`: at an edge some models have a row of zeros."""
    dense = _in_memory_order(tensor)
    while dense.dim() > 1:
        dense = dense[dense.shape[0] // 2]
    return dense.reshape(-1)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """With its dimensions as its elements lie: a row has neighbours."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _integers(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 2 and not rows.is_floating_point() else _as_integers(rows.contiguous())


def _as_integers(bits: Tensor) -> Tensor:
    """The rows of a contiguous tensor as integers as wide as fit, `(n, words)`."""
    rows = bits.flatten(0, -2)
    start, size = rows.storage_offset() * rows.element_size(), rows.shape[-1] * rows.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if dtype.itemsize >= rows.element_size() and start % dtype.itemsize == size % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows.view(torch.uint8)
