"""Adam: FP32 parameters against `torch.optim.Adam`, 16-bit ones against its formula in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import Adam, AdamW
from tests.support.optim.against_formula import (
    BF16,
    EPS,
    FP32,
    MODES,
    assert_rounded_once,
    displacements,
    gradients,
    parameter,
    train,
)

STEPS = 50
OPTIONS = [
    {"amsgrad": amsgrad, "decoupled_weight_decay": decoupled, "maximize": maximize, "weight_decay": decay}
    for amsgrad, (decoupled, decay), maximize in itertools.product(
        (False, True), ((False, 0.0), (False, 0.1), (True, 0.1)), (False, True)
    )
]


def fp32_bound(lr: float, largest: float) -> float:
    """Worst case of two FP32 implementations drifting apart in `STEPS` steps while their gradients are the same.

    Per step and implementation: the weight is rounded twice at most. The update lr · m̂ / √v̂: where v̂ averages g²
    evenly, |g| <= √t · √v̂ <= 7.1 √v̂ for t <= 50. m̂ sums four roundings a step (one is the decay's) of terms up to
    max|g|, ten steps deep for β1 = 0.9: 40 · 7.1; v̂ four a step over 50 steps, halved by the root, times |m̂| / √v̂:
    100 · 7.1. Together below 1000 half ulps of lr; 2048 for two implementations, with the few of the final formula.
    """
    return STEPS * EPS * (4 * largest + 2048 * lr)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("lr", "betas"), [(1e-2, (0.9, 0.999)), (torch.tensor(3e-3), (0.8, 0.95)), (1e-2, (0.0, 0.0))], ids=str
)
def test_fp32_parameters_get_torchs_adam(options, lr, betas):
    ours, theirs = parameter(), parameter()
    mine = Adam([ours], lr=lr, betas=betas, **options)
    reference = torch.optim.Adam([theirs], lr=lr, betas=betas, **options)
    for optimizer in (mine, reference):
        train(optimizer, gradients(STEPS))
    bound = fp32_bound(float(lr), theirs.abs().max().item())
    assert (ours - theirs).abs().max().item() <= bound
    assert bound <= float(lr) / 20  # a twentieth of one step: a wrong term would show
    assert set(mine.state[ours]) == set(reference.state[theirs])
    for name, value in reference.state[theirs].items():
        # Four roundings a step and implementation, of terms up to max g² < 25.
        assert (mine.state[ours][name] - value).abs().max() <= 2 * 4 * STEPS * EPS * 25, name


def formula(weight, grad, state, step, *, lr, betas, weight_decay, amsgrad, maximize, decoupled_weight_decay, eps=1e-8):
    """arXiv:1412.6980, Alg. 1, with AMSGrad (arXiv:1904.09237, Alg. 2) and decay as in torch."""
    (beta1, beta2), m, v = betas, state["exp_avg"], state["exp_avg_sq"]
    grad, reach = -grad if maximize else grad, grad.abs()
    if not decoupled_weight_decay:
        grad, reach = grad + weight_decay * weight, reach + weight_decay * weight.abs()
    first, first_size = beta1 * m + (1 - beta1) * grad, beta1 * m.abs() + (1 - beta1) * reach
    second, second_size = beta2 * v + (1 - beta2) * grad**2, beta2 * v + (1 - beta2) * reach**2
    new = {"exp_avg": (first, first_size), "exp_avg_sq": (second, second_size)}
    if amsgrad:
        second = torch.maximum(state["max_exp_avg_sq"], second)
        new["max_exp_avg_sq"] = (second, second_size)
    size = lr / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)
    update, terms = -size * first, size * first_size * (1 + second_size / second)
    if decoupled_weight_decay:
        update, terms = update - lr * weight_decay * weight, terms + lr * weight_decay * weight.abs()
    return update, new, terms


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_formula_rounded_once(dtype, rounding, state_rounding, options):
    hyper = {"lr": 1e-2, "betas": (0.9, 0.99), **options}
    assert_rounded_once(Adam, formula, dtype, rounding, state_rounding, **hyper)


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_with_decoupled_decay_it_is_adamw(rounding):
    ours, theirs = parameter(BF16), parameter(BF16)
    for cls, param, options in ((Adam, ours, {"decoupled_weight_decay": True}), (AdamW, theirs, {})):
        train(cls([param], lr=1e-2, weight_decay=0.1, rounding=rounding, **options), gradients(10, BF16))
    assert torch.equal(ours, theirs)


def test_the_penalty_alone_takes_steps_of_the_learning_rate():
    """With zero gradients m̂ / √v̂ of the penalty is the sign of the weight, whatever the decay; without it, 0 / ε.

    The first step's quotient is one to a few FP32 roundings; each further step adds a few more.
    """
    for dtype in (FP32, BF16):
        optimizer = Adam([torch.nn.Parameter(torch.tensor([1.5, -1.5], dtype=dtype))], lr=2.0**-7, weight_decay=0.01)
        (param,) = optimizer.param_groups[0]["params"]
        train(optimizer, [torch.zeros(2)])
        assert (param.detach().double().abs() - (1.5 - 2.0**-7)).abs().max() <= 16 * EPS
        still = torch.nn.Parameter(torch.tensor([1.5, -1.5], dtype=dtype))
        train(Adam([still], lr=2.0**-7), [torch.zeros(2)] * 3)
        assert still.tolist() == [1.5, -1.5]


def test_bf16_weights_follow_fp64():
    """Relative to what 1,000 steps of lr 1e-4 move FP64 weights by (1.4e-2 rms; weights of σ 0.02 are spaced 2**-13).

    - Kahan, FP32 state: a step changes the compensation, spaced 2**-22, with a deviation of half a spacing at most:
      √1000 · 2**-23 = 4e-6 in 1.4e-2, 3e-4; a factor 2 to 4 more where weights are larger. Measured 1.7e-4.
    - BF16 state: v errs by a variance of (1-β2) · v · spacing <= (1-β2) · v² · 2**-7 a step and forgets over
      1/(1-β2) steps: a deviation of √(2**-8) = 6% at most, of the step 3%. Measured 1.0e-2.
    - Stochastic: √1000 · 2**-14 = 2e-3 in 1.4e-2 for an element, 0.2% for the mean of 4,096. Measured 1.0000.
    - Nearest: a step of 3e-5 moves no weight above 2**-7, which is two thirds of them. Measured 0.46.
    """
    found = displacements(Adam, torch.optim.Adam, lr=1e-4, weight_decay=0.1)
    assert found["FP32 state"][0] <= 1e-3
    assert found["BF16 state"][0] <= 3e-2
    assert abs(found["stochastic"][1] - 1) <= 1e-2
    assert found["nearest"][1] <= 0.6
