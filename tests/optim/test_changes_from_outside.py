"""Parameters, states and options that others change between steps."""

import copy

import pytest
import torch
from torch import nn

from hf_lowprec.optim import SGD, AdamW

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


def test_an_expanded_parameter_is_refused():
    with pytest.raises(ValueError, match="share one place in memory"):
        AdamW([nn.Parameter(torch.zeros(1, dtype=torch.bfloat16).expand(4))])


@pytest.mark.parametrize(
    ("cls", "arguments", "change"),
    [
        (SGD, {"momentum": 0.9}, {"momentum": 0.0}),
        (AdamW, {"amsgrad": True}, {"amsgrad": False}),
        (AdamW, {"rounding": "kahan"}, {"rounding": "stochastic"}),
        (AdamW, {"rounding": "stochastic"}, {"rounding": "kahan"}),
    ],
)
def test_an_option_changed_on_the_way_survives_a_checkpoint(cls, arguments, change):
    param, optimizer = stepped(cls, **arguments)
    optimizer.param_groups[0].update(change)
    optimizer.step()
    clone_param = nn.Parameter(param.detach().clone())
    clone_param.grad = param.grad
    clone = cls([clone_param], lr=0.01, **{**arguments, **change})
    clone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        optimizer.step()
        clone.step()
    assert torch.equal(param, clone_param)


@pytest.mark.parametrize("step", [1, 1.0, torch.tensor(1), torch.tensor([1.0])])
def test_a_step_count_of_any_kind_goes_on_counting(step):
    param, optimizer = stepped()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = step
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.state[param]["step"] == 2


def test_a_compensation_for_an_fp32_parameter_is_refused():
    _, optimizer = stepped()
    uncast = AdamW([nn.Parameter(torch.zeros(8))], lr=0.01)
    with pytest.raises(ValueError, match=r"'compensation'.*a float32 parameter of AdamW"):
        uncast.load_state_dict(optimizer.state_dict())
