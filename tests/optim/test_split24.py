"""Master weights of 24 bits: a BF16 weight and an int8 remainder, rounded stochastically."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.optim import AdamW
from hf_lowprec.rounding import join
from hf_lowprec.rounding.low_bits import fp32_value, stored_pair
from hf_lowprec.rounding.modes import MODES
from hf_lowprec.rounding.random_bits import random_bits
from tests.support.random_numbers import randn

BF16, FP32, INT8, INT32 = torch.bfloat16, torch.float32, torch.int8, torch.int32
MODE = MODES["split24"]
UNIT = 1 << 8
"""The distance between bit patterns of neighbouring master weights."""


def floats(pattern: torch.Tensor) -> torch.Tensor:
    return pattern.to(INT32).view(FP32)


def patterns(value: torch.Tensor) -> torch.Tensor:
    return value.view(INT32).long()


def step_with_bits(master: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored pair after a step of size zero from FP32 `master`, with given 16 random bits."""
    zero = torch.full_like(master, -0.0)  # which leaves zeros their sign
    weight, new = MODE.add(master, zero, {}, lambda role: bits.int(), BF16)
    return weight, new["remainder8"]


def test_every_master_of_24_bits_survives():
    """All 2^24 patterns, whatever the random bits: they have no low bits to round."""
    for sign in (0, -(1 << 31)):
        pattern = torch.arange(0, 0x7F800000 + UNIT, UNIT, dtype=torch.int64) + sign
        master = floats(pattern)
        weight, remainder = step_with_bits(master, torch.full_like(pattern, 0xFFFF))
        assert torch.equal(weight.to(BF16).float(), weight)
        assert torch.equal(remainder.to(INT8).int(), remainder)
        again = MODE.load(weight, {"remainder8": remainder})
        assert torch.equal(again.view(INT32), master.view(INT32))
        assert torch.equal(fp32_value(weight.to(BF16), remainder.to(INT8)).view(INT32), master.view(INT32))


@pytest.mark.parametrize("upper", [0x3F800000, 0x3F7FFF00, 0x00000000, 0x7F7FFE00, 0x34ABCD00])
def test_rounding_is_unbiased(upper):
    """Of the 256 values of the random bits that count, as many round up as the low bits say."""
    low = torch.arange(UNIT).repeat_interleave(UNIT)
    bits = torch.arange(UNIT).repeat(UNIT) << 8
    weight, remainder = step_with_bits(floats(upper + low), bits)
    rounded = patterns(MODE.load(weight, {"remainder8": remainder}))
    ups = (rounded - upper).view(UNIT, UNIT)
    assert set(ups.unique().tolist()) == {0, UNIT}
    assert torch.equal((ups == UNIT).sum(1), torch.arange(UNIT))


def test_special_values():
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(FP32).max])
    for bits in (0, 0xFFFF):
        weight, remainder = step_with_bits(special, torch.full((len(special),), bits))
        again = MODE.load(weight, {"remainder8": remainder})
        assert torch.equal(again[:4].view(INT32), special[:4].view(INT32))
        assert again[4].isnan()
        # The largest FP32 number lies between the largest with 24 bits and infinity.
        assert again[5] == (torch.inf if bits else floats(torch.tensor(0x7F7FFF00)))


def test_a_stored_pair_has_the_weight_of_a_cast():
    """Whatever FP32 numbers a model is loaded with, and with whatever dither: except ties, which split differently."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1 << 16, generator=generator)
    value = torch.cat((value, floats(0x3F800000 + torch.arange(1 << 17))))
    value = value[(value.view(INT32) & 0xFFFF) != 0x8000]
    weight, remainder = stored_pair(value, BF16, INT8)
    assert torch.equal(weight, value.to(BF16))
    distance = (patterns(fp32_value(weight, remainder)) - patterns(value)).abs()
    near_tie = (patterns(value) & 0xFFFF) - 0x8000
    assert (distance <= torch.where((near_tie < 0) & (near_tie > -UNIT // 2), UNIT - 1, UNIT // 2)).all()


def master(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    return join(param.detach().float(), optimizer.state[param]["remainder8"].int() << 8)


def test_a_step_is_that_of_fp32_rounded_by_the_upper_random_bits_of_role_0(any_backend):
    """The rounding in integers: random bits are added to the pattern of the FP32 weight, and 8 bits are cut off."""
    sizes = (100, 37)
    ours = [nn.Parameter(randn(size, seed=size).to(BF16)) for size in sizes]
    exact = [nn.Parameter(param.detach().float()) for param in ours]
    options = {"lr": 1e-3, "backend": any_backend}
    pair = (
        AdamW(ours, rounding="split24", seed=5, state_dtype=FP32, initial_compensation="zero", **options),
        AdamW(exact, **options),
    )
    for step in range(1, 4):
        for optimizer, params in zip(pair, (ours, exact), strict=True):
            for param in params:
                grad = randn(len(param), seed=step)
                param.grad = grad.to(BF16).to(param.dtype)
            optimizer.step()
        for number, (param, reference) in enumerate(zip(ours, exact, strict=True)):
            index = torch.arange(len(param))
            bits = random_bits(seed=5, step=step, parameter=number, role=0, index=index).long() >> 8
            expected = (patterns(reference.detach()) + bits) & -UNIT
            assert torch.equal(patterns(master(pair[0], param)), expected)
            with torch.no_grad():
                reference.copy_(floats(expected))  # the next step begins with it


def test_the_weight_is_the_nearest_to_its_master(any_backend):
    param = nn.Parameter(randn(1000, seed=2).to(BF16))
    optimizer = AdamW([param], lr=1e-2, rounding="split24", backend=any_backend)
    for step in range(5):
        param.grad = randn(1000, seed=step).to(BF16)
        optimizer.step()
        exact = master(optimizer, param).double()
        bits = param.detach().view(torch.int16)
        for neighbour in (-1, 1):
            other = (bits + neighbour).view(BF16).double()
            assert ((param.detach().double() - exact).abs() <= (other - exact).abs()).all()


@pytest.mark.parametrize("state_dtype", [None, torch.int8])
def test_bytes(state_dtype):
    """2 for the weight, 1 for the remainder, 2 for the gradient; 4 or 2 and a sixteenth for the moments."""
    model = nn.Linear(64, 64, bias=False).to(BF16)
    optimizer = AdamW(model.parameters(), rounding="split24", state_dtype=state_dtype)
    param = model.weight
    param.grad = randn(64, 64, seed=0).to(BF16)
    optimizer.step()
    tensors = [param, param.grad, *(value for name, value in optimizer.state[param].items() if name != "step")]
    assert sum(tensor.nbytes for tensor in tensors) == param.numel() * (9 if state_dtype is None else 7 + 1 / 16)


def test_only_bf16_weights_are_split():
    with pytest.raises(ValueError, match=r"rounding='split24' in param group 0 does not support torch\.float16"):
        AdamW([nn.Parameter(torch.ones(2, 2, dtype=torch.float16))], rounding="split24")


def test_a_name_of_its_own():
    cls, arguments = hf_lowprec.optimizer_factory("adamw_bf16_split24")
    assert (cls, arguments) == (AdamW, {"rounding": "split24"})
