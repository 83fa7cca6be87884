"""Where states lie in memory: on a CPU at other distances from page boundaries than their weight and each other.

A load waits for an earlier store in flight whose address agrees with its own in the last twelve bits, though they be
pages apart (AMD, Software Optimization Guide, publication 25112, section 5.5, "False Dependencies"; Intel calls it
4-KByte aliasing). What the C library allocates in a segment lies 64 bytes further into a page each time, so that a step
would load from one state just where it stored to its neighbour a moment ago.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hf_lowprec.optim.sharding import dtensor_like, is_sharded, local_shard

PAGE = 4096
"""Bytes after which the last twelve bits of an address come again."""
SMALLEST = 16 * PAGE
"""Bytes from which on a state is worth up to one page more."""
_LINE = 64


def zeros_apart(param: Tensor, dtype: torch.dtype, place: int, places: int) -> Tensor:
    """Contiguous zeros of `param`'s shape, on its device and distributed as it is.

    Args:
        param: the parameter.
        dtype: of the zeros.
        place: which of the parameter's states this is, from 0.
        places: how many there are; they divide the page that begins at the weight.
    """
    part = local_shard(param)
    if part.device.type != "cpu" or part.numel() * dtype.itemsize < SMALLEST:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
    memory = torch.zeros(part.numel() + PAGE // dtype.itemsize, dtype=dtype, device="cpu")
    wanted = part.data_ptr() + PAGE * (place + 1) // (places + 1)
    first = (wanted - memory.data_ptr()) % PAGE // _LINE * _LINE // dtype.itemsize
    zeros = memory[first : first + part.numel()].view(part.shape)
    # Of a shard with an offset in its storage torch makes a DTensor that it cannot copy. Where a tensor is plain the
    # offset is of use: it is saved, so that what is loaded lies apart as well.
    return dtensor_like(from_dlpack(zeros), param) if is_sharded(param) else zeros
