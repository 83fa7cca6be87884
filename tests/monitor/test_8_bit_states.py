"""Measurements of steps with second moments in 8 bits: their decay arrives."""

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.rounding.block_floats import BLOCK, code_spacing, decode, encode, intended_bias

INT8, BF16 = torch.int8, torch.bfloat16


def set_gradients(params, step: int, scale: float = 1e-2) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        spread = 10.0 ** torch.randint(-3, 1, param.shape, generator=generator)
        param.grad = (torch.randn(param.shape, generator=generator) * spread * scale).bfloat16()


@pytest.mark.parametrize(("beta2", "precision"), [(0.95, 0.01), (0.999, 0.04)])
def test_the_decay_of_second_moments_arrives(beta2, precision):
    """Large gradients, then zeros: all of them decay, by less than a spacing of 8 bits."""
    param = nn.Parameter(torch.full((2048, 64), 1.0, dtype=BF16))
    optimizer = hf_lowprec.AdamW([param], betas=(0.9, beta2), rounding="stochastic", state_dtype=INT8)
    set_gradients([param], 0)
    optimizer.step()
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    lost, variance = 0.0, 0.0
    for _ in range(20):
        param.grad = torch.zeros_like(param)
        monitor.measure_next_step()
        optimizer.step()
        numbers = monitor.last.by_kind["all"]
        share, error = numbers["lost_second_moment"], numbers["lost_second_moment_error"]
        assert abs(share) < 5 * error
        lost, variance = lost + share / 20, variance + (error / 20) ** 2
        assert "second_moment_frozen" not in [finding.code for finding in monitor.findings()]
    # Steps are independent. The bias that is intended would seem to be a loss of some 3%.
    assert abs(lost) < 3 * variance**0.5
    assert variance**0.5 < precision


@pytest.mark.parametrize(("ratio", "share"), [(1e3, 0.0), (1e7, 1.0)])
def test_moments_that_stay_far_below_their_neighbours_are_found(ratio, share):
    """One gradient of each block is larger by `ratio`. Below 40 octaves, second moments cannot decay at all."""
    param = nn.Parameter(torch.zeros(256, 2 * BLOCK, dtype=BF16))
    optimizer = hf_lowprec.AdamW([param], betas=(0.9, 0.95), state_dtype=INT8)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    for step in range(100):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).bfloat16() * 1e-3
        param.grad[:, ::BLOCK] = ratio * 1e-3
        if step == 99:
            monitor.measure_next_step()
        optimizer.step()
    numbers = monitor.last.by_kind["all"]
    assert abs(numbers["lost_second_moment"] - share) < 5 * numbers["lost_second_moment_error"]
    found = [finding.message for finding in monitor.findings() if finding.code == "second_moment_frozen"]
    assert ["state_dtype=exp_avg:int8|exp_avg_sq:bfloat16" in message for message in found] == [True] * int(share)


def test_spacing_and_bias_are_those_of_the_codes():
    code = torch.arange(1, 256, dtype=torch.int32)
    scale = torch.full_like(code, 120)
    values = decode(code, scale, nonnegative=True).double()
    distances = code_spacing(code, scale, nonnegative=True).double()
    assert torch.equal(distances[1:], values.diff())
    assert distances[0] == distances[1]
    # All draws at nine places between a code and the one below, in blocks whose largest element keeps the scale.
    largest = 2.0 ** (120 - 127) * 1.5
    for number in (40, 70, 130, 200):
        below, above = values[number - 2], values[number - 1]
        exact = (below + (above - below) * torch.arange(1, 10) / 10).float()
        block = torch.cat([exact, torch.zeros(BLOCK - 10), torch.tensor([largest])])
        draws = torch.arange(1 << 16, dtype=torch.int32).repeat_interleave(BLOCK)
        rounded = decode(*encode(block.repeat(1 << 16), draws, nonnegative=True), nonnegative=True)
        rounded, exact = rounded.view(-1, BLOCK)[:, :9].double(), exact.double()
        expected = intended_bias((above - exact) * (exact - below), exact)
        error = ((rounded - exact).mean(0) - expected).abs()
        # Draws have 16 bits. The draw from which on a number is rounded up is that of the skewed random number,
        # which makes the bias c·d·|1-2f| larger or smaller, where c = 9/32 and d is a quarter or less.
        assert (error < 2.0**-14 * (above - below) + 9 / 32 / 4 * expected).all()
