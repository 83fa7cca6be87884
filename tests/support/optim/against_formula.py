"""Shared by the tests of single algorithms: training on fixed gradients, comparisons of steps with FP64 formulas."""

from collections.abc import Callable

import torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 2.0**-24  # half an FP32 ulp, relative
SHAPE = (40, 25)
"""Kahan summation as in the papers. The formulas tell what one step does; a first compensation has tests of its own."""
MODES = [(BF16, "kahan"), (BF16, "stochastic"), (BF16, "nearest"), (FP16, "kahan"), (FP16, "nearest"), (FP32, "kahan")]
"""FP32 parameters have FP32 states, and no compensation."""

NOT_AVERAGED = {"max_exp_avg_sq", "previous_grad"}  # states that are always rounded to nearest

Formula = Callable[..., tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]]
"""`(weight, grad, states, step, **hyperparameters) -> (update, new states, size)`, all FP64.

Each new state is a pair of its value and its size. A size is the sum of the magnitudes of the terms that are added up,
which rounding errors are relative to; `size` is that of the update.
"""


def gradients(steps: int, dtype: torch.dtype = FP32, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    """The same normally distributed gradients in every call."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]


def parameter(dtype: torch.dtype = FP32, shape: tuple[int, ...] = SHAPE) -> torch.nn.Parameter:
    """A parameter with the same normally distributed weights in every call."""
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype))


def train(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> None:
    """Step the only parameter of `optimizer` with each of `grads`."""
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad.to(param.dtype, copy=True)
        optimizer.step()


def estimate(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The weight of the only parameter of `optimizer` plus its compensation, FP64."""
    (param,) = optimizer.param_groups[0]["params"]
    return param.detach().double() + optimizer.state[param].get("compensation", torch.zeros(())).double()


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at FP64 magnitudes."""
    bits, smallest = {BF16: (8, -133), FP16: (11, -24), FP32: (24, -149)}[dtype]
    return torch.exp2(torch.frexp(value)[1].double().sub(bits).clamp(min=smallest))


def assert_rounded_once(
    cls,
    formula: Formula,
    dtype: torch.dtype,
    rounding: str,
    state_rounding: str,
    undecided: Callable[..., torch.Tensor] | None = None,
    update_error: int = 16,
    state_error: int = 8,
    **hyper,
) -> None:
    """Compare each of eight steps with `formula` of the values stored before it, rounded once.

    Args:
        cls: the optimizer class.
        formula: its formula in FP64.
        dtype: dtype of the weight.
        rounding: the rounding mode.
        state_rounding: the rounding of its states.
        undecided: `(weight, grad, states, **hyper)`, where rounding errors may decide between branches of the formula.
        update_error: error of FP32 arithmetic in the update, in half ulps of its size: two for each operation, host
            scalars included, on a term. The sum with the weight adds two more.
        state_error: the same in the new states.
        hyper: hyperparameters of both.
    """
    param = parameter(dtype)
    optimizer = cls([param], rounding=rounding, state_rounding=state_rounding, backend="eager", **hyper)
    state_dtype = FP32 if dtype is FP32 else BF16
    names = [state.name for state in optimizer.states(optimizer.param_groups[0])]
    rounded_away = set()  # states with errors that only stochastic rounding makes
    zeros = torch.zeros(SHAPE, dtype=FP64)
    stored = dict.fromkeys([*names, "compensation"], zeros)
    for step, grad in enumerate(gradients(8, dtype), start=1):
        before, compensation = param.detach().double(), stored["compensation"]
        own = {name: stored[name] for name in names}
        decided = ~undecided(before, grad.double(), own, **hyper) if undecided else torch.ones(SHAPE, dtype=torch.bool)
        update, states, size = formula(before, grad.double(), own, step, **hyper)
        target = before + update + compensation
        train(optimizer, [grad])
        new_state = {name: value for name, value in optimizer.state[param].items() if name != "step"}
        assert {value.dtype for value in new_state.values()} <= {state_dtype}
        stored = {name: value.double() for name, value in new_state.items()}
        slack = EPS * (update_error * size + 2 * (before.abs() + update.abs() + compensation.abs()))
        after = param.detach().double()
        reach = (1.0 if rounding == "stochastic" else 0.5) * ulp(torch.maximum(after.abs(), target.abs()), dtype)
        assert ((after - target).abs() <= reach + slack)[decided].all()
        expected = {name: (exact, state_error * EPS * size) for name, (exact, size) in states.items()}
        if rounding == "kahan" and dtype is not FP32:
            expected["compensation"] = (target - after, slack)
        assert stored.keys() == expected.keys()
        for name, (exact, noise) in expected.items():
            error = (stored[name] - exact).abs()
            spacing = ulp(torch.maximum(stored[name].abs(), exact.abs()), state_dtype)
            reach = spacing / 2 if state_rounding == "nearest" or name in NOT_AVERAGED else spacing
            unclear = ~decided if name == "compensation" else torch.zeros_like(decided)
            assert ((error <= reach + noise) | unclear).all(), name
            if (error > spacing / 2 + noise).any():
                rounded_away.add(name)
        stored.setdefault("compensation", zeros)
    random = state_rounding == "stochastic" and state_dtype is BF16
    assert rounded_away - {"compensation"} == (set(names) - NOT_AVERAGED if random else set())


def assert_update_is_not_rounded(cls, formula: Formula, update_error: int = 16, **hyper) -> None:
    """The update is computed from the FP32 states, before these are rounded for storage.

    From a weight of zero, weight + compensation is the update to 2**-16; rounded states would make it off by 2**-9. The
    weight has 8 bits, the compensation is 2**-9 of it at most and is stored with a relative error of 2**-7 at most.
    """
    param = parameter(BF16)
    optimizer = cls([param], backend="eager", **hyper)
    first, *others = gradients(6, BF16)
    train(optimizer, [first])
    for step, grad in enumerate(others, start=2):
        state = {name: value.double() for name, value in optimizer.state[param].items()}
        param.data.zero_()
        optimizer.state[param]["compensation"].zero_()
        update, _, size = formula(param.detach().double(), grad.double(), state, step, **hyper)
        train(optimizer, [grad])
        assert ((estimate(optimizer) - update).abs() <= 2.0**-16 * update.abs() + update_error * EPS * size).all()
