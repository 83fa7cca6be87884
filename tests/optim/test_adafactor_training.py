"""Adafactor in training: groups, options that change, clipping, skipped steps, bytes."""

import copy
import math

import pytest
import torch
from torch import nn

from hf_lowprec import optimizer_factory
from hf_lowprec.optim import Adafactor
from tests.support.optim.adafactor_formula import STEPS, TRAINER, Paper, assert_near, gradients, papers, train, weights
from tests.support.optim.optimizer_contents import assert_equal, everything
from tests.support.triton_available import quiet_interpreter, require_triton

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = quiet_interpreter


@pytest.fixture(params=["eager", "native", pytest.param("triton", marks=pytest.mark.every_case)])
def backend(request) -> str:
    """Triton's interpreter takes seconds; test_backends.py compares it with `eager`."""
    if request.param == "triton":
        require_triton()
    return request.param


# Groups, gradients and options that come and go.


def test_each_group_has_its_options_its_schedule_and_parameters_without_gradients():
    own = [
        {"lr": 0.5, "weight_decay": 0.1},
        {"beta1": 0.9, "d": 2.0},
        {**TRAINER, "beta2_decay": -0.5, "maximize": True},
    ]
    params = weights()
    groups = [{"params": params[k::3], **options} for k, options in enumerate(own)]
    expected = [Paper(param, **own[k % 3]) for k, param in enumerate(params)]
    optimizer = Adafactor(groups, max_grad_norm=5.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 5))
    for step in range(STEPS):
        grads = {k: grad for k, grad in enumerate(gradients(step, params)) if (step + k) % 4}
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads.values()))
        for k, param in enumerate(params):
            param.grad = grads[k].to(FP32) if k in grads else None
            if k in grads:
                factor = min(1.0, 5.0 / (norm + 1e-6))
                expected[k].step(grads[k].double() * factor, lr=optimizer.param_groups[k % 3]["lr"])
        optimizer.step()
        scheduler.step()
    assert_near(params, expected)
    assert [int(optimizer.state[param]["step"]) for param in params] == [paper.time for paper in expected]


CHANGES = {5: {"beta1": 0.9}, 9: {"scale_parameter": False}, 12: {"beta1": None}, 15: {"relative_step": False}}
CHANGES |= {18: {"maximize": True, "eps": (1e-2, 0.5), "d": 2.0}, 21: {"lr": 1.0, "scale_parameter": True}}


@pytest.mark.filterwarnings("ignore:the state dict that was loaded replaces options")
@pytest.mark.parametrize("saved", [False, True])
def test_options_may_change_between_steps(backend, saved):
    """A momentum begins at zero. `saved`: also after loading into an optimizer with other options."""
    params, expected = weights(), papers(weights(), steps=())
    optimizer = Adafactor(params, backend=backend)
    for step in range(STEPS if backend != "triton" else 6):
        if saved and step in CHANGES:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = Adafactor(params, backend=backend, beta1=None if step == 12 else 0.5, d=4.0)
            optimizer.load_state_dict(state)
        optimizer.param_groups[0] |= CHANGES.get(step, {})
        train(optimizer, params, [step])
        for paper, grad in zip(expected, gradients(step, params), strict=True):
            paper.step(grad, **CHANGES.get(step, {}))
    assert_near(params, expected)


@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_means_are_of_the_clipped_gradients(backend, scale):
    """Squares of 1e30 overflow; of gradients of norm 0.01 they do not."""
    params, expected, steps = weights(), papers(weights(), steps=()), range(3 if backend == "triton" else STEPS)
    train(Adafactor(params, backend=backend, max_grad_norm=0.01), params, steps, scale)
    for step in steps:
        grads = [grad.double() for grad in gradients(step, params, scale)]
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads))
        for paper, grad in zip(expected, grads, strict=True):
            paper.step(grad * min(1.0, 0.01 / (norm + 1e-6)))
    assert_near(params, expected)


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_a_step_with_an_infinity_is_skipped(backend, rounding):
    found = []
    for steps in ([0, 1, 2, 3], [0, 1, 3]):
        params = weights(BF16)
        optimizer = Adafactor(params, rounding=rounding, beta1=0.9, skip_nonfinite=True, backend=backend)
        for step in steps:
            for param, grad in zip(params, gradients(step, params), strict=True):
                param.grad = grad
            params[3].grad[2, 2] = math.inf if step == 2 else 1.0
            optimizer.step()
        found.append([everything(optimizer)[key] for key in ("params", "state")])
    assert_equal(*found)


# 16 bits: sizes, rounding.

SIZES = {"split": 2, "kahan": 2, "stochastic": 0, "nearest": 0}


@pytest.mark.parametrize("beta1", [None, 0.9])
@pytest.mark.parametrize("rounding", list(SIZES))
def test_bytes_of_states(rounding, beta1):
    param = nn.Parameter(torch.ones(512, 512, dtype=BF16))
    param.grad = torch.ones_like(param)
    optimizer = Adafactor([param], rounding=rounding, beta1=beta1)
    optimizer.step()
    states = optimizer.state[param]
    means = 4 * (512 + 512)
    held = sum(state.nbytes for name, state in states.items() if name != "step")
    assert held == means + 512 * 512 * (SIZES[rounding] + 2 * (beta1 is not None))


def test_the_factory_passes_the_arguments_of_trainer():
    assert optimizer_factory("adafactor_bf16_sr", lr=0.1)[1].items() >= TRAINER.items()
