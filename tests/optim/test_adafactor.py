"""Adafactor against the formulas of Shazeer and Stern (arXiv:1804.04235), torch's class and transformers'."""

import pytest
import torch
import transformers.optimization
from torch import nn

from hf_lowprec import fp32_state_dict
from hf_lowprec.optim import Adafactor
from tests.support.optim.adafactor_formula import SHAPES, STEPS, TRAINER, assert_near, gradients, papers, train, weights
from tests.support.optim.gradient_dtypes import allow_gradients_in
from tests.support.optim.optimizer_contents import assert_equal
from tests.support.triton_available import quiet_interpreter, require_triton

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = quiet_interpreter

FORMULAS = [{}, {"weight_decay": 0.1, "lr": 0.3}, {"beta1": 0.9, "maximize": True}, {"d": 3.0, "beta2_decay": -1.0}]
FORMULAS += [{**TRAINER, "beta1": 0.5, "weight_decay": 0.5}, {"lr": torch.tensor(2.0), "eps": (1e-4, 1.0)}]
FORMULAS += [{"scale_parameter": False, "lr": 1.0}, {"relative_step": False, "beta1": 0.0}]


@pytest.fixture(params=["eager", "native", pytest.param("triton", marks=pytest.mark.every_case)])
def backend(request) -> str:
    """Triton's interpreter takes seconds; test_backends.py compares it with `eager`."""
    if request.param == "triton":
        require_triton()
    return request.param


@pytest.mark.combinations(1)
@pytest.mark.parametrize("options", FORMULAS, ids=str)
def test_fp32_parameters_get_the_papers_formula(backend, options):
    steps = range(8 if backend == "triton" else STEPS)
    params, expected = weights(), papers(weights(), steps, **options)
    train(Adafactor(params, backend=backend, **options), params, steps)
    assert_near(params, expected)
    for paper, start in zip(expected, weights(), strict=True):  # a wrong term would show
        moved = (paper.weight - start).abs()
        assert not moved.numel() or paper.bound().max() <= moved.max() / 100


@pytest.mark.combinations(1)
@pytest.mark.parametrize("eps", [(2.0**-23, 1e-3), (1e-30, 1e-3)], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-9, 1e-5, 1e5, 1e10, 1e15])
def test_gradients_may_be_tiny_or_huge(scale, eps):
    """Of 1e15, squares are 1e30; the product of two means would overflow, and of 1e-12 underflow."""
    params, expected = weights(), papers(weights(), scale=scale, eps=eps)
    train(Adafactor(params, eps=eps), params, scale=scale)
    assert_near(params, expected)


# torch's and transformers' classes.

TORCHS = [
    {},
    {"weight_decay": 0.1, "lr": 0.01},
    {"weight_decay": 0.1, "maximize": True},
    {"beta2_decay": -1.0},
    {"d": 1.5},
]
"""First the options that torch's own tests go through, which need a package that is not installed."""
TORCHS += [{"lr": torch.tensor(0.5), "weight_decay": 0.2, "eps": (1e-6, 0.1), "d": 2.0}]


@pytest.mark.combinations(1)
@pytest.mark.parametrize("options", TORCHS, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e-4, 1.0, 1e3])
def test_fp32_parameters_get_torchs_adafactor(options, scale):
    """torch's product of means overflows from 1e5 on, and torch divides by the number of elements."""
    shapes = [shape for shape in SHAPES if 0 not in shape]
    ours, theirs = weights(shapes=shapes), weights(shapes=shapes)
    expected = papers(ours, scale=scale, **options)
    train(Adafactor(ours, **options), ours, scale=scale)
    train(torch.optim.Adafactor(theirs, **options), theirs, scale=scale)
    assert_near(ours, expected)
    assert_near(theirs, expected, sums=True)


