"""Every step of every algorithm, in every mode, is its formula in FP64, applied to what is stored and rounded once.

That backends agree is in `test_backends.py`; matrices of Muon, which are multiplied in BF16, are in `test_muon.py`.
"""

import itertools
import math
from collections import defaultdict

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_lowprec import optimizer_factory
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.state.states import dtype_in, value_in
from hf_lowprec.rounding import join
from tests.support.optim.formulas import EPS, FORMULAS, momentum_for

BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
SHAPES = [(20, 33), (8, 64), (7,), (), (2, 3, 4), (0, 5)]
NEVER_STOCHASTIC = {"max_exp_avg_sq", "previous_grad"}
BETAS = [(0.9, 0.999), (0.8, 0.95), (0.0, 0.0)]


def each(**values) -> list[dict]:
    """Every combination of values of these arguments."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


TRAINER = {"eps": (0.0, 1e-3), "square_eps": 1e-30, "relative_step": False, "scale_parameter": False}
"""What Trainer's `optim="adafactor"` passes to Adafactor."""
OPTIONS: dict[str, list[dict]] = {
    "Adafactor": [
        {}, {"weight_decay": 0.1, "lr": 0.3}, {"beta1": 0.9}, {"d": 3.0, "beta2_decay": -1.0}, {"eps": (1e-4, 1.0)},
        TRAINER, {**TRAINER, "beta1": 0.5, "weight_decay": 0.5}, {"scale_parameter": False, "lr": 1.0},
    ],
    "Adam": [
        *each(amsgrad=[False, True], decoupled_weight_decay=[False, True], weight_decay=[0.0, 0.1], betas=BETAS),
        *each(factored=[True], decoupled_weight_decay=[False, True], weight_decay=[0.1]),
    ],
    "AdamW": [
        *each(amsgrad=[False, True], weight_decay=[0.0, 0.1], betas=BETAS, eps=[1e-8, 0.1]),
        *each(factored=[True], betas=BETAS, eps=[1e-8, 0.1]),
    ],
    "Adan": each(
        no_prox=[False, True], betas=[(0.98, 0.92, 0.99), (0.9, 0.5, 0.95)], weight_decay=[0, 1.0], eps=[1e-8, 0.1]
    ),
    "Lion": each(betas=[(0.9, 0.99), (0.5, 0.9)], weight_decay=[0, 1.0]),
    "Prodigy": [
        *each(weight_decay=[0.0, 0.1], use_bias_correction=[False, True], safeguard_warmup=[False, True]),
        {"d0": 0.1, "d_coef": 0.5, "lr": 0.5}, {"betas": (0.8, 0.9), "eps": 1e-3},
    ],
    # The last three never leave RAdam's first phase: ρ∞ is 5, 4 (a zero in the rectification's denominator) and 1.
    "RAdam": each(
        decoupled_weight_decay=[False, True], weight_decay=[0.0, 0.1], eps=[1e-8, 0.1],
        betas=[*BETAS[:2], (0.9, 2 / 3), (0.5, 0.6), (0.0, 0.0)],
    ),
    "SGD": [
        {"weight_decay": decay, **kind}
        for decay in (0.0, 0.1)
        for kind in ({}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3}, {"momentum": 0.9, "nesterov": True})
    ],
    "ScheduleFreeAdamW": each(warmup_steps=[0, 1, 7, 100], weight_decay=[0.0, 0.1], betas=[(0.9, 0.99), (0.5, 0.0)]),
    "StableAdamW": each(betas=[(0.9, 0.95), (0.5, 0.99)], weight_decay=[0.0, 0.1], eps=[1e-6, 1e-2]),
}  # fmt: skip
MODES = [
    {"dtype": dtype, "rounding": rounding, "state_dtype": state_dtype, "state_rounding": state_rounding}
    for dtype, roundings in {BF16: ("kahan", "split", "stochastic", "nearest"), FP16: ("kahan", "nearest")}.items()
    for rounding in roundings
    for state_rounding, state_dtypes in {"stochastic": (BF16, FP32, INT8), "nearest": (BF16,)}.items()
    for state_dtype in state_dtypes
]
MODES += [{"dtype": FP32, "rounding": "kahan", "state_dtype": None, "state_rounding": "stochastic"}]
TENSOR_LR = {"lr": "a tensor"}
SETTINGS = [{}, {"max_grad_norm": 0.5}, {"skip_nonfinite": True}, TENSOR_LR, {"maximize": True}]
"""With `skip_nonfinite`, scalars are computed on the device."""
CASES = [
    (name, options, mode, SETTINGS[(number + number_of_mode) % len(SETTINGS)])
    for number, (name, options) in enumerate((name, options) for name in OPTIONS for options in OPTIONS[name])
    for number_of_mode, mode in enumerate(MODES)
    if (number + number_of_mode) % 3 == 0
]


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


TINY = (1e-29, 1e-15, 1e-24)


