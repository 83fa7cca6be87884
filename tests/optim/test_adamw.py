"""AdamW: FP32 parameters against `torch.optim.AdamW`, 16-bit ones against the paper's formula in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import AdamW
from tests.support.optim.against_formula import (
    EPS,
    FP16,
    MODES,
    assert_rounded_once,
    assert_update_is_not_rounded,
    gradients,
    parameter,
    train,
)

OPTIONS = [
    {"amsgrad": amsgrad, "maximize": maximize, "weight_decay": decay}
    for amsgrad, maximize, decay in itertools.product((False, True), (False, True), (0.0, 0.1))
]


def fp32_bound(steps: int, lr: float, largest: float) -> float:
    """Worst case of two FP32 implementations drifting apart while their gradients are the same.

    Per step and implementation: the weight is rounded twice at most (decay, update). The update lr · m̂ / √v̂: where v̂
    averages g² evenly, |g| <= √t · √v̂ <= 5.5 √v̂ for t <= 30. m̂ sums three roundings a step of terms up to max|g|, ten
    steps deep for β1 = 0.9: 30 · 5.5; v̂ three a step over 30 steps, halved by the root, times |m̂| / √v̂: 45 · 5.5.
    Together below 420 half ulps of lr; 1024 for two implementations with the few roundings of the final formula.
    """
    return steps * EPS * (4 * largest + 1024 * lr)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-3)], ids=["number", "tensor"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95), (0.0, 0.0)], ids=str)
def test_fp32_parameters_get_torchs_adamw(options, lr, betas):
    steps = 30
    ours, theirs = parameter(), parameter()
    mine = AdamW([ours], lr=lr, betas=betas, **options)
    reference = torch.optim.AdamW([theirs], lr=lr, betas=betas, **options)
    for optimizer in (mine, reference):
        train(optimizer, gradients(steps))
    bound = fp32_bound(steps, float(lr), theirs.abs().max().item())
    assert (ours - theirs).abs().max().item() <= bound
    assert bound <= float(lr) / 20  # a twentieth of one step: a wrong term would show
    assert set(mine.state[ours]) == set(reference.state[theirs])
    for name, value in reference.state[theirs].items():
        # Three roundings a step and implementation, of terms up to max g² < 25: at most 180 of them.
        assert (mine.state[ours][name] - value).abs().max() <= 180 * EPS * 25, name


def formula(weight, grad, state, step, *, lr, betas, eps, weight_decay, amsgrad, maximize):
    """arXiv:1711.05101, Alg. 2, with the decay multiplied by lr as in torch.

    A state's size is the sum of the magnitudes of its value and of the gradient.
    """
    magnitude = grad.abs()
    grad = -grad if maximize else grad
    (beta1, beta2), m, v = betas, state["exp_avg"], state["exp_avg_sq"]
    new = {"exp_avg": beta1 * m + (1 - beta1) * grad, "exp_avg_sq": beta2 * v + (1 - beta2) * grad**2}
    second = new["exp_avg_sq"]
    if amsgrad:
        second = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], second)
    step_size = lr / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)
    update = -step_size * new["exp_avg"] - lr * weight_decay * weight
    size = step_size * (beta1 * m.abs() + (1 - beta1) * magnitude) + lr * weight_decay * weight.abs()
    return update, {name: (value, value.abs() + magnitude) for name, value in new.items()}, size


HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_formula_rounded_once(dtype, rounding, state_rounding, options):
    """FP32 arithmetic performs seven operations on each term of the update, and two on those of the states."""
    assert_rounded_once(AdamW, formula, dtype, rounding, state_rounding, state_error=4, **HYPER, **options)


@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
def test_the_update_uses_the_moments_before_they_are_rounded(state_rounding):
    def adamw(params, **hyper):
        return AdamW(params, state_rounding=state_rounding, **hyper)

    assert_update_is_not_rounded(adamw, formula, weight_decay=0.0, amsgrad=False, maximize=False, **HYPER)


def test_fp16_cannot_be_rounded_stochastically():
    with pytest.raises(ValueError, match=r"stochastic.*|float16") as error:
        AdamW([parameter(FP16)], rounding="stochastic")
    for word in ("rounding", "stochastic", "float16", "kahan"):  # the argument, the values, and what would be right
        assert word in str(error.value)
