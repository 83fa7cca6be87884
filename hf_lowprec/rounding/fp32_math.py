"""FP32 operations that give the same bits on every device: square root, NaN, bit pattern."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
"""2⁻¹²⁶. Divisors are at least this large, so that zero divided by one is zero."""


def sqrt_rn(value: Tensor) -> Tensor:
    """Compute the correctly rounded FP32 square root; `torch.sqrt` on CPU is off by one ulp for a fifth of all values.

    Rounding twice, to FP64 and then to FP32, gives the correct result because FP64's 53 bits are more than 2·24 + 2.
    """
    if has_torch_function_unary(value):
        return handle_torch_function(sqrt_rn, (value,), value)
    return value.double().sqrt().float()


def quiet_nan(value: Tensor) -> Tensor:
    """Replace every NaN of `value` with the one whose payload is only the quiet bit.

    Rounding adds to the bit pattern, and a NaN with a full payload would overflow into a number. A renderer may leave
    this out where no such NaN can occur.
    """
    if has_torch_function_unary(value):
        return handle_torch_function(quiet_nan, (value,), value)
    return torch.where(value != value, float("nan"), value)


def bit_pattern(value: Tensor) -> Tensor:
    """Return the bits of `value` as int32, with quiet NaNs."""
    return quiet_nan(value).view(torch.int32)
