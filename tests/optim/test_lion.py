"""Lion: against the paper's algorithm in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import Lion
from tests.support.optim.against_formula import (
    BF16,
    EPS,
    FP32,
    FP64,
    MODES,
    TEXTBOOK,
    assert_rounded_once,
    displacements,
    estimate,
    gradients,
    parameter,
    train,
)

STEPS = 50
OPTIONS = [
    {"maximize": maximize, "weight_decay": decay} for maximize, decay in itertools.product((False, True), (0, 1.0))
]


class PaperLion:
    """arXiv:2302.06675, Alg. 2, in FP64."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        self.param_groups = [{"params": list(params)}]
        self.lr, self.betas, self.weight_decay, self.maximize = lr, betas, weight_decay, maximize
        self.momentum = torch.zeros_like(self.param_groups[0]["params"][0], requires_grad=False)
        self.closest = float("inf")  # the smallest number that a sign was taken of

    @torch.no_grad()
    def step(self):
        (param,), (beta1, beta2) = self.param_groups[0]["params"], self.betas
        assert param.dtype is FP64
        grad = -param.grad if self.maximize else param.grad
        direction = beta1 * self.momentum + (1 - beta1) * grad
        self.closest = min(self.closest, direction.abs().min().item())
        param -= self.lr * (direction.sign() + self.weight_decay * param)
        self.momentum = beta2 * self.momentum + (1 - beta2) * grad


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.9), (0.0, 0.0)], ids=str)
def test_fp32_parameters_get_the_papers_lion(options, betas):
    """A step rounds the weight once and its own terms, of lr and lr · |w|, three times each."""
    lr = 1e-2
    ours, exact = parameter(), torch.nn.Parameter(parameter().double())
    mine, paper = Lion([ours], lr=lr, betas=betas, **options), PaperLion([exact], lr, betas, **options)
    for optimizer in (mine, paper):
        train(optimizer, gradients(STEPS))
    # Four roundings a step of terms up to 5, all fifty steps deep: no sign is a matter of rounding.
    assert paper.closest > 4 * 5 * EPS
    bound = STEPS * EPS * (exact.abs().max().item() * (1 + 3 * lr) + 4 * lr)
    assert (ours.double() - exact).abs().max().item() <= bound <= lr / 20
    assert (mine.state[ours]["exp_avg"] - paper.momentum).abs().max() <= 4 * STEPS * EPS * 5


def formula(weight, grad, state, step, *, lr, betas, weight_decay, maximize):
    """The same, with the sizes of its terms."""
    (beta1, beta2), m, grad = betas, state["exp_avg"], -grad if maximize else grad
    update = -lr * ((beta1 * m + (1 - beta1) * grad).sign() + weight_decay * weight)
    size = beta2 * m.abs() + (1 - beta2) * grad.abs()
    return update, {"exp_avg": (beta2 * m + (1 - beta2) * grad, size)}, lr * (1 + weight_decay * weight.abs())


def undecided(weight, grad, state, *, lr, betas, weight_decay, maximize):
    """Where FP32 may see another sign: three roundings of each term."""
    terms = betas[0] * state["exp_avg"], (1 - betas[0]) * (-grad if maximize else grad)
    unclear = sum(terms).abs() <= 4 * EPS * sum(map(torch.abs, terms))
    assert unclear.sum() <= 2
    return unclear


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_formula_rounded_once(dtype, rounding, state_rounding, options):
    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), **options}
    assert_rounded_once(Lion, formula, dtype, rounding, state_rounding, undecided, **hyper)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_first_step_is_the_sign_of_the_gradient(dtype):
    grad = torch.tensor([1e4, -1e4, 1e-30, -1e-30, 0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    param = torch.nn.Parameter(torch.zeros(9, dtype=dtype))
    train(Lion([param], lr=2.0**-7), [grad])
    assert (param[:-1] / -(2.0**-7)).tolist() == [1, -1, 1, -1, 0, 0, 1, -1]
    assert param[-1].isnan()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_without_gradients_the_weight_decays_and_nothing_else(dtype):
    param = torch.nn.Parameter(torch.full((64,), 1.5, dtype=dtype))
    optimizer = Lion([param], lr=0.1, weight_decay=0.5, **TEXTBOOK)
    train(optimizer, [torch.zeros(64)] * 10)
    # BF16: the rest is 2**-8 at most, decays only once it is in the weight, and is stored to 2**-8 of itself.
    bound = 10 * (0.05 * 2.0**-8 + 2.0**-16) if dtype is BF16 else 10 * 8 * EPS
    assert ((estimate(optimizer) - 1.5 * 0.95**10).abs() <= bound).all()
    assert not optimizer.state[param]["exp_avg"].any()


def test_bf16_weights_follow_fp64():
    """Relative to what 1,000 steps of lr 1e-4 move FP64 weights by (8e-2 rms).

    - Kahan, FP32 state: a step changes the compensation, spaced 2**-21 for weights around 0.06, with a deviation of
      half a spacing at most: √1000 · 2**-22 = 8e-6 in 8e-2, 1e-4. Measured 6e-5.
    - BF16 state: at 0.3 a momentum is spaced 2**-9; half of that a step, over √50 steps, is a deviation of 0.007. The
      direction is spread over 0.1 to 0.3: a sign in a hundred comes out wrong, either way, and moves by 2 · lr:
      2 · √(1000 / 100) · 1e-4 = 6e-4 in 8e-2, 8e-3. Measured 4.1e-3.
    - Stochastic: √1000 · 2**-13 = 4e-3 in 8e-2 for an element, 0.08% for the mean of 4,096. Measured 1.0004.
    - Nearest: a step of 1e-4 moves no weight above 2**-5. Measured 0.32.
    """
    found = displacements(Lion, PaperLion, lr=1e-4, weight_decay=0.1)
    assert found["FP32 state"][0] <= 5e-4
    assert found["BF16 state"][0] <= 1.2e-2
    assert abs(found["stochastic"][1] - 1) <= 5e-3
    assert found["nearest"][1] <= 0.5