def gradients(step: int, dtype: torch.dtype, scale: float = 1.0, tiny: tuple[float, ...] = TINY) -> list[Tensor]:
    """Every seventh gradient is zero, every fifth twentyfold; some rows and a column are zero or `tiny`."""
    generator = torch.Generator().manual_seed(100 + step)
    scale *= 0.0 if step % 7 == 6 else 20.0 if step % 5 == 4 else 1.0
    found = [torch.randn(shape, generator=generator) * scale for shape in SHAPES]
    for grad in found[:3]:
        grad[0], grad[1], grad[2] = 0, grad[1] * tiny[0], grad[2] * tiny[1]
    found[0][:, 3] *= tiny[2]
    return [grad.to(dtype) for grad in found]


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of `dtype` at FP64 magnitudes."""
    bits, smallest = {BF16: (8, -133), FP16: (11, -24), FP32: (24, -149)}[dtype]
    return torch.exp2(torch.frexp(value)[1].double().sub(bits).clamp(min=smallest))


def stored(optimizer: torch.optim.Optimizer, param: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """In FP64: the weight, with its remainder if it has one; its compensation; and its other states, decoded."""
    state = optimizer.state[param]
    names = {key.removesuffix("_code") for key in state if not key.endswith(("_scale", "step"))}
    states = {name: value_in(state, name) for name in names}
    weight = param.detach().float()
    if "remainder" in states:
        weight = join(weight, states.pop("remainder").int())
    compensation = states.pop("compensation", torch.zeros(param.shape))
    return weight.double(), compensation.double(), {name: value.double() for name, value in states.items()}


def largest(*values: Tensor) -> float:
    return max((value.abs().max().item() for value in values if value.numel()), default=0.0)


def rounded_stochastically(
    found: Tensor, exact: Tensor, dtype: torch.dtype, stochastic: bool, noise: Tensor | float
) -> bool:
    """Assert that `found` is `exact`, up to `noise`, rounded once; return whether to nearest does not explain it.

    NaN stands for what is not known exactly. Codes of 8 bits are an eighth or a quarter apart and, below their window,
    as far as the window's smallest number is from zero.
    """
    larger = torch.maximum(found.abs(), exact.abs())
    spacing = larger / 4 + 2.0**-20 * largest(exact) if dtype == INT8 else ulp(larger, dtype)
    error = (found - exact).abs()
    assert ((error <= spacing / (1 if stochastic or dtype == INT8 else 2) + noise) | exact.isnan()).all()
    return bool((error > spacing / 2 + noise).any())


def assert_step(optimizer: torch.optim.Optimizer, step: int, grads: list[Tensor]) -> set[str]:
    """Take a step and compare it; returns the states that were rounded stochastically.

    In half ulps, FP32 arithmetic errs by at most 24 in an update and 16 in a state, host scalars included, of terms
    that are as large as updates or states are somewhere; and by two in the sum of weight and update.
    """
    (group,) = optimizer.param_groups
    params, found = group["params"], set()
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    norm = sum(grad.double().square().sum() for grad in grads).sqrt().item()
    factor = min(1.0, (optimizer.max_grad_norm or math.inf) / (norm + 1e-6))
    before, used = [stored(optimizer, param) for param in params], dict(group)
    optimizer.step()
    after, exact, fed_back, algorithm = [stored(optimizer, param) for param in params], [], [], type(optimizer).__name__
    for grad, (weight, _, old), (new_weight, _, new) in zip(grads, before, after, strict=True):
        state = {name: torch.zeros_like(value) for name, value in new.items()} | old
        formula, states = FORMULAS[algorithm](weight, grad.double() * factor, state, step, used)
        momentum, share = momentum_for(algorithm, states, grad.double() * factor, step, used)
        if momentum:
            states = states | {momentum: states[momentum] - (formula - new_weight) * share}
        exact.append((formula, states))
        fed_back.append((momentum, share))
    size = largest(*(new.nan_to_num() - old for (new, _), (old, *_) in zip(exact, before, strict=True)))
    sizes = defaultdict(float)
    for (_, states), (*_, stored_before) in zip(exact, before, strict=True):
        for name, value in states.items():
            sizes[name] = max(sizes[name], largest(value, stored_before.get(name, value)))
    stochastic_states = group["state_rounding"] == "stochastic"
    for param, (weight, low, _), (new_weight, new_low, new), (formula, states), (momentum, share) in zip(
        params, before, after, exact, fed_back, strict=True
    ):
        assert new.keys() >= states.keys()
        noise = EPS * (24 * size + 2 * (weight.abs() + low.abs() + (formula - weight).abs()))
        target = formula + low
        dtype = FP32 if group["rounding"] == "split" else param.dtype
        rounded_stochastically(new_weight, target, dtype, group["rounding"] == "stochastic", noise)
        if "compensation" in optimizer.state[param]:
            rounded_stochastically(new_low, target - new_weight, BF16, stochastic_states, noise)
        for name, value in states.items():
            of_state = 16 * EPS * sizes[name] + 2.0**-40 * size  # and scalars in FP64
            of_state += noise * share if name == momentum else 0.0
            stochastic = stochastic_states and name not in NEVER_STOCHASTIC
            if rounded_stochastically(new[name], value, dtype_in(optimizer.state[param], name), stochastic, of_state):
                found.add(name)
    return found


@pytest.mark.parametrize(("name", "options", "mode", "settings"), CASES, ids=str)
def test_every_step_is_the_formula_rounded_once(name, options, mode, settings):
    """Learning rates change in every step, and decay rates after the eighth."""
    dtype, *_ = mode.values()
    lr = options.get("lr", 1.0 if name == "Prodigy" else 1e-2)
    arguments = {key: value for key, value in {**mode, **settings, **options}.items() if key != "dtype"}
    arguments["lr"] = torch.tensor(lr) if settings == TENSOR_LR else lr
    optimizer = ALGORITHMS[name](weights(dtype), backend="eager", **arguments)
    (group,) = optimizer.param_groups
    stochastic = set()
    for step in range(1, 13):
        rate = lr * (1 + step % 3) / 2
        group["lr"] = group["lr"].fill_(rate) if settings == TENSOR_LR else rate
        if step == 9 and "betas" in group:
            group["betas"] = tuple(0.75 * beta for beta in group["betas"])
        stochastic |= assert_step(optimizer, step, gradients(step, dtype))
    if (mode["state_dtype"], mode["state_rounding"]) == (BF16, "stochastic") and 0.0 not in group.get("betas", ()):
        assert stochastic >= {state.name for state in optimizer.states(group) if state.accumulates}
    assert not stochastic & NEVER_STOCHASTIC


def test_rows_without_gradients_do_not_undo_the_clipping_of_stableadamw():
    """0/0 would; the square of eps is below FP32's numbers."""
    optimizer = ALGORITHMS["StableAdamW"](weights(FP32), eps=1e-24, backend="eager")
    for step in range(1, 13):
        assert_step(optimizer, step, gradients(step, FP32, tiny=(0.0, 0.0, 0.0)))


