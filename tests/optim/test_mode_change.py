"""Changing the rounding mode within a run, and by loading a state dict of another mode: nothing is lost."""

import copy
import warnings

import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, Adafactor, AdamW, StableAdamW
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.state.fp32_weights import fp32_estimates
from hf_lowprec.rounding.modes import AUXILIARY_STATES
from hf_lowprec.rounding.random_bits import random_bits
from tests.golden.steps import checkpoint_path
from tests.support.optim.optimizer_contents import assert_equal, everything, params_of, train
from tests.support.random_numbers import randn
from tests.support.triton_available import rarely_on_triton

BF16 = torch.bfloat16
OTHERS = ["stochastic", "nearest"]
COMPARED = ["params", "state", "param_groups"]
pytestmark = pytest.mark.filterwarnings("ignore:the rounding mode changes from:RuntimeWarning")


def weights(count: int = 5000, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(randn(count, seed=seed).mul(0.02).to(BF16))


def stepped(rounding: str = "kahan", cls=AdamW, steps: int = 5, count: int = 5000, **options):
    """An optimizer of two parameters after steps whose updates are far below a weight's spacing."""
    optimizer = cls([weights(count), weights(30, seed=1)], lr=1e-5, rounding=rounding, **options)
    train(optimizer, steps)
    return optimizer


def exact(optimizer) -> list[torch.Tensor]:
    """The FP32 estimates of the weights, as FP64: weight plus compensation."""
    params = params_of(optimizer)
    estimate = fp32_estimates(nn.ParameterList(params), optimizer)
    return [estimate(param).detach().double() for param in params]


def take_no_way(optimizer) -> None:
    """A step with a learning rate of 0, which changes no weight."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(optimizer, 1, seed=9)


def test_a_compensation_may_have_any_strides():
    """The loader of torch keeps those of the saved tensor."""
    made, twin = (stepped(cls=SGD, count=6) for _ in range(2))
    for optimizer, transposed in ((made, True), (twin, False)):
        for param in params_of(optimizer):
            state = optimizer.state[param]
            param.data, param.grad = param.detach().view(2, -1), None
            compensation = state["compensation"].view(2, -1)
            state["compensation"] = compensation.t().contiguous().t() if transposed else compensation
        set_mode(optimizer, "split")
        take_no_way(optimizer)
    assert_equal(everything(made), everything(twin))


def set_mode(optimizer, rounding: str) -> None:
    for group in optimizer.param_groups:
        group["rounding"] = rounding


def test_nearest_takes_in_the_compensation_rounded_once():
    optimizer = stepped()
    sums = exact(optimizer)
    set_mode(optimizer, "nearest")
    assert_equal(exact(optimizer), sums)
    take_no_way(optimizer)
    for param, expected in zip(params_of(optimizer), sums, strict=True):
        # Kahan's weight is the nearest one already, except where the compensation was rounded to a tie or beyond.
        assert torch.equal(expected.float().double(), expected)
        assert torch.equal(param.detach(), expected.float().to(BF16))
        assert "compensation" not in optimizer.state[param]


def test_the_bits_are_a_function_of_seed_parameter_and_element():
    optimizer = stepped(seed=7, first_parameter=3)
    sums = [p.detach().float() + optimizer.state[p]["compensation"].float() for p in params_of(optimizer)]
    set_mode(optimizer, "stochastic")
    take_no_way(optimizer)
    for number, (param, expected) in enumerate(zip(params_of(optimizer), sums, strict=True), 3):
        bits = random_bits(seed=7, step=0, parameter=number, role=1, index=torch.arange(param.numel()))
        pattern = expected.view(torch.int32).to(torch.int64) + bits
        assert torch.equal(param.detach().view(torch.int16).to(torch.int64) & 0xFFFF, (pattern >> 16) & 0xFFFF)


@rarely_on_triton()
@pytest.mark.parametrize("rounding", OTHERS)
@pytest.mark.parametrize("cls", [AdamW, SGD, StableAdamW, Adafactor])
def test_backends_agree_before_and_after(cls, rounding, any_backend):
    found = []
    for backend in ("eager", any_backend):
        optimizer = stepped(cls=cls, backend=backend, count=1500)  # more than a block of the `triton` backend
        set_mode(optimizer, rounding)
        train(optimizer, 3, seed=1)
        set_mode(optimizer, "kahan")
        train(optimizer, 3, seed=2)
        found.append(everything(optimizer))
    first, second = found
    assert_equal([first["params"], first["state"]], [second["params"], second["state"]])


@pytest.mark.combinations(1)
@pytest.mark.parametrize("first", ["kahan", "split", *OTHERS])
@pytest.mark.parametrize("then", ["kahan", "split", *OTHERS])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_state_dict_of_another_mode_continues_as_within_the_run(name, first, then):
    def made(rounding):
        params = [nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).to(BF16)) for _ in range(2)]
        return ALGORITHMS[name](params, lr=1e-3, rounding=rounding)

    within, resumed = made(first), made(then)
    train(within, 3)
    saved, kept = copy.deepcopy(within.state_dict()), [p.detach().clone() for p in params_of(within)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load_state_dict(saved)
    said = [str(each.message).startswith(f"the rounding mode changes from {first!r} to {then!r}") for each in caught]
    assert said == [True] * (first != then)
    with torch.no_grad():  # weights loaded after the optimizer, as accelerate may do
        for param, value in zip(params_of(resumed), kept, strict=True):
            param.copy_(value)
    set_mode(within, then)
    assert_equal(resumed.state_dict(), within.state_dict())  # converted in the next step, and not earlier
    for optimizer in (within, resumed):
        train(optimizer, 3, seed=1)
    first_run, second_run = (everything(optimizer) for optimizer in (within, resumed))
    assert_equal([first_run[key] for key in COMPARED], [second_run[key] for key in COMPARED])
    for param in params_of(within):
        assert ("compensation" in within.state[param]) == (then == "kahan")
        assert ("remainder" in within.state[param]) == (then == "split")


def test_a_checkpoint_with_compensations_loads_into_the_default():
    """A warning names both modes, and the FP32 weights stay. Other groups may keep Kahan summation, as FP16 ones do."""
    saved = torch.load(checkpoint_path("AdamW", "kahan"), weights_only=True)
    split, norm, half = params = [nn.Parameter(value) for value in saved["weights"].values()]
    optimizer = AdamW([{"params": [split]}, {"params": [norm]}, {"params": [half], "rounding": "kahan"}])
    with pytest.warns(RuntimeWarning, match="the rounding mode changes from 'kahan' to 'split', as this AdamW"):
        optimizer.load_state_dict(saved["optimizer"])
    before, total = exact(optimizer), split.detach().float() + optimizer.state[split]["compensation"].float()
    assert not torch.equal(total, split.float())
    take_no_way(optimizer)
    assert_equal(exact(optimizer), [total.double(), *before[1:]])
    low_bits = [{*AUXILIARY_STATES} & optimizer.state[param].keys() for param in params]
    assert low_bits == [{"remainder"}, set(), {"compensation"}]


@pytest.mark.parametrize(("first", "then"), [("kahan", "split"), ("split", "kahan")])
def test_low_bits_change_their_form(first, then):
    """To a remainder without loss (the estimate is an FP32 number); to a compensation, 8 bits of what is missing."""
    optimizer = stepped(first)
    sums = exact(optimizer)
    set_mode(optimizer, then)
    assert_equal(exact(optimizer), sums)
    take_no_way(optimizer)
    for param, found, expected in zip(params_of(optimizer), exact(optimizer), sums, strict=True):
        error = (found - expected).abs()
        if then == "split":
            assert not error.any()
        else:  # half a spacing of 2**-7 at most, to 2**-8 of itself; two rounding steps: the change, and the step
            assert (error <= 2 * 2.0**-16 * expected.abs()).all()
        missing = (param.detach().double() - expected).abs()
        assert (missing <= 2.0**-8 * expected.abs() * (1 + 2.0**-6)).all()


def test_a_third_mode_after_a_step_that_failed_in_between():
    """A state of the new mode was created, but not yet filled."""
    optimizer = stepped()
    sums = exact(optimizer)
    for param in params_of(optimizer):
        optimizer.state[param]["remainder"] = torch.zeros_like(param, dtype=torch.int16)
    set_mode(optimizer, "nearest")
    take_no_way(optimizer)
    for param, expected in zip(params_of(optimizer), sums, strict=True):
        assert optimizer.state[param].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert ((param.detach().double() - expected).abs() <= 2.0**-8 * expected.abs()).all()


@pytest.mark.parametrize("then", OTHERS)
def test_a_checkpoint_between_the_change_and_the_step_loses_nothing(then):
    within = stepped()
    set_mode(within, then)
    resumed = AdamW([nn.Parameter(p.detach().clone()) for p in params_of(within)], lr=1e-5, rounding=then)
    with warnings.catch_warnings():  # both have the new mode
        warnings.simplefilter("error")
        resumed.load_state_dict(copy.deepcopy(within.state_dict()))
    for made in (within, resumed):
        train(made, 3, seed=1)
    first_run, second_run = (everything(optimizer) for optimizer in (within, resumed))
    assert_equal([first_run[key] for key in COMPARED], [second_run[key] for key in COMPARED])


def test_a_step_that_fails_folds_nothing():
    optimizer = stepped()
    set_mode(optimizer, "stochastic")
    first, second = params_of(optimizer)
    first.grad = torch.ones_like(first)
    second.grad = torch.ones_like(second).to_sparse()
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert_equal(everything(optimizer), before)


def test_parameters_without_a_gradient_keep_theirs_until_they_have_one():
    optimizer = stepped()
    set_mode(optimizer, "nearest")
    first, second = params_of(optimizer)
    sums = exact(optimizer)
    first.grad, second.grad = torch.zeros_like(first), None
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert "compensation" not in optimizer.state[first]
    assert torch.equal(exact(optimizer)[1], sums[1])


@pytest.mark.parametrize(
    ("first", "then"), [("kahan", "stochastic"), ("stochastic", "kahan"), ("split", "kahan"), ("kahan", "split")]
)
def test_a_change_before_gradients_are_clipped(first, then):
    """`clip_grad_norm_` makes the plan, with autograd on."""
    optimizers = [stepped(first) for _ in range(2)]
    for optimizer, clips in zip(optimizers, (True, False), strict=True):
        set_mode(optimizer, then)
        for param in params_of(optimizer):
            param.grad = torch.ones_like(param)
        if clips:
            optimizer.clip_grad_norm_(1e9)
        optimizer.step()
    one, other = map(everything, optimizers)
    assert_equal(one["state"], other["state"])
    assert_equal(one["params"], other["params"])


@pytest.mark.parametrize(("first", "then"), [("kahan", "nearest"), ("split", "nearest"), ("kahan", "split")])
def test_a_strided_parameter_is_folded(first, then):
    param = nn.Parameter(weights(60).detach().view(6, 10).t())
    optimizer = AdamW([param], lr=1e-5, rounding=first)
    train(optimizer, 5)
    sums = exact(optimizer)[0]
    set_mode(optimizer, then)
    take_no_way(optimizer)
    # A compensation is at most half a spacing, up to its own rounding, so both are the nearest number.
    assert ((param.detach().double() - sums).abs() <= sums.abs() * 2**-8).all()
    assert not param.is_contiguous()
