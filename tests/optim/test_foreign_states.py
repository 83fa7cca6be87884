"""State dicts of torch, optimi, torchao and flashoptim: converted where the formula is the same, else refused."""

import copy
import warnings

import optimi
import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

from hf_lowprec.optim import SGD, Adafactor, Adam, AdamW, Lion, Muon, RAdam, StableAdamW
from hf_lowprec.optim.algorithms import ALGORITHMS
from tests.support.optim.optimizer_contents import assert_equal, everything, params_of, refuses, train
from tests.support.triton_available import require_triton

pytestmark = pytest.mark.filterwarnings(
    "ignore:the state of .* was converted:RuntimeWarning",
    "ignore:the state dict that was loaded replaces:RuntimeWarning",
)
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
SHAPE = (6, 5)
BEFORE, AFTER = 10, 10
"""Steps before and after the conversion."""


def params(dtype: torch.dtype, count: int = 2) -> list[nn.Parameter]:
    """Weights that BF16 represents."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(SHAPE, generator=generator).mul(0.1).to(BF16).to(dtype) for _ in range(count)]
    return [nn.Parameter(value) for value in values]


def gradients(optimizer, steps: range) -> None:
    """Steps whose gradients BF16 represents, and which change slowly, as those of a model do."""
    for step in steps:
        for number, param in enumerate(params_of(optimizer)):
            drawn = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
            more = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * step + number))
            param.grad = (drawn + 0.3 * more).to(BF16).to(param.dtype)
        optimizer.step()


def converted(source, cls, dtype: torch.dtype, **options):
    """An optimizer of ours with the weights and the state of `source`."""
    target = cls([nn.Parameter(p.detach().to(dtype, copy=True)) for p in params_of(source)], **options)
    with pytest.warns(RuntimeWarning, match="was converted for"):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
    return target


def estimates(optimizer) -> list[torch.Tensor]:
    """Weight plus compensation, FP64."""
    zero = torch.zeros(())
    return [p.detach().double() + optimizer.state[p].get("compensation", zero).double() for p in params_of(optimizer)]


def largest_difference(ours, reference) -> float:
    pairs = zip(estimates(ours), params_of(reference), strict=True)
    return max(float((mine - theirs.detach().double()).abs().max()) for mine, theirs in pairs)


TORCH = [
    pytest.param(torch.optim.AdamW, AdamW, {"weight_decay": 0.1}, id="AdamW"),
    pytest.param(torch.optim.AdamW, AdamW, {"amsgrad": True, "maximize": True}, id="AdamW-amsgrad"),
    pytest.param(torch.optim.AdamW, AdamW, {"foreach": True, "capturable": False}, id="AdamW-foreach"),
    pytest.param(torch.optim.AdamW, Adam, {"weight_decay": 0.1}, id="AdamW-by-Adam"),
    pytest.param(torch.optim.Adam, Adam, {"weight_decay": 0.1}, id="Adam"),
    pytest.param(torch.optim.Adam, AdamW, {"weight_decay": 0.0}, id="Adam-by-AdamW"),
    pytest.param(torch.optim.RAdam, RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}, id="RAdam"),
    pytest.param(torch.optim.SGD, SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}, id="SGD"),
    pytest.param(torch.optim.SGD, SGD, {"momentum": 0.9, "nesterov": True}, id="SGD-nesterov"),
    pytest.param(torch.optim.SGD, SGD, {}, id="SGD-plain"),
]
LR = 1e-3


def continued_like_fp64(theirs, ours, in_fp32: dict | None = None, **options) -> torch.optim.Optimizer:
    """Train with `theirs` in FP32 and on with `ours`, and compare with all steps by `theirs` in FP64; returns `ours`.

    `in_fp32` are options of the FP32 steps alone.

    Both round each weight once per step, by 2^-24 of it, and the update by a few 2^-24 of its size. Adam's updates are
    at most a few lr; SGD's are lr times a momentum below 10 times the largest gradient of about 5.
    """
    reference = theirs(params(FP64), lr=LR, **options)
    source = theirs(params(FP32), lr=LR, **(options | (in_fp32 or {})))
    gradients(reference, range(BEFORE + AFTER))
    gradients(source, range(BEFORE))
    target = converted(source, ours, FP32, lr=1.0)
    gradients(target, range(BEFORE, BEFORE + AFTER))
    update = LR * (50 if ours is SGD else 5)
    assert largest_difference(target, reference) < (BEFORE + AFTER) * 2**-24 * (1 + 20 * update)
    (group,) = target.param_groups
    assert group.keys() == ours(params(FP32)).param_groups[0].keys(), "no key of the other library stays"
    for param in params_of(target):
        names = {"step", *(state.name for state in target.stored_states(group, param))}
        assert target.state[param].keys() == names, "nor one of its states"
    return target


@pytest.mark.parametrize(("theirs", "ours", "options"), TORCH)
def test_torch_in_fp32_continues_like_fp64(theirs, ours, options):
    target = continued_like_fp64(theirs, ours, **options)
    assert {type(target.state[p]["step"]) for p in params_of(target)} == {torch.Tensor}


@pytest.mark.parametrize(("theirs", "ours", "options"), TORCH)
def test_torch_in_fp32_continues_with_bf16_weights_and_states(theirs, ours, options):
    """The weights that come over are BF16 numbers here, so only what follows is rounded.

    Per step, Kahan's compensation is rounded by at most 2^-8 of itself, which is at most half a spacing, 2^-8 of the
    weight; and the decay reads the stored weight, 2^-8 off. A moment is off by 2^-9 at the conversion and by 2^-8 after
    each step, which it forgets with its decay rate β, so by at most 2^-8 / (1 - β) of its largest value: 10 · 2^-8 of
    the update for β = 0.9, and half of that for the second moment, because of the square root.
    """
    betas = {} if ours is SGD else {"betas": (0.9, 0.9)}
    reference = theirs(params(FP64), lr=LR, **options, **betas)
    gradients(reference, range(BEFORE))
    source = theirs(params(FP32), lr=LR, **options, **betas)
    source.load_state_dict(reference.state_dict())
    with torch.no_grad():
        for param, other in zip(params_of(source), params_of(reference), strict=True):
            param.copy_(other.to(BF16))
            other.copy_(param)
    target = converted(source, ours, BF16, lr=1.0, rounding="kahan")
    assert all(value.dtype == BF16 for p in params_of(target) for k, value in target.state[p].items() if k != "step")
    for param in params_of(target):  # zero, as the papers have it, whatever the initial compensation is
        target.state[param]["compensation"] = torch.zeros_like(param)
    gradients(reference, range(BEFORE, BEFORE + AFTER))
    gradients(target, range(BEFORE, BEFORE + AFTER))
    update = LR * (50 if ours is SGD else 5)
    moments = 10 * 2**-8 * (1 if ours is SGD else 1.5)
    bound = AFTER * (2**-16 + LR * 0.1 * 2**-8 + update * moments)
    moved = max(
        float((p.detach() - q.detach().double()).abs().max())
        for p, q in zip(params_of(reference), params_of(source), strict=True)
    )
    assert largest_difference(target, reference) < min(bound, 0.1 * moved)


@pytest.mark.parametrize(
    ("adjust_lr_fn", "ours"), [(None, "original"), ("original", "original"), ("match_rms_adamw", "match_rms_adamw")]
)
def test_torchs_muon(adjust_lr_fn, ours):
    def made(cls, dtype, **options):
        return cls(params(dtype), lr=LR, weight_decay=0.1, momentum=0.9, ns_steps=4, **options)

    source = made(torch.optim.Muon, FP32, eps=1e-6, adjust_lr_fn=adjust_lr_fn)
    gradients(source, range(BEFORE))
    before = [p.detach().clone() for p in params_of(source)]
    target = converted(source, Muon, FP32, lr=1.0)
    (group,) = target.param_groups
    assert (group["ns_eps"], group["eps"], group["adjust_lr_fn"], group["ns_steps"]) == (1e-6, 1e-8, ours, 4)
    for other in (source, target):
        gradients(other, range(BEFORE, BEFORE + AFTER))
    moved = max(float((p.detach() - q).abs().max()) for p, q in zip(params_of(source), before, strict=True))
    # Both orthogonalize in BF16, with inputs that are equal up to the last bits of FP32.
    assert largest_difference(target, source) < 2**-6 * moved


OPTIMI = [
    pytest.param(optimi.AdamW, AdamW, {"weight_decay": 0.1}, id="AdamW"),
    pytest.param(optimi.AdamW, AdamW, {"weight_decay": 1e-4, "decouple_lr": True}, id="AdamW-decoupled"),
    pytest.param(optimi.Adam, Adam, {"weight_decay": 0.1}, id="Adam"),
    pytest.param(optimi.Adam, Adam, {"weight_decay": 1e-4, "decouple_lr": True}, id="Adam-decoupled"),
    pytest.param(optimi.StableAdamW, StableAdamW, {"weight_decay": 0.1}, id="StableAdamW"),
    pytest.param(optimi.Lion, Lion, {"weight_decay": 0.1}, id="Lion"),
    pytest.param(optimi.SGD, SGD, {"momentum": 0.9, "dampening": True, "weight_decay": 0.1}, id="SGD"),
    pytest.param(optimi.SGD, SGD, {"momentum": 0.9, "weight_decay": 0.1}, id="SGD-undamped"),
    pytest.param(optimi.SGD, SGD, {}, id="SGD-plain"),
]


IMPLEMENTATIONS = ["for-loop", "foreach"]
if Version(optimi.__version__) >= Version("0.3") and not torch.cuda.is_available():  # in Triton's interpreter
    IMPLEMENTATIONS.append("triton")


@pytest.mark.filterwarnings("ignore:Parameter `foreach` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("theirs", "ours", "options"), OPTIMI)
def test_optimi_in_fp32_continues_like_fp64(theirs, ours, options, implementation):
    """As with torch; optimi's moments are divided by the bias correction, which costs one more rounding each."""
    if implementation == "triton":
        require_triton()
    chosen = {"triton": True} if implementation == "triton" else {"foreach": implementation == "foreach"}
    continued_like_fp64(theirs, ours, chosen, foreach=False, **options)


