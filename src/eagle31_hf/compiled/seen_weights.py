"""Whether weights are still those that graphs have built in: asked before every generation, so answered quickly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

SAMPLED_ELEMENTS = 16
"""Of each tensor whose content decides about no token, spread over all of it."""


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

    Args:
        weights: the tensors.
        whole: those of them that are read whole where `by_content`: of a target, as its text depends on every element.
            It takes as long as reading its weights for one token does. Of the others, which a drafter has alone, a
            sample is read.
        by_content: read elements, too: writes through `.data`, as adapters are merged and rows of new tokens set,
            leave a tensor's version alone. The weights must be on the CPU.
    """

    def __init__(self, weights: Sequence[Tensor], *, whole: Sequence[Tensor] = (), by_content: bool):
        self._versions = [version_of(tensor) for tensor in weights]
        self._samples: dict[torch.dtype, list[Tensor]] = {}  # views, so that all are read by one call for each dtype
        self._words: list[Tensor] = []  # the bits of whole tensors as integers, and tensors that have gaps
        read_whole = {tensor.data_ptr() for tensor in whole}
        for tensor in {tensor.data_ptr(): tensor for tensor in weights}.values() if by_content else ():
            is_whole = tensor.data_ptr() in read_whole
            line = _line(tensor.detach())
            self._samples.setdefault(tensor.dtype, []).append(line[:: _step(line, tensor, is_whole=is_whole)])
            if is_whole:
                self._words.append(_as_integers(line) if len(line) == tensor.numel() else tensor.detach())
        self._contents = self._read()

    def are_still(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, and nothing was written to them."""
        if [version_of(tensor) for tensor in weights] != self._versions:
            return False
        return all(map(torch.equal, self._read(), self._contents))

    def _read(self) -> list[Tensor]:
        samples = [torch.cat(each).view(torch.uint8) for each in self._samples.values()]
        # A sum of integers is changed by any one of them.
        return (
            samples if not self._words else [*samples, torch.stack([_integers(words).sum() for words in self._words])]
        )


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Where it lies, and how often it was written to in ways that torch counts."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _line(tensor: Tensor) -> Tensor:
    """All its elements as they lie there, `(n,)`; of a tensor with gaps, those along its longest dimension."""
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(by_stride)
    if dense.is_contiguous():
        return dense.view(-1)
    longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    return tensor[tuple(slice(None) if dim == longest else 0 for dim in range(tensor.dim()))]


def _step(line: Tensor, tensor: Tensor, *, is_whole: bool) -> int:
    """How far the elements that are looked at lie apart."""
    if not is_whole or tensor.dim() < 2:
        return max(1, len(line) // SAMPLED_ELEMENTS)
    # A sum does not see that rows have changed places: one element of each row and column does.
    columns = max(1, tensor.shape[-1])
    step = min(columns + 1, max(1, len(line) // columns))
    while math.gcd(step, columns) > 1:
        step -= 1
    return step


def _integers(words: Tensor) -> Tensor:
    return words if words.dim() == 1 and not words.is_floating_point() else _as_integers(words.contiguous().view(-1))


def _as_integers(bits: Tensor) -> Tensor:
    """The same memory `(n,)` as integers, as wide as fit."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        start, size = bits.storage_offset() * bits.element_size(), bits.numel() * bits.element_size()
        if dtype.itemsize >= bits.element_size() and start % dtype.itemsize == size % dtype.itemsize == 0:
            return bits.view(dtype)
    return bits.view(torch.uint8)
