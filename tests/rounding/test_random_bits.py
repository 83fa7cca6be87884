"""Random bits: a pure function of the arguments, uniform, and independent between elements, steps, roles and streams.

Every statistic has a threshold of level LEVEL = 1e-9 from the chi-square tails of Laurent & Massart (2000, Lemma 1):
P(X >= k + 2 sqrt(kx) + 2x) <= exp(-x) and P(X <= k - 2 sqrt(kx)) <= exp(-x). The module evaluates fewer than 1,000
statistics, so by Bonferroni a perfect generator would fail anywhere in it with a probability below 1e-6. The draws are
fixed by their seeds: a run never differs from the last one.
"""

import itertools
import math

import pytest
import torch

from hf_lowprec.rounding.random_bits import random_bits

LEVEL = 1e-9
BASE = {"seed": 1234, "step": 5, "parameter": 3, "role": 1}
OTHERS = [{"seed": 1235}, {"step": 6}, {"parameter": 4}, {"role": 0}, {"role": 2}, {"role": 3}, {"role": 4}]
STRIDES = [1 << k for k in range(0, 33, 4)] + [3, 1000, 50257]


def draw(index: torch.Tensor | int, **changed: int) -> torch.Tensor:
    if isinstance(index, int):
        index = torch.arange(index)
    return random_bits(**{**BASE, **changed}, index=index)


def assert_uniform(cell: torch.Tensor, cells: int) -> None:
    """Pearson's statistic of `cell` in [0, cells) is neither too large nor too small; 16 or more expected per cell."""
    expected = cell.numel() / cells
    assert expected >= 16
    counts = torch.bincount(cell.flatten().long(), minlength=cells).double()
    statistic = ((counts - expected).square().sum() / expected).item()
    freedom, x = cells - 1, math.log(2 / LEVEL)
    assert statistic <= freedom + 2 * math.sqrt(freedom * x) + 2 * x
    assert statistic >= freedom - 2 * math.sqrt(freedom * x)


def assert_independent(first: torch.Tensor, second: torch.Tensor, bits: int = 4) -> None:
    """The joint distribution of the top bits, of the bottom bits, and of the two crossed, is uniform."""
    assert first.shape == second.shape
    size = 1 << bits
    for a, b in itertools.product((first >> (16 - bits), first % size), (second >> (16 - bits), second % size)):
        assert_uniform(a * size + b, size * size)


def assert_different(first: torch.Tensor, second: torch.Tensor) -> None:
    """65,536 pairs of independent 16-bit numbers agree Poisson(1) times; more than 20 times has a chance of 1e-20."""
    assert first.numel() == second.numel() == 65_536
    assert (first == second).sum() <= 20


def test_range_dtype_and_shape():
    bits = draw(torch.arange(65_536).reshape(16, 64, 64))
    assert bits.dtype is torch.int32
    assert bits.shape == (16, 64, 64)
    assert bits.min() >= 0
    assert bits.max() < 65_536
    assert draw(torch.arange(0)).shape == (0,)
    assert draw(torch.tensor(7)).shape == ()


def test_bits_are_reproducible_and_leave_torchs_generator_alone():
    first = draw(4096)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(draw(4096), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_element_does_not_depend_on_the_rest_of_the_call():
    whole = draw(5000)
    for start, stop in [(0, 1), (17, 18), (4999, 5000), (1000, 1003), (128, 4096)]:
        assert torch.equal(draw(torch.arange(start, stop)), whole[start:stop])
    shuffled = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(shuffled), whole[shuffled])
    assert torch.equal(draw(torch.arange(9998)[::2]), draw(9998)[::2])


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_every_argument_counts(other):
    assert_different(draw(65_536), draw(65_536, **other))


def test_neighbouring_elements_differ():
    bits = draw(65_537)
    assert_different(bits[1:], bits[:-1])


SEEDS = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]


def test_seeds_of_any_sign_and_size_differ():
    drawn = [draw(65_536, seed=seed) for seed in SEEDS]
    for first, second in itertools.combinations(drawn, 2):
        assert_different(first, second)


@pytest.mark.parametrize("seed", [*SEEDS, 2**64 + 5, -(2**100), 10**30])
def test_every_seed_is_uniform(seed):
    assert_uniform(draw(1 << 18, seed=seed) >> 8, 256)


