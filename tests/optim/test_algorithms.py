"""What some algorithms do besides the steps of `test_formulas.py`: Prodigy's estimate, averages, infinite gradients."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from hf_lowprec.optim import Lion, Prodigy, ScheduleFreeAdamW
from tests.support.optim.formulas import FORMULAS

BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_first_step_of_lion_is_the_sign_of_the_gradient(dtype):
    param = nn.Parameter(torch.zeros(9, dtype=dtype))
    grad = torch.tensor([1e4, -1e4, 1e-30, -1e-30, 0.0, -0.0, math.inf, -math.inf, math.nan])
    param.grad = grad.to(dtype)
    Lion([param], lr=2.0**-7).step()
    assert (param[:-1] / -(2.0**-7)).tolist() == [1, -1, 1, -1, 0, 0, 1, -1]
    assert param[-1].isnan()


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((40, 25), (7,), ())]


def noisy_steps(optimizer: torch.optim.Optimizer, steps: int):
    """Take steps with noisy gradients of `|p - 3|²/2`, so that Prodigy's d grows; yields after each."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in params:
            param.grad = (param.detach().float() - 3 + torch.randn(param.shape, generator=generator)).to(param.dtype)
        optimizer.step()
        yield [param.grad.double() for param in params]


PRODIGY = [{}, {"weight_decay": 0.1, "use_bias_correction": True}, {"betas": (0.8, 0.9), "eps": 1e-3}]
PRODIGY += [{"safeguard_warmup": True, "d_coef": 0.5, "d0": 1e-5}]
BITS_OF_D = [(FP32, "kahan", 2**-14), (BF16, "split", 0.005), (BF16, "stochastic", 0.005), (FP16, "kahan", 0.005)]


@pytest.mark.parametrize(("dtype", "rounding", "relative_error"), BITS_OF_D)
@pytest.mark.parametrize("options", PRODIGY, ids=str)
def test_prodigy_estimates_d_as_the_paper(options, dtype, rounding, relative_error):
    """Against Algorithm 4 in FP64, which gets the gradients at our weights, so that errors do not feed on themselves.

    A step rounds its sums of FP32 numbers in 10 operations, each to 2⁻²⁴, and d multiplies with the errors of those
    before: 100 steps are 1000 roundings, 2⁻¹⁴ of d. States in BF16 are off by at most 2⁻⁸ more after each of 100 steps,
    at random: a sum over 1000 elements by about √(100/1000) · 2⁻⁸, 0.0012; d by four times that.
    """
    optimizer = Prodigy(parameters(dtype), rounding=rounding, backend="eager", error_feedback=False, **options)
    (group,) = optimizer.param_groups
    weights = [param.detach().double() for param in group["params"]]
    exact = {**group, "numerator": 0.0}
    states = [dict.fromkeys(("exp_avg", "exp_avg_sq", "s", "p0_minus_p"), torch.zeros(())) for _ in weights]
    beta1, beta2 = group["betas"]
    for step, grads in enumerate(noisy_steps(optimizer, 100), start=1):
        rate = exact["d"] * group["lr"]
        if group["use_bias_correction"]:
            rate *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
        slope = sum((grad * state["p0_minus_p"]).sum() for grad, state in zip(grads, states, strict=True)).item()
        exact["numerator"] = math.sqrt(beta2) * exact["numerator"] + exact["d"] / exact["d0"] * rate * slope
        stepped = [FORMULAS["Prodigy"](*each, step, exact) for each in zip(weights, grads, states, strict=True)]
        weights, states = map(list, zip(*stepped, strict=True))
        size = sum(state["s"].abs().sum() for state in states).item()
        exact["d"] = max(exact["d"], group["d_coef"] * exact["numerator"] / size)
    assert exact["d"] > 1000 * group["d0"]
    assert group["d"] == pytest.approx(exact["d"], rel=relative_error)


def test_d_is_shared_by_all_groups_and_saved():
    params = parameters(BF16)
    optimizer = Prodigy([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}], rounding="split")
    list(noisy_steps(optimizer, 20))
    first, second = optimizer.param_groups
    assert first["d"] == second["d"] > 1e-6
    others = [nn.Parameter(param.detach().clone()) for param in params]
    resumed = Prodigy([{"params": others[:1]}, {"params": others[1:]}], rounding="split")
    with pytest.warns(RuntimeWarning, match="weight_decay=0.1"):
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["d"] == first["d"]
    for each in (optimizer, resumed):
        list(noisy_steps(each, 5))
    assert all(map(torch.equal, params, others))
    assert resumed.param_groups[1]["d"] == first["d"]


@pytest.mark.parametrize("value", [math.nan, 0.0])
@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {}], ids=str)
def test_gradients_that_say_nothing_leave_d_as_it_was(options, value):
    optimizer = Prodigy(parameters(BF16), **options)
    list(noisy_steps(optimizer, 10 if value else 0))
    (group,) = optimizer.param_groups
    before = group["d"], group["d_numerator"]
    for param in group["params"]:
        param.grad = torch.full_like(param, value)
    optimizer.step()
    assert (group["d"], group["d_numerator"]) == before


