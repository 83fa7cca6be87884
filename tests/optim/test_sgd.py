"""SGD: FP32 parameters against `torch.optim.SGD`, 16-bit ones against its formula in FP64."""

import itertools

import pytest
import torch

from hf_lowprec.optim import SGD

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 2.0**-24  # half an FP32 ulp, relative
SHAPE = (40, 25)
KINDS = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
]
OPTIONS = [
    {**kind, "maximize": maximize, "weight_decay": decay}
    for kind, maximize, decay in itertools.product(KINDS, (False, True), (0.0, 0.1))
]


def ids(options: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items())


def gradients(steps: int, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SHAPE, generator=generator).clamp(-4, 4).to(dtype) for _ in range(steps)]


def parameter(dtype: torch.dtype = FP32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(4)).to(dtype))


def train(optimizer: torch.optim.Optimizer, param: torch.Tensor, grads: list[torch.Tensor]) -> None:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()


def fp32_bound(steps: int, lr: float, largest: float) -> float:
    """Worst case of two FP32 implementations drifting apart on equal gradients of 4 at most.

    Per step and implementation: one rounding of the weight, and an update with a rounding for each of at most six
    operations, on values up to lr · 5 / (1 - 0.9) (decay included), themselves carrying up to ten steps of such errors.
    """
    return 2 * steps * EPS * (largest + lr * 50 * 6 * 10)


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-3)], ids=["number", "tensor"])
def test_fp32_parameters_get_torchs_sgd(options, lr):
    steps = 30
    ours, theirs = parameter(), parameter()
    mine, reference = SGD([ours], lr=lr, backend="eager", **options), torch.optim.SGD([theirs], lr=lr, **options)
    train(mine, ours, gradients(steps))
    train(reference, theirs, gradients(steps))
    bound = fp32_bound(steps, float(lr), theirs.abs().max().item())
    assert (ours - theirs).abs().max().item() <= bound
    assert bound <= float(lr) / 20  # a twentieth of a step with a unit gradient: a wrong term would show
    if options["momentum"]:
        buffer = reference.state[theirs]["momentum_buffer"]
        # Four roundings a step and implementation of values up to 50, ten steps deep.
        assert (mine.state[ours]["momentum_buffer"] - buffer).abs().max() <= 2 * 4 * 10 * 50 * EPS
    else:
        assert set(mine.state[ours]) <= {"step"}