@pytest.mark.parametrize(
    ("dtype", "placeholder", "shape"),
    [(FP32, torch.uint8, SHAPE), (FP32, torch.uint8, (1,)), (FP32, FP32, (1,)), (BF16, BF16, SHAPE)],
)
def test_the_placeholder_of_a_compensation_is_not_taken_for_one(dtype, placeholder, shape):
    """optimi's Triton kernels get one element for a weight without one; loaded again, it has the weight's dtype."""
    source = optimi.AdamW([nn.Parameter(torch.ones(shape, dtype=dtype))], lr=LR, kahan_sum=False)
    params_of(source)[0].grad = torch.ones(shape, dtype=dtype)
    source.step()
    saved = copy.deepcopy(source.state_dict())
    saved["state"][0]["kahan_comp"] = torch.zeros(1, dtype=placeholder)
    target = AdamW([nn.Parameter(torch.ones(shape, dtype=dtype))])
    target.load_state_dict(saved)
    assert "compensation" not in target.state[params_of(target)[0]]
    train(target, 1)


@pytest.mark.parametrize(("theirs", "ours", "options"), OPTIMI)
def test_the_compensation_of_optimi_comes_over(theirs, ours, options):
    """With updates far below half a spacing, all of the displacement is in the compensation.

    By default, StableAdamW of optimi 0.3.3 takes its Triton kernels on a CPU as well.
    """
    options = {**options, "weight_decay": 0.0, "foreach": False}
    source = theirs(params(BF16), lr=1e-6, **options)
    reference = theirs(params(FP64), lr=1e-6, **options)
    for optimizer in (source, reference):
        gradients(optimizer, range(BEFORE))
    sums = [p.detach().double() + source.state[p]["kahan_comp"].double() for p in params_of(source)]
    target = converted(source, ours, BF16, lr=1.0)
    for mine, expected, exact in zip(estimates(target), sums, params_of(reference), strict=True):
        assert torch.equal(mine, expected)
        moved = exact.detach() - exact.detach().to(BF16).double()
        # optimi rounds moments and sums to BF16 in every step: some percent of the displacement, not its sign.
        assert float((mine - exact.detach()).abs().mean()) < 0.2 * float(moved.abs().mean())


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_the_compensation_of_optimi_is_rounded_into_the_weights_in_other_modes(rounding):
    source = optimi.AdamW(params(BF16), lr=1e-5)  # moves a weight by a fifth of its spacing
    gradients(source, range(BEFORE))
    sums = [p.detach().double() + source.state[p]["kahan_comp"].double() for p in params_of(source)]
    target = converted(source, AdamW, BF16, lr=1.0, rounding=rounding)
    target.param_groups[0]["lr"] = 0.0
    gradients(target, range(BEFORE, BEFORE + 1))
    for param, expected in zip(params_of(target), sums, strict=True):
        assert "compensation" not in target.state[param]
        assert ((param.detach().double() - expected).abs() <= expected.abs() * 2**-7).all()  # one spacing
    if rounding == "stochastic":
        assert any(not torch.equal(p, q) for p, q in zip(params_of(target), params_of(source), strict=True))


