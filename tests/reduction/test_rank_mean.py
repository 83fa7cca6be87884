"""`mean_in_rank_order` gives the bits of the NumPy reference, for values of every kind."""

from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch

from hf_lowprec.reduction import mean_in_rank_order
from hf_lowprec.reduction import rank_mean as module
from hf_lowprec.reduction.rank_mean import CHUNK
from tests.support.reduction.numpy_reference import (
    ALL_PATTERNS,
    as_tensor,
    bf16_to_fp32,
    gradients,
    mean,
    mean_in_16_bits,
    round_to_bf16,
    same_bits,
)

RANKS = [1, 2, 3, 4, 8]
SPECIAL = np.array(
    # ±0, smallest and largest subnormal, smallest normal, 1 and its neighbours, largest, ±Inf, two NaN
    [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 1],
    dtype=np.uint16,
)


def result(versions: list[np.ndarray], divisor: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    stacked = torch.stack([as_tensor(version) for version in versions])
    out = torch.full(stacked.shape[1:], 7, dtype=dtype or stacked.dtype)
    before = stacked.clone()
    assert mean_in_rank_order(stacked, divisor or len(versions), out) is out
    assert torch.equal(stacked.nan_to_num(), before.nan_to_num())
    return out


def test_the_rounding_of_the_definition_is_the_nearest_of_all_values():
    """Checked by exact distances, so that the reference itself is tested."""
    finite = bf16_to_fp32(ALL_PATTERNS)[np.isfinite(bf16_to_fp32(ALL_PATTERNS))].astype(np.float64)
    grid = np.unique(finite)
    values = np.random.default_rng(0).integers(0, 0x7F7F_0000, 20_000, dtype=np.uint32)
    values[:4000] = values[:4000] & 0xFFFF_0000 | 0x8000
    values = values.view(np.float32)
    above = np.searchsorted(grid, values.astype(np.float64)).clip(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    rounded = bf16_to_fp32(round_to_bf16(values)).astype(np.float64)
    wide = values.astype(np.float64)
    assert np.array_equal(np.abs(rounded - wide), np.minimum(wide - low, high - wide))
    tie = wide - low == high - wide
    assert tie.sum() > 3000
    assert not (round_to_bf16(values)[tie] & 1).any()


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mean_over_all_bit_patterns(ranks):
    """Every pattern meets random ones, those of its own exponent, and its negative."""
    random = np.random.default_rng(ranks)
    anything = [ALL_PATTERNS, *(random.permutation(ALL_PATTERNS) for _ in range(ranks - 1))]
    similar = [
        ALL_PATTERNS,
        *(ALL_PATTERNS ^ random.integers(0, 128, ALL_PATTERNS.size, dtype=np.uint16) for _ in range(ranks - 1)),
    ]
    opposite = [
        ALL_PATTERNS,
        *(ALL_PATTERNS ^ (0x8000 if rank % 2 else random.choice(4, ALL_PATTERNS.size)) for rank in range(1, ranks)),
    ]
    for versions in (anything, similar, opposite):
        versions = [version.astype(np.uint16) for version in versions]
        assert same_bits(result(versions), mean(versions))


@pytest.mark.parametrize("ranks", [2, 3])
def test_special_values_meet_each_other(ranks):
    versions = [part.reshape(-1) for part in np.meshgrid(*[SPECIAL] * ranks)]
    assert same_bits(result(versions), mean(versions))


@pytest.mark.parametrize("ranks", RANKS)
def test_the_largest_values_overflow_as_fp32_does(ranks):
    versions = [np.array([0x7F7F, 0xFF7F, 0x7F00, 0x7F7F], dtype=np.uint16)] * ranks
    expected = {1: [0x7F7F, 0xFF7F, 0x7F00, 0x7F7F], 2: [0x7F80, 0xFF80, 0x7F80, 0x7F80]}[min(ranks, 2)]
    assert same_bits(result(versions), np.array(expected, dtype=np.uint16))


@pytest.mark.parametrize("ranks", RANKS)
def test_minus_zero_stays_only_if_all_have_it(ranks):
    zeros = [torch.tensor([-0.0, -0.0], dtype=torch.bfloat16) for _ in range(ranks)]
    zeros[-1] = torch.tensor([-0.0, 0.0], dtype=torch.bfloat16)
    out = mean_in_rank_order(torch.stack(zeros), ranks, torch.empty(2, dtype=torch.bfloat16))
    assert out.signbit().tolist() == [True, False]


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_order_and_width_would_show_on_these_gradients(ranks):
    versions = gradients(torch.bfloat16, (4000,), ranks, seed=1)
    forward, backward = as_tensor(mean(versions)), mean(versions[::-1])
    assert not same_bits(forward, backward)
    assert not same_bits(forward, mean_in_16_bits(versions))
    assert same_bits(result(versions), mean(versions))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 63, 1001, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_size(dtype, count):
    versions = gradients(dtype, (count,), 3, seed=count)
    assert same_bits(result(versions), mean(versions))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_other_dtypes(dtype, ranks):
    versions = gradients(dtype, (5000,), ranks, seed=ranks)
    assert same_bits(result(versions), mean(versions))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sum_of_16_bits_is_rounded_once_also_in_fp16(ranks):
    patterns = np.random.default_rng(ranks).permuted(np.tile(ALL_PATTERNS, (ranks, 1)), axis=1)
    versions = list(patterns.view(np.float16))
    assert same_bits(result(versions), mean(versions))
    assert same_bits(result(versions, divisor=1), mean(versions, divisor=1))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sum_into_fp32_is_not_rounded_to_16_bits(ranks):
    """FSDP2 goes on computing with an FP32 sum."""
    versions = gradients(torch.bfloat16, (3000,), ranks, seed=5)
    with np.errstate(all="ignore"):
        total = bf16_to_fp32(versions[0])
        for version in versions[1:]:
            total = total + bf16_to_fp32(version)
    assert same_bits(result(versions, 1, torch.float32), total)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 8])
def test_the_mean_of_equal_fp32_values_is_exact(ranks):
    values = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32)
    assert same_bits(result([values] * ranks), values)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_mean_of_fp32_values_of_like_size_is_correctly_rounded(ranks):
    versions = [np.random.default_rng(rank).uniform(-2, 2, 300).astype(np.float32) for rank in range(ranks)]
    versions = [np.where(np.abs(version) < 0.25, np.float32(0.5), version) for version in versions]
    for mine, *values in zip(result(versions).tolist(), *(version.tolist() for version in versions), strict=True):
        exact = sum(map(Fraction, values)) / ranks
        near = np.float32(mine)
        for neighbour in (np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))):
            assert abs(Fraction(mine) - exact) <= abs(Fraction(float(neighbour)) - exact)


def test_out_may_be_one_of_the_versions_to_send():
    """DDP's hook writes the mean over the shard of the bucket that was sent."""
    versions = gradients(torch.bfloat16, (4, 999), 1, seed=2)[0]
    sent = as_tensor(versions[1])
    received = as_tensor(versions)
    mean_in_rank_order(received, 4, sent)
    assert same_bits(sent, mean(list(versions)))


def test_blocks_are_no_part_of_the_result():
    versions = gradients(torch.bfloat16, (1000,), 3, seed=4)
    with mock.patch.object(module, "CHUNK", 7):
        assert same_bits(result(versions), mean(versions))
