"""Error feedback: the momentum lets the coming steps add what stochastic rounding took, so that errors do not add up.

That every step stores the momentum of the formula is in `test_formulas.py`. Here spacings are those of BF16 in [1, 2).
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from hf_lowprec.optim import SGD, AdamW
from hf_lowprec.optim.algorithms import ALGORITHMS
from hf_lowprec.optim.state.fp32_weights import fp32_estimates
from tests.support.optim.every_optimizer import build, parameters
from tests.support.optim.optimizer_contents import assert_equal, params_of, train

BF16, FP32 = torch.bfloat16, torch.float32
SPACING = 2.0**-7
DECAY = 0.9
NO_MATRICES = {"use_muon": False}


def made(name: str, dtype: torch.dtype = BF16, **options):
    group = {"params": [nn.Parameter(torch.linspace(1, 1.9, 1024).to(dtype))]} | (NO_MATRICES if name == "Muon" else {})
    return ALGORITHMS[name]([group], rounding="stochastic", state_dtype=FP32, **options)


def take_steps(optimizer, steps: int) -> None:
    """With gradients that stay as they are, so that second moments do, apart from their bias correction."""
    (param,) = params_of(optimizer)
    param.grad = torch.linspace(0.5, 2, 1024).to(param.dtype)
    for _ in range(steps):
        optimizer.step()


def in_fp32(optimizer, name: str, **options):
    """A copy that rounds nothing."""
    twin = made(name, FP32, **options)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    params_of(twin)[0].data.copy_(params_of(optimizer)[0])
    return twin


def apart(first: Tensor, second: Tensor) -> float:
    return (first.detach().double() - second.detach().double()).norm().item()


PRODIGY = {"d0": 1e-3, "d_coef": 0.0}
"""Its estimate stays at d0."""
PAYMENTS = [
    *((name, {"lr": 1e-3}, 1, 0.02) for name in ("Adam", "AdamW", "Muon", "StableAdamW", "Adan")),
    *((name, {"lr": 1e-3}, 200, 0.01) for name in ("AdamW", "StableAdamW", "Adan")),
    ("AdamW", {"lr": 1e-3, "amsgrad": True}, 10, 0.02),
    ("RAdam", {"lr": 1e-2}, 10, 0.1),  # its rectification doubles while most is added
    ("RAdam", {"lr": 1e-2}, 200, 0.01),
    ("Prodigy", {**PRODIGY, "use_bias_correction": True}, 1, 0.02),
    ("Prodigy", {**PRODIGY, "betas": (0.9, 0.9)}, 200, 0.01),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5}, 2, 0.01),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "nesterov": True}, 2, 0.01),
    ("Adafactor", {"lr": 1e-3, "beta1": 0.9}, 2, 0.01),
]


@pytest.mark.parametrize(("name", "options", "step", "tolerance"), PAYMENTS, ids=str)
def test_the_coming_steps_add_what_rounding_took(name, options, step, tolerance):
    """In step number `step`; after it nothing is rounded. 2% are those of the coming bias correction."""
    optimizer = made(name, **options)
    take_steps(optimizer, step - 1)
    exact = in_fp32(optimizer, name, **options)
    take_steps(optimizer, 1)
    take_steps(exact, 1)
    took = apart(*params_of(exact), *params_of(optimizer))
    assert took > 0.03 * SPACING * 1024**0.5
    continued = in_fp32(optimizer, name, **options)
    for each in (continued, exact):
        take_steps(each, 400)  # 0.98⁴⁰⁰ is 3e-4
    assert apart(*params_of(continued), *params_of(exact)) <= tolerance * took


@pytest.mark.parametrize("then", ["split", "kahan"])
def test_what_is_owed_is_added_in_another_mode(then):
    """Kahan's compensation is rounded 100 times to 2⁻⁸ of at most half a spacing: at random, 0.01 spacings in all."""
    optimizer = made("AdamW", lr=1e-3)
    take_steps(optimizer, 9)
    exact = in_fp32(optimizer, "AdamW", lr=1e-3)
    take_steps(optimizer, 1)
    optimizer.param_groups[0]["rounding"] = then
    took = apart(*params_of(optimizer), *params_of(exact))
    take_steps(optimizer, 100)
    take_steps(exact, 101)
    (param,) = params_of(optimizer)
    found = fp32_estimates(nn.ParameterList([param]), optimizer)(param)
    assert apart(found, *params_of(exact)) <= 0.05 * took