# Adafactor.


@pytest.mark.parametrize("options", [{"eps": (2.0**-23, 1e-3)}, {"eps": (0.0, 1e-3), "square_eps": 1e-30}], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-9, 1e-5, 1e5, 1e10, 1e15])
def test_gradients_of_adafactor_may_be_tiny_or_huge(scale, options):
    """Of 1e15, squares are 1e30; the product of two means would overflow, and of 1e-12 underflow."""
    optimizer = ALGORITHMS["Adafactor"](weights(FP32), backend="eager", **options)
    for step in range(1, 10):
        assert_step(optimizer, step, gradients(step, FP32, scale, tiny=(0.0, 0.0, 0.0)))


CHANGES = {5: {"beta1": 0.9}, 6: {"scale_parameter": False}, 8: {"beta1": None}, 9: {"relative_step": False}}
CHANGES |= {10: {"maximize": True, "eps": (1e-2, 0.5), "d": 2.0, "scale_parameter": True}}


def test_options_of_adafactor_may_change_between_steps():
    """A momentum begins at zero."""
    optimizer = ALGORITHMS["Adafactor"](weights(FP32), backend="eager")
    for step in range(1, 13):
        optimizer.param_groups[0] |= CHANGES.get(step, {})
        assert_step(optimizer, step, gradients(step, FP32))


@pytest.mark.parametrize("theirs", [torch.optim.Adafactor, transformers.Adafactor], ids=["torch's", "Trainer's"])
def test_the_formula_of_adafactor_is_that_of_the_classes(theirs):
    """In FP64."""
    params = [nn.Parameter(param.detach().double()) for param in weights(FP32) if param.numel()]
    group = {"lr": 0.5, "beta2_decay": -0.8, "d": 1.0, "beta1": None, "weight_decay": 0.0, "maximize": False}
    if theirs is torch.optim.Adafactor:
        shared = {"eps": (1e-6, 1e-3), "d": 1.5, "weight_decay": 0.1, "maximize": True}
        group |= {**shared, "square_eps": 0.0, "relative_step": True, "scale_parameter": True}
    else:
        shared = {"relative_step": False, "scale_parameter": False}
        group |= TRAINER
    optimizer, states = theirs(params, lr=0.5, **shared), [defaultdict(lambda: torch.zeros(())) for _ in params]
    for step in range(1, 10):
        expected = []
        for param, state, grad in zip(params, states, gradients(step, FP32), strict=False):
            param.grad = grad.double()
            expected.append(FORMULAS["Adafactor"](param.detach().clone(), param.grad, state, step, group))
        optimizer.step()
        for param, state, (weight, new) in zip(params, states, expected, strict=True):
            torch.testing.assert_close(param.detach(), weight, rtol=1e-9, atol=1e-12)
            state |= new


def test_the_factory_passes_what_trainer_passes():
    assert optimizer_factory("adafactor_bf16_sr", lr=0.1)[1].items() >= TRAINER.items()
