"""The exact update of a sample: against the formula on whole FP64 tensors; its error bar; second moments in 8 bits; and
measuring changes nothing."""

import functools

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.monitor.step_precision import COLUMN
from hf_lowprec.optim.state.states import value_in
from hf_lowprec.rounding.block_floats import BLOCK
from hf_lowprec.rounding.low_bits import fp64_value

INT8, BF16 = torch.int8, torch.bfloat16


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter((torch.randn(shape) * 0.1).to(dtype)) for shape in [(96, 160), (2, 3, 32), (50,), (7, 40)]]


def set_gradients(params, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 0.01).bfloat16().to(param.dtype)


def measured_step(monitor, params) -> list[tuple[torch.Tensor, int]]:
    """Take a step; the sampled exact updates of each parameter, and the spacing of its sample."""
    found = {}

    def look(*_) -> None:
        for block in monitor._running.blocks:
            for k, row in enumerate(block.rows):
                sample = block.updates.exact.update[k, : block.samples.counts[k]]
                found[row] = sample.clone(), block.samples.strides[k]

    monitor.measure_next_step()
    handle = monitor.optimizer.register_step_pre_hook(look)
    monitor.optimizer.step()
    handle.remove()
    return [found[row] for row in range(len(params))]


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic", "nearest"])
def test_updates_of_this_package_are_adamws(rounding, state_dtype):
    params = parameters(torch.bfloat16)
    options = {"rounding": rounding, "state_dtype": state_dtype}
    optimizer = hf_lowprec.AdamW(params, lr=1e-3, weight_decay=0.1, **options)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    for step in range(3):
        set_gradients(params, step)
        expected = []
        for param in params:
            state = optimizer.state[param]
            m, v = (value_in(state, name).double() if state else 0.0 for name in ("exp_avg", "exp_avg_sq"))
            g, t = param.grad.double(), step + 1
            # Split weights decay as their masters do, which differ from them by half a spacing.
            w = fp64_value(param.detach(), state.get("remainder"))
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            denominator = (v / (1 - 0.999**t)).sqrt() + 1e-8
            expected.append(-1e-3 * (m / (1 - 0.9**t) / denominator + 0.1 * w))
        found = measured_step(monitor, params)
        for whole, (sample, stride) in zip(expected, found, strict=True):
            # A dozen FP32 operations, each off by at most 2^-24; a sum may cancel half of a term.
            torch.testing.assert_close(sample, whole.flatten()[::stride], rtol=2**-18, atol=1e-9)


def ulps(value: torch.Tensor) -> torch.Tensor:
    """The spacing of BF16 numbers at `value`; 0 at 0."""
    return torch.where(value == 0, 0.0, torch.exp2(torch.frexp(value.double())[1].double() - 8))


ROUNDED = {
    "stochastic": lambda weight, state: ulps(weight),
    "kahan": lambda weight, state: ulps(state["compensation"]),
}
"""The spacing of what a step rounds stochastically, by mode: the weight or the compensation."""


@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic", "nearest"])
def test_the_error_bar_is_that_of_the_numbers_that_are_rounded(rounding, state_rounding):
    """All 64 elements are sampled. Rounding to nearest is not random, so it has no such error."""
    param = nn.Parameter((torch.randn(64, generator=torch.Generator().manual_seed(0)) * 0.1).bfloat16())
    optimizer = hf_lowprec.AdamW([param], lr=1e-3, rounding=rounding, state_rounding=state_rounding)
    monitor = hf_lowprec.PrecisionMonitor(optimizer)
    for step in range(2):
        set_gradients([param], step)
        before = param.detach().clone()
        ((update, _),) = measured_step(monitor, [param])
        expected = torch.zeros((), dtype=torch.float64)
        if rounding in ROUNDED and not (rounding == "kahan" and state_rounding == "nearest"):
            grid = ROUNDED[rounding](before, optimizer.state[param])
            away = torch.where(grid == 0, 0.0, update.abs() % grid)
            expected = (update.square() * away * (grid - away)).sum()
        sums = monitor.last.sums[0, COLUMN["update_unbiased_variance"]]
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0.0)


def test_a_measured_run_is_the_run_bit_for_bit():
    results = []
    for every in (0, 1):
        in_8_bits = functools.partial(hf_lowprec.AdamW, weight_decay=0.1, state_dtype=torch.int8)
        for make in (hf_lowprec.AdamW, in_8_bits, torch.optim.AdamW, torch.optim.SGD):
            params = parameters(torch.bfloat16)
            optimizer = make(params, lr=1e-3)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)  # replaces `optimizer.step`
            hf_lowprec.PrecisionMonitor(optimizer, every=every)
            for step in range(5):
                set_gradients(params, step)
                optimizer.step()
                scheduler.step()
            results.append(torch.cat([p.detach().flatten() for p in params]))
    half = len(results) // 2
    for plain, measured in zip(results[:half], results[half:], strict=True):
        assert torch.equal(plain, measured)


@pytest.mark.parametrize(("beta2", "precision"), [(0.95, 0.01), (0.999, 0.04)])
def test_the_decay_of_second_moments_arrives(beta2, precision):
    """Large gradients, then zeros: all of them decay, by less than a spacing of 8 bits."""
    param = nn.Parameter(torch.full((2048, 64), 1.0, dtype=BF16))
    optimizer = hf_lowprec.AdamW([param], betas=(0.9, beta2), rounding="stochastic", state_dtype=INT8)
    generator = torch.Generator().manual_seed(0)
    spread = 1e-2 * 10.0 ** torch.randint(-3, 1, param.shape, generator=generator)
    param.grad = (torch.randn(param.shape, generator=generator) * spread).bfloat16()
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
