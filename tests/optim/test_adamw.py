"""AdamW: FP32 parameters against `torch.optim.AdamW`, 16-bit ones against the paper's formula in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import AdamW
from tests.support.optim.against_formula import (
    BF16,
    EPS,
    FP16,
    FP32,
    MODES,
    TEXTBOOK,
    assert_rounded_once,
    assert_stepped_as_if_alone,
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
    train(AdamW([ours], lr=lr, betas=betas, backend="eager", **options), gradients(steps))
    train(torch.optim.AdamW([theirs], lr=lr, betas=betas, **options), gradients(steps))
    bound = fp32_bound(steps, float(lr), theirs.abs().max().item())
    assert (ours - theirs).abs().max().item() <= bound
    assert bound <= float(lr) / 20  # a twentieth of one step: a wrong term would show


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fp32_states_are_torchs(amsgrad):
    ours, theirs = parameter(), parameter()
    mine, reference = (cls([p], amsgrad=amsgrad) for cls, p in ((AdamW, ours), (torch.optim.AdamW, theirs)))
    for optimizer in (mine, reference):
        train(optimizer, gradients(30))
    expected = reference.state[theirs]
    assert set(mine.state[ours]) == set(expected)
    for name, value in expected.items():
        state = mine.state[ours][name]
        dtype = torch.int64 if name == "step" else value.dtype  # torch counts in FP32
        assert (state.dtype, state.shape) == (dtype, value.shape), name
        # Three roundings a step and implementation, of terms up to max g² < 25: at most 180 of them.
        assert (state - value).abs().max() <= 180 * EPS * 25, name
    assert mine.state[ours]["step"].item() == 30


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


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_the_first_step_has_the_size_of_the_learning_rate(dtype):
    """m̂ = g and √v̂ = |g|: the step is lr against the sign of the gradient, whatever its size."""
    param = torch.nn.Parameter(torch.zeros(6, dtype=dtype))
    lr = 2.0**-7  # every format holds it
    grad = torch.tensor([4.0, -4.0, 0.25, -0.25, 100.0, 0.0])
    train(AdamW([param], lr=lr, eps=1e-30, weight_decay=0.1), [grad.to(dtype)])
    assert (param.detach().float() + lr * grad.sign()).abs().max() <= lr * 2.0**-8 / 2


def test_decay_is_decoupled_from_the_gradient():
    """With zero gradients the moments stay zero and the weight shrinks by lr · decay a step, and by nothing else."""
    for dtype in (FP32, BF16):
        param = torch.nn.Parameter(torch.full((64,), 1.5, dtype=dtype))
        optimizer = AdamW([param], lr=0.1, weight_decay=0.5, backend="eager", **TEXTBOOK)
        train(optimizer, [torch.zeros(64, dtype=dtype)] * 10)
        total = param.detach().double() + optimizer.state[param].get("compensation", torch.zeros(64)).double()
        # BF16: the rest is 2**-8 at most, decays only once it is in the weight, and is stored to 2**-8 of itself.
        bound = 10 * (0.05 * 2.0**-8 + 2.0**-16) if dtype is BF16 else 10 * 8 * EPS
        assert ((total - 1.5 * 0.95**10).abs() <= bound).all()
        assert not optimizer.state[param]["exp_avg"].any()
        assert not optimizer.state[param]["exp_avg_sq"].any()


MIXED = [
    (BF16, {"rounding": "stochastic", "state_dtype": FP32}),
    (BF16, {"rounding": "kahan", "state_rounding": "nearest", "lr": 1e-2}),
    (BF16, {"rounding": "nearest", "state_dtype": {"exp_avg_sq": FP32}, "state_rounding": "nearest"}),
    (FP32, {"rounding": "kahan", "amsgrad": True}),
    (FP16, {"rounding": "nearest", "state_dtype": FP32}),
]


def test_groups_of_any_mode_and_dtype_share_an_optimizer():
    states = assert_stepped_as_if_alone(AdamW, MIXED)
    assert ["compensation" in state for state in states] == [False, True, False, False, False]
    assert [state["exp_avg_sq"].dtype for state in states] == [FP32, BF16, FP32, FP32, FP32]
    assert [state["exp_avg"].dtype for state in states] == [FP32, BF16, BF16, FP32, FP32]


def test_fp16_cannot_be_rounded_stochastically():
    with pytest.raises(ValueError, match=r"stochastic.*|float16") as error:
        AdamW([parameter(FP16)], rounding="stochastic")
    for word in ("rounding", "stochastic", "float16", "kahan"):  # the argument, the values, and what would be right
        assert word in str(error.value)
