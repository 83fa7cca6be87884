"""Which tensors have their elements in memory, one after the other and as the numbers that they are.

Kernels read and write by address. Whatever gives them one asks here first. Other tensors are copied: those that are not
contiguous; those that PyTorch marks instead of computing them (`is_neg()`: memory has the other sign; zeros without
memory, which `torch.sgn` leaves as gradients); those that communication has yet to write; subclasses of Tensor that
wrap others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_lowprec.optim.sharding import when_written

_LOW = 1 << 36
"""A tensor without memory has its offset as address, below this one. Others may lie there, too."""


def in_plain_memory(tensor: Tensor) -> Tensor:
    """`tensor` if its memory is as described above; else a copy, after waiting for communication that writes it."""
    tensor = when_written(tensor)
    if tensor.is_contiguous() and not tensor.is_neg() and (Tensor.data_ptr(tensor) >= _LOW or _has_memory(tensor)):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def are_in_plain_memory(tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Return whether all tensors, which have these addresses, are in plain memory. In C, if none has a low address."""
    return (
        all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and (min(addresses, default=_LOW) >= _LOW or all(map(_has_memory, tensors)))
    )


def may_be_freed(tensors: Sequence[Tensor], addresses: Sequence[int]) -> bool:
    """Return whether the memory of a tensor may have been freed; `validation.check_memory` makes sure."""
    return min(addresses, default=_LOW) < _LOW and any(
        address == tensor.storage_offset() * tensor.element_size() and tensor.numel() > 0
        for tensor, address in zip(tensors, addresses, strict=True)
    )


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and not tensor._is_zerotensor()
