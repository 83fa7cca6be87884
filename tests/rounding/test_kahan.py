"""Kahan summation loses nothing that FP32 can hold; checked in FP64, in which every sum below is exact."""

import math

import pytest
import torch

from hf_lowprec.rounding import kahan_add, round_nearest

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


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_nan_and_infinity_reach_the_weight(dtype):
    update = torch.tensor([math.nan, math.inf, -math.inf])
    total, _ = kahan_add(torch.ones(3), update, torch.zeros(3), dtype)
    assert total[0].isnan()
    assert total[1:].tolist() == [math.inf, -math.inf]
