"""Parameters, states and options that others change between steps."""

import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW
from tests.support.triton_available import quiet_interpreter, rarely_on_triton

pytestmark = quiet_interpreter
BACKENDS = ("eager", "native")


def stepped(cls=AdamW, size: int = 8, **arguments) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    param = nn.Parameter(torch.linspace(-1, 1, size).bfloat16())
    optimizer = cls([param], lr=0.01, **arguments)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_was_resized_is_refused(backend):
    param, optimizer = stepped(backend=backend)
    param.data = torch.zeros(4096, dtype=torch.bfloat16)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"parameter 0 has shape \(4096,\).*exp_avg \(8,\).*build a new optimizer"):
        optimizer.step()
    assert not param.any()
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_is_told_of_the_write(backend):
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([param], backend=backend)
    loss = (param * param).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def converted_after_a_step(before: torch.dtype, after: torch.dtype, **arguments) -> tuple[nn.Parameter, AdamW]:
    """A parameter, with a gradient, that was converted between its first and its second step."""
    param = nn.Parameter(torch.linspace(-1, 1, 8, dtype=before))
    optimizer = AdamW([param], lr=0.01, backend="eager", **arguments)
    param.grad = torch.ones_like(param)
    optimizer.step()
    for tensor in (param, param.grad):
        tensor.data = tensor.data.to(after)
    return param, optimizer


@pytest.mark.parametrize(
    ("before", "after", "arguments"),
    [
        (torch.float32, torch.bfloat16, {"rounding": "kahan"}),
        (torch.float32, torch.bfloat16, {"rounding": "stochastic"}),
        (torch.bfloat16, torch.float32, {"rounding": "stochastic"}),
    ],
)
def test_a_parameter_that_was_converted_after_its_first_step_is_said_once(before, after, arguments):
    param, optimizer = converted_after_a_step(before, after, **arguments)
    names = [str(dtype).removeprefix("torch.") for dtype in (before, after)]
    text = rf"1 parameters were converted from {names[0]} to {names[1]} after their first step.*exp_avg, exp_avg_sq\) "
    with pytest.warns(RuntimeWarning, match=rf"{text}stay in {names[0]}\. Call cast_model\(model\) before the first"):
        optimizer.step()
    assert optimizer.state[param]["exp_avg"].dtype == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_conversion_that_leaves_no_state_in_another_dtype_is_not_said():
    """FP32 states were asked for, or a new optimizer was built, or the state was loaded."""
    _, optimizer = converted_after_a_step(torch.float32, torch.bfloat16, state_dtype=torch.float32)
    param, earlier = converted_after_a_step(torch.float32, torch.bfloat16, rounding="stochastic")
    rebuilt = AdamW([param], lr=0.01, backend="eager")
    loaded = AdamW([param], lr=0.01, backend="eager", rounding="stochastic")
    loaded.load_state_dict(earlier.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (optimizer, rebuilt, loaded):
            each.step()


def test_a_parameter_without_gradient_may_be_converted():
    """It has no remainder before its first step in 16 bits."""
    params = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = AdamW(params, lr=0.01, backend="eager")
    for dtype in (torch.float32, torch.bfloat16):
        for param in params:
            param.data, param.grad = param.data.to(dtype), None
            if dtype == torch.float32 or param is params[0]:
                param.grad = torch.ones_like(param)
        with warnings.catch_warnings(record=True) as caught:
            optimizer.step()
    assert "2 parameters were converted" in str(caught[0].message)
    assert [optimizer.state[param]["step"] for param in params] == [2, 1]


def move_state(state):
    state["exp_avg"].data = torch.full_like(state["exp_avg"], 0.25)


def transpose(tensor):
    tensor.data = tensor.data.t()


def swap_in_place(optimizer, params):
    transpose(params[2])
    for name in ("exp_avg", "exp_avg_sq", "remainder"):
        optimizer.state[params[2]][name].data = optimizer.state[params[2]][name].t().contiguous()


def move_weight(optimizer, params):
    params[0].data = params[0].data.clone()


def replace_param(optimizer, params):
    params[0] = optimizer.param_groups[0]["params"][0] = nn.Parameter(params[0].detach().clone())


def add_group(optimizer, params):
    params.append(nn.Parameter(torch.full((5,), 0.5, dtype=torch.bfloat16)))
    optimizer.add_param_group({"params": params[-1:], "lr": 0.3})


CHANGES_OF_TENSORS = {
    "replace state": lambda o, p: o.state[p[0]].update(exp_avg=torch.full_like(p[0], 0.25)),
    "move state": lambda o, p: move_state(o.state[p[0]]),
    "fill state": lambda o, p: o.state[p[0]]["exp_avg"].fill_(0.25),
    "widen state": lambda o, p: o.state[p[0]].update(exp_avg_sq=o.state[p[0]]["exp_avg_sq"].float()),
    "forget state": lambda o, p: o.state.pop(p[1]),
    "set count": lambda o, p: o.state[p[0]].update(step=torch.tensor(7.0)),
    "raise count": lambda o, p: o.state[p[0]]["step"].add_(3),
    "move weight": move_weight,
    "transpose weight": lambda o, p: transpose(p[2]),
    "swap in place": swap_in_place,
}
CHANGES = CHANGES_OF_TENSORS | {
    "lr": lambda o, p: o.param_groups[1].update(lr=0.1),
    "betas": lambda o, p: o.param_groups[0].update(betas=(0.5, 0.9)),
    "seed": lambda o, p: o.param_groups[0].update(seed=9),
    "rounding": lambda o, p: o.param_groups[0].update(rounding="stochastic"),
    "limit": lambda o, p: setattr(o, "max_grad_norm", 0.1),
    "replace group": lambda o, p: o.param_groups.__setitem__(1, {**o.param_groups[1], "lr": 0.7}),
    "replace parameter": replace_param,
    "add group": add_group,
}


def trained(backend) -> tuple[list[nn.Parameter], AdamW]:
    """Parameters in two groups, after three steps."""
    params = [nn.Parameter(torch.linspace(-1, 1, size).bfloat16()) for size in (8, 3)]
    params.append(nn.Parameter(torch.linspace(-1, 1, 36).bfloat16().view(6, 6)))
    groups = [{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.2}]
    optimizer = AdamW(groups, backend=backend)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    return params, optimizer


def give_gradients(params, step) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).bfloat16()


