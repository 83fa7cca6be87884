"""Prodigy against Algorithm 4 of Mishchenko and Defazio (arXiv:2306.06101), written out in FP64."""

import copy
import math

import pytest
import torch

from hf_lowprec.optim import Prodigy
from tests.support.optim.against_formula import BF16, FP16, FP32

SHAPES = ((40, 25), (7,), ())
OPTIONS = [
    {},
    {"weight_decay": 0.1, "use_bias_correction": True},
    {"safeguard_warmup": True, "d_coef": 0.5, "d0": 1e-5},
    {"betas": (0.8, 0.9), "eps": 1e-3},
]
MODES = [(BF16, "split"), (BF16, "kahan"), (BF16, "stochastic"), (FP16, "kahan")]


class Paper:
    """Algorithm 4 for some FP64 tensors. As in the authors' package, sums are in units of d0, and decay by √β2."""

    def __init__(
        self, weights, lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, use_bias_correction=False,
        safeguard_warmup=False, d0=1e-6, d_coef=1.0,
    ):  # fmt: skip
        self.weights = [weight.detach().double().clone() for weight in weights]
        self.first = [weight.clone() for weight in self.weights]
        self.means, self.squares, self.sums = ([torch.zeros_like(w) for w in self.weights] for _ in range(3))
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay
        self.corrected, self.safeguard, self.d0, self.coefficient = use_bias_correction, safeguard_warmup, d0, d_coef
        self.d, self.numerator, self.time = d0, 0.0, 0

    def step(self, grads):
        (beta1, beta2), d, self.time = self.betas, self.d, self.time + 1
        rate = d * self.lr
        if self.corrected:
            rate *= math.sqrt(1 - beta2**self.time) / (1 - beta1**self.time)
        self.numerator *= math.sqrt(beta2)
        for k, grad in enumerate(grad.double() for grad in grads):
            self.numerator += d / self.d0 * rate * (grad * (self.first[k] - self.weights[k])).sum().item()
            self.means[k] = beta1 * self.means[k] + (1 - beta1) * d * grad
            self.squares[k] = beta2 * self.squares[k] + (1 - beta2) * (d * grad) ** 2
            self.sums[k] = math.sqrt(beta2) * self.sums[k] + d / self.d0 * (d if self.safeguard else rate) * grad
            direction = self.means[k] / (self.squares[k].sqrt() + d * self.eps)
            self.weights[k] = self.weights[k] - rate * (direction + self.decay * self.weights[k])
        size = sum(total.abs().sum().item() for total in self.sums)
        self.d = max(d, self.coefficient * self.numerator / size)


def parameters(dtype=FP32):
    random = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]


def train(optimizer, papers, steps):
    """Noisy gradients of `|p - 3|²/2`, so that d grows; the same for all."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in params:
            noise = torch.randn(param.shape, generator=random)
            param.grad = (param.detach().float() - 3 + noise).to(param.dtype)
        for paper in papers:
            paper.step([param.grad for param in params])
        optimizer.step()


@pytest.mark.parametrize("backend", ["eager", "native"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_fp32_parameters_get_the_papers_formula(backend, options):
    """The gradients are those at our weights, so rounding errors do not feed on themselves.

    A step rounds its sums of FP32 numbers in 10 operations, each to 2⁻²⁴, and d multiplies with the errors of those
    before: 100 steps are 1000 roundings, 2⁻¹⁴ of d and of a way of at most 10. Measured: a seventieth.
    """
    params = parameters()
    optimizer, paper = Prodigy(params, backend=backend, **options), Paper(params, **options)
    train(optimizer, [paper], 100)
    assert paper.d > 1000 * paper.d0
    assert all(group["d"] == pytest.approx(paper.d, rel=2**-14) for group in optimizer.param_groups)
    for param, weight in zip(params, paper.weights, strict=True):
        assert (param.detach().double() - weight).abs().max() <= 10 * 2**-14


@pytest.mark.parametrize(("dtype", "rounding"), MODES)
def test_states_in_16_bits_estimate_the_same_d(dtype, rounding):
    """d is a quotient of sums over 1000 elements, whose states are off by at most 2⁻⁸ more after each of 100 steps.

    The errors are random, so each sum is off by about √(100/1000) · 2⁻⁸, 0.0012; d by four times that at most.
    Measured with four seeds: 0.0005.
    """
    params = parameters(dtype)
    optimizer, paper = Prodigy(params, rounding=rounding), Paper(params)
    train(optimizer, [paper], 100)
    assert paper.d > 1000 * paper.d0
    assert optimizer.param_groups[0]["d"] == pytest.approx(paper.d, rel=0.005)


def test_d_is_shared_by_all_groups_and_saved():
    params = parameters(BF16)
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}]
    optimizer = Prodigy(groups, rounding="split")
    train(optimizer, [], 20)
    first, second = optimizer.param_groups
    assert first["d"] == second["d"] > 1e-6
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = Prodigy([{"params": others[:1]}, {"params": others[1:]}], rounding="split")
    with pytest.warns(RuntimeWarning, match="weight_decay=0.1"):
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["d"] == first["d"]
    for each in (optimizer, resumed):
        train(each, [], 5)
    assert all(map(torch.equal, params, others))
    assert resumed.param_groups[1]["d"] == first["d"]


@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {}], ids=str)
def test_a_gradient_that_is_not_finite_leaves_d_as_it_was(options):
    params = parameters(BF16)
    optimizer = Prodigy(params, **options)
    train(optimizer, [], 10)
    before = {key: optimizer.param_groups[0][key] for key in ("d", "d_numerator")}
    for param in params:
        param.grad = torch.full_like(param, math.nan)
    optimizer.step()
    assert {key: optimizer.param_groups[0][key] for key in before} == before


def test_zero_gradients_leave_d_as_it_was():
    params = parameters(BF16)
    optimizer = Prodigy(params)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert optimizer.param_groups[0]["d"] == 1e-6


@pytest.mark.parametrize("options", [{}, {"safeguard_warmup": True, "use_bias_correction": True}], ids=str)
def test_at_lr_0_a_group_is_not_there_and_a_step_of_all_groups_is_none(options):
    """As in prodigyopt 1.1.2: neither adds to a sum or a moment, or counts."""
    (alone, idle), late = parameters(BF16)[:2], parameters(BF16)[0]
    with_idle = Prodigy([{"params": [alone]}, {"params": [idle], "lr": 0.0}], weight_decay=0.1, **options)
    delayed = Prodigy([late], weight_decay=0.1, lr=0.0, **options)
    before = idle.detach().clone()
    train(delayed, [], 3)
    delayed.param_groups[0]["lr"] = 1.0
    for step in range(30):
        for param, other in ((alone, late), (idle, None)):
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).bfloat16() + param - 3
            if other is not None:
                other.grad = param.grad.clone()
        with_idle.step()
        delayed.step()
    assert with_idle.param_groups[0]["d"] == delayed.param_groups[0]["d"] > 2e-6
    assert torch.equal(alone, late) and torch.equal(idle, before)
    assert not any(with_idle.state[idle][name].any() for name in ("exp_avg", "exp_avg_sq", "s"))


def test_gradient_release_is_refused():
    with pytest.raises(ValueError, match="excludes gradient_release=True"):
        Prodigy(parameters(), gradient_release=True)
