"""Adafactor in training: groups, options that change, clipping, skipped steps, strides, bytes, rounding, refusals."""

import copy
import math
import pickle

import pytest
import torch
import transformers.optimization
from torch import nn

from hf_lowprec import fp32_state_dict, optimizer_factory
from hf_lowprec.optim import Adafactor
from tests.support.optim.adafactor_formula import STEPS, TRAINER, Paper, assert_near, gradients, papers, train, weights
from tests.support.optim.optimizer_contents import assert_equal, everything, refuses
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


@pytest.mark.parametrize("rounding", ["split", "stochastic"])
def test_other_strides_give_the_same_bits(backend, rounding):
    """Of weights and gradients: transposed, with holes, and channels last."""
    shapes, found = [(6, 5), (4, 3, 7), (2, 3, 4, 5)], []
    for dense in (True, False):
        params = weights(BF16, shapes)
        if not dense:
            params[0] = nn.Parameter(params[0].detach().t().contiguous().t())
            params[1] = nn.Parameter(params[1].detach().repeat_interleave(2, -1)[..., ::2])
            params[2] = nn.Parameter(params[2].detach().to(memory_format=torch.channels_last))
        assert all(param.is_contiguous() == dense for param in params)
        optimizer = Adafactor(params, rounding=rounding, beta1=0.9, backend=backend)
        for step in range(3):
            for param, grad in zip(params, gradients(step, params), strict=True):
                param.grad = grad if dense else torch.empty_like(param).copy_(grad)
            optimizer.step()
        found.append([param.detach() for param in params])
        found[-1] += [optimizer.state[param][name] for param in params for name in ("row_var", "col_var", "exp_avg")]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_go_on_with_the_same_bits(copied):
    params = weights(BF16)
    optimizer = Adafactor([{"params": params[:6], "beta1": 0.9}, {"params": params[6:]}], max_grad_norm=1.0)
    train(optimizer, params, range(3))
    twin = copied(optimizer)
    for one in (optimizer, twin):
        train(one, [param for group in one.param_groups for param in group["params"]], range(3, 6))
    assert_equal(everything(optimizer), everything(twin))


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


@pytest.mark.parametrize("mode", ["kahan", "split", "sr"])
def test_named_optimizers_are_what_trainer_passes(mode):
    """Given to FP32 parameters, whose mode makes no difference."""
    cls, arguments = optimizer_factory(f"adafactor_bf16_{mode}", lr=0.1)
    ours, theirs, expected = weights(), weights(), papers(weights(), lr=0.1, **TRAINER)
    assert arguments.items() >= TRAINER.items()
    arguments.pop("rounding")
    train(cls(ours, **arguments), ours)
    train(transformers.optimization.Adafactor(theirs, lr=0.1, scale_parameter=False, relative_step=False), theirs)
    assert_near(ours, expected)
    assert_near(theirs, expected, sums=True)


@pytest.mark.parametrize("mode", ["kahan", "split", "stochastic", "nearest"])
def test_weights_move_by_steps_far_below_their_spacing(backend, mode):
    """100 steps of 2⁻¹⁴ from 0.75, where BF16 has a spacing of 2⁻⁸ and rounds steps below 2⁻⁹ away.

    Stochastic weights walk: a step's variance is at most 2⁻¹⁴·2⁻⁸, the mean's after 100 steps of 2¹⁴ weights is
    100·2⁻³⁶; five of its roots are 2⁻¹²·⁴, a thirtieth of the way. The others round
    each sum to 16 significant bits or more: 2⁻¹⁸ each, all the same way, are less than a tenth.
    """
    param = nn.Parameter(torch.full((128, 128), 0.75, dtype=BF16))
    options = {**TRAINER, "lr": 2.0**-14, "backend": backend}
    optimizer = Adafactor([param], rounding=mode, **options)
    steps = 4 if backend == "triton" else 100
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    found = fp32_state_dict(nn.ParameterList([param]), optimizer)["0"].double().mean().item()
    way = (0.75 - found) / (steps * 2.0**-14)
    if mode == "nearest":
        assert way == 0
    else:
        assert abs(way - 1) <= (1 / 30 if mode == "stochastic" else 1 / 10) * math.sqrt(100 / steps)


# Refusals.

BAD = [("lr", -1.0), ("lr", math.nan), ("lr", None), ("d", 0.5), ("d", math.nan), ("weight_decay", -1.0)]
BAD += [("beta2_decay", 0.5), ("beta2_decay", math.nan), ("beta2_decay", "fast"), ("beta1", 1.0), ("beta1", -0.1)]
BAD += [("beta1", math.nan), ("eps", 1e-3), ("eps", (1e-30,)), ("relative_step", "maybe"), ("scale_parameter", 2)]
BAD += [("maximize", None), ("rounding", "up"), ("eps[0]", (-1e-30, 1e-3)), ("eps[1]", (1e-30, math.nan))]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_arguments_are_named_with_their_value(name, value):
    argument, part = name.partition("[")[0], value[int(name[-2])] if "[" in name else value
    with pytest.raises(ValueError) as error:
        Adafactor(weights(BF16), **{argument: value})
    assert f"{name}={part!r} " in str(error.value)
    optimizer = Adafactor(weights(BF16))
    train(optimizer, weights(BF16), range(1))
    group = {"params": weights(BF16, [(2, 3)]), argument: value}
    refuses(lambda: optimizer.add_param_group(group), optimizer, [f"{name}={part!r} "])