def test_a_compensation_for_a_norm_that_is_fp32_here_is_refused_with_the_line_to_write():
    source = optimi.AdamW(params(BF16), lr=1e-6)
    gradients(source, range(BEFORE))
    target = AdamW(params(FP32), lr=1.0)
    saved = copy.deepcopy(source.state_dict())
    refuses(lambda: target.load_state_dict(saved), target, ["parameter 0", "float32 here", "pop('kahan_comp')"])
    for number, param in enumerate(params_of(target)):  # what the message says
        param.data.copy_(params_of(source)[number]).add_(saved["state"][number].pop("kahan_comp"))
    target.load_state_dict(saved)


def test_a_compensation_of_another_shape_is_refused_and_not_dropped():
    source, target = optimi.AdamW(params(BF16), lr=LR), AdamW(params(BF16))
    gradients(source, range(2))
    saved = copy.deepcopy(source.state_dict())
    saved["state"][0]["kahan_comp"] = torch.zeros(3, dtype=BF16)
    refuses(lambda: target.load_state_dict(saved), target, ["compensation of parameter 0 has shape (3,)", "(6, 5)"])


def test_a_momentum_that_was_saved_as_none_is_no_state():
    """As SGD of earlier versions of torch saved it without momentum."""
    source = torch.optim.SGD(params(FP32), lr=LR)
    saved = {**source.state_dict(), "state": {0: {"momentum_buffer": None}}}
    target = SGD(params(BF16))
    target.load_state_dict(saved)
    assert not target.state.get(params_of(target)[0])
    train(target, 1)


