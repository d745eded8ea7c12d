"""Keys and values in 8 bits: half the bytes of bf16, and speculation over them as exact as over full precision.

Every token and head has one scale for its key and one for its value, and 8 bits for each of its `D` numbers:

    key[b, h, t] = scale[b, h, t] * codes[b, h, t]      codes: int8

**A token is rounded once, when it is written**, drafted ones too, and what attends to it afterwards, itself
included, reads the rounded numbers. Were the draft window read as it came and rounded only when kept, a token would see
its neighbours differently depending on where a round or a prefill chunk happened to end, and drafting would change the
text. So a rejected node leaves no trace, an accepted one is moved and never rounded again, and the text is what this
target writes over this cache token by token.

**Scales are powers of two**: the smallest with which no code overflows. Scaling by one is exact in every dtype, so the
numbers read do not depend on the arithmetic, and packing what was unpacked gives the same numbers: a cache may travel
through a stock one, from turn to turn, without wearing out. It costs up to one of the 8 bits (docs/memory.md).

Scales per token rather than per channel (KIVI, arXiv 2402.02750): a channel's scale would have to be known before its
later tokens are, or be corrected afterwards by rounding again.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MANTISSA_BITS, EXPONENT_BIAS = 23, 127  # of float32
SMALLEST_EXPONENT = -24
"""The smallest power of two that fp16 has. Vectors smaller than 127 times that lose digits."""

LARGEST_CODE = 127


def encode(states: Tensor) -> tuple[Tensor, Tensor]:
    """`(B, heads, T, D)` as codes, int8 of the same shape, and scales `(B, heads, T, 1)`."""
    scales = _scales(states)
    codes = states / scales  # exact: a power of two only changes the exponent
    return codes.round_().to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """What the codes stand for, in the dtype of the scales."""
    return codes.to(scales.dtype).mul_(scales)


def _scales(states: Tensor) -> Tensor:
    """The smallest power of two by which each vector may be divided, in the dtype of `states`; read off the bits of
    its largest number, since a logarithm could round to the wrong side."""
    largest = torch.maximum(states.amax(-1, keepdim=True), -states.amin(-1, keepdim=True)).float()
    fraction, exponent = math.frexp(LARGEST_CODE)  # fraction in [0.5, 1)
    own_mantissa = int((2 * fraction - 1) * 2**MANTISSA_BITS)
    # A mantissa larger than that of the largest code carries into the exponent.
    rounded_up = largest.view(torch.int32) + (2**MANTISSA_BITS - 1 - own_mantissa)
    exponents = (rounded_up >> MANTISSA_BITS) - (exponent - 1)
    exponents.clamp_(min=EXPONENT_BIAS + SMALLEST_EXPONENT)
    return (exponents << MANTISSA_BITS).view(torch.float32).to(states.dtype)