def handed_everything(optimizer, params) -> tuple[list[nn.Parameter], AdamW]:
    """Copies of the parameters, and a new optimizer with copies of the states."""
    copies = [nn.Parameter(param.detach().clone().contiguous()) for param in params]
    others = iter(copies)
    anew = [{**group, "params": [next(others) for _ in group["params"]]} for group in optimizer.param_groups]
    other = AdamW(anew, backend="eager", max_grad_norm=optimizer.max_grad_norm)
    for param, twin in zip(params, copies, strict=True):
        if param in optimizer.state:
            other.state[twin] = {name: value.clone() for name, value in optimizer.state[param].items()}
    return copies, other


def assert_equal(params, optimizer, copies, other) -> None:
    for param, twin in zip(params, copies, strict=True):
        assert torch.equal(param, twin)
        for name, value in other.state[twin].items():
            assert torch.equal(optimizer.state[param][name], value), name


@pytest.mark.combinations(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_counts(change, any_backend):
    """Nothing kept from earlier steps is used by mistake: a new optimizer with the same states gives the same bits."""
    params, optimizer = trained(any_backend)
    CHANGES[change](optimizer, params)
    copies, other = handed_everything(optimizer, params)
    for step in range(3, 6):
        for each, tensors in ((optimizer, params), (other, copies)):
            give_gradients(tensors, step)
            each.step()
    assert_equal(params, optimizer, copies, other)


@rarely_on_triton()
@pytest.mark.combinations(1)
@pytest.mark.parametrize("change", CHANGES_OF_TENSORS)
def test_a_change_before_or_after_clipping_counts(change, any_backend):
    """The norm reads gradients alone; the step notices changes of weights and states."""
    params, optimizer = trained(any_backend)
    for step, is_after in ((3, True), (4, False), (5, True)):
        give_gradients(params, step)
        if is_after:
            norm = optimizer.clip_grad_norm_(1.0)
        CHANGES[change](optimizer, params)
        copies, other = handed_everything(optimizer, params)
        give_gradients(copies, step)
        expected = other.clip_grad_norm_(1.0)
        if not is_after:
            norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        other.step()
        assert torch.equal(norm, expected)
        assert_equal(params, optimizer, copies, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_becomes_another_view_of_its_memory_is_noticed(backend):
    """Its address and gradient stay the same."""
    param, optimizer = stepped(backend=backend, rounding="kahan")  # also for FP16
    param.grad = torch.ones_like(param)
    param.data = param.data.view(2, 4)
    with pytest.raises(ValueError, match=r"parameter 0 has shape \(2, 4\)"):
        optimizer.step()
    assert optimizer.state[param]["step"] == 1
    param.data = param.data.view(8).view(torch.float16)
    optimizer.step()
    assert [group.spec.param_dtype for group in optimizer._plan.fused_groups] == [torch.float16]


def test_gradients_are_not_kept_alive(any_backend):
    param, optimizer = stepped(backend=any_backend, max_grad_norm=1.0)
    gone = weakref.ref(param.grad.untyped_storage())
    optimizer.step()
    optimizer.clip_grad_norm_(0.5)
    gc.collect()
    assert gone() is not None
    optimizer.zero_grad()
    assert gone() is None


@pytest.mark.parametrize("change", [{"lr": 1e38, "weight_decay": 1e38}, {"rounding": "up"}], ids=str)
def test_a_step_that_fails_keeps_no_gradient_alive(any_backend, change):
    """It may fail before or after the gradients are collected."""
    param, optimizer = stepped(backend=any_backend)
    gone = weakref.ref(param.grad.untyped_storage())
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=r"rounding='up'|FP32 cannot hold"):
        optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert gone() is None


@rarely_on_triton()
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5, "skip_nonfinite": True}], ids=str)
def test_the_default_device_and_dtype_do_not_matter(any_backend, options):
    trained = []
    for default in (False, True):
        params = [nn.Parameter(torch.linspace(-1, 1, size).bfloat16()) for size in (8, 300)]
        for param in params:
            param.grad = torch.linspace(-2, 1, param.numel(), device=param.device).bfloat16()
        optimizer = AdamW(params, lr=1.1e-3, backend=any_backend, **options)
        try:
            if default:
                torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta") if default else nullcontext():
                for _ in range(3):
                    optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        trained.append([*params, *(value for state in optimizer.state.values() for value in state.values())])
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5, "skip_nonfinite": True}], ids=str)
def test_an_optimizer_that_is_dropped_lets_go_of_everything(any_backend, options):
    param, optimizer = stepped(backend=any_backend, **options)
    gone = [weakref.ref(param), weakref.ref(optimizer.state[param]["exp_avg"])]
    gc.disable()
    try:
        del param, optimizer
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_joins_late_counts_its_own_steps(backend):
    """Between two others of its group, which are three steps ahead; in FP32, where torch's AdamW is the reference."""
    starts = [torch.linspace(0.5, 1.5, 8) * k for k in (1, 2, 3)]
    ours, theirs = ([nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    optimizers = AdamW(ours, lr=0.1, backend=backend), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(6):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            for k, param in enumerate(params):
                param.grad = None if k == 1 and step < 3 else torch.full_like(param, (-0.7) ** step)
            optimizer.step()
    assert [int(optimizers[0].state[param]["step"]) for param in ours] == [6, 3, 6]
    # A dozen FP32 operations a step, each within half an ulp; one step's bias correction alone would be off by tenths.
    for param, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param, expected, rtol=6 * 12 * 2**-24, atol=0)
