"""The FP32 values that BF16 weights and the low bits kept by their cast hold together."""

from __future__ import annotations

import torch


def kept_values(exact: torch.Tensor) -> torch.Tensor:
    """`exact`, but ties that a cast to BF16 rounds down are the next FP32 number towards zero.

    Low bits are int16. What such a tie lies above its weight is 32768 units of FP32's last place, and int16 ends at
    32767. In a tie, the lower 16 bits of the pattern are 0x8000; it is rounded down if bit 16 is even already.

    Args:
        exact: FP32 tensor of any shape.

    Returns:
        FP32 tensor of the same shape.
    """
    pattern = exact.detach().view(torch.int32)
    rounded_down = (pattern & 0x1FFFF) == 0x8000
    return (pattern - rounded_down.int()).view(torch.float32)