def by_hand(keys: dict, **states) -> dict:
    """A state dict of two parameters, as a library that is not installed writes it."""
    state = {k: {"step": torch.tensor(3.0), **states} for k in range(2)}
    return {"state": state, "param_groups": [{"params": [0, 1], **keys}]}


MOMENTS = {"exp_avg": torch.full(SHAPE, 0.25, dtype=BF16), "exp_avg_sq": torch.full(SHAPE, 0.5, dtype=BF16)}
COMMON = {"betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}
# torchao/optim/adam.py: `_AdamBase`; flashoptim/optimizers.py: `FlashOptimizer.__init__` and `state_dict`.
TORCHAO = {"lr": torch.tensor(0.02), "initial_lr": torch.tensor(0.04), "amsgrad": False, **COMMON}
FLASHOPTIM = {"lr": 0.02, "initial_lr": 0.04, "master_bytewidth": 0, "quantize": True, **COMMON}


@pytest.mark.parametrize("keys", [TORCHAO, FLASHOPTIM], ids=["torchao", "flashoptim"])
def test_plain_tensors_of_torchao_and_flashoptim(keys):
    target = AdamW(params(BF16), rounding="stochastic", state_dtype={"exp_avg_sq": FP32})
    target.load_state_dict(by_hand(keys, **MOMENTS))
    (group,) = target.param_groups
    assert {key: group[key] for key in COMMON} == COMMON
    assert (type(group["lr"]), group["lr"]) == (float, pytest.approx(0.02))
    for param in params_of(target):
        state = target.state[param]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, int(state["step"])) == (BF16, FP32, 3)
        assert torch.equal(state["exp_avg"], MOMENTS["exp_avg"])
    train(target, 1)


class Quantized(torch.Tensor):
    """A subclass that stores something other than its numbers."""


@pytest.mark.parametrize(
    ("keys", "states", "words"),
    [
        (TORCHAO, {"exp_avg": torch.zeros(SHAPE).as_subclass(Quantized)}, ["exp_avg", "dequantize", "fresh state"]),
        (FLASHOPTIM, {"exp_avg::quantized": torch.zeros(SHAPE)}, ["exp_avg::quantized", "compress_state_dict=False"]),
        (FLASHOPTIM, {**MOMENTS, "error_bits": torch.zeros(SHAPE)}, ["error_bits", "get_fp32_model_state_dict"]),
    ],
)
def test_states_that_are_not_plain_are_refused(keys, states, words):
    target = AdamW(params(BF16))
    refuses(lambda: target.load_state_dict(by_hand(keys, **states)), target, words)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1), {}),
        (lambda p: transformers.Adafactor(p, lr=0.1, relative_step=False, beta1=0.9), {"beta1": 0.9}),
    ],
    ids=["torch", "transformers"],
)
def test_adafactor_continues(make, options):
    """In FP32, as the other would. In step t, an update has at most 10·t + 30 roundings, see `adafactor_formula.py`."""
    source = make(params(FP32))
    gradients(source, range(BEFORE))
    target = converted(source, Adafactor, FP32, **options)
    for optimizer in (source, target):
        gradients(optimizer, range(BEFORE, BEFORE + AFTER))
    moved = largest_difference(target, make(params(FP32)))
    assert largest_difference(target, source) <= 2 * (10 * (BEFORE + AFTER) + 30) * 2.0**-24 * moved
    assert moved > 0.1


