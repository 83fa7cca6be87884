"""The definition of the mean over ranks, in NumPy and on bit patterns, and gradients that tell it from other means.

Versions (one per rank) and results are NumPy arrays: of uint16 bit patterns for BF16, of values for FP16 and FP32.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tests.support.same_numbers import same_numbers

ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint16)
"""Every bit pattern of 16 bits."""


def bf16_to_fp32(patterns: np.ndarray) -> np.ndarray:
    """Convert BF16 bit patterns to the FP32 values they stand for."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round FP32 values to the patterns of the nearest BF16 values, ties to even, in integer arithmetic."""
    pattern = values.view(np.uint32).astype(np.uint64)
    kept, cut = pattern >> 16, pattern & 0xFFFF
    up = (cut > 0x8000) | ((cut == 0x8000) & (kept & 1 == 1))
    return np.where(np.isnan(values), 0x7FC0, kept + up).astype(np.uint16)


@np.errstate(all="ignore")
def mean(versions: Sequence[np.ndarray], divisor: int | None = None) -> np.ndarray:
    """`((v0 + v1) + …) / N` in FP32 for 16 bits and in FP64 for FP32, rounded once to the dtype of the versions."""
    sum_dtype = np.float64 if versions[0].dtype == np.float32 else np.float32
    read = bf16_to_fp32 if versions[0].dtype == np.uint16 else np.asarray
    total = read(versions[0]).astype(sum_dtype)
    for version in versions[1:]:
        total = total + read(version).astype(sum_dtype)
    total = total / sum_dtype(divisor or len(versions))
    assert total.dtype == sum_dtype
    return round_to_bf16(total) if versions[0].dtype == np.uint16 else total.astype(versions[0].dtype)


@np.errstate(all="ignore")
def added(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Add as `p.grad` does: the sum is rounded to the dtype of both."""
    with np.errstate(all="ignore"):
        return round_to_bf16(bf16_to_fp32(first) + bf16_to_fp32(second)) if first.dtype == np.uint16 else first + second


def mean_in_16_bits(versions: Sequence[np.ndarray]) -> np.ndarray:
    """A mean that is wrong on purpose: BF16 sums that are rounded at every addition."""
    total = versions[0]
    for version in versions[1:]:
        total = round_to_bf16(bf16_to_fp32(total) + bf16_to_fp32(version))
    return round_to_bf16(bf16_to_fp32(total) / np.float32(len(versions)))


def as_tensor(array: np.ndarray) -> Tensor:
    """The tensor of these values."""
    tensor = torch.from_numpy(np.array(array))  # NumPy makes scalars of arrays without dimensions
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def same_bits(tensor: Tensor, expected: np.ndarray) -> bool:
    """Compare shape, dtype and bits; a NaN equals any other NaN."""
    return same_numbers(tensor, as_tensor(expected))


def gradients(dtype: torch.dtype, shape: tuple[int, ...], ranks: int, seed: int) -> list[np.ndarray]:
    """Draw the gradients of each rank from `seed`.

    Half of the elements are chosen so that the order and the dtype of a sum change it: large ones that often cancel,
    and small ones. A quarter has any bit pattern, infinities and NaN included; the rest is normally distributed.
    """
    return list(_gradients(dtype, shape, ranks, seed))


@functools.lru_cache(maxsize=256)  # every rank draws those of all ranks, and many cases draw the same
def _gradients(dtype: torch.dtype, shape: tuple[int, ...], ranks: int, seed: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    count = int(np.prod(shape))
    by_rank = []
    for _ in range(ranks):
        sign = random.choice([-1.0, 1.0], count)
        large = sign * random.choice([1.0, 1.5], count) * 2.0 ** random.choice([0, 10, 11], count)
        small = sign * random.integers(128, 256, count) * 2.0 ** random.integers(-14, -10, count)
        values = np.where(random.random(count) < 0.5, large, small)
        everyday = random.standard_normal(count).astype(np.float32)
        kind = np.arange(count) % 4
        values = np.where(kind == 3, everyday, values).astype(np.float32)
        if dtype == torch.float32:
            scale = (1 + 2.0**-23 * random.integers(0, 1 << 23, count)).astype(np.float32)
            made, patterns = values * scale, random.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
        elif dtype == torch.float16:
            patterns = random.integers(0, 1 << 16, count, dtype=np.uint16).view(np.float16)
            made = values.astype(np.float16)
        else:
            made, patterns = round_to_bf16(values), random.integers(0, 1 << 16, count, dtype=np.uint16)
        by_rank.append(np.where(kind == 2, patterns, made).reshape(shape))
        by_rank[-1].flags.writeable = False
    return tuple(by_rank)
