"""The mean in rank order in one kernel: every version is read once, the result is written once.

Imported on first use only: it needs Triton.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _widened(values, BITS: tl.constexpr, WIDE: tl.constexpr):
    if BITS:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(WIDE)


@triton.jit
def mean(
    versions,
    out,
    ranks,
    count,
    divisor,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`out[i] = round((versions[0, i] + versions[1, i] + …) / divisor)`; versions: (ranks, count), sums in WIDE.

    BF16 comes as 16-bit patterns (BITS) and goes as such (NARROW): casts of Triton's interpreter truncate, and lose
    subnormals.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = place < count
    stride = tl.zeros_like(place) + count  # 64 bits; Triton makes a count of 1 a constant, which has no `.to`
    total = _widened(tl.load(versions + place, mask=held, other=0), BITS, WIDE)
    for rank in range(1, ranks):
        total += _widened(tl.load(versions + rank * stride + place, mask=held, other=0), BITS, WIDE)
    by = tl.full((BLOCK,), divisor, WIDE)
    total = tl.div_rn(total, by) if tl.float32 == WIDE else total / by
    if NARROW:
        pattern = total.to(tl.float32).to(tl.int32, bitcast=True)
        pattern = (pattern + ((pattern >> 16) & 1) + 0x7FFF) >> 16
        pattern = tl.where(total != total, 0x7FC0, pattern)
        tl.store(out + place, pattern.to(tl.int16), mask=held)
    else:
        tl.store(out + place, total.to(out.dtype.element_ty), mask=held)


def launch_mean(versions: Tensor, divisor: int, out: Tensor) -> Tensor:
    """`mean_in_rank_order` on a GPU, on its current stream."""
    wide = tl.float32 if versions.dtype.itemsize == 2 else tl.float64
    ranks, count = versions.shape
    if count:
        on_cpu = versions.device.type == "cpu"
        with nullcontext() if on_cpu else torch.get_device_module(versions.device).device(versions.device):
            mean[(triton.cdiv(count, _BLOCK),)](
                *(_patterns(versions), _patterns(out), ranks, count, float(divisor)),
                **{"BITS": versions.dtype == torch.bfloat16, "WIDE": wide, "NARROW": out.dtype == torch.bfloat16},
                **{"BLOCK": _BLOCK, "enable_fp_fusion": False},
            )
    return out


def _patterns(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
