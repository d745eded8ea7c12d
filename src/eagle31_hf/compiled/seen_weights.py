"""Whether weights are still those that graphs have built in: asked before every generation, so answered quickly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SAMPLED_ELEMENTS = 16
"""Of each tensor, spread over all of it: what changes a weight by design (a merged adapter) changes nearly all."""


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
        by_content: look at some of their elements, too: writes through `.data`, as adapters are merged, leave a
            tensor's version alone. They must be on the CPU.
    """

    def __init__(self, weights: Sequence[Tensor], *, by_content: bool):
        self._versions = [_version(tensor) for tensor in weights]
        self._samples: dict[torch.dtype, list[Tensor]] = {}  # views, so that all are read by one call for each dtype
        for tensor in weights if by_content else ():
            self._samples.setdefault(tensor.dtype, []).append(_sample(tensor))
        self._contents = self._read()

    def are_still(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, and nothing was written to them."""
        if [_version(tensor) for tensor in weights] != self._versions:
            return False
        return all(map(torch.equal, self._read(), self._contents))

    def _read(self) -> list[Tensor]:
        return [torch.cat(samples).view(torch.uint8) for samples in self._samples.values()]


def _version(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor:
    """A view of a few elements, `(n,)`."""
    tensor = tensor.detach()
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(by_stride)
    if dense.is_contiguous():
        line = dense.view(-1)
    else:  # one line of it, along its longest dimension
        longest = max(range(tensor.dim()), key=tensor.shape.__getitem__)
        line = tensor[tuple(slice(None) if dim == longest else 0 for dim in range(tensor.dim()))]
    return line[:: max(1, len(line) // SAMPLED_ELEMENTS)]
