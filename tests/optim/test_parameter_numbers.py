"""Optimizers of one parameter each: every parameter draws the random bits that one optimizer of all would draw."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hf_lowprec.optim import AdamW, param_groups
from tests.support.training.tiny_trainer import arguments

OPTIONS = [{"rounding": "stochastic"}, {"rounding": "kahan"}, {"backend": "eager", "seed": 5, "lr": torch.tensor(1e-2)}]


@pytest.fixture(autouse=True)
def fresh_numbers():
    param_groups.reset_numbers()


def parameters(number: int = 3, size: int = 4096) -> list[nn.Parameter]:
    """Parameters with equal weights."""
    return [nn.Parameter(torch.full((size,), 0.75).bfloat16()) for _ in range(number)]


def train(params, optimizers, steps: int = 3) -> None:
    for step in range(steps):
        for param in params:
            param.grad = torch.full_like(param, 0.1 + step)
        for optimizer in optimizers:
            optimizer.step()


def tensors(params, optimizers) -> list[torch.Tensor]:
    state = {param: values for optimizer in optimizers for param, values in optimizer.state.items()}
    return [tensor for param in params for tensor in (param, *state[param].values())]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_optimizer_per_parameter_draws_the_bits_of_one_of_all(options):
    together, apart = parameters(), parameters()
    one = [AdamW(together, **options)]
    each = [AdamW([param], **options) for param in apart]
    train(together, one)
    train(apart, each[::-1])  # as in a backward pass: numbers are those of construction
    assert all(map(torch.equal, tensors(together, one), tensors(apart, each)))
    assert not torch.equal(apart[0], apart[1]) or not torch.equal(*(each[k].state[apart[k]]["exp_avg"] for k in (0, 1)))


def test_a_number_can_be_given():
    params, others = parameters(), parameters()
    train(params, [AdamW([param], first_parameter=7) for param in params])
    train(others, [AdamW([*others[:1]], first_parameter=7), AdamW(others[1:], first_parameter=7)])
    assert torch.equal(params[0], params[1])  # asked for
    assert torch.equal(params[0], others[0]) and torch.equal(params[0], others[1])
    shifted, whole = parameters(1), parameters(3)
    train(shifted, [AdamW(shifted, first_parameter=2)])
    train(whole, [AdamW(whole)])
    assert torch.equal(shifted[0], whole[2])


def test_runs_that_are_compared_start_at_the_same_number():
    """Two models, and single parameters with optimizers of different settings."""
    first, second = parameters(), parameters()
    train([*first, *second], [AdamW(first), AdamW(second)])
    assert all(map(torch.equal, first, second))
    params = parameters(2)
    train(params, [AdamW([params[0]], backend="eager"), AdamW([params[1]], backend="native")])
    assert torch.equal(*params)


def test_state_dicts_keep_them():
    params = parameters()
    optimizers = [AdamW([param], lr=1e-2) for param in params]
    train(params, optimizers)
    saved = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    resumed = [nn.Parameter(param.detach().clone()) for param in params]
    others = [AdamW([param], lr=1e-2) for param in reversed(resumed)][::-1]
    for other, state in zip(others, saved, strict=True):
        other.load_state_dict(state)
    train(params, optimizers)
    train(resumed, others)
    assert all(map(torch.equal, tensors(params, optimizers), tensors(resumed, others)))


def test_an_added_group_continues_the_numbering():
    params, whole = parameters(4), parameters(4)
    optimizers = [AdamW([param], lr=1e-2, rounding="stochastic") for param in params[:2]]
    optimizers[1].add_param_group({"params": params[2:]})
    one = [AdamW(whole, lr=1e-2, rounding="stochastic")]
    train(params, optimizers)
    train(whole, one)
    assert all(map(torch.equal, tensors(params, optimizers), tensors(whole, one)))


def test_an_optimizer_that_only_checks_arguments_is_not_counted(tmp_path):
    from hf_lowprec.integrations.transformers.training_arguments import checked_arguments

    kwargs = checked_arguments(arguments(tmp_path, optim="adamw_bf16_kahan"))
    assert "first_parameter" not in AdamW(parameters(1), **kwargs).param_groups[0]
    numbered = arguments(tmp_path, optim="adamw_bf16_kahan", optim_args="first_parameter=3")
    assert checked_arguments(numbered)["first_parameter"] == 3


def test_a_number_of_any_integer_type_is_accepted_and_saved():
    params, twins = parameters(1), parameters(1)
    optimizer, twin = AdamW(params, first_parameter=np.int64(2)), AdamW(twins, first_parameter=2)
    train(params, [optimizer])
    train(twins, [twin])
    assert torch.equal(*params, *twins)
    assert optimizer.state_dict()["param_groups"] == twin.state_dict()["param_groups"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["first_parameter"] == 2