def formula(weight, grad, buffer, *, lr, momentum, weight_decay, maximize, dampening=0.0, nesterov=False):
    """torch's documented algorithm in FP64, `buffer` None at the first step: update, new buffer, its terms in size."""
    grad = -grad.double() if maximize else grad.double()
    grad, terms = grad + weight_decay * weight, grad.abs() + weight_decay * weight.abs()
    if not momentum:
        return -lr * grad, None, lr * terms
    new = grad if buffer is None else momentum * buffer.double() + (1 - dampening) * grad
    size = terms if buffer is None else momentum * buffer.double().abs() + (1 - dampening) * terms
    direction, size = (grad + momentum * new, terms + momentum * size) if nesterov else (new, size)
    return -lr * direction, new, lr * size


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at FP64 magnitudes."""
    bits, smallest = {BF16: (8, -133), FP16: (11, -24)}[dtype]
    return torch.exp2(torch.frexp(value)[1].double().sub(bits).clamp(min=smallest))


MODES = [(BF16, "kahan"), (BF16, "stochastic"), (BF16, "nearest"), (FP16, "kahan"), (FP16, "nearest")]


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_formula_rounded_once(dtype, rounding, state_rounding, options):
    """From the stored values before each step, the FP64 formula; what is stored after it is that, rounded as promised.

    FP32 arithmetic adds 12 half ulps of its summands at most to the update, and two to the sum.
    """
    lr, param = 1e-2, parameter(dtype)
    optimizer = SGD([param], lr=lr, rounding=rounding, state_rounding=state_rounding, backend="eager", **options)
    stored = {}
    reach_of = {"nearest": 0.5, "stochastic": 1.0}  # how far a rounding may go, in spacings
    for grad in gradients(8, dtype):
        before, carried = param.detach().double(), stored.get("compensation", torch.zeros(SHAPE)).double()
        update, buffer, terms = formula(before, grad, stored.get("momentum_buffer"), lr=lr, **options)
        target = before + update + carried
        train(optimizer, param, [grad])
        stored = {name: value.clone() for name, value in optimizer.state[param].items()}
        slack = EPS * (12 * terms + 2 * (before.abs() + update.abs() + carried.abs()))
        after = param.detach().double()
        reach = reach_of.get(rounding, 0.5) * ulp(torch.maximum(after.abs(), target.abs()), dtype)
        assert ((after - target).abs() <= reach + slack).all()
        expected = {} if buffer is None else {"momentum_buffer": (buffer, 12 * EPS * terms / lr)}
        if rounding == "kahan":
            expected["compensation"] = (target - after, slack)
        assert set(stored) - {"step"} == set(expected)
        for name, (exact, noise) in expected.items():
            value = stored[name].double()
            assert stored[name].dtype is BF16
            reach = reach_of[state_rounding] * ulp(torch.maximum(value.abs(), exact.abs()), BF16)
            assert ((value - exact).abs() <= reach + noise).all(), name


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_the_first_step_takes_the_whole_gradient_whatever_the_dampening(dtype, dampening):
    param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    optimizer = SGD([param], lr=0.5, momentum=0.5, dampening=dampening)
    grad = torch.tensor([1.0, -2.0, 0.25, 0.0], dtype=dtype)  # every number here is exact in every format
    train(optimizer, param, [grad])
    assert torch.equal(param.detach(), -0.5 * grad)
    train(optimizer, param, [grad])
    assert torch.equal(param.detach(), -0.5 * grad - 0.5 * (0.5 + 1 - dampening) * grad)


def test_the_update_uses_the_buffer_before_it_is_rounded():
    """From a weight of zero, weight + compensation is the update to 2**-16; a rounded buffer would be off by 2**-9."""
    param = parameter(BF16)
    optimizer = SGD([param], lr=1e-2, momentum=0.9, backend="eager")
    grads = gradients(6, BF16)
    train(optimizer, param, grads[:1])
    for grad in grads[1:]:
        state = {name: value.clone() for name, value in optimizer.state[param].items()}
        param.data.zero_()
        optimizer.state[param]["compensation"].zero_()
        buffer, zero = state["momentum_buffer"], torch.zeros(SHAPE, dtype=torch.float64)
        update, _, terms = formula(zero, grad, buffer, lr=1e-2, momentum=0.9, weight_decay=0.0, maximize=False)
        train(optimizer, param, [grad])
        total = param.detach().double() + optimizer.state[param]["compensation"].double()
        # The rest is 2**-9 of the weight at most, stored with a relative error of 2**-7 at most.
        assert ((total - update).abs() <= 2.0**-16 * update.abs() + 12 * EPS * terms).all()


GROUPS = [
    {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    {"lr": 1e-3, "weight_decay": 0.3},
    {"lr": 3e-3, "momentum": 0.5, "dampening": 0.1, "maximize": True},
]


def test_groups_have_their_own_hyperparameters_as_in_torch():
    pairs = [(parameter(), parameter()) for _ in GROUPS]
    for position, cls in enumerate((SGD, torch.optim.SGD)):
        groups = [{"params": [pair[position]], **group} for pair, group in zip(pairs, GROUPS, strict=True)]
        optimizer = cls(groups, lr=1.0)
        for grad in gradients(20):
            for pair in pairs:
                pair[position].grad = grad.clone()
            optimizer.step()
    for (ours, theirs), group in zip(pairs, GROUPS, strict=True):
        assert (ours - theirs).abs().max() <= fp32_bound(20, group["lr"], theirs.abs().max().item())


MIXED = [
    (BF16, {"rounding": "stochastic", "momentum": 0.9}),
    (BF16, {"rounding": "kahan", "state_rounding": "nearest", "momentum": 0.9, "state_dtype": FP32}),
    (BF16, {"rounding": "nearest", "momentum": 0.0}),
    (FP32, {"rounding": "kahan", "momentum": 0.9, "nesterov": True}),
    (FP16, {"rounding": "kahan", "momentum": 0.0, "state_rounding": "nearest"}),
]


def test_groups_of_any_mode_and_dtype_share_an_optimizer():
    """Each is stepped as if alone (only the first draws bits, and it has position 0 in both cases)."""
    together, alone = ([parameter(dtype) for dtype, _ in MIXED] for _ in range(2))
    shared = SGD([{"params": [p], **group} for p, (_, group) in zip(together, MIXED, strict=True)], lr=1e-2)
    own = [SGD([p], lr=1e-2, **group) for p, (_, group) in zip(alone, MIXED, strict=True)]
    for grad in gradients(10):
        for param in together + alone:
            param.grad = grad.to(param.dtype)
        for optimizer in [shared, *own]:
            optimizer.step()
    for first, second, optimizer in zip(together, alone, own, strict=True):
        assert torch.equal(first, second)
        assert shared.state[first].keys() == optimizer.state[second].keys()
        for name, value in optimizer.state[second].items():
            assert torch.equal(shared.state[first][name], value)
            assert shared.state[first][name].dtype is value.dtype
    assert ["compensation" in shared.state[p] for p in together] == [False, True, False, False, True]
    assert ["momentum_buffer" in shared.state[p] for p in together] == [True, True, False, True, False]
    assert shared.state[together[1]]["momentum_buffer"].dtype is FP32


def test_fp16_cannot_be_rounded_stochastically():
    with pytest.raises(ValueError, match="stochastic") as error:
        SGD([parameter(FP16)], rounding="stochastic")
    for word in ("rounding", "float16", "kahan"):  # the argument, the value, and what would be right
        assert word in str(error.value)


def test_two_parameters_of_one_group_draw_different_bits():
    first, second = parameter(BF16), parameter(BF16)
    optimizer = SGD([first, second], lr=1e-2, rounding="stochastic")
    for grad in gradients(3, BF16):
        first.grad, second.grad = grad.clone(), grad.clone()
        optimizer.step()
    assert not torch.equal(first, second)
    assert (first.double() - second.double()).abs().max() <= 3 * 2.0**-7 * 8  # a spacing a step, below 8
