"""The mean in rank order as one Triton kernel, which reads every element once and writes the result once.

`rank_mean.py` imports this module on first use, because it needs Triton.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _upcast(values, SUM_DTYPE: tl.constexpr):
    """Convert loaded elements to SUM_DTYPE; BF16 ones come as 16-bit patterns."""
    if values.dtype == tl.int16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(SUM_DTYPE)


@triton.jit
def mean(per_rank, out, ranks, count, divisor, SUM_DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `out[i] = round((per_rank[0, i] + per_rank[1, i] + …) / divisor)`; `per_rank` has shape (ranks, count).

    BF16 is loaded and stored as 16-bit patterns and converted here: the casts of Triton's interpreter truncate, and
    lose subnormals.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    stride = tl.zeros_like(offsets) + count  # 64 bits; Triton turns a count of 1 into a constant, which has no `.to`
    total = _upcast(tl.load(per_rank + offsets, mask=mask, other=0), SUM_DTYPE)
    for rank in range(1, ranks):
        total += _upcast(tl.load(per_rank + rank * stride + offsets, mask=mask, other=0), SUM_DTYPE)
    divisors = tl.full((BLOCK,), divisor, SUM_DTYPE)
    total = tl.div_rn(total, divisors) if tl.float32 == SUM_DTYPE else total / divisors
    if out.dtype.element_ty == tl.int16:
        pattern = total.to(tl.float32).to(tl.int32, bitcast=True)
        pattern = (pattern + ((pattern >> 16) & 1) + 0x7FFF) >> 16
        pattern = tl.where(total != total, 0x7FC0, pattern)
        tl.store(out + offsets, pattern.to(tl.int16), mask=mask)
    else:
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def launch_mean(per_rank: Tensor, divisor: float, out: Tensor) -> Tensor:
    """Run `mean_in_rank_order` on a GPU, on its current stream; the arguments are the same."""
    sum_dtype = tl.float32 if per_rank.dtype.itemsize == 2 else tl.float64
    ranks, count = per_rank.shape
    if count:
        on_cpu = per_rank.device.type == "cpu"
        with nullcontext() if on_cpu else torch.get_device_module(per_rank.device).device(per_rank.device):
            arguments = (_bf16_as_patterns(per_rank), _bf16_as_patterns(out), ranks, count, float(divisor))
            mean[(triton.cdiv(count, _BLOCK),)](*arguments, SUM_DTYPE=sum_dtype, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out


def _bf16_as_patterns(tensor: Tensor) -> Tensor:
    """View a BF16 tensor as 16-bit integers; return any other tensor as it is."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
