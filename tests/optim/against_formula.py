"""What the tests of an algorithm share: equal training, and each step beside a formula in FP64."""

from collections.abc import Callable

import torch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 2.0**-24  # half an FP32 ulp, relative
SHAPE = (40, 25)
MODES = [(BF16, "kahan"), (BF16, "stochastic"), (BF16, "nearest"), (FP16, "kahan"), (FP16, "nearest")]

ONLY_SET = {"max_exp_avg_sq", "previous_grad"}  # states that do not average: rounded to nearest, always

Formula = Callable[..., tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]]
"""`(weight, grad, states, step, **hyperparameters)`, all FP64, to the update, each state with the size of its terms,
and the size of the update's terms: what a rounding is relative to."""


def gradients(steps: int, dtype: torch.dtype = FP32, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]


def parameter(dtype: torch.dtype = FP32, shape: tuple[int, ...] = SHAPE) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype))


def train(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad.to(param.dtype, copy=True)
        optimizer.step()


def estimate(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The best estimate of the weight in FP64: what is stored and what is still owed to it."""
    (param,) = optimizer.param_groups[0]["params"]
    return param.detach().double() + optimizer.state[param].get("compensation", torch.zeros(())).double()


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at FP64 magnitudes."""
    bits, smallest = {BF16: (8, -133), FP16: (11, -24), FP32: (24, -149)}[dtype]
    return torch.exp2(torch.frexp(value)[1].double().sub(bits).clamp(min=smallest))


def assert_rounded_once(cls, formula: Formula, dtype, rounding: str, state_rounding: str, undecided=None, **hyper):
    """From the stored values before each of eight steps, `formula`; what is stored after is that, rounded as promised.

    FP32 arithmetic adds 16 half ulps at most to the update's terms (eight operations on each, host factors included),
    two to the sum, 8 to a state's terms. `undecided(weight, grad, states, **hyper)` is where the formula jumps.
    """
    param = parameter(dtype)
    optimizer = cls([param], rounding=rounding, state_rounding=state_rounding, backend="eager", **hyper)
    names = [state.name for state in optimizer.states(optimizer.param_groups[0])]
    scattered = set()
    zeros = torch.zeros(SHAPE, dtype=FP64)
    stored = dict.fromkeys([*names, "compensation"], zeros)
    for step, grad in enumerate(gradients(8, dtype), start=1):
        before, carried = param.detach().double(), stored["compensation"]
        own = {name: stored[name] for name in names}
        decided = ~undecided(before, grad.double(), own, **hyper) if undecided else torch.ones(SHAPE, dtype=torch.bool)
        update, states, terms = formula(before, grad.double(), own, step, **hyper)
        target = before + update + carried
        train(optimizer, [grad])
        held = {name: value for name, value in optimizer.state[param].items() if name != "step"}
        assert {value.dtype for value in held.values()} <= {BF16}
        stored = {name: value.double() for name, value in held.items()}
        slack = EPS * (16 * terms + 2 * (before.abs() + update.abs() + carried.abs()))
        after = param.detach().double()
        reach = (1.0 if rounding == "stochastic" else 0.5) * ulp(torch.maximum(after.abs(), target.abs()), dtype)
        assert ((after - target).abs() <= reach + slack)[decided].all()
        expected = {name: (exact, 8 * EPS * size) for name, (exact, size) in states.items()}
        if rounding == "kahan":
            expected["compensation"] = (target - after, slack)
        assert stored.keys() == expected.keys()
        for name, (exact, noise) in expected.items():
            spacing, error = ulp(torch.maximum(stored[name].abs(), exact.abs()), BF16), (stored[name] - exact).abs()
            reach = spacing / 2 if state_rounding == "nearest" or name in ONLY_SET else spacing
            unclear = ~decided if name == "compensation" else torch.zeros_like(decided)
            assert ((error <= reach + noise) | unclear).all(), name
            if (error > spacing / 2 + noise).any():
                scattered.add(name)
        stored.setdefault("compensation", zeros)
    assert scattered - {"compensation"} == (set(names) - ONLY_SET if state_rounding == "stochastic" else set())


WAYS = {
    "FP32 state": {"state_dtype": FP32},
    "BF16 state": {},
    "stochastic": {"rounding": "stochastic"},
    "nearest": {"rounding": "nearest"},
}


def displacements(cls, reference, *, steps: int = 1000, count: int = 4096, **hyper) -> dict[str, tuple[float, float]]:
    """Train BF16 weights the `WAYS` of `cls` and FP64 weights the way of `reference`, on equal gradients.

    Gradients have a mean of their own per element (σ 0.3) and unit noise, and drop to a fifth after a quarter of the
    steps; initial weights have σ 0.02.

    Returns:
        By way: the distance to the reference's final weights, relative to its displacement, and the length of the own
        displacement along it.
    """
    random = torch.Generator().manual_seed(0)
    start = (torch.randn(count, generator=random) * 0.02).to(BF16)
    mean = torch.randn(count, generator=random) * 0.3
    ours = {way: cls([torch.nn.Parameter(start.clone())], **hyper, **options) for way, options in WAYS.items()}
    exact = torch.nn.Parameter(start.double())
    theirs = reference([exact], **hyper)
    for step in range(steps):
        gradient = ((mean + torch.randn(count, generator=random)) * (1.0 if step < steps / 4 else 0.2)).to(BF16)
        for optimizer in (*ours.values(), theirs):
            train(optimizer, [gradient])
    wanted = exact.detach() - start.double()
    found = {}
    for way, optimizer in ours.items():
        moved = estimate(optimizer) - start.double()
        along = torch.dot(moved, wanted) / torch.dot(wanted, wanted)
        found[way] = (((moved - wanted).norm() / wanted.norm()).item(), along.item())
    return found
