"""What optimizers refuse by name: options that exclude each other, groups, parameters; a refusal changes nothing.

Single arguments are in `test_arguments.py`.
"""

import math
from typing import get_args

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_lowprec.casting import cast_model
from hf_lowprec.integrations.transformers.precision_report import precision_report
from hf_lowprec.optim import SGD, AdamW, Muon, Prodigy, ScheduleFreeAdamW
from hf_lowprec.optim.arguments import READERS
from hf_lowprec.optim.validation import check_scalars
from hf_lowprec.rounding import Rounding
from tests.support.optim.every_optimizer import BF16, FP16, FP32, parameters
from tests.support.optim.optimizer_contents import assert_equal, everything, params_of, refuses, train

INT8, NAN = torch.int8, math.nan


def trained(cls=AdamW) -> torch.optim.Optimizer:
    optimizer = cls(parameters())
    train(optimizer, 2)
    return optimizer


IN_8_BITS = {"state_dtype": INT8}
REFUSED = [
    (
        AdamW,
        FP16,
        {"rounding": "stochastic"},
        r"rounding='stochastic' in param group 0 does not support torch\.float16",
    ),
    (
        AdamW,  # the default
        FP16,
        {},
        r"rounding='split' in param group 0 does not support torch\.float16 parameters; use rounding='kahan'",
    ),
    (AdamW, BF16, {**IN_8_BITS, "state_rounding": "nearest"}, "state_rounding='nearest' in param group 0 is not"),
    (AdamW, BF16, {"state_dtype": {"exp_avg": INT8}, "state_rounding": "nearest"}, "always rounded stochastically"),
    (AdamW, BF16, {"state_dtype": {"max_exp_avg_sq": INT8}, "amsgrad": True}, "max_exp_avg_sq does not average over"),
    (AdamW, BF16, {"amsgrad": True, "factored": True}, "amsgrad=True needs the second moment of each element"),
    (AdamW, BF16, {"factored": True, "offload_states": True}, "AdamW or Adam without factored=True"),
    (AdamW, BF16, {"rounding": "split", "state_dtype": {"remainder": BF16}}, "names the state 'remainder'"),
    (Prodigy, BF16, {"gradient_release": True}, "Prodigy sums over all gradients"),
    (
        SGD,
        BF16,
        {"nesterov": True},
        "nesterov=True needs momentum > 0 and dampening=0; got momentum=0.0",
    ),
    (ScheduleFreeAdamW, BF16, {"betas": (0.0, 0.9)}, r"betas\[0\]=0 is invalid; it must be above 0"),
    (Muon, BF16, {}, r"not a parameter of shape \(7,\); pass matrices="),
    (Muon, BF16, {"matrices": [torch.zeros(4, 4)]}, "none of matrices= is among the parameters"),
    (Muon, BF16, {"adjust_lr_fn": "match"}, "adjust_lr_fn='match' in param group 0 is unknown; valid are 'original'"),
]


@pytest.mark.parametrize(("cls", "dtype", "options", "message"), REFUSED, ids=str)
def test_what_cannot_be_is_refused(cls, dtype, options, message):
    with pytest.raises(ValueError, match=message):
        cls(parameters(dtype), **options)


GROUPS = [
    (AdamW, {"params": None}, "param group 1 has no 'params'"),
    (AdamW, {"lr": 1.0}, "param group 1 has no 'params'"),
    (Muon, {}, "param group 1 has no 'params'"),
    (
        Muon,
        {"params": [torch.ones(4, 4)], "use_muon": "maybe"},
        "use_muon='maybe' in param group 1 is not True or False",
    ),
    (
        Muon,
        {"params": [torch.ones(4, 4)], "use_moun": False},
        "'use_moun' in param group 1 is not an argument.*did you mean 'use_muon'",
    ),
    (Muon, {"params": {torch.ones(4, 4)}}, "set"),
    (Muon, {"params": [torch.ones(4, 2), torch.ones(3)], "use_muon": True}, "pass matrices="),
    (AdamW, {"params": [torch.ones(1, dtype=BF16).expand(4)]}, "share the same memory"),
]


@pytest.mark.parametrize(("cls", "group", "message"), GROUPS, ids=str)
def test_groups_that_cannot_be_are_refused_and_leave_no_trace(cls, group, message):
    matrices = {"matrices": []} if cls is Muon else {}
    first = {"params": parameters()}
    with pytest.raises((ValueError, TypeError), match=message):
        cls([first, group], **matrices)
    optimizer = cls([first], **matrices)
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.add_param_group(dict(group))
    train(optimizer, 1)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("name", "value"), [("lr", NAN), ("lr", 1e38), ("rounding", "up"), ("state_rounding", 3)])
def test_a_bad_value_written_into_a_group_stops_the_step_before_it_changes_anything(name, value):
    optimizer = trained()
    good = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = value
    before = everything(optimizer)["params"], everything(optimizer)["state"]
    with pytest.raises(ValueError, match=name):
        optimizer.step()
    assert_equal((everything(optimizer)["params"], everything(optimizer)["state"]), before)
    optimizer.param_groups[0][name] = good
    train(optimizer, 1)


