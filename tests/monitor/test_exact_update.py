"""The exact update of a sample: against the formula on whole FP64 tensors; and measuring changes nothing."""

import functools

import pytest
import torch
from torch import nn

import hf_lowprec
from hf_lowprec.monitor.precision_monitor import PrecisionMonitor
from hf_lowprec.monitor.step_precision import COLUMN
from hf_lowprec.optim.state.states import value_in
from hf_lowprec.rounding.low_bits import fp64_value


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter((torch.randn(shape) * 0.1).to(dtype)) for shape in [(96, 160), (2, 3, 32), (50,), (7, 40)]]


def set_gradients(params, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 0.01).bfloat16().to(param.dtype)


def monitored_updates(monitor, params, optimizer) -> list[torch.Tensor]:
    """The updates that the monitor computed for the running step, by parameter."""
    updates = {}
    for block in monitor._running.blocks:
        for k, row in enumerate(block.rows):
            updates[row] = block.updates.exact.update[k, : block.samples.counts[k]], block.samples.strides[k]
    return [updates[row] for row in range(len(params))]


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic", "nearest"])
def test_updates_of_this_package_are_adamws(rounding, state_dtype):
    params = parameters(torch.bfloat16)
    options = {"rounding": rounding, "state_dtype": state_dtype}
    optimizer = hf_lowprec.AdamW(params, lr=1e-3, weight_decay=0.1, **options)
    monitor = PrecisionMonitor(optimizer)
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
        found = []
        monitor.measure_next_step()
        handle = optimizer.register_step_pre_hook(
            lambda *_, found=found: found.extend(monitored_updates(monitor, params, optimizer))
        )
        optimizer.step()
        handle.remove()
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
    monitor = PrecisionMonitor(optimizer)
    for step in range(2):
        set_gradients([param], step)
        before, found = param.detach().clone(), []
        monitor.measure_next_step()
        handle = optimizer.register_step_pre_hook(
            lambda *_, found=found: found.extend(monitored_updates(monitor, [param], optimizer))
        )
        optimizer.step()
        handle.remove()
        ((update, _),) = found
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
            PrecisionMonitor(optimizer, every=every)
            for step in range(5):
                set_gradients(params, step)
                optimizer.step()
                scheduler.step()
            results.append(torch.cat([p.detach().flatten() for p in params]))
    half = len(results) // 2
    for plain, measured in zip(results[:half], results[half:], strict=True):
        assert torch.equal(plain, measured)


class WithOwnList(torch.optim.SGD):
    """Has no states, and steps the parameters of a list of its own, in place."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.own = {"steps": [group["params"] for group in self.param_groups]}

    @torch.no_grad()
    def step(self, closure=None):
        for params in self.own["steps"]:
            for param in params:
                param.data.sub_(self.defaults["lr"] * param.grad)


def test_an_unusual_optimizer_is_watched_and_not_changed():
    """The updates are unknown; what has changed and what has not is known, and each step is taken once."""
    results = []
    for every in (0, 1):
        params = parameters(torch.bfloat16)
        optimizer = WithOwnList(params, lr=1e-2)
        monitor = PrecisionMonitor(optimizer, every=every)
        for step in range(4):
            set_gradients(params, step)
            params[1].grad.zero_()
            optimizer.step()
            assert every == 0 or monitor.last.by_tensor["param_groups[0]['params'][1]"]["never_moved"] == 1
        results.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(*results)
    assert [finding.tensors for finding in monitor.findings()] == [("param_groups[0]['params'][1]",)]
