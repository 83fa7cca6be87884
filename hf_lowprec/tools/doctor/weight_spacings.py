"""The distances between neighbouring BF16 numbers at the weights of a tensor.

They alone determine what rounding does to an update, and they depend only on a weight's exponent. So a histogram of 256
counts replaces the tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_lowprec.rounding.nearest import EXPONENTS, spacings_by_exponent

CHUNK = 1 << 22
"""Elements that are converted at a time."""

_MANTISSA_BITS = 7


def magnitudes() -> Tensor:
    """The root mean square of the numbers with each exponent field, if they are uniform (FP64, 256 elements)."""
    return spacings_by_exponent(torch.bfloat16) * 2**_MANTISSA_BITS * (7 / 3) ** 0.5


def count_spacings(tensor: Tensor) -> Tensor:
    """Count the elements of a tensor by the spacing of the BF16 numbers around them.

    Below a power of two, such as the 1.0 of a new norm, numbers are twice as dense as above it; it counts half for each
    spacing. NaNs and infinities are left out.

    Args:
        tensor: any floating-point tensor; it is rounded to BF16 first.

    Returns:
        An FP64 tensor of 256 counts in the order of `spacings_by_exponent`.
    """
    counts = torch.zeros(2 * EXPONENTS, dtype=torch.int64)
    for chunk in tensor.detach().reshape(-1).split(CHUNK):
        bits = chunk.to(torch.bfloat16).view(torch.int16).int() & 0x7FFF
        is_power = (bits & 0x7F) == 0
        counts += torch.bincount((bits >> _MANTISSA_BITS) * 2 + is_power, minlength=2 * EXPONENTS).cpu()
    counts[-2:] = 0  # infinities and NaNs
    others, powers = counts.double().view(EXPONENTS, 2).unbind(1)
    below = powers / 2
    below[:2] = 0  # zero and the smallest normal number have the same spacing on both sides
    return others + powers - below + torch.cat((below[1:], below.new_zeros(1)))
