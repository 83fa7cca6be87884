"""Placement of states in memory: on a CPU, at different offsets from page boundaries than their weight and each other.

A load waits for an earlier store in flight if the last twelve bits of their addresses are equal, even if they are pages
apart (AMD, Software Optimization Guide, publication 25112, section 5.5, "False Dependencies"; Intel calls it 4-KByte
aliasing). The C library places each of several large tensors 64 bytes further into a page than the one before, so a
step would load from one state just where it stored to its neighbour a moment ago.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hf_lowprec.optim.sharding import dtensor_like, is_sharded, local_shard
from hf_lowprec.optim.state.states_in_8_bits import scale_shape

PAGE = 4096
"""Bytes after which the last twelve bits of an address repeat."""
SMALLEST = 16 * PAGE
"""Bytes of the smallest state for which a page of extra memory is spent."""
_LINE = 64


def zeros_apart(param: Tensor, dtype: torch.dtype, shape: torch.Size, position: int, count: int) -> Tensor:
    """A new state: contiguous zeros, on the device of `param` and distributed as it is.

    Args:
        param: the parameter.
        dtype: dtype of the zeros.
        shape: their shape: that of `param`, or that of the scales of its blocks.
        position: which of the parameter's states this is, from 0.
        count: how many states it has; they divide the page that begins at the weight.
    """
    part = local_shard(param)
    if shape != param.shape:
        scales = torch.zeros(scale_shape(part.shape), dtype=dtype, device=part.device)
        return dtensor_like(scales, param, shape)
    if part.device.type != "cpu" or part.numel() * dtype.itemsize < SMALLEST:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
    memory = torch.zeros(part.numel() + PAGE // dtype.itemsize, dtype=dtype, device="cpu")
    target = part.data_ptr() + PAGE * (position + 1) // (count + 1)
    first = (target - memory.data_ptr()) % PAGE // _LINE * _LINE // dtype.itemsize
    zeros = memory[first : first + part.numel()].view(part.shape)
    # From a shard with an offset in its storage, torch makes a DTensor that it cannot copy, so shards have no offset.
    # A plain tensor keeps its offset, which is saved with it, so that loaded states are placed apart as well.
    return dtensor_like(from_dlpack(zeros), param) if is_sharded(param) else zeros
