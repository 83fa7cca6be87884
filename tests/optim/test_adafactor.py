"""Adafactor against the formulas of Shazeer and Stern (arXiv:1804.04235) and torch's class."""

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.optim import Adafactor
from tests.support.optim.adafactor_formula import SHAPES, STEPS, TRAINER, Paper, assert_near, papers, train, weights
from tests.support.triton_available import quiet_interpreter, require_triton

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
@pytest.mark.parametrize("options", [{"eps": (2.0**-23, 1e-3)}, {"eps": (0.0, 1e-3), "square_eps": 1e-30}], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-9, 1e-5, 1e5, 1e10, 1e15])
def test_gradients_may_be_tiny_or_huge(scale, options):
    """Of 1e15, squares are 1e30; the product of two means would overflow, and of 1e-12 underflow."""
    params, expected = weights(), papers(weights(), scale=scale, **options)
    train(Adafactor(params, **options), params, scale=scale)
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


@pytest.mark.parametrize("tiny", [1e-29, 1e-24, 2.6e-23, 1e-15])
@pytest.mark.parametrize("where", ["row", "column", "element", "element of a vector"])
def test_tiny_gradients_stop_neither_the_others_nor_themselves_as_in_trainer(where, tiny, backend):
    """Of a token that is hardly ever predicted, or of a unit that is dead."""
    place = {"row": (2,), "column": (slice(None), 3), "element": (2, 3), "element of a vector": (2,)}[where]
    shape, steps = ((40,) if "vector" in where else (40, 30)), 3 if backend == "triton" else 10
    ours, theirs = (nn.Parameter(weights(shapes=[shape])[0].detach().clone()) for _ in range(2))
    paper = Paper(ours, lr=1e-3, **TRAINER)
    optimizers = [
        Adafactor([ours], lr=1e-3, backend=backend, **TRAINER),
        transformers.Adafactor([theirs], lr=1e-3, relative_step=False, scale_parameter=False),
    ]
    for step in range(steps):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        grad[place] *= tiny
        paper.step(grad)
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    assert_near([ours], [paper])
    assert_near([theirs], [paper], sums=True)
    moved = (ours.detach() - weights(shapes=[shape])[0]).abs()
    assert moved.flatten().kthvalue(moved.numel() // 2).values > 1e-4 * steps


# 16 bits.