@pytest.mark.parametrize("loader", sorted(ALGORITHMS))
@pytest.mark.parametrize(
    ("source", "fitting"),
    [
        (torch.optim.AdamW, {"AdamW", "Adam"}),
        (torch.optim.RAdam, {"RAdam"}),
        (torch.optim.SGD, {"SGD"}),
        (optimi.Lion, {"Lion"}),
        (optimi.StableAdamW, {"StableAdamW"}),
        (torch.optim.NAdam, set()),
        (torch.optim.Adafactor, {"Adafactor"}),
        (torch.optim.Adamax, set()),
        (optimi.Adan, set()),
    ],
)
def test_another_algorithm_is_refused(source, fitting, loader):
    made = source(params(FP32), lr=0.1, foreach=False)
    gradients(made, range(2))
    target = ALGORITHMS[loader](params(BF16))
    if loader in fitting:
        return target.load_state_dict(made.state_dict())
    return refuses(lambda: target.load_state_dict(made.state_dict()), target, ["fresh state"])


@pytest.mark.parametrize(
    ("source", "loader", "words"),
    [
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), AdamW, ["an L2 penalty", "load it into Adam"]),
        (lambda p: optimi.Adam(p, lr=0.1, weight_decay=0.1), AdamW, ["an L2 penalty", "load it into Adam"]),
        (lambda p: optimi.SGD(p, lr=0.1, weight_decay=0.1, decouple_wd=True), SGD, ["decoupled", "weight_decay to 0"]),
    ],
)
def test_another_weight_decay_is_refused(source, loader, words):
    made = source(params(FP32))
    gradients(made, range(2))
    target = loader(params(BF16))
    refuses(lambda: target.load_state_dict(made.state_dict()), target, [*words, "fresh state"])


def test_groups_and_parameters_must_fit():
    source = torch.optim.AdamW(params(FP32), lr=0.1)
    gradients(source, range(2))
    two_groups = AdamW([{"params": [p]} for p in params(BF16)])
    refuses(lambda: two_groups.load_state_dict(source.state_dict()), two_groups, ["1 param groups", "has 2"])
    one_parameter = AdamW(params(BF16, 1))
    refuses(lambda: one_parameter.load_state_dict(source.state_dict()), one_parameter, ["has 2 parameters"])
    other_shape = AdamW([nn.Parameter(torch.zeros(2, dtype=BF16)) for _ in range(2)])
    refuses(lambda: other_shape.load_state_dict(source.state_dict()), other_shape, ["exp_avg", "(6, 5)"])


def test_parameters_that_were_never_stepped_have_no_state():
    source = torch.optim.AdamW(params(FP32), lr=0.1)
    params_of(source)[0].grad = torch.ones(SHAPE)
    source.step()
    target = converted(source, AdamW, BF16)
    assert [p in target.state for p in params_of(target)] == [True, False]


@pytest.mark.parametrize("rounding", ["kahan", "split", "stochastic"])
def test_a_converted_run_resumes_bit_for_bit(rounding):
    source = torch.optim.AdamW(params(FP32), lr=LR)
    gradients(source, range(BEFORE))
    target = converted(source, AdamW, BF16, rounding=rounding)
    twin = AdamW([nn.Parameter(p.detach().clone()) for p in params_of(target)], rounding=rounding)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the state dict that was loaded replaces")
        gradients(target, range(BEFORE, BEFORE + 3))
        twin.load_state_dict(copy.deepcopy(target.state_dict()))
    with torch.no_grad():
        for param, other in zip(params_of(twin), params_of(target), strict=True):
            param.copy_(other)
    for optimizer in (target, twin):
        gradients(optimizer, range(BEFORE + 3, BEFORE + 6))
    first, second = everything(target), everything(twin)
    assert_equal([first["params"], first["state"]], [second["params"], second["state"]])


def test_the_state_dict_that_is_loaded_is_left_as_it_is():
    source = optimi.AdamW(params(BF16), lr=0.1)
    gradients(source, range(2))
    saved = copy.deepcopy(source.state_dict())
    before = copy.deepcopy(saved)
    AdamW(params(BF16)).load_state_dict(saved)
    assert_equal(saved, before)
