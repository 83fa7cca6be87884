"""Kahan summation loses nothing that FP32 can hold; checked in FP64, in which every sum below is exact."""

import math

import pytest
import torch

from hf_lowprec.rounding import kahan_add, round_nearest, round_stochastic
from hf_lowprec.rounding.random_bits import random_bits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BITS = {BF16: 8, FP16: 11, FP32: 24}  # significant bits
COUNT = 50_000


def in_fp32(value: torch.Tensor) -> torch.Tensor:
    """Whether FP32 represents each of these FP64 values."""
    return value.float().double() == value


def half_ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the spacing of `dtype` at normal values."""
    return torch.exp2(torch.frexp(value.double())[1].double() - BITS[dtype] - 1)


def triples(dtype: torch.dtype, shift: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of either sign in [2**-6, 2**6), updates about 2**-shift of them, compensations up to half an ulp.

    Exponents span less than 53 bits, so FP64 adds them without error: weights are multiples of 2**-17 at least, updates
    have 24 bits from 2**-(6 + shift) down.
    """
    generator = torch.Generator().manual_seed(shift)
    uniform = torch.rand(3, COUNT, generator=generator)
    sign = torch.randint(0, 2, (3, COUNT), generator=generator) * 2.0 - 1
    weight = round_nearest(sign[0] * torch.exp2(uniform[0] * 12 - 6), dtype)
    update = sign[1] * weight * (0.5 + uniform[1]) * 2.0**-shift
    update[::2] = round_nearest(update[::2])  # short ones: their sum with the compensation mostly fits FP32
    compensation = round_nearest((sign[2] * uniform[2] * half_ulp(weight, dtype)).float(), BF16)
    return weight, update, compensation


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shift", [1, 3, 6, 8, 10, 14, 18])
def test_nothing_is_lost_where_fp32_represents_it(dtype, shift):
    weight, update, compensation = triples(dtype, shift)
    total, rest = kahan_add(weight, update, compensation, dtype)
    assert torch.equal(round_nearest(total, dtype), total)
    wanted = weight.double() + update.double() + compensation.double()
    exact = in_fp32(update.double() + compensation.double())
    # |update + compensation| <= |weight|: by Dekker's theorem y - (total - weight) then has no error of its own.
    assert torch.equal((total.double() + rest.double())[exact], wanted[exact])
    assert exact.sum() >= COUNT // 20  # the identity was tested on something
    # Elsewhere y = fl(update + compensation) is off by half an FP32 ulp of itself at most.
    allowed = half_ulp(update.double() + compensation.double(), FP32)
    assert ((total.double() + rest.double() - wanted).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shift", [-6, -3, -1])
def test_updates_larger_than_the_weight(dtype, shift):
    weight, update, compensation = triples(dtype, shift)
    total, rest = kahan_add(weight, update, compensation, dtype)
    y = update.double() + compensation.double()
    wanted = weight.double() + y
    difference = total.double() - weight.double()
    exact = in_fp32(y) & in_fp32(difference) & in_fp32(y - difference)
    assert torch.equal((total.double() + rest.double())[exact], wanted[exact])
    assert exact.sum() >= COUNT // 20


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shift", [1, 6, 10, 18])
def test_the_total_is_nearest_and_the_rest_within_half_an_ulp(dtype, shift):
    weight, update, compensation = triples(dtype, shift)
    total, rest = kahan_add(weight, update, compensation, dtype)
    y = update + compensation
    assert torch.equal(total, round_nearest(weight + y, dtype))
    # weight + y is rounded to FP32 first: another 2**-24 of the total; `frexp` gives the ulp of the total's binade.
    slack = half_ulp(total, FP32)
    assert (rest.double().abs() <= half_ulp(total, dtype) + slack).all()


def test_a_zero_update_moves_the_compensation_into_the_weight():
    weight = torch.tensor([1.0, -1.0, 0.0, 0.5, 256.0])
    compensation = torch.tensor([2**-9, -(2**-9), 2**-20, -(2**-12), 1.0])
    total, rest = kahan_add(weight, torch.zeros(5), compensation, BF16)
    assert torch.equal(total, torch.tensor([1.0, -1.0, 2**-20, 0.5, 256.0]))
    assert torch.equal(rest, torch.tensor([2**-9, -(2**-9), 0.0, -(2**-12), 1.0]))


def test_fp32_weights_can_be_compensated_too():
    weight = torch.tensor([1.0, -3.0])
    total, rest = kahan_add(weight, torch.tensor([2**-30, 2**-26]), torch.zeros(2), FP32)
    assert torch.equal(total, weight)
    assert torch.equal(rest, torch.tensor([2**-30, 2**-26]))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_nan_and_infinity_reach_the_weight(dtype):
    update = torch.tensor([math.nan, math.inf, -math.inf])
    total, _ = kahan_add(torch.ones(3), update, torch.zeros(3), dtype)
    assert total[0].isnan()
    assert total[1:].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2])
def test_long_sums_with_a_full_compensation(dtype, size):
    """4,000 random updates: each loses half an FP32 ulp of y, and |y| <= |u| + half an ulp of a weight below 8."""
    steps, lanes = 4_000, 64
    generator = torch.Generator().manual_seed(2)
    weight = round_nearest(torch.rand(lanes, generator=generator) + 0.5, dtype)
    compensation, exact = torch.zeros(lanes), weight.double()
    for _ in range(steps):
        update = (torch.rand(lanes, generator=generator) - 0.4) * size
        exact = exact + update.double()
        weight, compensation = kahan_add(weight, update, compensation, dtype)
    assert exact.abs().max() < 8
    largest_y = size + 8 * 2.0 ** -BITS[dtype]
    error = (weight.double() + compensation.double() - exact).abs().max()
    assert error <= steps * largest_y * 2.0**-24


def stored_sum(stochastic: bool, steps: int, lanes: int, update: float) -> torch.Tensor:
    """The sum of equal updates of weights of 0.75, with the compensation stored as BF16."""
    weight, compensation = torch.full((lanes,), 0.75), torch.zeros(lanes)
    for step in range(1, steps + 1):
        weight, compensation = kahan_add(weight, torch.full((lanes,), update), compensation, BF16)
        if stochastic:
            bits = random_bits(seed=0, step=step, parameter=0, role=0, index=torch.arange(lanes))
            compensation = round_stochastic(compensation, bits)
        else:
            compensation = round_nearest(compensation)
    return weight.double() + compensation.double() - 0.75


def test_a_compensation_rounded_to_nearest_stalls_and_a_stochastic_one_does_not():
    """Weights in [0.5, 1): the compensation grows to 2**-9, where BF16 is spaced 2**-17.

    Nearest: it stops for good where half its spacing exceeds the update of 1e-6, i.e. from 2**-11 on (spacing 2**-18,
    half of it 1.9e-6): at 4.9e-4 instead of 5e-3. Stochastic: each rounding errs by a mean of 0 and at most one
    spacing with probability p(1-p), a standard deviation of sqrt(u · spacing) <= sqrt(1e-6 · 2**-17) = 2.8e-6 each;
    over 5,000 steps and 256 lanes 1.2e-5 for the mean. Seven of them stay below 2% of 5e-3.
    """
    steps, lanes, update = 5_000, 256, 1e-6
    expected = steps * update
    assert (stored_sum(False, steps, 1, update) <= 2.0**-11).all()
    mean = stored_sum(True, steps, lanes, update).mean().item()
    assert abs(mean - expected) <= 7 * math.sqrt(steps * update * 2.0**-17 / lanes)
    assert 7 * math.sqrt(steps * update * 2.0**-17 / lanes) < 0.02 * expected