TRANSFORMERS = [{}, {"beta1": 0.9}, {"clip_threshold": 3.0, "decay_rate": -0.5}]
TRANSFORMERS += [{"scale_parameter": False, "weight_decay": 0.1, "beta1": 0.5}]
FIXED = {"relative_step": False, "lr": 0.1}
TRANSFORMERS += [FIXED, {**FIXED, "scale_parameter": False, "weight_decay": 0.3}]
NAMES = {"clip_threshold": "d", "decay_rate": "beta2_decay"}


def both_after(scale, **options) -> tuple[list, list]:
    """Weights trained by ours and by transformers' class."""
    ours, theirs = weights(), weights()
    mine = Adafactor(ours, eps=(1e-30, 1e-3), **{NAMES.get(name, name): value for name, value in options.items()})
    reference = transformers.optimization.Adafactor(theirs, **options)
    train(mine, ours, scale=scale)
    train(reference, theirs, scale=scale)
    return ours, theirs


@pytest.mark.combinations(1)
@pytest.mark.parametrize("options", TRANSFORMERS, ids=str)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e3])
def test_fp32_parameters_get_transformers_adafactor(options, scale):
    """From 1e4 on, a row of zeros is 0/0 there: its mean, 1e-30, is divided by one of 1e8."""
    ours, theirs = both_after(scale, **options)
    given = {NAMES.get(name, name): value for name, value in options.items()}
    expected = papers(weights(), scale=scale, eps=(1e-30, 1e-3), **given)
    assert_near(ours, expected)
    assert_near(theirs, expected, sums=True)


@pytest.mark.parametrize("scale", [1e-10, 1e-9, 1e-8])
def test_small_gradients_get_transformers_adafactor(scale):
    """transformers adds 1e-30, a millionth of the square of a hundredth of 1e-10: a few half ulps of the root."""
    ours, theirs = both_after(scale, **FIXED, scale_parameter=False)
    for mine, other, paper in zip(ours, theirs, papers(weights(), **TRAINER, lr=0.1), strict=True):
        assert ((mine - other).abs() <= 2 * paper.bound(mine.numel())).all(), tuple(mine.shape)


def test_transformers_own_test():
    """A thousand steps of 0.01 from (0.1, -0.2, -0.1) reach the target, with the tolerance of transformers' test."""
    weight, target = nn.Parameter(torch.tensor([0.1, -0.2, -0.1])), torch.tensor([0.4, 0.2, -0.5])
    optimizer = Adafactor([weight], lr=1e-2, d=1.0, beta2_decay=-0.8, beta1=None, weight_decay=0.0, **TRAINER)
    for _ in range(1000):
        optimizer.zero_grad()
        nn.functional.mse_loss(weight, target).backward()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), target, rtol=0, atol=1e-2)


# 16 bits.


@pytest.mark.combinations(1)
@pytest.mark.parametrize("grad_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("options", FORMULAS, ids=str)
def test_split_bf16_weights_are_the_rounded_weights_of_fp32_training(backend, options, grad_dtype):
    """FP32 gradients are no BF16 numbers, so they are drawn with a scale that is no power of two."""
    split, exact = weights(BF16), [nn.Parameter(param.detach().float()) for param in weights(BF16)]
    allow_gradients_in(grad_dtype, split)
    options, steps = {"backend": backend, **options}, range(4 if backend == "triton" else STEPS)
    mine, reference = (
        Adafactor(split, rounding="split", state_dtype=FP32, **options),
        Adafactor(exact, **options),
    )
    for step in steps:
        for param, twin, grad in zip(split, exact, gradients(step, split), strict=True):
            param.grad = grad if grad_dtype is BF16 else grad.float() * 0.3
            twin.grad = param.grad.float()
        mine.step()
        reference.step()
    for param, twin in zip(split, exact, strict=True):
        found = fp32_state_dict(nn.ParameterList([param]), mine)["0"]
        assert torch.equal(found, twin.detach()), tuple(param.shape)
        for name in mine.state[param].keys() - {"remainder"}:
            assert_equal(mine.state[param][name], reference.state[twin][name], name)