def test_a_group_that_is_to_be_of_matrices_is_checked_before_the_step():
    param = nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    optimizer = Muon([{"params": [param], "use_muon": False}])
    optimizer.param_groups[0]["use_muon"] = True
    with pytest.raises(ValueError, match="pass matrices="):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_of_another_dtype_are_refused_and_leave_no_trace(dtype):
    optimizer, param = trained(), nn.Parameter(torch.ones(3, dtype=dtype))
    refuses(lambda: optimizer.add_param_group({"params": [param]}), optimizer, [str(dtype), "bfloat16", "float32"])
    already = params_of(optimizer)[0]
    refuses(lambda: optimizer.add_param_group({"params": [already]}), optimizer, [])


def test_adding_a_group_does_not_look_at_the_others(monkeypatch):
    """Thousands of groups, one for each parameter, would take time that grows with the square of their number."""
    looks = []
    monkeypatch.setitem(READERS, get_args(Rounding), lambda name: looks.append(name) or name)
    AdamW([{"params": [nn.Parameter(torch.zeros(2, dtype=BF16))]} for _ in range(20)])
    assert len(looks) == 1 + 20


@pytest.mark.parametrize("cls", [AdamW, torch.optim.AdamW])
def test_a_look_at_the_state_of_an_idle_parameter_leaves_a_checkpoint_that_loads(cls):
    """`optimizer.state` is a `defaultdict`, so the look creates an empty entry."""
    looked_at, resumed = cls(parameters()), AdamW(parameters())
    stepped, idle, *_ = params_of(looked_at)
    stepped.grad = torch.ones_like(stepped)
    looked_at.step()
    assert not looked_at.state[idle]
    resumed.load_state_dict(looked_at.state_dict())
    assert [param.shape for param in resumed.state] == [stepped.shape]


@pytest.mark.parametrize("options", [{}, {"gradient_release": True}], ids=str)
def test_a_step_that_a_cuda_graph_would_capture_raises(monkeypatch, options):
    param = nn.Parameter(torch.ones(3).bfloat16())
    optimizer = AdamW([param], **options)

    def train():
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with monkeypatch.context() as during_capture:
        during_capture.setattr(torch.cuda, "is_initialized", lambda: True)
        during_capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="a CUDA graph cannot capture a step"):
            train()
    assert torch.equal(param, torch.ones_like(param)) and not optimizer.state
    optimizer.zero_grad()
    train()
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_learning_rate_that_a_scheduler_takes_below_zero_goes_on_as_in_torch(backend):
    ours, theirs = [nn.Parameter(torch.ones(3))], [nn.Parameter(torch.ones(3))]
    optimizers = AdamW(ours, lr=0.1, backend=backend), torch.optim.AdamW(theirs, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - 0.8 * step) for each in optimizers]
    for params, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
        for step in range(4):
            params[0].grad = torch.full((3,), 1.0 + step)
            optimizer.step()
            scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] < 0
    # Four steps of a dozen roundings of numbers below two.
    torch.testing.assert_close(ours[0], theirs[0], rtol=4 * 12 * 2**-24, atol=0)
    for bad in (float("nan"), float("-inf")):
        optimizers[0].param_groups[0]["lr"] = bad
        with pytest.raises(ValueError, match="lr="):
            optimizers[0].step()
    with pytest.raises(ValueError, match=r"lr=-0.1 is invalid; it must be a number >= 0$"):
        optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": -0.1})


def test_a_scalar_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match=r"lr=0.1 .* give gain=nan, which is not finite in FP32"):
        check_scalars({"lr": 0.1}, {"gain": float("nan")})


def test_a_device_without_fp64_is_named():
    with FakeTensorMode():
        param = nn.Parameter(torch.empty(4, dtype=torch.bfloat16, device="mps"))
        with pytest.raises(ValueError, match=r"param group 0 is on mps:0, .* no FP64.*use_cpu=True"):
            AdamW([param])


MATRIX, NORM = (4, 4), (4,)


@pytest.mark.parametrize(
    ("options", "params", "is_pointed_out"),
    [
        ({}, [(FP32, MATRIX), (FP32, NORM)], True),
        ({"rounding": "stochastic"}, [(FP32, MATRIX)], True),
        ({"rounding": "nearest"}, [(FP32, MATRIX)], False),
        ({"rounding": "kahan"}, [(FP32, MATRIX)], False),
        ({}, [(BF16, MATRIX)], False),
        ({}, [(BF16, MATRIX), (FP32, NORM)], False),
        ({}, [(FP32, NORM)], False),  # of a model whose matrices another optimizer has
    ],
)
def test_a_mode_for_16_bits_without_16_bit_weights_is_pointed_out(recwarn, options, params, is_pointed_out):
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for dtype, shape in params]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = AdamW([{"params": [param]} for param in params], **options)
    optimizer.step()
    rounding = options.get("rounding", "split")
    found = [str(warning.message) for warning in recwarn if "cast_model(model)" in str(warning.message)]
    assert [f"rounding={rounding!r} has no effect" in message for message in found] == [True] * is_pointed_out
    report = precision_report(nn.ParameterList(params), optimizer, cast_model(nn.Linear(1, 1)))
    assert (f"weights {rounding}" in report) == (params[0].dtype == BF16)
