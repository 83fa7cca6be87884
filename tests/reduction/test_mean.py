"""`mean_in_rank_order` is its definition, bit for bit, wherever values lie."""

from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch

from hf_lowprec.reduction import mean as module
from hf_lowprec.reduction import mean_in_rank_order
from hf_lowprec.reduction.mean import BLOCK
from tests.reduction.definition import ALL, agrees, as_tensor, gradients, mean, mean_in_16_bits, narrow, widen

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
    """Checked by exact distances, so that the definition stands on its own feet."""
    finite = widen(ALL)[np.isfinite(widen(ALL))].astype(np.float64)
    grid = np.unique(finite)
    values = np.random.default_rng(0).integers(0, 0x7F7F_0000, 20_000, dtype=np.uint32)
    values[:4000] = values[:4000] & 0xFFFF_0000 | 0x8000
    values = values.view(np.float32)
    above = np.searchsorted(grid, values.astype(np.float64)).clip(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    rounded = widen(narrow(values)).astype(np.float64)
    wide = values.astype(np.float64)
    assert np.array_equal(np.abs(rounded - wide), np.minimum(wide - low, high - wide))
    tie = wide - low == high - wide
    assert tie.sum() > 3000
    assert not (narrow(values)[tie] & 1).any()


@pytest.mark.parametrize("ranks", RANKS)
def test_the_mean_over_all_bit_patterns(ranks):
    """Every pattern meets random ones, those of its own exponent, and its negative."""
    random = np.random.default_rng(ranks)
    anything = [ALL, *(random.permutation(ALL) for _ in range(ranks - 1))]
    alike = [ALL, *(ALL ^ random.integers(0, 128, ALL.size, dtype=np.uint16) for _ in range(ranks - 1))]
    opposite = [ALL, *(ALL ^ (0x8000 if rank % 2 else random.choice(4, ALL.size)) for rank in range(1, ranks))]
    for versions in (anything, alike, opposite):
        versions = [version.astype(np.uint16) for version in versions]
        assert agrees(result(versions), mean(versions))


@pytest.mark.parametrize("ranks", [2, 3])
def test_special_values_meet_each_other(ranks):
    versions = [part.reshape(-1) for part in np.meshgrid(*[SPECIAL] * ranks)]
    assert agrees(result(versions), mean(versions))


@pytest.mark.parametrize("ranks", RANKS)
def test_the_largest_values_overflow_as_fp32_does(ranks):
    versions = [np.array([0x7F7F, 0xFF7F, 0x7F00, 0x7F7F], dtype=np.uint16)] * ranks
    wanted = {1: [0x7F7F, 0xFF7F, 0x7F00, 0x7F7F], 2: [0x7F80, 0xFF80, 0x7F80, 0x7F80]}[min(ranks, 2)]
    assert agrees(result(versions), np.array(wanted, dtype=np.uint16))


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
    assert not agrees(forward, backward)
    assert not agrees(forward, mean_in_16_bits(versions))
    assert agrees(result(versions), mean(versions))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 63, 1001, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_size(dtype, count):
    versions = gradients(dtype, (count,), 3, seed=count)
    assert agrees(result(versions), mean(versions))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_other_dtypes(dtype, ranks):
    versions = gradients(dtype, (5000,), ranks, seed=ranks)
    assert agrees(result(versions), mean(versions))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sum_of_16_bits_is_rounded_once_also_in_fp16(ranks):
    patterns = np.random.default_rng(ranks).permuted(np.tile(ALL, (ranks, 1)), axis=1)
    versions = list(patterns.view(np.float16))
    assert agrees(result(versions), mean(versions))
    assert agrees(result(versions, divisor=1), mean(versions, divisor=1))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sum_into_fp32_is_not_rounded_to_16_bits(ranks):
    """What FSDP2 goes on computing with."""
    versions = gradients(torch.bfloat16, (3000,), ranks, seed=5)
    with np.errstate(all="ignore"):
        total = widen(versions[0])
        for version in versions[1:]:
            total = total + widen(version)
    assert agrees(result(versions, 1, torch.float32), total)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 8])
def test_the_mean_of_equal_fp32_values_is_exact(ranks):
    values = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32).view(np.float32)
    assert agrees(result([values] * ranks), values)


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
    """DDP's hook writes over the part of the bucket that was sent."""
    versions = gradients(torch.bfloat16, (4, 999), 1, seed=2)[0]
    sent = as_tensor(versions[1])
    received = as_tensor(versions)
    mean_in_rank_order(received, 4, sent)
    assert agrees(sent, mean(list(versions)))


def test_blocks_are_no_part_of_the_result():
    versions = gradients(torch.bfloat16, (1000,), 3, seed=4)
    with mock.patch.object(module, "BLOCK", 7):
        assert agrees(result(versions), mean(versions))
