"""A checksum of a tensor's bits, to compare replicas without exchanging them.

With the bit pattern x_i at position i, it is Σ x_i · w_i modulo 2⁶⁴, where w_i = 2·G·i + 1 and G is ⌊2⁶⁴ / golden
ratio⌋ without its highest bit, which 2·G loses anyway. Every weight is odd and patterns have at most 32 bits, so a
change of any one element changes the sum. The weights differ, so an exchange of two different elements changes it too.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN_RATIO_BITS = 0x1E3779B97F4A7C15
"""G: ⌊2⁶⁴ / golden ratio⌋ modulo 2⁶³."""


def checksum(tensor: Tensor) -> Tensor:
    """Compute the checksum of a tensor's elements, in the order of their indices; of a sharded tensor the local part.

    Returns:
        An int64 scalar on the tensor's device. For a tensor on the meta device, which holds nothing, 0 on the CPU.
    """
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    patterns, chunk = _bit_patterns(local), _chunk_size(local.device)
    total = torch.zeros((), dtype=torch.int64, device=patterns.device)
    weights = _position_weights(min(patterns.numel(), chunk), patterns.device)
    for number, part in enumerate(patterns.split(chunk)):
        values = part.to(torch.int64)
        # A chunk's weights are those of the first chunk plus a constant, modulo 2⁶⁴.
        total += (values * weights[: part.numel()]).sum() + values.sum() * _weight_offset(number * chunk)
    return total


def _bit_patterns(tensor: Tensor) -> Tensor:
    """View a tensor's elements as integers of at most 32 bits; 16-bit elements in pairs where their number is even."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.element_size() == 2 and flat.storage_offset() % 2:
        flat = flat.clone()  # pairs must begin at even offsets
    integers = {1: torch.int8, 2: torch.int16 if flat.numel() % 2 else torch.int32}
    return flat.view(integers.get(flat.element_size(), torch.int32))


def _chunk_size(device: torch.device) -> int:
    """Patterns read at a time, at 8 bytes each: they fit a CPU's cache; elsewhere each chunk costs several launches."""
    return 1 << 16 if device.type == "cpu" else 1 << 22


def _position_weights(count: int, device: torch.device) -> Tensor:
    """The weights w_0 to w_(count - 1), modulo 2⁶⁴ as int64."""
    return torch.arange(count, device=device) * _weight_offset(1) + 1


def _weight_offset(positions: int) -> int:
    """The growth of the weight over so many positions: 2·G·positions modulo 2⁶⁴, as an int64."""
    offset = 2 * _GOLDEN_RATIO_BITS * positions % 2**64
    return offset - 2**64 if offset >= 2**63 else offset
