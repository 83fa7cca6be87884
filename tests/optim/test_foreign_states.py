"""State dicts of torch and transformers: converted where the formula is the same, else refused."""

import copy
import warnings

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.optim import SGD, Adafactor, Adam, AdamW, Muon, RAdam
from hf_lowprec.optim.algorithms import ALGORITHMS
from tests.support.optim.optimizer_contents import assert_equal, everything, params_of, refuses, train

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


def largest_difference(ours, reference) -> float:
    pairs = zip(params_of(ours), params_of(reference), strict=True)
    return max(float((mine.detach().double() - theirs.detach().double()).abs().max()) for mine, theirs in pairs)


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


def test_a_momentum_that_was_saved_as_none_is_no_state():
    """As SGD of earlier versions of torch saved it without momentum."""
    source = torch.optim.SGD(params(FP32), lr=LR)
    saved = {**source.state_dict(), "state": {0: {"momentum_buffer": None}}}
    target = SGD(params(BF16))
    target.load_state_dict(saved)
    assert not target.state.get(params_of(target)[0])
    train(target, 1)


def test_adafactor_of_transformers_continues():
    """In FP32, as the other would. In step t, an update has at most 10·t + 30 roundings, see `adafactor_formula.py`."""

    def make(parameters):
        return transformers.Adafactor(parameters, lr=0.1, relative_step=False, beta1=0.9)

    source = make(params(FP32))
    gradients(source, range(BEFORE))
    target = converted(source, Adafactor, FP32, beta1=0.9)
    for optimizer in (source, target):
        gradients(optimizer, range(BEFORE, BEFORE + AFTER))
    moved = largest_difference(target, make(params(FP32)))
    assert largest_difference(target, source) <= 2 * (10 * (BEFORE + AFTER) + 30) * 2.0**-24 * moved
    assert moved > 0.1


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_torchs_muon_continues(adjust_lr_fn):
    """In FP32, as torch's would. Both round a weight once for its decay and once for the update, by 2^-24 of it."""
    source = torch.optim.Muon(params(FP32), lr=LR, ns_steps=3, eps=1e-3, adjust_lr_fn=adjust_lr_fn)
    gradients(source, range(BEFORE))
    target = converted(source, Muon, FP32, lr=1.0)
    for optimizer in (source, target):
        gradients(optimizer, range(BEFORE, BEFORE + AFTER))
    assert largest_difference(target, source) <= 2 * AFTER * 2**-24
    assert target.param_groups[0]["ns_eps"] == 1e-3


@pytest.mark.parametrize("loader", sorted(ALGORITHMS))
@pytest.mark.parametrize(
    ("source", "fitting"),
    [
        (torch.optim.AdamW, {"AdamW", "Adam"}),
        (torch.optim.RAdam, {"RAdam"}),
        (torch.optim.SGD, {"SGD"}),
        (torch.optim.Muon, {"Muon"}),
        (torch.optim.NAdam, set()),
        (torch.optim.Adafactor, set()),
        (torch.optim.Adamax, set()),
    ],
)
def test_another_algorithm_is_refused(source, fitting, loader):
    made = source(params(FP32), lr=0.1, **({} if source is torch.optim.Muon else {"foreach": False}))
    gradients(made, range(2))
    target = ALGORITHMS[loader](params(BF16))
    if loader in fitting:
        return target.load_state_dict(made.state_dict())
    return refuses(lambda: target.load_state_dict(made.state_dict()), target, ["fresh state"])


def test_another_weight_decay_is_refused():
    source, target = torch.optim.Adam(params(FP32), weight_decay=0.1), AdamW(params(BF16))
    gradients(source, range(2))
    words = ["an L2 penalty", "load it into Adam", "fresh state"]
    refuses(lambda: target.load_state_dict(source.state_dict()), target, words)


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
    source = torch.optim.AdamW(params(BF16), lr=0.1)
    gradients(source, range(2))
    saved = copy.deepcopy(source.state_dict())
    before = copy.deepcopy(saved)
    AdamW(params(BF16)).load_state_dict(saved)
    assert_equal(saved, before)