@pytest.mark.parametrize("options", [{}, {"safeguard_warmup": True, "use_bias_correction": True}], ids=str)
def test_at_lr_0_a_group_is_not_there_and_a_step_of_all_groups_is_none(options):
    """As in prodigyopt 1.1.2: neither adds to a sum or a moment, or counts."""
    (alone, idle), late = parameters(BF16)[:2], parameters(BF16)[0]
    with_idle = Prodigy([{"params": [alone]}, {"params": [idle], "lr": 0.0}], weight_decay=0.1, **options)
    delayed = Prodigy([late], weight_decay=0.1, lr=0.0, **options)
    before = idle.detach().clone()
    list(noisy_steps(delayed, 3))
    delayed.param_groups[0]["lr"] = 1.0
    for _ in zip(noisy_steps(with_idle, 30), range(30), strict=False):
        late.grad = alone.grad.clone()
        delayed.step()
    assert with_idle.param_groups[0]["d"] == delayed.param_groups[0]["d"] > 2e-6
    assert torch.equal(alone, late) and torch.equal(idle, before)
    assert not any(with_idle.state[idle][name].any() for name in ("exp_avg", "exp_avg_sq", "s"))


SCHEDULE_FREE = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
ALL_MODES = [
    (FP32, "kahan"),
    (BF16, "split"),
    (BF16, "kahan"),
    (FP16, "kahan"),
    (BF16, "stochastic"),
    (BF16, "nearest"),
]


def schedule_free(dtype: torch.dtype = BF16, steps: int = 20, **options) -> tuple[nn.Parameter, ScheduleFreeAdamW]:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(40, 32, generator=generator).to(dtype))
    optimizer = ScheduleFreeAdamW([param], **SCHEDULE_FREE, **options)
    step(param, optimizer, range(steps))
    return param, optimizer


def step(param: Tensor, optimizer: ScheduleFreeAdamW, seeds: range) -> None:
    for seed in seeds:
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize(("dtype", "rounding"), ALL_MODES)
@pytest.mark.parametrize("state_dtype", [FP32, None, INT8])
def test_evaluation_is_of_the_averages_and_hardly_changes_training(dtype, rounding, state_dtype):
    """From y to x and back: rounded twice, to what weight and low bits hold. Most elements come back exactly."""
    if dtype == FP16 and state_dtype == INT8:
        pytest.skip("one dtype is enough")
    param, optimizer = schedule_free(dtype, rounding=rounding, state_dtype=state_dtype)
    before = param.detach().clone()
    optimizer.eval()
    optimizer.eval()  # nothing happens
    ulp = {FP32: 2**-23, BF16: 2**-7, FP16: 2**-10}[dtype] * before.abs().max()
    if state_dtype is FP32:  # x = y + (1 - 1/β1)·(z - y)
        average = before + (1 - 1 / 0.9) * optimizer.state[param]["z_minus_y"]
        assert (param.detach() - average).abs().max() <= ulp
    assert not torch.equal(param, before)
    optimizer.train()
    optimizer.train()
    assert (param.detach() != before).double().mean() < (0.5 if dtype == FP32 else 0.1)
    assert (param.detach() - before).abs().max() <= 2 * ulp


def test_no_step_is_taken_from_averages():
    param, optimizer = schedule_free()
    optimizer.eval()
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match=r"call optimizer\.train\(\) before the forward pass"):
        optimizer.step()
    assert torch.equal(param, before)
    optimizer.train()
    optimizer.step()
    assert not torch.equal(param, before)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_state_dict_says_whether_weights_are_averages(evaluated):
    param, optimizer = schedule_free(rounding="split")
    if evaluated:
        optimizer.eval()
    other = nn.Parameter(param.detach().clone())
    resumed = ScheduleFreeAdamW([other], rounding="split", **SCHEDULE_FREE)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for stepped, each in ((param, optimizer), (other, resumed)):
        each.train()
        step(stepped, each, range(20, 25))
    assert torch.equal(param, other)
    for each in (optimizer, resumed):
        each.eval()
    assert torch.equal(param, other)


@pytest.mark.parametrize("warmup", [0, 100])
def test_shares_of_the_average_are_the_papers(warmup):
    """The closed form of the sum of squared rates, over 300 steps."""
    optimizer = ScheduleFreeAdamW([nn.Parameter(torch.zeros(1))], warmup_steps=warmup)
    (group,) = optimizer.param_groups
    squares = [min(1.0, k / max(warmup, 1)) ** 2 * (1 - 0.999**k) for k in range(1, 301)]
    for t in range(1, 301):
        assert optimizer.scalars(group, 1.0, t)["share"] == pytest.approx(squares[t - 1] / sum(squares[:t]), rel=1e-9)
