"""FP32 numbers and the integers that their 32 bits are."""

import torch

INF, LARGEST = 0x7F800000, 0x7F7FFFFF
NANS = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7F80FFFF, 0xFF80FFFF, 0x7FC00000, 0xFFC00000, 0x7FBFFFFF]
"""Of several payloads and both signs."""


def patterns(value: torch.Tensor) -> torch.Tensor:
    """The patterns of FP32 numbers, int64 in [0, 2³²)."""
    return value.view(torch.int32).long() & 0xFFFFFFFF


def floats(pattern: torch.Tensor) -> torch.Tensor:
    """The FP32 numbers of patterns in [0, 2³²)."""
    return torch.where(pattern >= 2**31, pattern - 2**32, pattern).to(torch.int32).view(torch.float32)
