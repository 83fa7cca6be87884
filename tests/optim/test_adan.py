"""Adan: against the paper's algorithm in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import Adan
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
    {"maximize": maximize, "weight_decay": decay, "no_prox": no_prox}
    for maximize, (decay, no_prox) in itertools.product((False, True), ((0.0, False), (1.0, False), (1.0, True)))
]
BETAS = (0.98, 0.92, 0.99)


class PaperAdan:
    """arXiv:2208.06677, Alg. 1 without restarts, in FP64.

    Betas are one minus the paper's, moments start at zero and are bias-corrected, and the first difference is zero, all
    as in the authors' code.
    """

    def __init__(self, params, lr, betas=BETAS, eps=1e-8, weight_decay=0.0, maximize=False, no_prox=False):
        self.param_groups = [{"params": list(params)}]
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.maximize, self.no_prox = maximize, no_prox
        self.m = self.v = self.n = torch.zeros_like(self.param_groups[0]["params"][0], requires_grad=False)
        self.previous, self.k = None, 0

    @torch.no_grad()
    def step(self):
        (param,), (b1, b2, b3) = self.param_groups[0]["params"], [1 - beta for beta in self.betas]
        assert param.dtype is FP64
        self.k += 1
        grad = -param.grad if self.maximize else param.grad.clone()
        difference = grad - grad if self.previous is None else grad - self.previous
        self.previous = grad
        self.m = (1 - b1) * self.m + b1 * grad
        self.v = (1 - b2) * self.v + b2 * difference
        self.n = (1 - b3) * self.n + b3 * (grad + (1 - b2) * difference) ** 2
        m, v, n = (x / (1 - beta**self.k) for x, beta in zip((self.m, self.v, self.n), self.betas, strict=True))
        change = self.lr / (n.sqrt() + self.eps) * (m + (1 - b2) * v)
        decay = self.lr * self.weight_decay
        param.copy_((1 - decay) * param - change if self.no_prox else (param - change) / (1 + decay))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("betas", [BETAS, (0.9, 0.5, 0.95), (0.0, 0.0, 0.0)], ids=str)
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_fp32_parameters_get_the_papers_adan(options, betas, eps):
    """Worst case of FP32 drifting from FP64 on equal gradients, in half ulps of lr per step:

    Where n̂ averages (g + β2·δ)² evenly, |g + β2·δ| <= √t · √n̂ and by induction |g| <= √t · √n̂ <= 7.1 √n̂, |δ| <= 14 √n̂
    for t <= 50. m̂ sums three roundings a step, fifty steps deep: 150 · 7.1; v̂ three, twelve deep: 36 · 14; n̂ three a
    step and six of its square, halved by the root: 81 · (7.1 + 14). Together below 3300; 4096 with those of the final
    formula. Beside them the weight is rounded once a step, and its decay of lr · |w| three times.
    """
    lr = 1e-2
    ours, exact = parameter(), torch.nn.Parameter(parameter().double())
    mine, paper = (
        cls([param], lr=lr, betas=betas, eps=eps, **options) for cls, param in ((Adan, ours), (PaperAdan, exact))
    )
    for optimizer in (mine, paper):
        train(optimizer, gradients(STEPS))
    bound = STEPS * EPS * (2 * exact.abs().max().item() + 4096 * lr)
    assert (ours.double() - exact).abs().max().item() <= bound <= lr / 20
    state = mine.state[ours]
    assert torch.equal(state["previous_grad"].double(), paper.previous)
    for name, value, largest in (("exp_avg", paper.m, 5), ("exp_avg_diff", paper.v, 10), ("exp_avg_sq", paper.n, 225)):
        assert (state[name] - value).abs().max() <= 6 * STEPS * EPS * largest, name


def test_the_proximal_decay_is_not_the_decoupled_one():
    """Without gradients ten steps leave 1/1.05 or 0.95 of the weight each, and the moments are zero."""
    for dtype, (no_prox, left) in itertools.product((FP32, BF16), ((False, 1 / 1.05), (True, 0.95))):
        param = torch.nn.Parameter(torch.full((64,), 1.5, dtype=dtype))
        optimizer = Adan([param], lr=0.1, weight_decay=0.5, no_prox=no_prox, **TEXTBOOK)
        train(optimizer, [torch.zeros(64)] * 10)
        # BF16: the rest is 2**-8 at most, decays only once it is in the weight, and is stored to 2**-8 of itself.
        bound = 10 * (0.05 * 2.0**-8 + 2.0**-16) if dtype is BF16 else 10 * 8 * EPS
        assert ((estimate(optimizer) - 1.5 * left**10).abs() <= bound).all()
        assert not any(optimizer.state[param][name].any() for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq"))


def formula(weight, grad, state, step, *, lr, betas, weight_decay, maximize, no_prox, eps=1e-8):
    """One step of it, with the sizes of its terms."""
    (beta1, beta2, beta3), grad = betas, -grad if maximize else grad
    m, v, n, previous = (state[name] for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad"))
    difference = grad - previous if step > 1 else torch.zeros_like(grad)
    apart = (grad.abs() + previous.abs()) * (step > 1)
    new_m, m_size = beta1 * m + (1 - beta1) * grad, beta1 * m.abs() + (1 - beta1) * grad.abs()
    new_v, v_size = beta2 * v + (1 - beta2) * difference, beta2 * v.abs() + (1 - beta2) * apart
    new_n = beta3 * n + (1 - beta3) * (grad + beta2 * difference) ** 2
    n_size = beta3 * n + (1 - beta3) * (grad.abs() + beta2 * apart) ** 2
    scale = lr / ((new_n / (1 - beta3**step)).sqrt() + eps)
    change = scale * (new_m / (1 - beta1**step) + beta2 * new_v / (1 - beta2**step))
    size = scale * (m_size / (1 - beta1**step) + beta2 * v_size / (1 - beta2**step)) * (1 + n_size / new_n)
    decay = lr * weight_decay
    new_weight = (1 - decay) * weight - change if no_prox else (weight - change) / (1 + decay)
    states = {"exp_avg": (new_m, m_size), "exp_avg_diff": (new_v, v_size), "exp_avg_sq": (new_n, n_size)}
    return new_weight - weight, {**states, "previous_grad": (grad, 0 * grad)}, size + decay * weight.abs()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_formula_rounded_once(dtype, rounding, state_rounding, options):
    hyper = {"lr": 1e-2, "betas": BETAS, **options}
    assert_rounded_once(Adan, formula, dtype, rounding, state_rounding, **hyper)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_first_step_knows_no_difference(dtype):
    """m̂ = g and √n̂ = |g|: the step is lr against the sign of the gradient."""
    grad = torch.tensor([4.0, -4.0, 0.25, -0.25, 0.0])
    param = torch.nn.Parameter(torch.zeros(5, dtype=dtype))
    optimizer = Adan([param], lr=2.0**-7, eps=1e-30)
    train(optimizer, [grad])
    assert (param.detach().float() + 2.0**-7 * grad.sign()).abs().max() <= 2.0**-7 * 2.0**-9
    assert not optimizer.state[param]["exp_avg_diff"].any()
    assert torch.equal(optimizer.state[param]["previous_grad"].float(), grad)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_are_kept_to_the_nearest_bf16(dtype):
    param = parameter(BF16)
    param.grad_dtype = dtype
    optimizer = Adan([param], state_rounding="stochastic")
    for grad in gradients(3, dtype):
        param.grad = grad
        optimizer.step()
        assert torch.equal(optimizer.state[param]["previous_grad"], grad.to(BF16))


def test_bf16_weights_follow_fp64():
    """Relative to what 1,000 steps of lr 1e-4 move FP64 weights by (1.2e-2 rms; weights of σ 0.02 are spaced 2**-13).

    - Kahan, FP32 state: a step changes the compensation, spaced 2**-22, with a deviation of half a spacing at most:
      √1000 · 2**-23 = 4e-6 in 1.2e-2, 3e-4; a factor 2 to 4 more where weights are larger. Measured 2.0e-4.
    - BF16 state: n errs by √(2**-8) = 6% at most, the step by 3% (see `test_adam.py`), the momentum at β1 = 0.98 by
      half a spacing over √25 steps, 1% of it. Both forget within 100 steps, so that the sum of 1,000 errs by a third
      of that. Measured 6.6e-3.
    - Stochastic: √1000 · 2**-14 = 2e-3 in 1.2e-2 for an element, 0.3% for the mean of 4,096. Measured 0.9994.
    - Nearest: a step of 2e-5 moves no weight above 2**-7, which is two thirds of them. Measured 0.24.
    """
    found = displacements(Adan, PaperAdan, lr=1e-4, weight_decay=0.1)
    assert found["FP32 state"][0] <= 1e-3
    assert found["BF16 state"][0] <= 1.5e-2
    assert abs(found["stochastic"][1] - 1) <= 1e-2
    assert found["nearest"][1] <= 0.5