def errors(
    updates: Tensor, marks: tuple[int, ...], state_dtype: torch.dtype = FP32, turns: int = 10**9
) -> list[tuple[Tensor, Tensor]]:
    """Steps of SGD from 1.0 with an `update` for each weight, in spacings; at every mark, errors and exact places.

    Every `turns` steps the updates change their sign, so that weights stay below 2.
    """
    param = nn.Parameter(torch.ones(updates.shape, dtype=BF16))
    param.grad = -updates.to(BF16)
    size, gain, momentum, place = -param.grad.double(), 1 - DECAY, 0.0, 0.0
    options = {"momentum": DECAY, "rounding": "stochastic", "state_dtype": state_dtype}
    optimizer, found = SGD([param], lr=gain * SPACING, **options), []
    for step in range(marks[-1]):
        if step and step % turns == 0:
            param.grad.neg_()
        optimizer.step()
        momentum = DECAY * momentum + (-1) ** (step // turns) * gain
        place += momentum
        if step + 1 in marks:
            found.append(((param.detach().double() - 1) / SPACING - place * size, place * size))
    return found


def assert_mean(values: Tensor, expected: Tensor | float, deviation: float, more: float = 0.0) -> None:
    """Within five standard deviations of a mean, and `more`."""
    assert abs((values - expected).mean().item()) <= 5 * deviation / len(values) ** 0.5 + more


SMALL, LARGE = (2e-5, 1e-4), (0.3, 0.5)


def test_after_small_updates_a_weight_is_one_rounding_of_the_exact_one():
    """What is owed is always the exact minus the stored weight, and zero on average. Steps that are small do not leave
    the two numbers around the exact weight, so a share f between them means a variance of f(1-f): of its square over
    uniform f, that is 1/6 and the standard deviation √(1/30). Updates u leave behind up to u/(1-β).
    """
    for (found, places), most in zip(errors(torch.linspace(*SMALL, 4096), (1000, 10_000)), (0.1, 1), strict=True):
        share = places % 1
        assert_mean(found, 0, 6**-0.5)
        assert_mean(found.square(), share * (1 - share), 30**-0.5, more=SMALL[1] / (1 - DECAY))
        assert found.abs().max() <= 1.01 and places.max() > 0.9 * most


def test_the_error_of_large_updates_is_that_of_a_few_steps():
    """With O owed, a step to `u + (1-β)·O` behind a number adds `(u + (1-β)·O)·(1 - u - (1-β)·O)` to the variance V of
    O, and leaves β² of it: `V = u(1-u) - (1-β)²·V + β²·V`.
    """
    updates = torch.linspace(*LARGE, 4096).to(BF16).double()
    for found, _ in errors(updates, (50, 200)):
        variance = updates * (1 - updates) / (2 * (1 - DECAY))
        assert_mean(found, 0, variance.max() ** 0.5)
        assert_mean(found.square(), variance, 2**0.5 * variance.max())


@pytest.mark.every_case
@pytest.mark.timeout(1800)  # 100 microseconds a step, if nothing else runs
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_nor_does_it_grow_in_a_million_steps(state_dtype):
    """Of a momentum in BF16, what is owed is rounded at random in every step, which nothing feeds back.

    A spacing is 2⁻⁸ to 2⁻⁷ of a number, and the variance of a rounding a sixth of its square; of what is owed, 1/6.
    Smaller updates are a few ulps of FP32, to which sums of weight and update are rounded.
    """
    updates, marks = torch.linspace(2e-4, 1e-3, 512), (50_000, 950_000)
    for (found, places), steps in zip(errors(updates, marks, state_dtype, turns=100_000), marks, strict=True):
        share = places % 1
        walk = steps / 36 if state_dtype == BF16 else 0.0
        least, most = (1 / 6 + walk * spacing**2 for spacing in (2.0**-8, 2.0**-7))
        excess = found.square() - share * (1 - share) + 1 / 6
        assert_mean(found, 0, most**0.5)
        assert_mean(
            excess, (least + most) / 2, 2**0.5 * most, more=(most - least) / 2 + updates.max().item() / (1 - DECAY)
        )


def test_a_schedule_that_begins_again_from_almost_zero():
    """What is owed is multiplied by ten at most: a spacing by 10, and an ordinary error of up to four."""
    param, exact = (nn.Parameter(torch.ones(4096, dtype=dtype)) for dtype in (BF16, torch.float64))
    options = {"lr": 0.01 * SPACING, "momentum": DECAY}
    optimizers = SGD([param], rounding="stochastic", state_dtype=FP32, **options), torch.optim.SGD([exact], **options)
    schedules = [CosineAnnealingWarmRestarts(optimizer, T_0=100) for optimizer in optimizers]
    param.grad = torch.linspace(-1, -0.5, 4096).to(BF16)
    exact.grad = param.grad.double()
    for _ in range(300):
        for each in (*optimizers, *schedules):
            each.step()
        assert (param.double() - exact).abs().max() <= 14 * SPACING


def differ(optimizer, **changes) -> bool:
    """Whether the states of a step differ if error feedback ends before it. Both are taken by copies, after another."""
    both = [copy.deepcopy(optimizer) for _ in range(2)]
    for each, error_feedback in zip(both, (None, False), strict=True):
        train(each, 1)
        each.error_feedback = error_feedback
        each.param_groups[0] |= changes
        train(each, 1)
    assert_equal(*([param.detach() for param in params_of(each)] for each in both))
    states = [[value for state in each.state.values() for value in state.values()] for each in both]
    assert all(value.isfinite().all() for value in states[0])
    return not all(map(torch.equal, *states))


@pytest.mark.filterwarnings("ignore:the state of torch:RuntimeWarning")
@pytest.mark.parametrize("theirs", [False, True], ids=["ours", "torch's"])
@pytest.mark.parametrize("initial_lr", [{}, {"initial_lr": 0.01}], ids=str)
def test_feedback_begins_and_ends_with_any_step_and_needs_a_learning_rate(initial_lr, theirs):
    """Weights of zero, from which any update differs, and others; after steps of torch's, too."""
    params = [*parameters(), nn.Parameter(torch.zeros(64, dtype=BF16))]
    optimizer = AdamW(params, lr=0.01, rounding="stochastic", state_dtype=FP32)
    before = torch.optim.AdamW(params, lr=0.01) if theirs else optimizer
    train(before, 2)
    if theirs:
        optimizer.load_state_dict(before.state_dict())
    assert differ(optimizer, **initial_lr)
    for lr in (0.0, -0.01, 1e-45):
        assert not differ(optimizer, lr=lr, **initial_lr)


WITHOUT = [
    *((name, {}, "an update that is linear in a momentum") for name in ("Lion", "ScheduleFreeAdamW", "Muon")),
    *(("AdamW", {"rounding": rounding}, "rounding='stochastic'") for rounding in ("split", "kahan", "nearest")),
    *((name, {}, "a momentum that decays") for name in ("SGD", "Adafactor")),
    ("AdamW", {"betas": (0.0, 0.9)}, "a momentum that decays"),
    ("SGD", {"momentum": 1.0}, "a momentum that decays"),
]


@pytest.mark.parametrize(("name", "options", "needed"), WITHOUT, ids=str)
def test_what_has_no_feedback_steps_as_without_and_cannot_ask_for_it(name, options, needed):
    def matrices(**more):
        return build(name, parameters(shapes=[(8, 32)]), **{"rounding": "stochastic", **options, **more})

    optimizer = matrices()
    train(optimizer, 2)
    assert not differ(optimizer)
    with pytest.raises(ValueError, match=f"error_feedback=True needs {needed}, which param group 0 of {name} lacks"):
        matrices(error_feedback=True)


def test_every_group_must_be_able_to_feed_back_if_asked():
    first, second, whole = (*parameters(shapes=[(3,), (3,)]), *parameters(FP32, shapes=[(3,)]))
    optimizer = AdamW([first], rounding="stochastic", error_feedback=True)
    with pytest.raises(ValueError, match="needs rounding='stochastic', which param group 1 of AdamW lacks"):
        optimizer.add_param_group({"params": [second], "rounding": "split"})
    assert len(optimizer.param_groups) == 1
    optimizer = AdamW([whole], rounding="stochastic")
    train(optimizer, 2)
    assert not differ(optimizer)
