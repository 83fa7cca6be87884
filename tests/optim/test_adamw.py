"""AdamW: FP32 parameters against `torch.optim.AdamW`, 16-bit ones against the paper's formula in FP64."""

import itertools
import math

import pytest
import torch

from hf_lowprec.optim import AdamW

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 2.0**-24  # half an FP32 ulp, relative
SHAPE = (40, 25)
OPTIONS = [
    {"amsgrad": amsgrad, "maximize": maximize, "weight_decay": decay}
    for amsgrad, maximize, decay in itertools.product((False, True), (False, True), (0.0, 0.1))
]


def ids(options: dict) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items())


def gradients(steps: int, dtype: torch.dtype = FP32, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(steps)]


def parameter(dtype: torch.dtype = FP32, shape: tuple[int, ...] = SHAPE) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype))


def train(optimizer: torch.optim.Optimizer, param: torch.Tensor, grads: list[torch.Tensor]) -> None:
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()


def fp32_bound(steps: int, lr: float, largest: float) -> float:
    """Worst case of two FP32 implementations drifting apart while their gradients are the same.

    Per step and implementation: the weight is rounded twice at most (decay, update). The update lr · m̂ / √v̂: where v̂
    averages g² evenly, |g| <= √t · √v̂ <= 5.5 √v̂ for t <= 30. m̂ sums three roundings a step of terms up to max|g|, ten
    steps deep for β1 = 0.9: 30 · 5.5; v̂ three a step over 30 steps, halved by the root, times |m̂| / √v̂: 45 · 5.5.
    Together below 420 half ulps of lr; 1024 for two implementations with the few roundings of the final formula.
    """
    return steps * EPS * (4 * largest + 1024 * lr)


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-3)], ids=["number", "tensor"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95), (0.0, 0.0)], ids=str)
def test_fp32_parameters_get_torchs_adamw(options, lr, betas):
    steps = 30
    ours, theirs = parameter(), parameter()
    train(AdamW([ours], lr=lr, betas=betas, backend="eager", **options), ours, gradients(steps))
    train(torch.optim.AdamW([theirs], lr=lr, betas=betas, **options), theirs, gradients(steps))
    bound = fp32_bound(steps, float(lr), theirs.abs().max().item())
    assert (ours - theirs).abs().max().item() <= bound
    assert bound <= float(lr) / 20  # a twentieth of one step: a wrong term would show


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fp32_states_are_torchs(amsgrad):
    ours, theirs = parameter(), parameter()
    mine, reference = (cls([p], amsgrad=amsgrad) for cls, p in ((AdamW, ours), (torch.optim.AdamW, theirs)))
    for optimizer, param in ((mine, ours), (reference, theirs)):
        train(optimizer, param, gradients(30))
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
    """arXiv:1711.05101, Alg. 2 (decay times lr, as torch), in FP64: update, states, and the sum of its terms' sizes."""
    grad = -grad.double() if maximize else grad.double()
    (beta1, beta2), m, v = betas, state["exp_avg"].double(), state["exp_avg_sq"].double()
    new = {"exp_avg": beta1 * m + (1 - beta1) * grad, "exp_avg_sq": beta2 * v + (1 - beta2) * grad**2}
    second = new["exp_avg_sq"]
    if amsgrad:
        second = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"].double(), second)
    denominator = (second / (1 - beta2**step)).sqrt() + eps
    size = lr / (1 - beta1**step) / denominator
    update = -size * new["exp_avg"] - lr * weight_decay * weight.double()
    terms = size * (beta1 * m.abs() + (1 - beta1) * grad.abs()) + lr * weight_decay * weight.double().abs()
    return update, new, terms


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of `dtype` at normal FP64 magnitudes."""
    bits, smallest = {BF16: (8, -133), FP16: (11, -24), FP32: (24, -149)}[dtype]
    return torch.exp2(torch.frexp(value)[1].double().sub(bits).clamp(min=smallest))


HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}
MODES = [(BF16, "kahan"), (BF16, "stochastic"), (BF16, "nearest"), (FP16, "kahan"), (FP16, "nearest")]


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize(("dtype", "rounding"), MODES, ids=str)
def test_every_step_is_the_formula_rounded_once(dtype, rounding, state_rounding, options):
    """From the stored values before each step, the FP64 formula; what is stored after it is that, rounded as promised.

    FP32 arithmetic adds 16 half ulps at most to the update (seven operations on each term, host factors included), two
    to the sum, four to the states.
    """
    hyper = {**HYPER, **options}
    param = parameter(dtype)
    optimizer = AdamW([param], rounding=rounding, state_rounding=state_rounding, backend="eager", **hyper)
    zeros = torch.zeros(SHAPE)
    stored = dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), zeros)
    steps_of = {"nearest": 0.5, "stochastic": 1.0}  # how far a rounding may go, in spacings
    for step, grad in enumerate(gradients(8, dtype), start=1):
        before, carried = param.detach().double(), stored.get("compensation", zeros).double()
        update, states, terms = formula(before, grad, stored, step, **hyper)
        target = before + update + carried
        train(optimizer, param, [grad])
        stored = {name: value.clone() for name, value in optimizer.state[param].items()}
        slack = EPS * (16 * terms + 2 * (before.abs() + update.abs() + carried.abs()))
        after = param.detach().double()
        reach = ulp(torch.maximum(after.abs(), target.abs()), dtype)
        assert ((after - target).abs() <= steps_of.get(rounding, 0.5) * reach + slack).all()
        if rounding == "kahan":
            states["compensation"] = target - after
        assert set(stored) == {*states, "step"}
        for name, exact in states.items():
            value = stored[name].double()
            assert stored[name].dtype is BF16
            reach = steps_of[state_rounding] * ulp(torch.maximum(value.abs(), exact.abs()), BF16)
            noise = slack if name == "compensation" else 4 * EPS * (exact.abs() + grad.double().abs())
            assert ((value - exact).abs() <= reach + noise).all(), name


@pytest.mark.parametrize("state_rounding", ["stochastic", "nearest"])
def test_the_update_uses_the_moments_before_they_are_rounded(state_rounding):
    """From a weight of zero, weight + compensation is the update to 2**-16; rounded moments would be off by 2**-9.

    The weight keeps 8 bits, its rest is 2**-9 of it at most and stored with a relative error of 2**-7 at most.
    """
    param = parameter(BF16)
    hyper = {**HYPER, "weight_decay": 0.0}
    optimizer = AdamW([param], state_rounding=state_rounding, backend="eager", **hyper)
    grads = gradients(6, BF16)
    train(optimizer, param, grads[:1])
    for step, grad in enumerate(grads[1:], start=2):
        state = {name: value.clone() for name, value in optimizer.state[param].items()}
        param.data.zero_()
        optimizer.state[param]["compensation"].zero_()
        update, _, terms = formula(param.detach(), grad, state, step, amsgrad=False, maximize=False, **hyper)
        train(optimizer, param, [grad])
        total = param.detach().double() + optimizer.state[param]["compensation"].double()
        assert ((total - update).abs() <= 2.0**-16 * update.abs() + 16 * EPS * terms).all()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_the_first_step_has_the_size_of_the_learning_rate(dtype):
    """m̂ = g and √v̂ = |g|: the step is lr against the sign of the gradient, whatever its size."""
    param = torch.nn.Parameter(torch.zeros(6, dtype=dtype))
    lr = 2.0**-7  # every format holds it
    grad = torch.tensor([4.0, -4.0, 0.25, -0.25, 100.0, 0.0])
    train(AdamW([param], lr=lr, eps=1e-30, weight_decay=0.1), param, [grad.to(dtype)])
    assert (param.detach().float() + lr * grad.sign()).abs().max() <= lr * 2.0**-8 / 2


def test_decay_is_decoupled_from_the_gradient():
    """With zero gradients the moments stay zero and the weight shrinks by lr · decay a step, and by nothing else."""
    for dtype in (FP32, BF16):
        param = torch.nn.Parameter(torch.full((64,), 1.5, dtype=dtype))
        optimizer = AdamW([param], lr=0.1, weight_decay=0.5, backend="eager")
        train(optimizer, param, [torch.zeros(64, dtype=dtype)] * 10)
        total = param.detach().double() + optimizer.state[param].get("compensation", torch.zeros(64)).double()
        # BF16: the rest is 2**-8 at most, decays only once it is in the weight, and is stored to 2**-8 of itself.
        bound = 10 * (0.05 * 2.0**-8 + 2.0**-16) if dtype is BF16 else 10 * 8 * EPS
        assert ((total - 1.5 * 0.95**10).abs() <= bound).all()
        assert not optimizer.state[param]["exp_avg"].any()
        assert not optimizer.state[param]["exp_avg_sq"].any()


GROUPS = [
    {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0},
    {"lr": 1e-3, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.3, "amsgrad": True},
    {"lr": 3e-3, "maximize": True},
]


def test_groups_have_their_own_hyperparameters_as_in_torch():
    pairs = [(parameter(), parameter()) for _ in GROUPS]
    for position, cls in enumerate((AdamW, torch.optim.AdamW)):
        optimizer = cls([{"params": [pair[position]], **group} for pair, group in zip(pairs, GROUPS, strict=True)])
        for grad in gradients(20):
            for pair in pairs:
                pair[position].grad = grad.clone()
            optimizer.step()
    for (ours, theirs), group in zip(pairs, GROUPS, strict=True):
        assert (ours - theirs).abs().max() <= fp32_bound(20, group["lr"], theirs.abs().max().item())


MIXED = [
    (BF16, {"rounding": "stochastic", "state_dtype": FP32}),
    (BF16, {"rounding": "kahan", "state_rounding": "nearest", "lr": 1e-2}),
    (BF16, {"rounding": "nearest", "state_dtype": {"exp_avg_sq": FP32}, "state_rounding": "nearest"}),
    (FP32, {"rounding": "kahan", "amsgrad": True}),
    (FP16, {"rounding": "nearest", "state_dtype": FP32}),
]


def test_groups_of_any_mode_and_dtype_share_an_optimizer():
    """Each is stepped as if alone (only the first draws bits, and it has position 0 in both cases)."""
    together, alone = ([parameter(dtype) for dtype, _ in MIXED] for _ in range(2))
    shared = AdamW([{"params": [p], **group} for p, (_, group) in zip(together, MIXED, strict=True)])
    own = [AdamW([p], **group) for p, (_, group) in zip(alone, MIXED, strict=True)]
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
    assert ["compensation" in shared.state[p] for p in together] == [False, True, False, False, False]
    assert [shared.state[p]["exp_avg_sq"].dtype for p in together] == [FP32, BF16, FP32, FP32, FP32]
    assert [shared.state[p]["exp_avg"].dtype for p in together] == [FP32, BF16, BF16, FP32, FP32]


def test_fp16_cannot_be_rounded_stochastically():
    with pytest.raises(ValueError, match=r"stochastic.*|float16") as error:
        AdamW([parameter(FP16)], rounding="stochastic")
    for word in ("rounding", "stochastic", "float16", "kahan"):  # the argument, the values, and what would be right
        assert word in str(error.value)


def test_a_learning_rate_tensor_is_read_at_every_step():
    lr = torch.tensor(1e-2)
    ours, theirs = parameter(BF16), parameter(BF16)
    scheduled, plain = AdamW([ours], lr=lr), AdamW([theirs], lr=1.0)
    for step, grad in enumerate(gradients(5, BF16)):
        lr.fill_(1e-2 * 0.5**step)
        plain.param_groups[0]["lr"] = lr.item()
        train(scheduled, ours, [grad])
        train(plain, theirs, [grad])
    assert torch.equal(ours, theirs)
    assert math.isclose(lr.item(), 1e-2 / 16, rel_tol=1e-6)  # and is left alone