@pytest.mark.parametrize("base", [2**32, 2**32 + 1, 2**33, 2**35 + 12345, 2**40])
def test_elements_beyond_four_billion_have_their_own_bits(base):
    index = torch.arange(base, base + 65_536)
    assert_different(draw(index), draw(index % 2**32))
    assert_uniform(draw(torch.arange(base, base + (1 << 18))) >> 8, 256)


def test_no_seam_at_four_billion():
    """A range of indices across 2**32 (and across 2**31) has the bits of its two parts."""
    for seam in (2**31, 2**32):
        index = torch.arange(seam - 32_768, seam + 32_768)
        bits = draw(index)
        assert torch.equal(bits[:32_768], draw(index[:32_768]))
        assert torch.equal(bits[32_768:], draw(index[32_768:]))
        assert_different(bits, draw(65_536))
        assert_uniform(bits >> 8, 256)


@pytest.mark.parametrize("role", range(7))
@pytest.mark.parametrize("seed", [0, 1, 2**40 + 9])
def test_all_sixteen_bits_are_uniform(role, seed):
    for step in (1, 1000):
        assert_uniform(draw(1 << 20, role=role, seed=seed, step=step, parameter=0), 65_536)


@pytest.mark.parametrize("stride", STRIDES)
def test_strided_elements_are_uniform(stride):
    """A column of a matrix is as random as a row. Strides that are powers of two would reveal weak low bits."""
    for role in (0, 1, 2):
        bits = draw(torch.arange(1 << 16) * stride, role=role)
        for cell in (bits >> 8, bits % 256):
            assert_uniform(cell, 256)


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 16, 64, 255, 256, 1024, 4096, 65_536, 131_072])
@pytest.mark.parametrize("role", [0, 1, 2])
def test_elements_at_a_lag_are_independent(lag, role):
    bits = draw((1 << 18) + lag, role=role)
    assert_independent(bits[lag:], bits[:-lag])
    for combined in ((bits[lag:] - bits[:-lag]) % 65_536, bits[lag:] ^ bits[:-lag]):
        assert_uniform(combined >> 6, 1024)
        assert_uniform(combined % 1024, 1024)


@pytest.mark.parametrize("pair", list(itertools.combinations(range(5), 2)), ids=str)
def test_roles_are_pairwise_independent(pair):
    first, second = (draw(1 << 20, role=role) for role in pair)
    assert_independent(first, second, bits=8)
    assert_uniform(first ^ second, 65_536)
    assert_uniform((first - second) % 65_536, 65_536)


@pytest.mark.parametrize("name", ["seed", "step", "parameter"])
@pytest.mark.parametrize("distance", [1, 2, 16, 65_536])
def test_neighbouring_streams_are_independent(name, distance):
    first, second = draw(1 << 18), draw(1 << 18, **{name: BASE[name] + distance})
    assert_independent(first, second)
    assert_uniform((first ^ second) >> 6, 1024)
    # Nor is one stream the other one shifted by a few elements.
    for shift in (-2, -1, 1, 2):
        assert (first.roll(shift) == second).sum() <= 60  # Poisson(4)


@pytest.mark.parametrize("role", [0, 1, pytest.param(2, marks=pytest.mark.every_case)])
def test_one_element_over_consecutive_steps(role):
    """The bits that an element draws during a run: 4,096 steps of 64 elements."""
    index = torch.arange(64)
    history = torch.stack([draw(index, role=role, step=step) for step in range(1, 4097)])
    for element in range(64):
        assert_uniform(history[:, element] >> 9, 128)
    for lag in (1, 2, 3, 10):
        assert_independent(history[lag:], history[:-lag])
    # The sum over steps is what a stochastic weight accumulates: 4,096 x 64 uniform numbers, by Hoeffding.
    bound = 65_536 * math.sqrt(math.log(2 / LEVEL) / (2 * history.numel()))
    assert abs(history.double().mean().item() - 32_767.5) <= bound


def test_the_same_element_of_many_parameters():
    bits = torch.stack([draw(64, parameter=parameter) for parameter in range(4096)])
    assert_uniform(bits >> 8, 256)
    assert_independent(bits[1:], bits[:-1])
